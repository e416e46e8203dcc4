"""How many GPUs are split: data, tensor and pipeline parallelism, where the question leaves it open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.advise.tensor_parallel import split
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from harness.advise.model import Model

# Up to so many parameters: GPUs that split a layer, stages. As torchtitan publishes Llama 3 (benchmarks/llama3_h100_202412):
# 8B by FSDP, 70B by FSDP and TP8, 405B by FSDP, TP8 and PP8.
SIZES = ((30e9, 1, 1), (150e9, 8, 1), (float("inf"), 8, 8))
MICROBATCHES = 4  # for each stage: from there on the bubble is small (GPipe, arXiv:1811.06965, section 2.3)
SCHEDULES = {"1f1b": 1, "interleaved": 2}  # parts of the model on a GPU


@dataclass(frozen=True, slots=True)
class Layout:
    """GPUs by what they split; `said`: what was not asked for and is taken, in one line, "" where all was named."""

    dp: int
    tp: int
    pp: int
    virtual: int
    accumulation: int
    said: str = ""

    @property
    def world(self) -> int:
        """All of them."""
        return self.dp * self.tp * self.pp


def layout(
    model: Model,
    *,
    gpus: int | None,
    dp: int | None,
    tp: int | None,
    pp: int | None,
    accumulation: int | None,
    schedule: str,
    node: int,
) -> Layout:
    """The split of `gpus` GPUs; None is what the question leaves open.

    Without `gpus` what is not named is 1. With it, layers and stages are split as torchtitan splits models of that size, as far
    as the GPUs reach and the layers divide, and the rest is data parallel.

    Raises:
        UsageError: a split that does not multiply to `gpus`.
    """
    asked = {"tp": tp, "pp": pp, "dp": dp, "accumulation": accumulation}
    if gpus is None:
        tp, pp, dp = tp or 1, pp or 1, dp or 1
    else:
        tp, pp = _split(model, gpus, dp, tp, pp, node)
        if gpus % (tp * pp) or (dp or gpus // (tp * pp)) * tp * pp != gpus:
            named = f"dp={dp}, tp={tp}, pp={pp}" if dp else f"tp={tp}, pp={pp}"
            raise UsageError(
                f"gpus={gpus} is not what {named} multiply to; leave one of them out, or take gpus={(dp or 1) * tp * pp}"
            )
        dp = gpus // (tp * pp)
    if schedule not in SCHEDULES:
        raise UsageError(f"schedule={schedule}: expected {' or '.join(SCHEDULES)}")
    if pp == 1 and schedule != "1f1b":
        raise UsageError(f"schedule={schedule} is one of a pipeline; name its stages by pp=")
    taken = {"tp": tp, "pp": pp, "dp": dp}
    if accumulation is None:
        accumulation = MICROBATCHES * pp if pp > 1 else 1
    if pp > 1:
        taken["accumulation"] = accumulation
    left = [f"{name}={value}" for name, value in taken.items() if asked[name] is None]
    said = (
        f"taken, since it was not named: {', '.join(left)}" if left and (gpus is not None or pp > 1) else ""
    )
    return Layout(dp, tp, pp, SCHEDULES[schedule], accumulation, said)


def _split(
    model: Model, gpus: int, dp: int | None, tp: int | None, pp: int | None, node: int
) -> tuple[int, int]:
    """Tensor and pipeline parallelism."""
    _, most_tp, most_pp = next(size for size in SIZES if model.parameters <= size[0])
    room = gpus // (dp or 1)
    if tp is None:
        limit = min(most_tp, node, max(1, room // (pp or 1)))
        tp = next(n for n in (8, 4, 2, 1) if n <= limit and room % n == 0 and _divides(model, n))
    if pp is None:
        limit = min(most_pp, max(1, room // tp), model.blocks or 1)
        fits = (n for n in (8, 4, 2, 1) if n <= limit and room % (tp * n) == 0)
        pp = room // tp if dp else next(fits, 1)
    return tp, pp


def _divides(model: Model, tp: int) -> bool:
    try:
        split(model, tp)
    except UsageError:
        return tp == 1
    return True
