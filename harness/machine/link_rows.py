"""Rows of the suite `links`, read in one place: what is not as the suite writes it is refused with its reason. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.machine.links import FACTORS, SEND, End, Members, is_count
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One figure of one operation.

    Attributes:
        arm: the operation.
        members: who took part.
        ends: of all ranks of the run, by rank.
        size: bytes.
        backend: "gloo" or "nccl".
        calls: of one sample.
        rounds: that were asked for; there may be fewer samples, where the operation's time was up.
        value, samples: seconds or GB/s; finite and above 0.
    """

    arm: str
    members: Members
    ends: tuple[End, ...]
    size: int
    backend: str
    calls: str
    rounds: int
    value: float
    samples: tuple[float, ...]

    @property
    def places(self) -> tuple[tuple[str, ...], ...]:
        """Where those are that took part."""
        return tuple(self.ends[rank].place for rank in self.members.ranks)


def ends_of(resolved: Mapping[str, Any]) -> tuple[End, ...]:
    """All ranks of a run.

    Raises:
        ValueError: they are not there, or not as this version writes them.
    """
    found = resolved.get("ends")
    if not isinstance(found, list) or not found:
        raise ValueError("resolved.ends, which says who the ranks are, is missing; measure again")
    try:
        ends = tuple(End.of(end) for end in found)
    except ValueError as error:
        raise ValueError(
            f"resolved.ends is not as this version writes it ({error}); read it with the one that did"
        ) from error
    if [end.rank for end in ends] != list(range(len(ends))):
        raise ValueError("resolved.ends does not go by rank; measure again")
    return ends


def size_of(resolved: Mapping[str, Any]) -> int:
    """Bytes of a run's message.

    Raises:
        ValueError: they are not there, or no number above 0.
    """
    size = resolved.get("bytes")
    if not is_count(size) or not size:
        raise ValueError(f"resolved.bytes={size!r}: expected a whole number above 0; measure again")
    return size


def link_row(row: Mapping[str, Any]) -> LinkRow:
    """A row with status ok.

    Raises:
        ValueError: why it says nothing.
    """
    resolved = parse(row["resolved"])
    ends, arm = ends_of(resolved), str(row["arm"])
    if arm not in FACTORS:
        raise ValueError(f"operation {arm!r}: expected one of {', '.join(FACTORS)}")
    try:
        members = Members.of(str(row["part"] or ""))
    except ValueError as error:
        raise ValueError(f"part={row['part']!r}: expected ranks, such as 0>1 or 0-1-2") from error
    ranks = set(members.ranks)
    pair = len(members.ranks) == 2
    if len(ranks) < 2 or len(ranks) < len(members.ranks) or not ranks <= set(range(len(ends))):
        raise ValueError(f"part={row['part']!r}: expected several different ranks below {len(ends)}")
    if members.directed != (arm == SEND) or (members.directed and not pair):
        raise ValueError(f"part={row['part']!r}: expected 0>1 of a message, 0-1 of anything else")
    backend, rounds = resolved.get("backend"), parse(row["axes"]).get("rounds")
    if not isinstance(backend, str) or not is_count(rounds):
        raise ValueError("resolved.backend is no text, or axes.rounds no whole number; measure again")
    try:
        value, samples = float(row["value"]), tuple(float(one) for one in row["samples"])
    except TypeError:  # null in the file
        value, samples = math.nan, ()
    if not samples or not all(math.isfinite(one) and one > 0 for one in (value, *samples)):
        raise ValueError("a time or bandwidth is no finite number above 0; measure again")
    return LinkRow(
        arm, members, ends, size_of(resolved), backend, str(resolved.get("calls")), rounds, value, samples
    )
