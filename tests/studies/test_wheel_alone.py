"""Every main command from the wheel alone. Oracle: its exit code and what it prints, in an environment without anything else."""

from __future__ import annotations

import pytest
import wheel_alone

from harness.__main__ import commands


@pytest.mark.slow
def test_every_command_does_what_is_expected_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheel_alone.main([]) == 0, capsys.readouterr().out


def test_every_command_of_the_program_is_among_them() -> None:
    """But those that only print what another one prints, and words that name what is used instead."""
    gone = {"gpu", "kernel", "gate-selftest", "verdict-selftest"}
    asked = {words.split()[0] for words, _, _ in wheel_alone.COMMANDS}
    assert set(commands()) - {"-h", "--watch"} - gone <= asked
