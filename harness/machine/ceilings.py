"""What a machine reached in its stored runs: rates of matrix products, bandwidths by size, the cost of a launch.

The denominators of "share of the achievable" and the inputs of every prediction. Products come from the suites
`ceilings` and `gemm`; bandwidths and launches from `ceilings`. A pure function of rows; no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.case import arm_of
from harness.store.compare import SECONDS
from harness.store.outside import parse
from harness.store.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

MOVES = ("copy", "read", "transpose")  # kinds of bandwidth
BF16, TENSORWISE, ROWWISE = "bf16_eager", "tensorwise_eager", "rowwise_eager"  # arms of suite gemm
_KINDS = {
    "mm_bf16": BF16,
    "mm_fp8_tensorwise": TENSORWISE,
    "mm_fp8_rowwise": ROWWISE,
}  # by axis `what` of suite ceilings
SUITES = ("ceilings", "gemm")  # whose rows are read
_SUSTAINED = "sustained"
_COLUMNS = [
    "run_id",
    "suite",
    "arm",
    "arm_fields",
    "axes",
    "metric",
    "regime",
    "value",
    "unit",
    "bytes_moved",
]


@dataclass(frozen=True, slots=True)
class TimedProduct:
    """One matrix product [M, K] @ [K, N] and the median time that it took.

    Attributes:
        kind: `BF16`, `TENSORWISE` or `ROWWISE`.
        role: of the GEMM in a training step, which decides how FP8 accumulates; "output" for a plain product.
        run_id: where it was measured.
    """

    kind: str
    role: str
    M: int
    K: int
    N: int
    seconds: float
    run_id: str = ""

    @property
    def tflops(self) -> float:
        """1e12 FLOP/s."""
        return 2.0 * self.M * self.K * self.N / self.seconds / 1e12


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of one machine.

    Attributes:
        products: one for each shape, kind and role; under sustained load where that was measured.
        moves: "copy", "read" or "transpose" -> (bytes moved, bytes/s), ascending.
        launch_s: time a kernel of one element, launched back to back; None if not measured.
    """

    products: tuple[TimedProduct, ...]
    moves: Mapping[str, tuple[tuple[float, float], ...]]
    launch_s: float | None

    @property
    def achieved(self) -> dict[str, float]:
        """Best TFLOP/s by rate name, "bf16" and "fp8": the argument `achieved` of `harness.machine.mfu`."""
        best: dict[str, float] = {}
        for product in self.products:
            rate = "bf16" if product.kind == BF16 else "fp8"
            best[rate] = max(best.get(rate, 0.0), product.tflops)
        return best

    def bandwidth(self, moved: float, kind: str = "copy") -> float | None:
        """Bytes/s for that many bytes, between the measured sizes by the logarithm of the size; None if not measured."""
        curve = self.moves.get(kind, ())
        if not curve:
            return None
        sizes, rates = zip(*curve, strict=True)
        return float(np.interp(math.log(max(moved, 1.0)), np.log(sizes), rates))


def ceilings(frame: pd.DataFrame) -> Ceilings | None:
    """The ceilings in the rows of one machine; None where nothing of the kind was measured.

    Args:
        frame: rows of one environment, as `harness.store.read` gives them.
    """
    products: dict[tuple[object, ...], tuple[bool, TimedProduct]] = {}
    moves: dict[str, dict[float, float]] = {}
    launches = []
    own = (
        frame["suite"].isin(SUITES)
        & (frame["status"] == "ok")
        & frame["metric"].isin(["time_ms", "launch_us"])
    )
    for row in rows_of(frame.loc[own, [name for name in _COLUMNS if name in frame.columns]]):
        if arm_of(row).control:
            continue
        axes = parse(row["axes"])
        seconds = row["value"] * SECONDS[row["unit"]]
        if row["metric"] == "launch_us":
            launches.append(seconds)
        elif axes.get("what") in MOVES:
            curve = moves.setdefault(axes["what"], {})
            moved = float(row["bytes_moved"])
            curve[moved] = max(curve.get(moved, 0.0), moved / seconds)
        elif (product := _product(row, axes, seconds)) is not None:
            key = (product.kind, product.role, product.M, product.K, product.N)
            sustained = row["regime"] == _SUSTAINED
            known = products.get(key)
            if known is None or (sustained, -product.seconds) > (known[0], -known[1].seconds):
                products[key] = (sustained, product)
    if not products and not moves:
        return None
    return Ceilings(
        tuple(product for _, product in products.values()),
        {kind: tuple(sorted(curve.items())) for kind, curve in moves.items()},
        min(launches, default=None),
    )


def _product(row: Mapping[str, Any], axes: Mapping[str, Any], seconds: float) -> TimedProduct | None:
    if row["suite"] == "ceilings":
        kind, role, sizes = _KINDS.get(str(axes.get("what")), ""), "output", [axes.get("cube")] * 3
    else:
        role, sizes = str(axes.get("role", "output")), [axes.get(name) for name in "MKN"]
        # The recipes accumulate fast in the forward product alone.
        arm = arm_of(row)
        kind = str(replace(arm, variant="") if role == "output" and arm.variant == "fast" else arm)
        if axes.get("data", "randn") != "randn":
            return None
    M, K, N = (size if isinstance(size, int) else 0 for size in sizes)
    if kind not in (BF16, TENSORWISE, ROWWISE) or min(M, K, N) < 1:
        return None
    return TimedProduct(kind, role, M, K, N, seconds, str(row["run_id"]))
