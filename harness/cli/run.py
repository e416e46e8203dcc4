"""`python -m harness sweep=NAME ...`: compose and plan; what is to be measured goes on to `harness.cli.measure`.

The request is checked before torch is imported, so that a mistyped name costs no seconds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.config import load_request
from harness.cli.seeds_needed import seeds_needed
from harness.engine import places, shards
from harness.engine.plan import SweepPlan, describe, make_plan
from harness.machine import environment, raw_output
from harness.store import extensions
from harness.store.errors import UsageError, one_line
from harness.suites import SUITES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.cli.config import Request
    from harness.engine.settings import SweepConfig


def run_sweep(overrides: Sequence[str]) -> int:
    """Run one sweep from its command line; return the exit code of the contract (0, 1 or 2).

    What libraries write to standard error meanwhile goes to the log of the run.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    with raw_output.captured():
        return run_request(load_request(overrides, environment.device_kind))


def follow_sweep(overrides: Sequence[str], store: Any, rank: int) -> int:
    """Take part in the same command, of which another process of torchrun's is rank 0; return the exit code."""
    with raw_output.captured():
        from harness.engine.far import Follower

        try:
            request = load_request(overrides, environment.device_kind)
            config, cases = request.config, make_plan(request.config, SUITES).cases
        except UsageError as error:  # rank 0 says so
            return Follower(rank, {}, Path(), one_line(error)).follow(store)
        by_id = {planned.case.case_id: planned for planned in cases}
        return Follower(rank, by_id, Path(config.results_dir)).follow(store)


def run_request(request: Request) -> int:
    """Run one sweep; return the exit code of the contract (0, 1 or 2).

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config = request.config
    plan = make_plan(config, SUITES)
    if any(map(extensions.names, extensions.TABLES)):
        from harness.suites.extended import faults

        raw_output.notify("".join(f"warning: {why}\n" for why in faults().values()))
    shard = None if config.shard is None else shards.parse(config.shard)
    if shard is not None:
        plan = shards.share(plan, shard)
    places.check(config)
    gpus = places.of_command(config)
    shares = max(len(gpus), shard.count if shard is not None else 1)
    if shares > 1:
        from harness.judge.fleet import refuse_shares

        refuse_shares(config.suites)
    made_up = list(_made_up_batches(plan))
    if not config.dry_run or config.resume:
        from harness.cli import measure  # pandas, a pool, a report

        raw_output.notify("".join(f"{line}\n" for line in made_up))
        if not config.dry_run:
            return measure.run_plan(request, plan, gpus, shard)
    left = measure.left_to_run(config, plan, gpus, shard) if config.resume else []
    lines = [
        *describe(plan),
        *left,
        *made_up,
        *_called_for_a_dry_run(config),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if needed := seeds_needed(config, plan):
        from harness.store import printer

        sys.stdout.write(printer.as_text(needed))
    return 0


def _made_up_batches(plan: SweepPlan) -> Iterator[str]:
    """What the models of the user that are trained without `model.batch` read instead."""
    for name in dict.fromkeys(str(dict(c.case.axes).get("model", "")) for c in plan.cases):
        if name.startswith("{") and "batch" not in json.loads(name):
            from harness.training.models import UserModel, resolve

            spec = resolve(name)
            assert isinstance(spec, UserModel)
            yield f"model.batch is not named: {spec.tokens.sentence}"


def _called_for_a_dry_run(config: SweepConfig) -> Iterator[str]:
    """What dry_run=true ran of the user's code: a model of theirs has the shapes that building it shows."""
    model = config.model
    if isinstance(model, dict) and model.get("_target_"):
        yield f"dry_run=true imports and calls model._target_={model['_target_']}, where a plan needs the layers of the model"
