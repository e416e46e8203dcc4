"""Looks: colour and marker of an arm. A recipe keeps both in every figure of a page; the fill tells its arms apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.drawing import INK, MARKERS, SERIES
from harness.report.runs import once
from harness.store.arm import WITHOUT_FP8, Arm, arms_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from harness.report.runs import Machine

# Recipes that fp8core publishes, each with a place of its own, so that pages of different runs agree.
PLACES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8", "delayed", "static")
FILLS = ("full", "none", "left", "right", "top", "bottom")
BASELINE = {"marker": "p", "color": INK, "linestyle": "none", "fillstyle": "none"}


def subject(arm: Arm) -> str:
    """What a colour stands for: the recipe, else whose arm it is; "" of an arm without FP8.

    >>> subject(Arm("rowwise", "compile", peer="torchao")), subject(Arm(peer="te")), subject(Arm("bf16", "eager"))
    ('rowwise', 'te', '')
    """
    if arm.recipe in WITHOUT_FP8:
        return ""
    return arm.recipe or arm.peer or arm.variant or arm.casts or arm.mode


def look(machine: Machine, arm: Arm, fill: int = 0) -> dict[str, Any]:
    """Keywords of `Axes.plot` for the marks of an arm; `fill` counts the arms of one recipe within a figure."""
    name = subject(arm)
    if not name:
        return dict(BASELINE)
    place = _places(machine).get(name, len(PLACES))
    # Beyond the first eight a colour comes back with the next marker, so that the pair stays unique up to 64.
    marker = MARKERS[(place + place // 8) % 8]
    style = FILLS[fill % len(FILLS)]
    return {"marker": marker, "color": SERIES[place % 8], "linestyle": "none", "fillstyle": style}


def looks(machine: Machine, arms: Iterable[tuple[str, Arm]]) -> dict[str, dict[str, Any]]:
    """The look of each named arm of one figure."""
    seen: dict[str, int] = {}
    found = {}
    for name, arm in arms:
        if name not in found:
            found[name] = look(machine, arm, seen.get(subject(arm), 0))
            seen[subject(arm)] = seen.get(subject(arm), 0) + 1
    return found


@once
def _places(machine: Machine) -> Mapping[str, int]:
    """The place of each recipe or implementation of these rows; those not in `PLACES` follow by name."""
    others = {subject(arm) for arm in arms_of(machine.frame)} - {"", *PLACES}
    return {name: i for i, name in enumerate((*PLACES, *sorted(others)))}
