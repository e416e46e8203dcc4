"""One shard as a launcher's job: what runs in a process of the launcher, on this machine or another."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from harness.cli import process_end
from harness.engine import shards, side_by_side
from harness.machine.processes import interruptible
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from omegaconf import DictConfig

    from harness.engine.shards import Shard

DOLLAR = "\\u0024"  # in place of "$", which OmegaConf would read


def _with_dollars(text: str) -> str:
    return text.replace(DOLLAR, "$")


def run(config: DictConfig) -> int:
    """Run the job of one shard in a process of the launcher; return its exit code.

    Raises:
        SystemExit: the scheduler has taken the job back, to run it again: to return would tell the launcher that it is done.
    """
    with _taken_back() as taken:
        try:
            code = _run(config)
        except Exception as error:
            if taken:  # by submitit, which says so with an exception of its own
                raise
            code = process_end.internal_error(error)
        if taken:
            raise SystemExit(f"shard {config.shard}: taken back by signal {taken[0]}")
        return code


@contextmanager
def _taken_back() -> Iterator[list[int]]:
    """Notes the signal with which submitit's handler queues a job again that reaches its time or is preempted.

    The signals that Slurm then ends it with come while this process still unwinds, and would count as an interruption.
    """
    noted: list[int] = []
    handler = signal.getsignal(signal.SIGUSR2)
    if not callable(handler):
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        handler(number, frame)

    signal.signal(signal.SIGUSR2, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGUSR2, handler)


def _run(config: DictConfig) -> int:
    folder = Path(_with_dollars(config.folder))
    if folder.is_dir():  # else this is another machine, and paths are absolute where they matter
        os.chdir(folder)
    shard = shards.parse(config.shard)
    if config.lead:
        side_by_side.exit_with(config.lead)
    try:
        with (
            interruptible() as interrupts,
            side_by_side.shard_turn(config.lead) if config.lead else nullcontext(True) as wanted,
        ):
            if interrupts.heard or not wanted:  # an earlier shard was stopped, and the sweep with it
                return 2
            if config.places:
                _settle(config)
            return _run_shard(config, shard)
    except UsageError as error:
        sys.stderr.write(f"error: shard {shard}: {error}\n")
    except KeyboardInterrupt:  # before it measured anything
        sys.stderr.write(f"error: shard {shard}: interrupted\n")
    return 2


def _settle(config: DictConfig) -> None:
    """Takes a place for this process, which keeps it for all shards that it gets: a GPU that is open stays open."""
    own = side_by_side.acquire_place(config.lead, config.places)
    if config.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = config.gpus[own]
    if config.cores:
        shards.pin(shards.cores_of(own, config.places, list(config.cores)))


def _run_shard(config: DictConfig, shard: Shard) -> int:
    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib's processes name a way of their own, which those that a sweep starts would look for in vain.
        multiprocessing.set_start_method("forkserver", force=True)
    from harness.cli.sweep import run_sweep

    words = [
        *json.loads(config.words),
        f"shard={shard}",
        *([f"run_id={config.run_id}"] if config.run_id else []),
    ]
    return run_sweep(words)
