"""Every main command from the wheel alone. Oracle: its exit code and what it prints, in an environment without anything else."""

from __future__ import annotations

import pytest
import wheel_alone


@pytest.mark.slow
def test_every_command_does_what_is_expected_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheel_alone.main([]) == 0, capsys.readouterr().out


def test_every_command_of_the_program_is_among_them() -> None:
    """But those that only print what another one prints."""
    from harness.__main__ import commands

    asked = {command.words[0] for command in [*wheel_alone.commands(), *wheel_alone.LONG]}
    assert set(commands()) - {"-h"} <= asked
