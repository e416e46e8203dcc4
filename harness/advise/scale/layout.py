"""How a job is split over its GPUs where the question leaves it open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.advise.model import split
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from harness.advise.model import Model

MOST_GPUS = 2**16
# Up to so many parameters: GPUs that split a layer, stages. As torchtitan publishes Llama 3 (benchmarks/llama3_h100_202412):
# 8B by FSDP, 70B by FSDP and TP8, 405B by FSDP, TP8 and PP8.
_SIZES = ((30e9, 1, 1), (150e9, 8, 1), (float("inf"), 8, 8))
_MICROBATCHES = 4  # for each stage: from there on the bubble is small (GPipe, arXiv:1811.06965, section 2.3)
SCHEDULES = {"1f1b": 1, "interleaved": 2}  # parts of the model on a GPU


def layout(
    model: Model,
    gpus: int | None,
    dp: int | None,
    tp: int | None,
    pp: int | None,
    accumulation: int | None,
    schedule: str,
    node: int,
) -> tuple[dict[str, Any], str]:
    """How `gpus` GPUs are split, as fields of `Step`; and in one line what was not named and is taken, "" for nothing.

    None is what the question leaves open. Without `gpus` what is not named is 1. With it, layers and stages are split as
    torchtitan splits models of that size, as far as the GPUs reach and the layers divide, and the rest is data parallel.

    Raises:
        UsageError: a split that does not multiply to `gpus`; a schedule without a pipeline.
    """
    asked = {"tp": tp, "pp": pp, "dp": dp, "accumulation": accumulation}
    if gpus is None:
        tp, pp, dp = tp or 1, pp or 1, dp or 1
    else:
        _, most_tp, most_pp = next(size for size in _SIZES if model.parameters <= size[0])
        room = gpus // (dp or 1)
        if tp is None:
            most_tp = min(most_tp, node, max(1, room // (pp or 1)))
            tp = next(n for n in (8, 4, 2, 1) if n <= most_tp and room % n == 0 and _divides(model, n))
        if pp is None:
            most_pp = min(most_pp, max(1, room // tp), model.blocks or 1)
            stages = (n for n in (8, 4, 2, 1) if n <= most_pp and room % (tp * n) == 0)
            pp = max(1, room // tp) if dp else next(stages, 1)
        if (dp or gpus // (tp * pp)) * tp * pp != gpus:
            named = f"dp={dp}, tp={tp}, pp={pp}" if dp else f"tp={tp}, pp={pp}"
            raise UsageError(
                f"gpus={gpus} is not what {named} multiply to; leave one of them out, or take gpus={(dp or 1) * tp * pp}"
            )
        dp = gpus // (tp * pp)
    if (world := dp * tp * pp) > MOST_GPUS:
        raise UsageError(f"world={world}: expected at most {MOST_GPUS}")
    if pp == 1 and schedule != "1f1b":
        raise UsageError(f"schedule={schedule} is one of a pipeline; name its stages by pp=")
    if accumulation is None:
        accumulation = _MICROBATCHES * pp if pp > 1 else 1
    taken = {"tp": tp, "pp": pp, "dp": dp, **({"accumulation": accumulation} if pp > 1 else {})}
    left = [f"{name}={value}" for name, value in taken.items() if asked[name] is None]
    warning = f"taken, since it was not named: {', '.join(left)}" if left and (gpus or pp > 1) else ""
    sizes = {"dp": dp, "tp": tp, "pp": pp, "accumulation": accumulation}
    return {**sizes, "virtual": SCHEDULES[schedule]}, warning


def _divides(model: Model, tp: int) -> bool:
    try:
        split(model, tp)
    except UsageError:
        return tp == 1
    return True
