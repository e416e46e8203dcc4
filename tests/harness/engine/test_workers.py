"""Workers and their pool. Oracle: what the jobs below return, and the process table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from harness.engine import workers
from harness.engine.workers import Conditions, Ended, Pool, Reporter
from harness.machine import ranks

MIB = 2**20


def answer(value: Any, tell: Reporter, *, spoiled: bool = False) -> tuple[Any, bool]:
    return (value, os.getpid()), spoiled


def facts(tell: Reporter) -> tuple[Any, bool]:
    return (os.environ.get("OF_THIS_TEST"), str(Path.cwd()), torch.get_num_threads()), False


def signs(count: int, tell: Reporter) -> tuple[Any, bool]:
    for i in range(count):
        tell(i + 1, count, f"step {i + 1}")
    return count, False


def hang(tell: Reporter) -> tuple[Any, bool]:
    tell(0, 0, "the sleep began")
    child = subprocess.Popen(["sleep", "600"])
    Path("child").write_text(str(child.pid))
    time.sleep(600)
    raise AssertionError


def hog(size: int, tell: Reporter) -> tuple[Any, bool]:
    try:
        return len(bytearray(size)), False
    except MemoryError:
        return "refused", False


def grow(size: int, tell: Reporter) -> tuple[Any, bool]:
    KEPT.append(b"x" * size)
    return os.getpid(), False


KEPT: list[bytes] = []


def rank() -> int:
    return torch.distributed.get_rank()


def with_ranks(tell: Reporter) -> tuple[Any, bool]:
    return ranks.run(rank, 2), False


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def do(jobs: Sequence[Any], *, count: int = 1, timeout_s: float = 120, **conditions: Any) -> list[Ended]:
    with Pool([Conditions.here(**conditions)] * count, timeout_s) as pool:
        return list(pool.run(jobs))


def test_a_worker_is_used_again_and_ends_with_the_pool() -> None:
    ended = do([partial(answer, i) for i in range(5)])
    assert [e.result[0] for e in ended] == list(range(5))
    (process,) = {e.result[1] for e in ended}
    assert process != os.getpid()
    assert not psutil.pid_exists(process)
    assert {(e.fault, e.tries, e.worker) for e in ended} == {("", 1, 0)}


def test_a_worker_waits_while_its_result_is_dealt_with() -> None:
    """The next case must not be timed while the rows of the last are written."""
    asked: list[int] = []

    def jobs() -> Iterator[Any]:
        for i in range(3):
            asked.append(i)
            yield partial(answer, i)

    with Pool([Conditions.here()], 60) as pool:
        for i, _ in enumerate(pool.run(jobs())):
            assert asked == list(range(i + 1))


def test_a_silent_job_is_ended_with_all_that_it_started() -> None:
    hung, good = do([hang, partial(answer, "next")], timeout_s=0.5)
    assert hung.fault == (
        "no sign of life for 0.5 s since the sleep began; case_timeout_s=SECONDS allows more"
    )
    assert not hung.died
    assert hung.tries == 1
    assert good.result[0] == "next"
    child = int(Path("child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_each_sign_of_life_gives_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this side leaps 100 s a sign; five of them exceed 150 s, any two do not."""
    leaps, clock = [0], time.monotonic
    monkeypatch.setattr(workers.time, "monotonic", lambda: clock() + 100 * leaps[0])
    seen: list[tuple[int, int]] = []

    def on_sign(job: Any, done: int, total: int) -> None:
        leaps[0] += 1
        seen.append((done, total))

    with Pool([Conditions.here()], 150) as pool:
        (ended,) = pool.run([partial(signs, 5)], on_sign)
    assert ended.result == 5
    assert seen == [(0, 0), (1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_memory_beyond_the_limit_is_refused_as_anywhere() -> None:
    ended = do([partial(hog, size * MIB) for size in (64, 512, 64)], memory_bytes=256 * MIB)
    assert [e.result for e in ended] == [64 * MIB, "refused", 64 * MIB]


def test_a_worker_that_leaks_is_replaced() -> None:
    conditions = replace(Conditions.here(), leak_bytes=96 * MIB)
    with Pool([conditions], 60) as pool:
        found = [e.result for e in pool.run([partial(grow, size * MIB) for size in (64, 64, 64, 1)])]
    assert found[0] == found[1] == found[2] != found[3]


def test_a_worker_that_dies_at_rest_costs_nothing() -> None:
    with Pool([Conditions.here()], 60) as pool:
        first, second = [], []
        for ended in pool.run([partial(answer, 1), partial(answer, 2)]):
            (second if first else first).append(ended)
            if not second:
                os.kill(ended.result[1], signal.SIGKILL)
    assert second[0].result[0] == 2
    assert second[0].result[1] != first[0].result[1]


def test_a_worker_takes_over_environment_folder_and_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do([facts])  # the server has started now, whatever the environment was then
    monkeypatch.setenv("OF_THIS_TEST", "set later")
    (ended,) = do([facts], variables={"OTHER": "1"})
    assert ended.result == ("set later", str(tmp_path), torch.get_num_threads())


def test_a_job_may_start_ranks_of_its_own() -> None:
    (ended,) = do([with_ranks])
    assert ended.result == [0, 1], ended.fault


def test_no_suite_starts_a_thread_in_the_server_that_workers_are_forked_from() -> None:
    """Oracle: the kernel's list of threads of a process that imports what the server does. pandas and pyarrow start one."""
    code = (
        "import importlib, os; from harness.engine import workers; from harness.suites import NAMES\n"
        "for name in [*workers.PRELOADED, *(f'harness.suites.{n}' for n in NAMES)]:\n"
        "    importlib.import_module(name)\n"
        "    assert len(os.listdir('/proc/self/task')) == 1, name"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
