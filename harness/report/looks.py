"""Looks: colour and marker of an arm. A recipe keeps both in every figure of a page; the fill says whose it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.report.drawing import INK, MARKERS, MUTED, SERIES
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


def look(machine: Machine, arm: Arm) -> dict[str, Any]:
    """Keywords of `Axes.plot` for the marks of an arm: by recipe the colour and the marker, by whose it is the fill."""
    name = subject(arm)
    if not name:
        return dict(BASELINE)
    places, fills = _places(machine), _fills(machine)
    place = places.get(name, len(places))
    beyond = place - len(PLACES)
    # What is no published recipe never takes a recipe's colour: the eighth and grey alternate, the marker tells them apart.
    colour = SERIES[place] if beyond < 0 else (SERIES[7], MUTED)[beyond % 2]
    fill = FILLS[fills.get((name, _whose(arm)), 0) % len(FILLS)]
    return {"marker": MARKERS[place % 8], "color": colour, "linestyle": "none", "fillstyle": fill}


def looks(machine: Machine, arms: Iterable[tuple[str, Arm]]) -> dict[str, dict[str, Any]]:
    """The look of each named arm of one figure."""
    return {name: look(machine, arm) for name, arm in dict(arms).items()}


def _whose(arm: Arm) -> tuple[str, str, str]:
    return arm.peer, arm.variant, arm.casts


@once
def _places(machine: Machine) -> Mapping[str, int]:
    """The place of each recipe or implementation of these rows; those not in `PLACES` follow by name."""
    others = {subject(arm) for arm in arms_of(machine.frame)} - {"", *PLACES}
    return {name: i for i, name in enumerate((*PLACES, *sorted(others)))}


@once
def _fills(machine: Machine) -> Mapping[tuple[str, tuple[str, str, str]], int]:
    """Fill of each arm of a recipe, however it is run: ours is full, others follow by name."""
    kinds: dict[str, set[tuple[str, str, str]]] = {}
    for arm in arms_of(machine.frame):
        kinds.setdefault(subject(arm), set()).add(_whose(arm))
    return {(name, kind): i for name, own in kinds.items() for i, kind in enumerate(sorted(own))}
