"""Suite `allgather`: what FSDP2 gains by gathering weights as FP8 codes, in bytes, collectives and time.

Each arm is a launch of ranks that train a stack of linear layers (`harness.training.parallel.gathers`). Bytes and calls are
counted at the collective; the loss of each arm must equal, bit for bit, that of the same layers with weights gathered in
high precision, which are trained beside it. Times are of the same rounds: `exposed_ms` is what the step takes longer than
one with nothing on the wire. On a CPU all ranks share the cores, and a time is a check of the mechanism.

torchao's arms run in the same sweep; what it can't do (shards of unequal length, with 3 ranks) is a skipped row with
what it said.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from harness.machine import ranks
from harness.peers import PEERS
from harness.store.errors import Cause
from harness.suites.common import crossed_points, lacking
from harness.suites.parallel import not_finite
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported
from harness.training.parallel.cells import deviation
from harness.training.parallel.gathers import ALONE, HIGH, OWN, Gather, Measured, measure, weights_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.store.case import Case

TIMEOUT_S = 180.0
BASE = "no_fp8"
TORCHAO = PEERS["torchao"]

AXES = {
    "ranks": Axis("processes; 3 make shards of unequal length of the usual sizes", default=2),
    "param_dtype": Axis("of weights that are gathered in high precision", ("bf16", "fp32")),
    "width": Axis("of the residual stream", default=128),
    "hidden": Axis("of a block's inner layer", default=128),
    "layers": Axis("blocks, one all-gather each", default=4),
    "tokens": Axis("of each rank's step", default=64),
    "rounds": Axis("timed steps of each of the ways that take turns", default=10),
}
_WAYS = {  # arm -> whose, whether scales are found by a call after each step, what it is
    BASE: ("", False, "no FP8; weights gathered in param_dtype"),
    "fp8": ("fp8core", False, "tensorwise, weights gathered in FP8"),
    "fp8_precomputed": ("fp8core", True, "the same, with scales computed right after each step"),
    "torchao": ("torchao", False, "torchao's tensorwise, weights gathered in FP8"),
    "torchao_precomputed": ("torchao", True, "the same, with scales computed right after each step"),
}
ARMS = {
    name: ArmInfo(doc, BASE, "tensorwise") if whose else ArmInfo(doc)
    for name, (whose, _, doc) in _WAYS.items()
}


points = crossed_points("allgather", "axes.width and axes.hidden", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Sizes that FP8 matmul does not take, too few GPUs, or a missing peer."""
    whose = _WAYS[arm][0]
    for axis in ("width", "hidden", "tokens"):
        if whose and case.integer(axis) % 16:
            return Unsupported("shape", f"{axis}={case.integer(axis)}: FP8 matmul takes multiples of 16")
    missing = ranks.gpus_missing(case.integer("ranks"), device)
    return lacking(missing or (TORCHAO.missing(device) if whose == "torchao" else None))


def work(case: Case) -> float:
    """Bytes of weights that a step gathers."""
    return 2.0 * case.integer("width") * case.integer("hidden") * case.integer("layers")


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """Trains in ranks, and says what went over the wire and how long it took."""
    whose, precompute, _ = _WAYS[arm]
    sizes = {name: case.integer(name) for name in ("width", "hidden", "layers", "tokens", "rounds")}
    dtype = case.text("param_dtype")
    gather = Gather(whose, precompute, **sizes, param_dtype=dtype, seed=case.seed, device=device)
    world, theirs = case.integer("ranks"), whose == "torchao"
    resolved: dict[str, object] = {
        "library": whose or "none",
        "recipe": "tensorwise" if whose else "none",
        "world": world,
        "hosts": ranks.hosts(world),
        "weights": dict(weights_in(gather)),
        "timed": "training steps of all ranks, the ways alternating, in the same rounds",
        "version": TORCHAO.version() if theirs else None,
    }
    try:
        every: list[Measured] = ranks.run(measure, world, gather, timeout_s=TIMEOUT_S, device=device)
    except ranks.RanksError as error:
        said = str(error).splitlines()[0]
        if error.lost:
            return Trial((), resolved, said, cause=Cause.DIED)
        if not theirs:
            raise
        return Trial((), resolved, refusal=f"torchao {TORCHAO.version()} failed: {said}")
    first = every[0]
    if first.refusal:
        return Trial((), resolved, refusal=first.refusal)
    if fault := not_finite([one.losses[OWN] for one in every]):
        return Trial((), resolved, fault, cause=Cause.DIVERGED)
    means = {
        way: tuple(map(statistics.fmean, zip(*(one.losses[way] for one in every), strict=True)))
        for way in first.losses
    }
    losses = means[OWN]
    last, rounds = len(losses), tuple(range(gather.rounds))
    resolved["scale_all_reduces_per_step"] = first.scale_all_reduces
    on_step(last, last)
    series = [Series("loss", losses, tuple(range(last)))]
    if whose:
        apart = deviation(losses, means[HIGH])
        if apart != 0 and not theirs:  # NaN included: the reference's loss is no number
            fault = f"losses differ by {apart:.2e} from those with weights gathered in high precision"
            return Trial((), resolved, fault, cause=Cause.NUMERICS)
        series.append(Series("loss_deviation", (apart,), (last - 1,)))
    for (collective, kind), (calls, size) in sorted(first.sent.items()):
        series.append(Series("wire_bytes", (float(size),), (0,), f"{collective} {kind}"))
        series.append(Series("collectives", (float(calls),), (0,), f"{collective} {kind}"))
    # A step is over when its slowest rank is done.
    ms = {way: tuple(map(max, zip(*(one.ms[way] for one in every), strict=True))) for way in first.ms}
    series += [Series("step_ms", took, rounds, "" if way == OWN else way) for way, took in ms.items()]
    exposed = tuple(own - alone for own, alone in zip(ms[OWN], ms[ALONE], strict=True))
    resolved["exposed_share"] = statistics.median(exposed) / statistics.median(ms[OWN])
    return Trial((*series, Series("exposed_ms", exposed, rounds)), resolved)
