"""The prediction against what others published: `python reports/studies/published_speedups.py` prints the tables of reports/published/studies/speedups.md.

With `--fitted` it leaves the held-out half alone, which is scored once, at the end.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from speedups.case import META_H100, Case
from speedups.halves import FITTED, HELD_OUT
from speedups.table import ROWS, Row

from harness.advise.decide import ON, UNDECIDED, verdict
from harness.advise.layer import layer_cost
from harness.advise.model import Linear, Model, split
from harness.advise.rates import PUBLISHED, Figure, Rates, long_rate, rates_of
from harness.advise.step import Ratio, speedup, step_ratio, with_interval
from harness.advise.trace import trace
from harness.machine.hardware import named
from harness.training.models import MODELS, ModelSpec
from harness.training.models.nanogpt import GptConfig
from harness.training.step import Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

POINTS = 0.10  # a prediction is a hit if it is this near
FLAT = 0.02  # a published ratio nearer to 1 has no sign: each is one run without an interval

OTHER_MODELS: Mapping[str, GptConfig] = {
    "nanochat_d24": GptConfig(32768, 2048, 24, 12, 1536, bias=False),
    "mpt_3b": GptConfig(50368, 65536, 32, 20, 2560, bias=False),
    "mpt_1b": GptConfig(50368, 65536, 24, 16, 2048, bias=False),
}
TE_LAYER = "te_5b_layer"  # hidden 4096, feed-forward 16384: the four layers of one block


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case and its prediction; `anchored` also knows the published throughput in bf16."""

    case: Case
    predicted: Ratio
    anchored: float | None = None

    @property
    def points(self) -> float:
        """Predicted less measured."""
        return self.predicted.value - self.case.measured

    @property
    def hit(self) -> bool:
        """Within `POINTS`."""
        return abs(self.points) <= POINTS

    @property
    def inside(self) -> bool:
        """The measured ratio lies in the predicted interval."""
        return self.predicted.low <= self.case.measured <= self.predicted.high

    @property
    def is_step(self) -> bool:
        """A whole training step, not layers alone."""
        return self.case.model not in ("", TE_LAYER)

    @property
    def sign(self) -> str:
        """ "right", "wrong", or "flat" where the measured ratio has no sign; what was predicted has no say in that."""
        if abs(self.case.measured - 1) <= FLAT:
            return "flat"
        return "right" if (self.predicted.value > 1) == (self.case.measured > 1) else "wrong"

    @property
    def said(self) -> str:
        """What the advice says of the ratio: "on", "off" or "can't tell"."""
        return verdict(self.predicted)

    @property
    def false(self) -> bool:
        """It was measured slower and the advice says "on"."""
        return self.said == ON and self.case.measured < 1


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a case of a whole step is predicted from: its model (one GPU's part), rates, plan and layers in FP8."""

    model: Model
    rates: Rates
    plan: Step
    converted: frozenset[str]


def step_of(case: Case) -> Inputs:
    """The step of a case."""
    given: dict[str, Any] = dict(case.plan)
    plan = Step(**given)
    model = split(_model(case.model, case.seq).with_tokens(case.batch * case.seq), plan.tp)
    converted = (layer.fqn for layer in model.layers if layer.fqn.rsplit(".", 1)[-1] not in case.left_out)
    return Inputs(model, machine(case.machine), plan, frozenset(converted))


def outcome(case: Case) -> Outcome:
    """The prediction for one case."""
    if case.layer is not None:
        rates = machine(case.machine)
        tokens, K, N = case.layer
        layer = Linear("", K, N, tokens, 0)
        return Outcome(case, with_interval(lambda r: layer_cost(layer, case.recipe, r).speedup, rates))
    step = step_of(case)
    anchored = None
    if case.bf16 is not None:
        seconds = step.model.tokens * step.plan.accumulation / (step.plan.tp * case.bf16)
        known = replace(step.plan, bf16_step_s=seconds)
        anchored = step_ratio(step.model, step.rates, known, case.recipe, step.converted)
    return Outcome(case, speedup(step.model, step.rates, step.plan, case.recipe, step.converted), anchored)


@functools.cache
def machine(name: str) -> Rates:
    """The rates of a GPU of the table, or of the H100 that Meta publishes with.

    Its peak nobody knows (torchtitan, benchmarks/llama3_h100_202412, second footnote), so its products stand by
    themselves: 585 and 1126 TFLOP/s at 8192^3 (FBGEMM pull request 2546); bandwidth 2.2 of 2.4 TB/s (pytorch 133242).
    """
    if name != META_H100:
        return rates_of(named(name))
    bandwidth, cube = 2.2e12, (8192, 8192, 8192)
    figures = dict(rates_of(named("h100")).figures)
    source = "FBGEMM pull request 2546, 8192^3"
    figures["bandwidth"] = Figure(bandwidth, 0.05, PUBLISHED, "pytorch issue 133242")
    figures["bf16"] = Figure(long_rate(585, cube, bandwidth), 0.08, PUBLISHED, source)
    figures["fp8"] = Figure(long_rate(1126, cube, bandwidth), 0.08, PUBLISHED, source)
    return Rates(name, figures)


@functools.cache
def _model(name: str, seq: int) -> Model:
    """One sequence; all else is proportional."""
    if name == TE_LAYER:
        sizes = (("qkv", 4096, 12288), ("proj", 4096, 4096), ("up", 4096, 16384), ("down", 16384, 4096))
        layers = tuple(Linear(word, K, N, seq, i) for i, (word, K, N) in enumerate(sizes))
        return Model(name, layers, seq, whole=False)
    spec = MODELS.get(name) or ModelSpec(name, "", "", OTHER_MODELS[name])
    return trace(spec, 1, seq)


def table(outcomes: Sequence[Outcome], rows: Sequence[Row]) -> list[str]:
    """Markdown: a row for each case, then the summary."""
    lines = [
        "| case | measured | predicted | 95 % interval | said | off by | anchored | | seen | source |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for found, row in zip(outcomes, rows, strict=True):
        case, ratio = found.case, found.predicted
        marks = {"wrong": ["**wrong sign**"], "flat": ["measured flat"], "right": []}[found.sign]
        if case.known and not found.hit:
            marks.append("**miss**")
        if not case.known:
            marks.append(f"sign only: {case.note}")
        source = case.source if row.date in case.source else f"{case.source}, {row.date}"
        anchored = "" if found.anchored is None else f"{found.anchored:.3f}"
        lines.append(
            f"| {case.key} | {case.measured:.3f} | {ratio.value:.3f} | {ratio.low:.2f}-{ratio.high:.2f} | "
            f"{found.said} | {100 * found.points:+.1f} | {anchored} | {', '.join(marks)} | {row.seen} | {source} |"
        )
    return [*lines, "", *summary(outcomes)]


def summary(found: Sequence[Outcome]) -> list[str]:
    """Summary of the outcomes, one sentence per line."""
    signs = Counter(o.sign for o in found)
    lines = [f"Signs: {signs['right']} right, {signs['wrong']} wrong, {signs['flat']} flat, of {len(found)}."]
    said = Counter(o.said for o in found)
    lines.append(
        f"Said: on {said['on']}, off {said['off']}, can't tell {said[UNDECIDED]}; on where it was measured slower: "
        f"{sum(o.false for o in found)}."
    )
    steps = [o for o in found if o.case.known and o.is_step]
    hits, inside = sum(o.hit for o in steps), sum(o.inside for o in steps)
    if not steps:
        return lines
    error = math.sqrt(sum(o.points**2 for o in steps) / len(steps))
    lines.append(
        f"Steps whose conditions are known: {hits} of {len(steps)} within {100 * POINTS:.0f} points "
        f"({hits / len(steps):.0%}), {inside} inside the interval, root mean square {100 * error:.1f} points."
    )
    anchored = [o.anchored - o.case.measured for o in steps if o.anchored is not None]
    if anchored:
        near = sum(abs(points) <= POINTS for points in anchored)
        lines.append(
            f"Anchored by the published bf16 throughput: {near} of {len(anchored)} within {100 * POINTS:.0f} points."
        )
    return lines


def of_half(half: str) -> list[Row]:
    """The rows of a half, in the order of the file."""
    return [row for row in ROWS if row.half == half]


def main() -> int:
    """Prints the tables."""
    halves = (FITTED,) if "--fitted" in sys.argv[1:] else (FITTED, HELD_OUT)
    parts = (of_half(half) for half in halves)
    tables = (table([outcome(row.case) for row in rows], rows) for rows in parts)
    sys.stdout.write("\n\n".join("\n".join(lines) for lines in tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
