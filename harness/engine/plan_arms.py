"""Arms that a request names: of the peers that it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.store.errors import unknown
from harness.suites import NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.timing.workload import Plannable


def choose_peers(
    names: Sequence[str] | None, parts: dict[str, dict[str, Any]], suites: Mapping[str, Plannable]
) -> None:
    """Leaves out the arms of the peers that are not named; None names all."""
    if names is None:
        return
    # Not of every suite: one that another package brings, and that this sweep does not use, may fail to be imported.
    used = {part["suite"] for part in parts.values()} | {name for name in suites if name in NAMES}
    known = {info.peer for name in used for info in suites[name].ARMS.values() if info.peer}
    for name in names:
        if name not in known:
            raise unknown("peer", name, known)
    for part in parts.values():
        arms = suites[part["suite"]].ARMS
        part["arms"] = [a for a in part["arms"] or arms if a not in arms or arms[a].peer in ("", *names)]


def refuse_unknown_without(
    names: Sequence[str], parts: Mapping[str, dict[str, Any]], suites: Mapping[str, Plannable]
) -> None:
    """UsageError for a name of `without=` that no arm of the parts has."""
    known = [arm for part in parts.values() for arm in suites[part["suite"]].ARMS]
    for name in names:
        if name not in known:
            raise unknown("arm", name, known)
