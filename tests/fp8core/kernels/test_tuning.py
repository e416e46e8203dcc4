"""tuning: the fastest candidate, measured once for a bucket, from a cache file that may hold anything."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton

from fp8core.kernels import tuning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("cache")

FAST, SLOW = {"BLOCK": 1}, {"BLOCK": 2}
ONCE = [2, 1]  # run before the clock starts
MEASURED = ONCE + ([2, 1, 1, 2] * tuning.ROUNDS)[: 2 * tuning.ROUNDS]


class Clock:
    """Runs a closure and answers the time that its candidate was given; counts the measurements."""

    def __init__(self, times: dict[int, float]) -> None:
        self.times = times
        self.launched: list[int] = []

    def run(self, candidate: tuning.Candidate) -> None:
        self.launched.append(candidate["BLOCK"])

    def time_ms(self, closure: Callable[[], None]) -> float:
        closure()
        return self.times[self.launched[-1]]


def pick(
    by: Clock, shape: tuple[int, ...] = (1000, 64), device: str = "H200", run: Any = None, **options: Any
) -> tuning.Candidate:
    options = {"time_ms": by.time_ms} | options
    offered = options.pop("offered", [SLOW, FAST])
    return tuning.choose("cast", shape, torch.bfloat16, device, offered, run or by.run, **options)


def failing(
    error: Exception, *candidates: tuning.Candidate
) -> tuple[Clock, Callable[[tuning.Candidate], None]]:
    """A clock, and its `run`, which raises at these candidates."""
    clock = Clock({1: 0.5, 2: 0.9})

    def run(candidate: tuning.Candidate) -> None:
        clock.run(candidate)
        if candidate in candidates:
            raise error

    return clock, run


NO_ROOM = triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory")


def test_fastest_is_measured_once_and_kept(cache: Path) -> None:
    """Oracle: the given times. The second call, the same bucket and a new process (`forget`) measure nothing."""
    clock = Clock({1: 0.5, 2: 0.9})
    assert pick(clock) == FAST
    assert clock.launched == MEASURED
    assert pick(clock, (1024, 33)) == FAST
    tuning.forget()
    assert pick(clock) == FAST
    assert clock.launched == MEASURED
    assert list(json.loads(cache.read_text()).values()) == [FAST]


@pytest.mark.parametrize("change", [{"shape": (1025, 64)}, {"device": "B200"}])
def test_other_buckets_and_devices_are_measured(change: dict[str, object]) -> None:
    clock = Clock({1: 0.5, 2: 0.9})
    pick(clock)
    pick(clock, **change)
    assert clock.launched == MEASURED * 2


KEY = tuning.key("cast", (1024, 64), torch.bfloat16, "H200")


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '"x"', "null", "\x00\xff", '{"cast": 3}',
    *(json.dumps({KEY: e}) for e in ({"BLOCK": 99}, {"BLOCK": "1"}, {"BLOCK": 1.0}, {"BLOCK": True}, "BLOCK", [], None))])  # fmt: skip
def test_a_cache_without_a_candidate_of_this_product_is_measured_anew_and_repaired(
    content: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged; or with a candidate that a newer version dropped, or something of another type."""
    cache.parent.mkdir()
    cache.write_text(content, encoding="latin-1")
    clock = Clock({1: 0.5, 2: 0.9})
    with caplog.at_level(logging.WARNING):
        assert pick(clock) == FAST
    assert clock.launched == MEASURED
    assert caplog.records or content.startswith('{"')
    assert json.loads(cache.read_text())[KEY] == FAST


def test_cache_that_cannot_be_written_does_not_matter(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert pick(Clock({1: 0.5, 2: 0.9})) == FAST
    assert "cannot be written" in caplog.text


def test_what_another_process_wrote_is_kept(cache: Path) -> None:
    pick(Clock({1: 0.5, 2: 0.9}))
    table = json.loads(cache.read_text())
    cache.write_text(json.dumps({**table, "other": {"BLOCK": 7}}))
    pick(Clock({1: 0.9, 2: 0.5}), (9, 9))
    assert len(json.loads(cache.read_text())) == 3


def test_refused_candidates() -> None:
    """A candidate that the device has no room for is skipped; none left is an error."""
    clock, run = failing(NO_ROOM, FAST)
    assert pick(clock, run=run) == SLOW
    clock, run = failing(NO_ROOM, FAST, SLOW)
    with pytest.raises(RuntimeError, match="no candidate of cast 4 bfloat16 x runs on this device"):
        pick(clock, (3,), "x", run)


def test_every_candidate_is_launched_inside_and_none_after_an_exception(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the device has no room for is skipped, as it is by a choice; a fault of a kernel is raised."""
    clock, run = failing(NO_ROOM, SLOW)
    with tuning.every_candidate(), tuning.every_candidate():
        assert pick(clock, run=run, time_ms=None) == SLOW
    assert clock.launched == [2, 1]
    _, faulty = failing(ZeroDivisionError("a fault of the kernel"), SLOW)
    with pytest.raises(ZeroDivisionError), tuning.every_candidate():
        pick(clock, run=faulty, time_ms=None)
    monkeypatch.setenv("FP8CORE_TUNE", "0")
    assert pick(clock, run=faulty, time_ms=None) == SLOW
    assert not cache.exists()


def test_a_candidate_with_a_fault_is_no_refusal() -> None:
    """What does not compile is a fault of the kernel: it is raised, and no other tile is taken instead."""
    clock, run = failing(triton.compiler.errors.CompilationError("x", None, "a fault of the kernel"), SLOW)
    with pytest.raises(triton.compiler.errors.CompilationError):
        pick(clock, run=run)


def test_no_candidate_is_begun_after_the_limit(cache: Path) -> None:
    """Oracle: the given times and a clock that counts candidates, 15 s each. One process chooses once; the file waits."""
    offered = [SLOW, {"BLOCK": 3}, FAST]
    clock = Clock({1: 0.1, 2: 0.9, 3: 0.5})

    def choose(limit_s: float) -> tuning.Candidate:
        return pick(clock, offered=offered, limit_s=limit_s, clock=lambda: 15.0 * len(set(clock.launched)))

    assert choose(20) == {"BLOCK": 3}
    assert set(clock.launched) == {2, 3}
    clock.launched.clear()
    assert choose(20) == {"BLOCK": 3}
    assert not clock.launched
    pick(Clock({1: 0.5, 2: 0.9}), (9, 9))  # writes the file
    assert len(json.loads(cache.read_text())) == 1
    cache.unlink()
    tuning.forget()
    clock.launched.clear()
    assert choose(0) == SLOW
    tuning.forget()
    clock.launched.clear()
    assert choose(1000) == FAST
    assert list(json.loads(cache.read_text()).values()) == [FAST]


def test_a_full_gpu_takes_the_default_and_remembers_nothing(cache: Path) -> None:
    def full(closure: object) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    clock = Clock({1: 0.5, 2: 0.9})
    clock.time_ms = full
    assert pick(clock) == SLOW
    assert not cache.exists()


def test_default_where_nothing_can_be_measured(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU or with FP8CORE_TUNE=0 the first candidate, and no file."""
    monkeypatch.setenv("FP8CORE_TUNE", "0")
    clock = Clock({})
    assert pick(clock, time_ms=None) == SLOW
    assert not clock.launched
    assert not cache.exists()
    with pytest.raises(ValueError, match="no candidates"):
        pick(clock, offered=[])


def test_while_a_graph_records_what_is_known_is_taken_and_nothing_measured(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the default before it was measured, the fastest after."""
    monkeypatch.setattr(tuning, "off", lambda: False)
    monkeypatch.setattr(tuning, "capturing", lambda: True)
    clock = Clock({1: 0.5, 2: 0.9})
    assert pick(clock, time_ms=None) == SLOW
    assert not cache.exists()
    pick(clock)
    clock.launched.clear()
    assert pick(clock, time_ms=None) == FAST
    assert not clock.launched


def test_cache_file_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8CORE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.cache_file() == tmp_path / "fp8core" / "tuning.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.cache_file() == tmp_path / ".cache" / "fp8core" / "tuning.json"
