"""The name of the arm under way. Oracle: what was written; the rest of the module is tested through `harness.engine.workers`."""

from __future__ import annotations

import pytest

from harness.engine.worker_process import ArmUnderWay


@pytest.mark.parametrize("name", ["", "rowwise_eager", "\u00fc" * 100])
def test_a_name_is_read_as_it_was_written_whatever_stood_there(name: str) -> None:
    arm = ArmUnderWay()
    arm.write("another, and a longer one than any of the names")
    arm.write(name)
    assert arm.read() == name


def test_a_name_that_is_too_long_is_that_of_no_arm_and_not_of_another() -> None:
    arm = ArmUnderWay()
    for name in ("a" * 1000, "\u00fc" * 1000):
        arm.write(name)
        assert arm.read() not in ("", name)
        assert len(arm.read()) > 100
