"""Reproduced: whether a peer does here what its own authors publish of it, before it is compared with ours.

A figure of ours counts as theirs where it was measured at their shape; at any other shape it can contradict them, and the words
then name both shapes, but it confirms nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from harness.store import text
from harness.store.case import arm_of
from harness.store.compare import DISTURBED
from harness.store.outside import parse
from harness.store.published import RATE, SPEEDUP, Published, of_row
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.store.case import Arm

OFF = 0.05  # further from the nearest of the authors' figures a figure is not theirs


class Found(StrEnum):
    """What a comparison with the authors' figures came to."""

    REPRODUCED = "peer_reproduced"
    NOT_REPRODUCED = "peer_not_reproduced"
    NOT_MEASURED = "peer_shape_not_measured"


@dataclass(frozen=True, slots=True)
class OwnFigure:
    """One figure of ours of a peer: in `unit`, at `shape` (keys as `Published.shape` has them); `cut` says which part of a model."""

    value: float
    unit: str
    shape: Mapping[str, str | int]
    cut: str = ""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """What was found of an arm: `theirs`, and `ours` nearest to its shape, None where nothing here is of its kind."""

    found: Found
    theirs: Published
    ours: OwnFigure | None = None

    @property
    def words(self) -> str:
        """What every table that shows the arm says of it."""
        if self.ours is None or self.found == Found.NOT_MEASURED:
            return "its authors' shape was not measured"
        value, theirs = figure(self.ours.value, self.ours.unit), figure(self.theirs)
        if self.found == Found.REPRODUCED:
            return f"reproduced: {value} where its authors have {theirs} on {self.theirs.device}"
        where = "" if _is_at(self.theirs, self.ours) else ", at another shape"
        return f"not reproduced{where}: {value} where its authors have {theirs}"


def reproduction(arm: Arm, published: Sequence[Published], ran: Sequence[OwnFigure]) -> Reproduction | None:
    """Whether an arm of a peer does what its authors publish of its recipe; None where they publish nothing of it.

    Args:
        arm: of the peer.
        published: what its authors measured.
        ran: what was measured here, of this arm.
    """
    theirs = [each for each in published if each.recipe == arm.recipe]
    own = [each for each in theirs if each.mode == arm.mode]
    near = [
        (apart, each, one)
        for each in own
        for one in ran
        if each.unit == one.unit and (apart := _apart(each, one)) is not None
    ]
    if not near:  # a figure of another mode is shown, and compared with nothing
        return Reproduction(Found.NOT_MEASURED, (own or theirs)[0]) if theirs else None
    _, each, one = min(near, key=lambda found: (found[0], found[2].cut != ""))  # all of a model before a part
    if max(each.low / one.value, one.value / each.high) > 1 + OFF:
        return Reproduction(Found.NOT_REPRODUCED, each, one)
    return Reproduction(Found.REPRODUCED if _is_at(each, one) else Found.NOT_MEASURED, each, one)


def reproductions(
    times: Iterable[Mapping[str, Any]], pairs: Iterable[Mapping[str, Any]]
) -> dict[str, Reproduction]:
    """`reproduction` of each arm of a peer, by its name.

    Args:
        times: rows of times of one machine, with `tflops`.
        pairs: their paired ratios (`harness.store.compare.pairs_of`).
    """
    of_peers = grouped((row["arm"], row) for row in times if arm_of(row).peer and not arm_of(row).control)
    ran: dict[str, list[OwnFigure]] = {}
    about = {(row["run_id"], row["case_id"], row["arm"]): row for rows in of_peers.values() for row in rows}
    for pair in pairs:
        row = about.get((pair["run_id"], pair["case_id"], pair["arm"]))
        is_sound = (
            pair["speedup"] > 0 and pair["condition"] not in DISTURBED and pair["regime"] != "sustained"
        )
        if row is not None and pair["fp8"] and is_sound:
            ran.setdefault(row["arm"], []).append(OwnFigure(pair["speedup"], SPEEDUP, *_measured(row)))
    for row in (row for rows in of_peers.values() for row in rows):
        is_beside = parse(row["timing"]).get("contended")
        if row["status"] == "ok" and row["tflops"] > 0 and row["regime"] != "sustained" and not is_beside:
            ran.setdefault(row["arm"], []).append(OwnFigure(row["tflops"], RATE, *_measured(row)))
    found = {
        name: reproduction(arm_of(rows[-1]), of_row(rows[-1]), ran.get(name, ()))
        for name, rows in of_peers.items()
    }
    return {name: each for name, each in found.items() if each is not None}


def _measured(row: Mapping[str, Any]) -> tuple[dict[str, str | int], str]:
    """The shape of a row, and which part of the model it is of; "" for all of it."""
    axes, layers = text.axes_of(row["axes"]), str(parse(row["resolved"]).get("layers", ""))
    shape: dict[str, str | int] = {"model": str(axes["model"])} if axes.get("model") else {}
    sizes = {
        name: size
        for name in ("M", "K", "N", "batch", "seq")
        if isinstance(size := axes.get(name), int) and size > 0
    }
    shape |= {name: sizes[name] for name in text.SIZES if name in sizes}
    if "batch" in sizes and "seq" in sizes:
        shape["tokens"] = sizes["batch"] * sizes["seq"]
    return shape, layers.removeprefix("truncated to ") if layers.startswith("truncated") else ""


def _apart(theirs: Published, own: OwnFigure) -> float | None:
    """How far apart two shapes are, 0 for the same; None where they are of different kinds."""
    apart = 0.0
    for key, value in theirs.shape.items():
        mine = own.shape.get(key)
        if isinstance(value, int) and isinstance(mine, int):
            apart += abs(math.log(mine / value))
        elif mine != value:
            return None
    return apart


def _is_at(theirs: Published, own: OwnFigure) -> bool:
    return _apart(theirs, own) == 0 and not own.cut


def in_words(shape: Mapping[str, str | int], cut: str = "") -> str:
    """A shape, and which part of the model.

    >>> in_words({"model": "llama3_8b", "tokens": 16384}, "4 of 32 layers"), in_words({"M": 4096, "K": 16384, "N": 7168})
    ('16,384 tokens, 4 of 32 layers of llama3_8b', '4096x16384x7168')
    """
    if "model" not in shape:
        return "x".join(str(shape[key]) for key in text.SIZES if key in shape)
    tokens = f"{text.count(int(shape['tokens']))} tokens, " if "tokens" in shape else ""
    return f"{tokens}{f'{cut} of ' if cut else ''}{shape['model']}"


def figure(value: float | Published, unit: str = "") -> str:
    """A figure with its unit: of ours, or those of the authors."""
    if isinstance(value, Published):
        return " to ".join(dict.fromkeys(figure(each, value.unit) for each in (value.low, value.high)))
    return text.ratio(value) if unit == SPEEDUP else f"{text.number(value, 4)} {unit}"
