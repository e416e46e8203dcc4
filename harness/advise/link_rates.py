"""Link rates: what stored runs measured of a GPU's links, as the figures "link" and "network" of its rates.

A rate is the bus bandwidth of an all-gather of at least `LARGE` bytes of the suite `links`; of smaller ones the time is latency.
It is that of the most ranks, of the newest run with so many, of its largest size; kinds of link are never mixed. To the
node ("link") the ranks lie within one host. To other nodes ("network") the bus bandwidth of a group with as many ranks on each
host is what a node's cards carry together: a GPU gets it divided by the GPUs of a node. Where fewer GPUs of a host sent at once
than a node has, they may have shared one card or had one each; the smaller rate is taken, and the spread reaches the larger.

Only NCCL's between GPUs of the model that is asked about count. gloo carries the bytes of CPUs and says nothing about NVLink or
a network card. Whatever is not applied is named. Imports no torch.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.advise.rates import MEASURED, Figure
from harness.machine.hardware import of_env
from harness.machine.link_rows import LinkRow, link_row
from harness.machine.links import ALL_GATHER, HOSTS, NETWORKS, SUITE, kind
from harness.store.compare import rows_of
from harness.store.json_columns import parse
from harness.store.text import bytes_, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from harness.machine.hardware import Device

LARGE = 2**26  # bytes of a message from which its time is bandwidth: 64 MiB
_SPREAD = 0.05  # relative standard error that is assumed; nothing was measured on GPUs yet
_FEWER_SPREAD = 0.15  # likewise, of fewer ranks than a node has GPUs
_NETWORK_SPREAD = 0.2  # likewise, of all GPUs at once: other jobs share the network
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
    """One all-gather: its figure, bytes, ranks, ranks of each host, kind of link, GB/s, and where and when it was measured."""

    figure: str
    size: int
    ranks: int
    per_host: int
    link: str
    bus: float
    run_id: str
    at: str


def link_rates(frame: pd.DataFrame, device: Device, node: int = 8) -> LinkRates:
    """The rates of a GPU's links in some rows.

    Args:
        frame: of any machines, as `harness.store.read` gives them.
        device: the GPU that is asked about.
        node: GPUs of a node that is asked about.
    """
    own = frame[(frame["suite"] == SUITE) & ((frame["status"] != "ok") | (frame["metric"] == "bus_gb_s"))]
    ignored: dict[str, None] = {}
    found = []
    for row in rows_of(own):
        run, env = f"run {row['run_id']}", parse(row["env"])
        if row["status"] != "ok":
            if row["arm"] == ALL_GATHER:
                ignored[f"{run}: all-gather {row['status']}: {row['reason']}"] = None
            continue
        try:
            read = link_row(row)
        except ValueError as error:
            ignored[f"{run}: {error}"] = None
            continue
        models = sorted({end.model for end in read.ends} - {""})
        if read.backend != _TRANSPORT or of_env(env) is not device:
            what = str(env.get("gpu") or "CPUs")
            ignored[
                f"{run}: links between {what} over {read.backend} are not applied to the {device.key}"
            ] = None
        elif len(models) > 1:
            ignored[f"{run}: links between {' and '.join(models)} are those of neither and not applied"] = (
                None
            )
        elif read.arm == ALL_GATHER:
            gathered, why = _gathered(row, read)
            if gathered is None:
                ignored[f"{run}: {why}"] = None
            else:
                found.append(gathered)
    figures = {}
    for name in ("link", "network"):
        if best := _best(found, name):
            figures[name] = _figure(best, node)
    return LinkRates(figures, tuple(ignored))


def _gathered(row: Mapping[str, Any], read: LinkRow) -> tuple[_Gathered | None, str]:
    """None, and why, for what says nothing about a rate."""
    ends = [read.ends[rank] for rank in read.members.ranks]
    kinds = {kind(one, other) for i, one in enumerate(ends) for other in ends[i + 1 :]}
    if NETWORKS in kinds:
        return None, "links between networks of one host are not those of a node"
    if read.size < LARGE:
        return None, (
            f"all-gathers below {bytes_(LARGE)}, such as of {bytes_(read.size)}, are not applied: their time is latency; "
            f"measure with axes.kib={LARGE // 1024}"
        )
    hosts = Counter(end.host for end in ends)
    if len(set(hosts.values())) > 1:
        return None, "all-gathers of more ranks on one host than on another are not applied"
    name = "network" if HOSTS in kinds else "link"
    joined = HOSTS if HOSTS in kinds else " and ".join(sorted(kinds))
    per_host = next(iter(hosts.values()))
    at = str(row["created_at"] or "")
    return _Gathered(name, read.size, len(ends), per_host, joined, read.value, str(row["run_id"]), at), ""


def _best(found: Sequence[_Gathered], name: str) -> list[_Gathered]:
    """Most ranks of a host, then most ranks, the newest run, its largest size; of several kinds the slowest one."""
    own = [one for one in found if one.figure == name]
    if not own:
        return []
    ranks = max((one.per_host, one.ranks) for one in own)
    own = [one for one in own if (one.per_host, one.ranks) == ranks]
    run = max(own, key=lambda one: (one.at, one.run_id)).run_id
    own = [one for one in own if one.run_id == run]
    size = max(one.size for one in own)
    kinds: dict[str, list[_Gathered]] = {}
    for one in own:
        if one.size == size:
            kinds.setdefault(one.link, []).append(one)
    return min(kinds.values(), key=_middle)


def _middle(own: Sequence[_Gathered]) -> float:
    return statistics.median(one.bus for one in own)


def _figure(own: Sequence[_Gathered], node: int) -> Figure:
    one, value = own[0], _middle(own) * 1e9
    source = (
        f"all-gather of {bytes_(one.size)} by {one.ranks} ranks ({plural(len(own), 'group')}), {one.link}, run {one.run_id} "
        f"of {one.at[:10]}"
    )
    if one.figure == "link":
        return Figure(value, _SPREAD if one.ranks >= node else _FEWER_SPREAD, MEASURED, source)
    if one.per_host >= node:
        shared = (
            f", {value / 1e9:.3g} GB/s for {one.per_host} GPUs a node at once" if one.per_host > 1 else ""
        )
        return Figure(value / one.per_host, _NETWORK_SPREAD, MEASURED, source + shared)
    # As if all GPUs of a node shared what these had; three standard errors up, each has as much as these had
    room = node / one.per_host
    source += (
        f", {value / 1e9:.3g} GB/s for {one.per_host} of {node} GPUs a node, taken for all of them: they were not measured "
        f"at once, and with cards of their own have up to {room:.3g} times as much"
    )
    return Figure(value / node, max(_NETWORK_SPREAD, room ** (1 / 3) - 1), MEASURED, source)


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
