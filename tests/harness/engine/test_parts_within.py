"""Parts of a sweep that are cut off. Oracle: a clock, and signals that this process sends to itself."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from harness.engine.parts import CUT, within
from harness.machine.processes import interruptible


@pytest.fixture(autouse=True)
def _signals_restored() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def sleeps(seconds: float, code: int = 0) -> Callable[[], int]:
    def work() -> int:
        time.sleep(seconds)
        return code

    return work


def records_its_end(seconds: float, then_s: float = 0.0) -> Callable[[], int]:
    """A sweep: it records that it was interrupted, which takes `then_s`, and returns 2."""

    def work() -> int:
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            time.sleep(then_s)
            return 2
        return 0

    return work


@pytest.mark.parametrize("work", [sleeps(2.0), records_its_end(2.0)])
def test_each_part_is_cut_off_at_its_own_deadline(work: Callable[[], int]) -> None:
    with interruptible():
        for _ in range(3):
            began = time.monotonic()
            assert within(0.2, work) == CUT
            assert time.monotonic() - began < 1.5


def test_a_part_that_ends_in_time_after_one_that_was_cut_keeps_its_exit_code() -> None:
    with interruptible():
        assert within(0.1, sleeps(1.0)) == CUT
        assert within(5.0, sleeps(0.1, 1)) == 1


@pytest.mark.parametrize("work", [sleeps(3.0), records_its_end(3.0)])
def test_a_signal_soon_after_a_cut_ends_the_whole(work: Callable[[], int]) -> None:
    with interruptible():
        assert within(0.1, sleeps(1.0)) == CUT
        later = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM])
        later.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            within(10.0, work)
        assert time.monotonic() - began < 2.0
        later.join()


def test_a_signal_while_a_cut_part_records_its_end_ends_the_whole_after_that() -> None:
    """It breaks no file that is being written, and is not lost."""
    recorded = []

    def work() -> int:
        code = records_its_end(3.0, then_s=0.8)()
        recorded.append(code)
        return code

    with interruptible():
        later = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM])
        later.start()
        with pytest.raises(KeyboardInterrupt):
            within(0.1, work)
        later.join()
    assert recorded == [2]


def test_a_deadline_after_a_signal_does_not_turn_it_into_a_cut() -> None:
    with interruptible():
        later = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM])
        later.start()
        with pytest.raises(KeyboardInterrupt):
            within(0.3, records_its_end(3.0, then_s=0.6))
        later.join()


def test_work_that_no_interrupt_reached_keeps_its_exit_code() -> None:
    """A process that was started with SIGTERM ignored cannot be cut off."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with interruptible():
        assert within(0.1, sleeps(0.4)) == 0
