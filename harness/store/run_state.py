"""Whether a run has ended: what `_run.json` says of it, and those of its shards together. Rows alone never say it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store import run_files
from harness.store.parquet import run_folder
from harness.store.run_files import read_about

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

UNKNOWN = "unknown"
# The state of a run whose shards are in several: that which says most about what is missing
_STATES = ("failed", "interrupted", "running", "finished")


def made_by(about: Mapping[str, Any]) -> str:
    """What made a run: "sweep", "launch" (which started its shards), "import", "gate", ... ("sweep" where nothing says it)."""
    return str(about.get("made_by") or "sweep")


def about(folder: Path) -> dict[str, Any]:
    """What is known of a run; of one that has shards, what they say together.

    Where it was spread several times, all shards of one spread are all of it; so is a process that ended it without any.
    """
    own, spreads = read_about(folder), dict[int, list[dict[str, Any]]]()
    for path, count in run_files.shards(folder).items():
        if (path / run_files.ABOUT).exists():
            spreads.setdefault(count, []).append(read_about(path))
    alone = made_by(own) != "launch"  # which knows of shards alone
    if not spreads or (alone and own.get("state") == "finished"):
        return own
    shards = [one for spread in spreads.values() for one in spread]
    states = {one.get("state") for one in shards} | {"running"}  # a shard is yet to come, or to go on
    if any([one.get("state") for one in spread] == ["finished"] * n for n, spread in spreads.items()):
        states = {"finished"}
    return {
        **(own or shards[0]),
        "state": next(state for state in _STATES if state in states),
        "started_at": min(str(one.get("started_at", "")) for one in shards),
    }


def states(files: Iterable[str | Path]) -> dict[str, str]:
    """By run id, the state of the runs that files of rows belong to; of several copies that which says most is missing.

    A run without `_run.json`, such as one whose rows were gathered into a file with others', is not in it.
    """
    found: dict[str, set[str]] = {}
    for folder in dict.fromkeys(run_folder(Path(file)) for file in files):
        known = about(folder)
        if known:
            found.setdefault(str(known.get("run_id", folder.name)), set()).add(
                str(known.get("state", UNKNOWN))
            )
    return {run: next((state for state in _STATES if state in seen), UNKNOWN) for run, seen in found.items()}
