"""Names of axes, checked before torch is imported; `harness.engine.plan` checks their values, and all suites of other packages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.store.errors import unknown
from harness.suites import SUITES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def refuse_unknown(config: Mapping[str, Any]) -> None:
    """Refuse an axis that no suite of the sweep has.

    Args:
        config: plain values of `harness.cli.config.SweepConfig`; interpolations need not be resolved, and are not judged.

    Raises:
        UsageError: names the axis and the nearest one.
    """
    parts = config["parts"]
    if not isinstance(parts, dict) or not all(isinstance(part, dict) for part in parts.values()):
        return  # an interpolation
    known = [_known(part) for part in parts.values()]
    for part, names in zip(parts.values(), known, strict=True):
        _refuse(part["axes"], names)
    every = None if None in known else {name for names in known for name in names or ()}
    _refuse(config["axes"], every if parts else _known(config))  # those of the whole sweep belong to any part


def _known(part: Mapping[str, Any]) -> Collection[str] | None:
    """The axes of a part's suite; None where only importing it, or resolving its name, tells them."""
    return SUITES.axis_names(part["suite"]) if isinstance(part["suite"], str) else None


def _refuse(axes: Any, known: Collection[str] | None) -> None:
    if known is None or not isinstance(axes, dict):
        return
    for axis, values in axes.items():
        if values is not None and axis not in known:  # null unsets what another sweep has set
            raise unknown("axis", axis, known)
