"""Pays: whether FP8 can be faster at all for matrices of a size, from the rates of the machine.

For a Linear layer with M tokens, K inputs and N outputs, forward and backward, with b bytes moved by its casts per
element of the three matrices, FP8 wins if and only if

    1/M + 1/N + 1/K  <  (6 BW / b) (1/P16 - 1/P8)

GEMMs do 6 M N K operations at P16 or P8 FLOP/s, casts move b (MK + KN + MN) bytes at BW. Launches, which make small
layers worse still, are left out, so a layer below the line cannot win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.machine.ceilings import ceilings
from harness.machine.hardware import of_env
from harness.machine.kernels_by_name import CAST
from harness.store.compare import FP8_DTYPES, TIMES, pairs_of
from harness.store.outside import parse
from harness.store.rows import rows_of
from harness.store.text import interval, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

FUSED_CAST_BYTES = (
    6.0  # read bf16 twice (amax, cast), write FP8 in both layouts: the least that fused casts move
)
LayerLoss = tuple[str, tuple[str, ...], str]  # symptom, evidence, cause
# Of a layer below the line of break-even
SURFACE = (
    "casts move bytes in proportion to the matrices' surface and GEMMs gain in proportion to their volume"
)


@dataclass(frozen=True, slots=True)
class ReachedRates:
    """What a machine reaches: FLOP/s of matrix products and bytes/s of copies, and where that is from."""

    bf16: float
    fp8: float
    bandwidth: float
    source: str

    def bound(self, cast_bytes: float = FUSED_CAST_BYTES) -> float:
        """What 1/M + 1/N + 1/K must stay below."""
        return 6 * self.bandwidth / cast_bytes * (1 / self.bf16 - 1 / self.fp8)

    def break_even(self, tokens: float, cast_bytes: float = FUSED_CAST_BYTES) -> float:
        """Smallest N = K at which FP8 wins with so many tokens; inf where no size does.

        >>> round(ReachedRates(780e12, 1300e12, 4e12, "").break_even(16384))
        1005
        """
        left = self.bound(cast_bytes) - 1 / tokens
        return 2 / left if left > 0 else math.inf


def rates(frame: pd.DataFrame) -> ReachedRates | None:
    """Rates of the machine of these rows: measured in the suite `ceilings`, else published; None where unknown.

    Args:
        frame: rows of one environment.
    """
    found = ceilings(frame[frame["suite"] == "ceilings"])
    if found is not None and {"bf16", "fp8"} <= found.achieved.keys() and found.moves.get("copy"):
        copy = max(rate for _, rate in found.moves["copy"])
        best = found.achieved
        return ReachedRates(best["bf16"] * 1e12, best["fp8"] * 1e12, copy, "measured in the ceilings")
    env = parse(frame["env"].iloc[0]) if len(frame) else {}
    device = of_env(env)
    if device is None:
        return None
    bf16, fp8 = device.peak_tflops("bf16"), device.peak_tflops("e4m3")
    if bf16 is None or fp8 is None:
        return None
    return ReachedRates(bf16 * 1e12, fp8 * 1e12, device.bandwidth_tb_s * 1e12, "published peaks")


def losses(frame: pd.DataFrame, pairs: Sequence[dict[str, Any]] | None = None) -> Iterator[LayerLoss]:
    """Arms that FP8 made slower, with the reason that sizes or casts give: (symptom, evidence, cause).

    Only times of a GPU count. Layers (suite `linear`) are held against the break-even line by their shapes; training
    steps (suite `train`) by what FP8 could save at best.
    """
    if pairs is None:
        timed = frame["suite"].isin(["linear", "train"]) & frame["metric"].isin(TIMES)
        pairs = pairs_of(rows_of(frame[timed]))
    for env_id, own in frame.groupby("env_id", sort=False):
        if parse(own["env"].iloc[0]).get("device") in (None, "", "cpu"):
            continue
        slower = [p for p in pairs if p["env_id"] == env_id and p["verdict"] == "slower" and p["fp8"]]
        if not slower or (machine := rates(own)) is None:
            continue
        yield from _layers(machine, [r for r in slower if r["suite"] == "linear"])
        steps = [r for r in rows_of(own[own["suite"] == "train"]) if r["status"] == "ok"]
        for pair in slower:
            rows = {
                (r["metric"], r.get("part")): r
                for r in steps
                if (r["case_id"], r["arm"]) == (pair["case_id"], pair["arm"])
            }
            times = [row for (metric, _), row in rows.items() if metric == "time_ms"]
            if pair["suite"] == "train" and times:
                yield _step(machine, pair, times[0], rows.get(("kernel_time_ms", CAST), {}).get("value"))


def _layers(machine: ReachedRates, slower: list[dict[str, Any]]) -> Iterator[LayerLoss]:
    small: dict[str, dict[str, str]] = {}  # by arm and case: alone and under load it is one layer
    for r in slower:
        axes = parse(r["axes"])
        sizes = [s for n in "MKN" if isinstance(s := axes.get(n), int) and s > 0]
        surface = sum(1 / s for s in sizes)
        found = small.setdefault(r["arm"], {})
        if len(sizes) == 3 and surface >= machine.bound():
            shape = "x".join(map(str, sizes))
            found.setdefault(
                r["case_id"], f"{shape}: {ratio(r['speedup'])}, 1/M + 1/K + 1/N = 1/{1 / surface:.0f}"
            )
    line = f"even fused casts need less than 1/{1 / machine.bound():.0f} ({machine.source})"
    for arm, shapes in small.items():
        if shapes:
            symptom = f"{arm} is slower than bf16 in {len(shapes)} layers too small for FP8"
            yield symptom, (line, *[*shapes.values()][:3]), SURFACE


def _step(
    machine: ReachedRates, pair: dict[str, Any], step: dict[str, Any], casts: float | None
) -> LayerLoss:
    """A slower step: what its profile supports, its casts against what its FP8 GEMMs can save."""
    fp8_flops = sum(f for d, f in parse(step["flops"]).items() if d in FP8_DTYPES)
    saved = 1e3 * fp8_flops * (1 / machine.bf16 - 1 / machine.fp8)
    evidence = [
        f"step {step['value']:.3g} ms against {pair['baseline_value']:.3g} ms: {ratio(pair['speedup'])} "
        f"({interval(pair['low'], pair['high'])})",
        f"FP8 GEMMs can save at most {saved:.3g} ms of it, by {machine.source}",
    ]
    cause = "not known: the time of its casts was not measured; axes.profile=true measures it"
    if casts is not None:
        evidence.append(f"its casts take {casts:.3g} ms")
        cause = f"its casts take {casts:.3g} ms, and its FP8 GEMMs can save at most {saved:.3g} ms"
        if casts < saved:
            cause = (
                f"not its casts: they take {casts:.3g} ms of the {saved:.3g} ms that its FP8 GEMMs can save; the rows "
                "do not show what takes the rest"
            )
    axes = parse(pair["axes"])
    tokens = (parse(step["resolved"]).get("tokens_per_step") or 0) / int(axes.get("accumulation") or 1)
    if tokens:
        size = machine.break_even(tokens)
        wins = f"only layers wider than about {size:.0f} win" if math.isfinite(size) else "no width wins"
        evidence.append(f"with {tokens:.0f} tokens a pass {wins}, even with fused casts")
    symptom = f"{pair['arm']} is slower than {pair['baseline']} ({axes.get('model', 'model unknown')})"
    return symptom, tuple(evidence), cause
