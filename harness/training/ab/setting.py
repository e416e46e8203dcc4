"""What a trial is given: refused where it cannot be, and told among ranks before the first step.

Ranks that were given other trials would switch at other steps: their collectives could hang, and their times prove nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from harness.store.errors import UsageError
from harness.training.ab.exchange import SilentRankError
from harness.training.ab.plan import FP8, GATHER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8core.recipe import Recipe
    from harness.training.ab.exchange import Exchange
    from harness.training.ab.plan import Plan
    from harness.training.ab.switch import Switch


def check(
    after: object, rank_timeout_s: object, fp8_all_gather: object, module_filter_fn: object, clock: object
) -> None:
    """Refuses arguments of a trial that no trial can have.

    Raises:
        UsageError: one line with the value and what is expected.
    """
    if after not in (None, "bf16", "fp8"):
        raise UsageError(f"after={after!r}: expected 'bf16', 'fp8' or None")
    if (
        not isinstance(rank_timeout_s, int | float)
        or isinstance(rank_timeout_s, bool)
        or not rank_timeout_s > 0
    ):
        raise UsageError(f"rank_timeout_s={rank_timeout_s!r}: expected seconds above 0")
    if not isinstance(fp8_all_gather, bool) and fp8_all_gather != "both":
        raise UsageError(f"fp8_all_gather={fp8_all_gather!r}: expected True, False or 'both'")
    if module_filter_fn is not None and not callable(module_filter_fn):
        raise UsageError(
            f"module_filter_fn={module_filter_fn!r}: expected a function of a module and its name that returns a bool, or None"
        )
    if clock is not None and not all(hasattr(clock, name) for name in ("mark", "settle", "ms", "method")):
        raise UsageError(
            f"clock={clock!r}: expected a clock with mark, settle, ms and method (harness.timing.clock.Clock), or None"
        )


def of(
    plan: Plan, switch: Switch, gather: object, ends_in_fp8: bool, restore: Sequence[str] | None
) -> dict[str, Any]:
    """What all ranks must have been given alike, as JSON values by the name that a difference is told with."""
    arms = [arm for arm in (FP8, GATHER) if arm in plan.arms]
    recipes = {arm: sorted({_fingerprint(recipe) for recipe in switch.recipes(arm).values()}) for arm in arms}
    return {
        **{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(plan).items()},
        "recipe": switch.asked.name,
        "recipes of the layers": recipes,
        "fp8_all_gather": gather,
        "FP8 layers": len(switch.layers),
        "ends in FP8": ends_in_fp8,
        "restore": None if restore is None else list(restore),
    }


def _fingerprint(recipe: Recipe) -> str:
    """The recipe's name with a hash of all that it says: recipes of one name may cast otherwise."""
    content = repr(replace(recipe, doc=""))
    return f"{recipe} ({hashlib.sha256(content.encode()).hexdigest()[:8]})"


def disagreement(exchange: Exchange, mine: Mapping[str, Any]) -> str:
    """Why the ranks are not in one trial; "" if they are. All ranks must ask, before their first step.

    Args:
        exchange: among the ranks.
        mine: see `of`.
    """
    try:
        messages = exchange.all_of(dict(mine))
    except SilentRankError as error:
        return str(error)
    first = messages[0]
    for rank, message in enumerate(messages):
        names = [name for name in first if message.get(name) != first[name]]
        if names:
            theirs = ", ".join(f"{name}={message.get(name)!r}" for name in names)
            ours = ", ".join(f"{name}={first[name]!r}" for name in names)
            return f"the ranks are not in one trial: rank {rank} has {theirs}, rank 0 {ours}"
    return ""
