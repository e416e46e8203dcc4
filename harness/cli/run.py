"""`python -m harness sweep=NAME ...`: compose and plan; what is to be measured goes on to `harness.cli.measure`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from harness.cli import seeds_needed
from harness.engine import places, shards
from harness.engine.plan import Plan, describe, make_plan
from harness.machine import raw_output, torchrun
from harness.store import extensions
from harness.suites import SUITES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from harness.cli.config import Request


def run_request(request: Request) -> int:
    """Run one sweep; return the exit code of the contract (0, 1 or 2).

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    config = request.config
    plan = make_plan(config, SUITES)
    if any(map(extensions.names, extensions.TABLES)):
        from harness.suites.extended import faults

        for why in faults().values():
            raw_output.say(f"warning: {why}\n")
    shard = None
    if config["shard"] is not None:
        shard = shards.parse(config["shard"])
        plan = shards.share(plan, shard)
    if torchrun.started() > 1:  # rank 0 alone is linked to the others: no worker could call them
        config["isolate"] = False
    places.check(config)
    gpus = places.chosen(
        config["devices"], config["device"], places.gpus() if config["device"] == "cuda" else ()
    )
    shares = max(len(gpus), shard.count if shard is not None else 1)
    if shares > 1:
        from harness.judge.fleet.request import refuse_shares

        refuse_shares(config, shares)
    if config["bisect"] is not None:
        from harness.cli import bisection  # it trains: not needed by any other command

        bisection.check(plan, config["bisect"], config["resume"])
    if config["dry_run"] and not config["resume"]:
        return _listed(config, plan)
    from harness.cli import measure  # pandas, a pool, a report

    for line in _made_up_batches(plan):
        raw_output.say(f"{line}\n")

    if config["dry_run"]:
        return _listed(config, plan, measure.left_to_run(config, plan, gpus, shard))
    return measure.run_plan(request, plan, gpus, shard)


def _listed(config: dict[str, Any], plan: Plan, left: Iterable[str] = ()) -> int:
    """Prints what dry_run=true prints."""
    own = [*_made_up_batches(plan), *_called_for_a_dry_run(config)]
    said = [*describe(plan), *seeds_needed.lines(config, plan), *left, *own]
    sys.stdout.write("\n".join(said) + "\n")
    return 0


def _made_up_batches(plan: Plan) -> Iterator[str]:
    """What the models of the user that are trained without `model.batch` read instead."""
    for name in dict.fromkeys(str(dict(c.case.axes).get("model", "")) for c in plan.cases):
        if name.startswith("{") and "batch" not in json.loads(name):
            from harness.training.models import UserModel, resolve

            spec = resolve(name)
            assert isinstance(spec, UserModel)
            yield f"model.batch is not named: {spec.tokens.said}"


def _called_for_a_dry_run(config: dict[str, Any]) -> Iterator[str]:
    """What dry_run=true ran of the user's code: a model of theirs has the shapes that building it shows."""
    model = config["model"]
    if isinstance(model, dict) and model.get("_target_"):
        yield f"dry_run=true imports and calls model._target_={model['_target_']}, where a plan needs the layers of the model"
