"""For dry_run=true of training runs: how many seeds they need, by the noise of runs that are stored here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.store import run_files

if TYPE_CHECKING:
    from harness.engine.plan import SweepPlan
    from harness.engine.settings import SweepConfig
    from harness.judge.verdict.stored_noise import SeedsNeeded
    from harness.store.case import Arm

PUBLISHED = Path("results/published")


def seeds_needed(config: SweepConfig, plan: SweepPlan) -> SeedsNeeded | None:
    """What stored runs say of the training runs of a plan; None where none are planned, or none is to be judged.

    Args:
        config: of the command line.
        plan: of the whole request, or of one of its shards.
    """
    training = [c for c in (*plan.cases, *plan.elsewhere) if hasattr(c.suite, "check_request")]
    if not training or config.train.judge is False:
        return None
    from harness.judge.verdict import rows
    from harness.judge.verdict.stored_noise import SeedsNeeded

    request: dict[str, tuple[dict[str, Any], Counter[Arm]]] = {}
    for planned in training:
        axes = json.loads(planned.case.axes_json)
        axes.pop("seed", None)
        _, arms = request.setdefault(json.dumps(axes, sort_keys=True), (axes, Counter()))
        arms.update(planned.suite.ARMS[name].record(name) for name in planned.runnable)
    stored = []
    if folders := _runs(rows.SUITE, Path(config.results_dir), PUBLISHED):
        from harness import store  # pandas

        stored = rows.setups(store.open_run(folders))
    return SeedsNeeded.of(list(request.values()), stored)


def _runs(suite: str, *folders: Path) -> list[Path]:
    """Folders of the runs and shards of a suite below some folders, known by their _run.json."""
    found = {}
    for file in sorted(
        {
            file.resolve(): file for folder in folders for file in run_files.below(folder, run_files.ABOUT)
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
