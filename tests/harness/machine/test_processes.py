"""What ends a command. Oracle: signals that this process sends to itself; whole commands: `test_command_line`."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from harness.machine.processes import interruptible

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def nobody(number: int, frame: object) -> None:
    """Stands in for what would end the tests."""


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """A shell's "&" hands SIGINT down as ignored, `nohup` SIGHUP."""
    before = [(number, signal.signal(number, nobody)) for number in ENDING]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDING)
def test_each_of_these_signals_ends_what_is_within_once_and_nothing_outside(number: signal.Signals) -> None:
    with interruptible() as interrupts:
        assert not interrupts.heard
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        for other in ENDING:  # those that follow closely count as the same one
            signal.raise_signal(other)
    assert interrupts.heard
    signal.raise_signal(number)
    assert signal.getsignal(number) is nobody


def test_one_within_another_is_the_outer_one() -> None:
    with interruptible() as outer, interruptible() as inner:
        assert inner is outer
