"""For dry_run=true of training runs: how many seeds they need, by the noise of runs that are stored here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store import run_files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.engine.plan import Plan
    from harness.engine.settings import SweepConfig

PUBLISHED = Path("results/published")


def lines(config: SweepConfig, plan: Plan) -> Iterator[str]:
    """Lines to print; none where no training runs are planned, or none is to be judged.

    Args:
        config: of the command line.
        plan: of the whole request, or of one of its shards.
    """
    training = [c for c in (*plan.cases, *plan.elsewhere) if hasattr(c.suite, "check_request")]
    if not training or config.train.judge is False:
        return
    from harness.judge.verdict import rows, stored_noise

    request: dict[str, tuple[dict[str, Any], Counter[str]]] = {}
    for planned in training:
        axes = json.loads(planned.case.axes_json)
        axes.pop("seed", None)
        _, arms = request.setdefault(json.dumps(axes, sort_keys=True), (axes, Counter()))
        arms.update(planned.runnable)
    folders = _runs(rows.SUITE, Path(config.results_dir), PUBLISHED)
    from harness.engine.runlog import duration  # Parquet

    stored = []
    if folders:
        from harness import store  # pandas

        stored = rows.setups(store.open_run(folders))
    runs = [(axes, arm, n) for axes, arms in request.values() for arm, n in arms.items()]
    took = [(n, stored_noise.seconds(stored, axes, arm)) for axes, arm, n in runs]
    known, total = sum(n for n, each in took if each), sum(n for n, _ in took)
    seconds = sum(n * each for n, each in took if each)
    yield f"{total} training runs: " + (
        f"{known} of them {duration(seconds)} of training by stored runs with the same axes"
        if known
        else "how long is unknown, no stored run has the same axes"
    )
    yield from stored_noise.lines([(axes, list(arms)) for axes, arms in request.values()], stored)


def _runs(suite: str, *places: Path) -> list[Path]:
    """Folders of the runs and shards of a suite below some folders, known by their _run.json."""
    found = {}
    for file in sorted(
        {
            file.resolve(): file for place in places for file in run_files.below(place, run_files.ABOUT)
        }.values()
    ):
        config = run_files.read_about(file.parent).get("config", {})
        try:
            suites = {config["suite"], *(part["suite"] for part in config["parts"].values())}
        except (TypeError, KeyError, AttributeError):
            continue  # another program's, or a shard's whole
        if suite in suites:
            found[file.parent.resolve()] = file.parent
    return list(found.values())
