"""Published: what the authors of another implementation measured of it themselves, as data.

`published.yaml` has the figures of the peers of this tree, by the first word of their arms; a package that brings a peer gives
its own (`harness.peers.Peer.published`). A row of a peer's arm stores them (`resolved.peer_published`), so that a reader needs
neither the package nor torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from harness.store.case import arm_of
from harness.store.outside import parse
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Mapping

SPEEDUP, RATE = "x", "TFLOP/s"
UNITS = (SPEEDUP, RATE)


@dataclass(frozen=True, slots=True)
class Published:
    """A figure that authors publish, and what they measured it at.

    Attributes:
        recipe: name of the recipe, as arms have it.
        mode: eager or compile.
        low: the figure, or the least of those that they give for the same shape.
        high: the largest of them.
        shape: what was measured: `model` and `tokens` (of a microbatch, a GPU), or M, K and N of a product.
        device: whose figure it is, "8 H100".
        source: a link to the page or file that gives it.
        unit: of the figure: x, a speedup over bf16 of the same mode on the same GPUs, or TFLOP/s.
        base: what a speedup is over, with its rate where it is given.
        remark: what else their run had that an arm here may lack.
        capability: compute capability of the device, where its rate is compared with those of others.

    Raises:
        ValueError: a field that cannot be so.
    """

    recipe: str
    mode: str
    low: float
    high: float
    shape: Mapping[str, str | int]
    device: str
    source: str
    unit: str = SPEEDUP
    base: str = ""
    remark: str = ""
    capability: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < float("inf"):
            raise ValueError(f"figure {self.low} to {self.high}: expected 0 < low <= high")
        if self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r}: expected one of {', '.join(UNITS)}")
        if not (self.shape and self.device and self.source.startswith("https://")):
            raise ValueError(
                "a published figure needs a shape, a device and a source that is a link, https://"
            )

    @property
    def stored(self) -> dict[str, Any]:
        """Fields as a row holds them."""
        return {name: value for name, value in asdict(self).items() if value != ""}


def of_row(row: Mapping[str, Any]) -> tuple[Published, ...]:
    """The figures of a row's peer: those that the row holds, else, of rows from before they were stored, the table's."""
    figures = parse(row["resolved"]).get("peer_published")
    if not isinstance(figures, list | tuple):
        return of_peer(arm_of(row).peer)
    return tuple(made for each in figures if (made := _read(each)) is not None)


def of_peer(word: str) -> tuple[Published, ...]:
    """The figures of a peer of this tree, by the first word of its arms; () for a peer without any."""
    return _table().get(word, ())


def rates_on(capability: str) -> list[Published]:
    """The rates of products that the authors of peers publish of GPUs of that compute capability."""
    return [e for own in _table().values() for e in own if e.unit == RATE and e.capability == capability]


@cache
def _table() -> Mapping[str, tuple[Published, ...]]:
    entries = beside(__file__, "published.yaml")
    return {word: tuple(Published(**each) for each in own) for word, own in entries.items()}


def _read(stored: object) -> Published | None:
    """One figure of a row that anyone may have written; None where it is none."""
    try:
        return Published(**stored)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError):
        return None
