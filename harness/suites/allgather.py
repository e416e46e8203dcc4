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
from harness.store.cause import Cause
from harness.suites.common import crossed_points
from harness.suites.parallel import not_finite
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported
from harness.training.parallel.bounds import deviation
from harness.training.parallel.gathers import ALONE, HIGH, OWN, Gather, Measured, measure, weights_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.store.case import Case

TIMEOUT_S = 180.0
BASE = "no_fp8"
TORCHAO = PEERS["torchao"]

AXES: Mapping[str, Axis] = {
    "ranks": Axis("processes; 3 make shards of unequal length of the usual sizes", default=2),
    "param_dtype": Axis("of weights that are gathered in high precision", ("bf16", "fp32")),
    "width": Axis("of the residual stream", default=128),
    "hidden": Axis("of a block's inner layer", default=128),
    "layers": Axis("blocks, one all-gather each", default=4),
    "tokens": Axis("of each rank's step", default=64),
    "rounds": Axis("timed steps of each of the ways that take turns", default=10),
}
# arm -> (whose, whether scales are found by a call after each step)
_WAYS = {
    BASE: ("", False),
    "fp8": ("fp8core", False),
    "fp8_precomputed": ("fp8core", True),
    "torchao": ("torchao", False),
    "torchao_precomputed": ("torchao", True),
}
ARMS: Mapping[str, ArmInfo] = {
    BASE: ArmInfo("no FP8; weights gathered in param_dtype"),
    "fp8": ArmInfo("tensorwise, weights gathered in FP8", BASE, "tensorwise"),
    "fp8_precomputed": ArmInfo("the same, with scales computed right after each step", BASE, "tensorwise"),
    "torchao": ArmInfo("torchao's tensorwise, weights gathered in FP8", BASE, "tensorwise"),
    "torchao_precomputed": ArmInfo(
        "the same, with scales computed right after each step", BASE, "tensorwise"
    ),
}


points = crossed_points("allgather", "axes.width and axes.hidden", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """Sizes that FP8 matmul does not take, too few GPUs, or a missing peer."""
    for axis in ("width", "hidden", "tokens"):
        if arm != BASE and case.integer(axis) % 16:
            return Unsupported("shape", f"{axis}={case.integer(axis)}: FP8 matmul takes multiples of 16")
    missing = ranks.gpus_missing(case.integer("ranks"), device)
    if missing is None and _WAYS[arm][0] == "torchao":
        missing = TORCHAO.missing(device)
    return Unsupported("device", missing) if missing else None


def work(case: Case) -> float:
    """Bytes of weights that a step gathers."""
    return 2.0 * case.integer("width") * case.integer("hidden") * case.integer("layers")


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """Trains in ranks, and says what went over the wire and how long it took."""
    gather, world = gather_of(case, arm, device), case.integer("ranks")
    peer = gather.implementation == "torchao"
    resolved: dict[str, object] = {
        "library": gather.implementation or "none",
        "recipe": "tensorwise" if gather.implementation else "none",
        "world": world,
        "hosts": ranks.hosts(world),
        "weights": dict(weights_in(gather)),
        "timed": "training steps of all ranks, the ways alternating, in the same rounds",
        "version": TORCHAO.version() if peer else None,
    }
    try:
        every: list[Measured] = ranks.run(measure, world, gather, timeout_s=TIMEOUT_S, device=device)
    except ranks.RanksError as error:
        if error.lost:
            return Trial((), resolved, str(error).splitlines()[0], cause=Cause.DIED)
        if not peer:
            raise
        return Trial(
            (), resolved, refusal=f"torchao {TORCHAO.version()} failed: {str(error).splitlines()[0]}"
        )
    if every[0].refusal:
        return Trial((), resolved, refusal=every[0].refusal)
    if fault := not_finite([one.losses[OWN] for one in every]):
        return Trial((), resolved, fault, cause=Cause.DIVERGED)
    losses, rounds = _mean([one.losses[OWN] for one in every]), tuple(range(gather.rounds))
    resolved["scale_all_reduces_per_step"] = every[0].scale_all_reduces
    on_step(len(losses), len(losses))
    series = [Series("loss", losses, tuple(range(len(losses))))]
    if gather.implementation:
        apart = deviation(losses, _mean([one.losses[HIGH] for one in every]))
        if apart > 0 and not peer:
            return Trial(
                (),
                resolved,
                f"losses differ by {apart:.2e} from those with weights gathered in high precision",
                cause=Cause.NUMERICS,
            )
        series.append(Series("loss_deviation", (apart,), (len(losses) - 1,)))
    for (collective, dtype), (calls, size) in sorted(every[0].sent.items()):
        series.append(Series("wire_bytes", (float(size),), (0,), f"{collective} {dtype}"))
        series.append(Series("collectives", (float(calls),), (0,), f"{collective} {dtype}"))
    # A step is over when its slowest rank is done.
    ms = {
        name: [max(took) for took in zip(*(one.ms[name] for one in every), strict=True)]
        for name in every[0].ms
    }
    series += [
        Series("step_ms", tuple(took), rounds, "" if name == OWN else name) for name, took in ms.items()
    ]
    exposed = tuple(own - alone for own, alone in zip(ms[OWN], ms[ALONE], strict=True))
    resolved["exposed_share"] = statistics.median(exposed) / statistics.median(ms[OWN])
    return Trial((*series, Series("exposed_ms", exposed, rounds)), resolved)


def gather_of(case: Case, arm: str, device: str) -> Gather:
    """What an arm of a case measures."""
    implementation, precompute = _WAYS[arm]
    sizes = {name: case.integer(name) for name in ("width", "hidden", "layers", "tokens", "rounds")}
    return Gather(
        implementation,
        precompute,
        **sizes,
        param_dtype=case.text("param_dtype"),
        seed=case.seed,
        device=device,
    )


def _mean(curves: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(statistics.fmean(losses) for losses in zip(*curves, strict=True))
