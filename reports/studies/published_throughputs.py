"""The prediction against published throughputs: `python reports/studies/published_throughputs.py` prints the tables of reports/published/studies/scale.md."""

from __future__ import annotations

import csv
import io
import math
import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from published_speedups import machine, step_of
from speedups.throughputs import LEFT_OUT, PUBLISHED, Published

from harness.advise.scale.job import ClusterJob
from harness.advise.scale.predict import step_parts
from harness.advise.step import step_cost
from harness.machine.hardware import named

if TYPE_CHECKING:
    from collections.abc import Sequence

NEAR = (0.10, 0.25)  # shares of the published figure


@dataclass(frozen=True, slots=True)
class Outcome:
    """A published throughput and its prediction, tokens/s of one GPU."""

    case: Published
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.case.tokens_per_s - 1


def outcome(case: Published) -> Outcome:
    """The prediction for one published throughput."""
    if isinstance(case.step, ClusterJob):
        job = case.step
        parts = step_parts(job, machine(named(job.gpu).key))
        return Outcome(case, job.tokens * job.accumulation / job.tp / parts.total)
    step = step_of(case.step)
    recipe, layers = (case.step.recipe, step.converted) if case.fp8 else (None, frozenset[str]())
    parts = step_cost(step.model, step.rates, step.plan, recipe, layers)
    return Outcome(case, step.model.tokens * step.plan.accumulation / step.plan.tp / parts.total)


def table(found: Sequence[Outcome]) -> list[str]:
    """Lines of reports/published/studies/scale-published.csv: a row for each published figure."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        ("run", "assumed", "published_tokens_per_s", "predicted_tokens_per_s", "off_by_percent", "source")
    )
    for one in found:
        case = one.case
        speeds = (f"{case.tokens_per_s:.0f}", f"{one.predicted:.0f}", f"{100 * one.error:+.0f}")
        writer.writerow((case.key, case.assumed, *speeds, case.source))
    return text.getvalue().splitlines()


def summary(found: Sequence[Outcome]) -> list[str]:
    """Markdown: errors of the predictions by publisher."""
    groups: dict[str, list[Outcome]] = {"all": list(found)}
    for one in found:
        groups.setdefault(one.case.source.split(",")[0].split(" ")[0], []).append(one)
    lines = [
        "| published by | figures | median off by | within 10 % | within 25 % |",
        "|---|---|---|---|---|",
    ]
    for name, ones in groups.items():
        errors = [one.error for one in ones]
        shares = (sum(abs(e) <= near for e in errors) for near in NEAR)
        lines.append(
            f"| {name} | {len(ones)} | {100 * statistics.median(errors):+.0f} % | {' | '.join(map(str, shares))} |"
        )
    spread = math.sqrt(statistics.fmean(math.log1p(one.error) ** 2 for one in found))
    return [
        *lines,
        "",
        f"Typical factor of error {math.exp(spread):.2f}.",
    ]


def left_out() -> list[str]:
    """Markdown: what was published and is not predicted, and why."""
    return [
        "| not predicted | why |",
        "|---|---|",
        *(f"| {what} | {why} |" for what, why in LEFT_OUT.items()),
    ]


def main() -> int:
    """Prints the tables of the page; with `--csv` the file."""
    outcomes = [outcome(case) for case in PUBLISHED]
    lines = table(outcomes) if "--csv" in sys.argv[1:] else [*summary(outcomes), "", *left_out()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
