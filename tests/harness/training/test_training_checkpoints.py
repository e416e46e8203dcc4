"""Checkpoints. Oracle: the uninterrupted run, bit for bit."""

from __future__ import annotations

import errno
import functools
import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop_jobs import STEPS, curves, job

from harness.training import loop
from harness.training.loop import train


def test_cpu_seconds_before_a_checkpoint_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a clock that only moves when it is read, once a checkpoint and at the end: those of a whole run."""

    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    ticks = map(float, itertools.count(100))
    clocks = {"monotonic": time.monotonic, "perf_counter": time.perf_counter}
    monkeypatch.setattr(loop, "time", SimpleNamespace(**clocks, process_time=lambda: next(ticks)))
    with pytest.raises(KeyboardInterrupt):
        train(job(""), "cpu", tmp_path, interrupt)
    assert train(job(""), "cpu", tmp_path).facts["cpu_s"] == STEPS


@functools.cache
def whole():
    """Curves of the uninterrupted run."""
    return curves(train(job(), "cpu"))


def interrupted(folder: Path, step: int = 6) -> list[Path]:
    """Checkpoints of a run that ended after that many steps, newest first."""

    def stop(done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(job(), "cpu", folder, stop)
    return sorted(folder.glob("step-*"), reverse=True)


def flip(path: Path) -> None:
    path /= "run.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    (shard,) = path.glob("__0_*.distcp")
    shard.write_bytes(shard.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("damage", "said"),
    [(flip, "run.pt does not have the hash"), (cut, "__0_0.distcp has changed"),
     (lambda p: (p / ".metadata").unlink(), "No such file")],
)  # fmt: skip
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    damage: Any, said: str, tmp_path: Path
) -> None:
    newest, before = interrupted(tmp_path)
    damage(newest)
    resumed = train(job(), "cpu", tmp_path)
    assert resumed.facts["resumed_from_steps"] == [int(before.name[5:13])] == [4]
    (problem,) = resumed.facts["checkpoint_problems"]
    assert problem.startswith(f"{newest.name} is not used: ")
    assert said in problem
    assert curves(resumed) == whole()


def test_no_whole_checkpoint_means_from_the_start(tmp_path: Path) -> None:
    for path in interrupted(tmp_path):
        flip(path)
    resumed = train(job(), "cpu", tmp_path)
    assert resumed.facts["resumed_from_steps"] == []
    assert len(resumed.facts["checkpoint_problems"]) == 2
    assert curves(resumed) == whole()


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    interrupted(tmp_path)
    resumed = train(job(identity="another run"), "cpu", tmp_path)
    assert resumed.facts["resumed_from_steps"] == []
    assert (
        "it is of run 'a run ranks=1', not 'another run ranks=1'" in resumed.facts["checkpoint_problems"][0]
    )


def test_two_checkpoints_are_kept_and_no_half_one(tmp_path: Path) -> None:
    assert [int(p.name[5:13]) for p in interrupted(tmp_path)] == [5, 4]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)  # as rank 0's part is written, the last one
    result = train(job(), "cpu", tmp_path)
    assert curves(result) == whole()
    assert "step 1 was not saved" in result.facts["checkpoint_problems"][0]
    assert list(tmp_path.iterdir()) == []
