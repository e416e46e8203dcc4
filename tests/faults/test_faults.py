"""Every planted fault is caught by the check that it names, and no check fails without one."""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path

import forked
import pytest
import torch
from fault_checks import CHECKS
from layer_faults import ALL_FAULTS as FAULTS


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_implementation_passes(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name: str) -> None:
    """ValueError: some faults make operands that a GEMM refuses, which is caught as well."""
    fault = FAULTS[name]
    with fault.planted(), pytest.raises((AssertionError, ValueError)):
        CHECKS[fault.caught_by]()


def test_faults_leave_nothing_behind() -> None:
    places = [target.rpartition(".") for fault in FAULTS.values() for target, _ in fault.patches]

    def there() -> list[int]:
        return [id(inspect.getattr_static(pkgutil.resolve_name(of), name)) for of, _, name in places]

    before = there()
    for fault in FAULTS.values():
        with fault.planted():
            assert there() != before
    assert there() == before


def test_the_catalogue_is_large_and_uses_every_check() -> None:
    assert len(FAULTS) >= 20
    assert {fault.caught_by for fault in FAULTS.values()} == set(CHECKS)


def test_faults_are_read_by_scripts_too() -> None:
    """`python tests/faults/test_faults_in_training.py` has no path of pytest's."""
    folder = Path(__file__).parent
    ran = forked.run(["-c", "import layer_faults; print(len(layer_faults.ALL_FAULTS))"], folder, {})
    assert ran.stdout == f"{len(FAULTS)}\n", ran.stderr
