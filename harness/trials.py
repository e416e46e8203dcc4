"""Runs the arms of trial suites: one after the other here, or several at once in processes of their own.

A run depends on nothing but its case and arm, so on a CPU its result is the same bit for bit wherever and beside
whatever it runs; on a GPU as far as its kernels are deterministic (`harness.training.loop`). A process that dies, or
loses its device, takes only the run that it had with it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.errors import one_line
from harness.workload import Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.context import SpawnProcess
    from pathlib import Path

    from harness.case import Case
    from harness.workload import TrialSuite

DIED = "the process of this run died"  # a failed row whose reason starts with this is run by resume=
REPORT_S = 0.2  # between two messages about the steps of one run


@dataclass(frozen=True, slots=True)
class Task:
    """One run to make: an arm of a case, and the folder where it may keep checkpoints."""

    suite: TrialSuite
    case: Case
    arm: str
    workspace: Path


@dataclass(frozen=True, slots=True)
class Done:
    """One run that has ended. `trace` is there where it raised; `died`: it can be run again as it is."""

    task: Task
    trial: Trial
    trace: str = ""
    died: bool = False


def run(
    tasks: Sequence[Task],
    device: str,
    lanes: int,
    on_step: Callable[[Task, int, int], None],
    may_start: Callable[[], bool] = lambda: True,
) -> Iterator[Done]:
    """Makes the runs in order and yields each as it ends; those that may not start are left out.

    Args:
        tasks: the runs.
        device: "cpu" or "cuda".
        lanes: runs at once; 1: in this process.
        on_step: told how many steps of a run are done, and of how many; 0 when it starts.
        may_start: asked before each.
    """
    if lanes == 1 or len(tasks) < 2:
        for task in tasks:
            if not may_start():
                return
            on_step(task, 0, 0)
            yield _run(task, device, partial(on_step, task))
    else:
        yield from _in_processes(tasks, device, min(lanes, len(tasks)), on_step, may_start)


def _run(task: Task, device: str, on_step: Callable[[int, int], None]) -> Done:
    try:
        return Done(task, task.suite.trial(task.case, task.arm, device, task.workspace, on_step))
    except Exception as error:  # noqa: BLE001 - whatever a suite raises becomes a row; the other runs go on
        trace = "".join(traceback.format_exception(error))[-4000:]
        return Done(task, Trial((), failure=one_line(error)), trace)


class _Lane:
    """A process that makes one run after the other."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")  # a forked torch may hang in its thread pool
        self.ours, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        # A module does not pickle; its name does.
        suite = task.suite.__name__ if isinstance(task.suite, ModuleType) else task.suite
        self.task = task
        self.ours.send((suite, task.case, task.arm, task.workspace))

    def end(self) -> None:
        self.process.terminate()
        self.process.join()
        self.ours.close()


def _in_processes(
    tasks: Sequence[Task],
    device: str,
    count: int,
    on_step: Callable[[Task, int, int], None],
    may_start: Callable[[], bool],
) -> Iterator[Done]:
    waiting, lanes = deque(tasks), [_Lane(device) for _ in range(count)]

    def feed(lane: _Lane) -> None:
        lane.task = None
        if waiting and may_start():
            on_step(waiting[0], 0, 0)
            lane.give(waiting.popleft())

    try:
        for lane in lanes:
            feed(lane)
        while any(lane.task for lane in lanes):
            ready = wait([lane.ours for lane in lanes if lane.task])
            for index, lane in enumerate(lanes):
                task = lane.task
                if task is None or lane.ours not in ready:
                    continue
                try:
                    message = lane.ours.recv()
                except (EOFError, OSError):
                    lane.end()
                    code = lane.process.exitcode or 0
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    lanes[index] = _Lane(device)
                    feed(lanes[index])
                    yield Done(
                        task, Trial((), failure=f"{DIED} ({how}); resume=RUN_ID runs it again"), died=True
                    )
                    continue
                if isinstance(message, tuple):
                    on_step(task, *message)
                else:
                    if message.lost:
                        lane.end()
                        lanes[index] = lane = _Lane(device)
                    feed(lane)
                    yield Done(task, message.trial, message.trace)
    finally:
        for lane in lanes:
            lane.end()


@dataclass(frozen=True, slots=True)
class _Answer:
    trial: Trial
    trace: str
    lost: bool  # the process can't use its device any more; the next run needs another one


def device_works(device: str) -> bool:
    """Whether the device still answers: after a CUDA fault every later call of a process fails."""
    if device == "cpu":
        return True
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _end_with_parent() -> None:
    """Ends this process when the one that would store its run was killed: the checkpoints are resume='s then."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _serve(parent: Connection, device: str) -> None:
    """The other process: makes runs until the parent has no more, or is gone."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches every process of the terminal; the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    last = 0.0

    def report(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            try:
                parent.send((done, total))
            except OSError:
                os._exit(1)  # as _end_with_parent, which may be a moment later

    while True:
        try:
            suite, case, arm, workspace = parent.recv()
        except (EOFError, OSError):
            return
        made: Any = importlib.import_module(suite) if isinstance(suite, str) else suite
        done = _run(Task(made, case, arm, workspace), device, report)
        parent.send(_Answer(done.trial, done.trace, not device_works(device)))
