"""Lost NVLink: ends and pairs of ends that have none where most of their like do. No time is needed.

Compared are GPUs of one model on hosts with as many of them. The usual number of NVLink neighbours is what more than half of
them have; so GPUs in bridged pairs, and those that are joined in a mesh that is not whole, are no outliers.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from typing import TYPE_CHECKING

from harness.judge.fleet.link_outlier import LinkOutlier
from harness.machine.links import PCIE, has_nvlink
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.judge.fleet.link_rule import Place
    from harness.machine.links import End

NO_NVLINK = "no NVLink"


def lost(runs: Sequence[tuple[str, tuple[End, ...]]]) -> tuple[list[LinkOutlier], list[str]]:
    """What is out of line, and what nobody can tell.

    Args:
        runs: model and ends of operations, the newest last.
    """
    unclear: dict[str, None] = {}
    # By the number of GPUs of its host that were there too: a run with fewer of them takes nothing back
    newest: dict[tuple[Place, int], tuple[str, End, tuple[End, ...]]] = {}
    for model, ends in reversed(dict.fromkeys(reversed(runs))):
        known = [end for end in ends if end.gpu and end.nvlinked is not None]
        unread = [end for end in ends if end.gpu and end.nvlinked is None]
        if known and unread:  # its links are compared with each other alone, as those of a GPU without NVLink
            unclear[
                f"cannot tell whether NVLink is lost: NVML cannot say it of {some([e.name for e in unread])}"
            ] = None
        for end in known:
            mates = tuple(mate for mate in known if mate.host == end.host and mate is not end)
            newest[end.place, len(mates)] = (end.model or model, end, mates)
    alike: dict[tuple[str, int], list[tuple[End, tuple[End, ...]]]] = {}
    for model, end, mates in newest.values():
        if mates:
            alike.setdefault((model, len(mates)), []).append((end, mates))
    found: list[LinkOutlier] = []
    for (model, _), own in sorted(alike.items()):
        said, why = _lost(own)
        found += said
        if why:
            unclear[f"{model}: {why}"] = None
    return found, list(unclear)


def _lost(own: Sequence[tuple[End, tuple[End, ...]]]) -> tuple[list[LinkOutlier], str]:
    linked = {end.place: [mate for mate in mates if has_nvlink(end, mate)] for end, mates in own}
    without = {place for place, mates in linked.items() if not mates}
    if len(without) == len(own):
        return [], ""
    if 2 * len(without) >= len(own):
        return [], f"cannot tell whether NVLink is lost: {len(without)} of {len(own)} GPUs have none"
    found = [
        LinkOutlier(NO_NVLINK, (end.name,), PCIE, 0, 0.0, f"{len(own) - len(without)} of {len(own)} such GPUs have NVLink")
        for end, _ in own
        if end.place in without
    ]  # fmt: skip
    rest = [(end, mates) for end, mates in own if end.place not in without]
    # Neighbours that are out of line themselves count as if they were joined
    degree = {
        end.place: len(linked[end.place]) + sum(mate.place in without for mate in mates)
        for end, mates in rest
    }
    usual, count = Counter(degree.values()).most_common(1)[0]
    if 2 * count <= len(rest):
        return found, "cannot tell whether NVLink is lost: no number of neighbours is that of most GPUs"
    short = [end for end, _ in rest if degree[end.place] < usual]
    named: set[Place] = set()
    for one, other in combinations(short, 2):
        if one.host == other.host and not has_nvlink(one, other):
            why = f"each has {degree[one.place]} and {degree[other.place]} NVLink neighbours, most such GPUs {usual}"
            found.append(LinkOutlier(NO_NVLINK, (one.name, other.name), PCIE, 0, 0.0, why))
            named |= {one.place, other.place}
    for end in short:
        if end.place not in named:
            why = f"{degree[end.place]} NVLink neighbours, most such GPUs have {usual}"
            found.append(LinkOutlier(NO_NVLINK, (end.name,), PCIE, 0, 0.0, why))
    return found, ""
