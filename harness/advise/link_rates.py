"""Link rates: what stored runs measured of a GPU's links, as the figures "link" and "network" of its rates.

A rate is the bus bandwidth of the largest all-gather of the suite `links`: to the node, of the largest group that lies within one
host; to other nodes, of one GPU a host. Only NCCL's between GPUs of the model that is asked about count. gloo carries the bytes
of CPUs and says nothing about NVLink or a network card, so its rows are never applied, and the answer says so. Imports no torch.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.advise.rates import MEASURED, Figure
from harness.machine.hardware import of_env
from harness.machine.links import ALL_GATHER, HOSTS, NETWORKS, SUITE, End, Members, kind
from harness.store.compare import rows_of
from harness.store.json_columns import parse
from harness.store.text import bytes_, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from harness.machine.hardware import Device

_SPREAD = 0.05  # relative standard error that is assumed; nothing was measured on GPUs yet
_TRANSPORT = "nccl"


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What was found.

    Attributes:
        figures: "link" and "network" of `harness.advise.rates.FIGURES`, those that were measured.
        ignored: why rows of links were not applied, a sentence each.
    """

    figures: Mapping[str, Figure] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Gathered:
    """One all-gather: its figure, bytes, ranks, kind of link, value, and where and when it was measured."""

    figure: str
    size: int
    ranks: int
    link: str
    bus: float
    run_id: str
    day: str


def link_rates(frame: pd.DataFrame, device: Device) -> LinkRates:
    """The rates of a GPU's links in some rows.

    Args:
        frame: of any machines, as `harness.store.read` gives them.
        device: the GPU that is asked about.
    """
    own = frame[(frame["suite"] == SUITE) & (frame["status"] == "ok") & (frame["metric"] == "bus_gb_s")]
    ignored: dict[str, None] = {}
    found = []
    for row in rows_of(own):
        resolved, env = parse(row["resolved"]), parse(row["env"])
        if resolved["backend"] != _TRANSPORT or of_env(env) is not device:
            what = str(env.get("gpu") or "CPUs")
            ignored[
                f"run {row['run_id']}: links between {what} over {resolved['backend']} are not applied to the {device.key}"
            ] = None
        elif row["arm"] == ALL_GATHER and (gathered := _gathered(row, resolved)) is not None:
            found.append(gathered)
    figures = {name: _figure(best) for name in ("link", "network") if (best := _best(found, name))}
    return LinkRates(figures, tuple(ignored))


def _gathered(row: Mapping[str, Any], resolved: Mapping[str, Any]) -> _Gathered | None:
    """None for a group whose links are of several kinds: its rate is that of none of them."""
    ends = [End.of(resolved["ends"][rank]) for rank in Members.of(row["part"]).ranks]
    kinds = {kind(one, other) for i, one in enumerate(ends) for other in ends[i + 1 :]}
    if NETWORKS in kinds or (HOSTS in kinds and len(kinds) > 1):
        return None
    name = "network" if HOSTS in kinds else "link"
    joined, day = " and ".join(sorted(kinds)), str(row["created_at"] or "")[:10]
    return _Gathered(name, resolved["bytes"], len(ends), joined, float(row["value"]), str(row["run_id"]), day)


def _best(found: Sequence[_Gathered], name: str) -> list[_Gathered]:
    """The largest groups at the largest size."""
    own = [one for one in found if one.figure == name]
    top = max(((one.size, one.ranks) for one in own), default=None)
    return [one for one in own if (one.size, one.ranks) == top]


def _figure(own: Sequence[_Gathered]) -> Figure:
    one = own[0]
    runs = ", ".join(sorted({f"{each.run_id} of {each.day}" for each in own}))
    source = f"all-gather of {bytes_(one.size)} by {one.ranks} ranks ({plural(len(own), 'group')}), {one.link}, run {runs}"
    return Figure(statistics.median(each.bus for each in own) * 1e9, _SPREAD, MEASURED, source)


def said(figures: Mapping[str, Figure], ignored: Sequence[str]) -> str:
    """Which rates of links were measured, where and when, and which come from data sheets; "" where no run has any.

    >>> said({"link": Figure(4e11, 0.05, MEASURED, "run a"), "network": Figure(4e10, 0.2, "typical", "80 %")}, [])
    'to the node 400 GB/s, measured (run a); to other nodes 40 GB/s, not measured (80 %)'
    """
    if not ignored and all(figures[name].kind != MEASURED for name in ("link", "network")):
        return ""
    parts = []
    for name, where in (("link", "to the node"), ("network", "to other nodes")):
        figure = figures[name]
        how = "measured" if figure.kind == MEASURED else "not measured"
        parts.append(f"{where} {figure.value / 1e9:.3g} GB/s, {how} ({figure.source})")
    return "; ".join([*parts, *ignored])
