"""The ledger: public FP8 and NVFP4 runs, judged by one rule; `python reports/studies/ledger.py` writes it.

It makes reports/published/ledger.html with its markdown twin and ledger.csv, harness/advise/losses.csv and four_bits.csv, the tables of docs/evidence.md and docs/evidence.csv,
from results/published/curves and reports/studies/evidence.csv. A word on a loss is that of `harness.judge.verdict.rule.judge`.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import advised_losses
import evidence
import mlperf
import numpy as np
from advised_losses import interval
from documented_table import fill

from harness.advise import four_bits, losses
from harness.judge.verdict.result import MARGIN, percent
from harness.report.drawing import BAND, INK, MUTED, SERIES, Chart, sheet, styled, ticks
from harness.report.render import render_sections
from harness.report.section import Section
from harness.report.table import Column, make_table, word
from harness.store.printer import Cell, Table, markdown_table
from harness.store.text import plural

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from harness.store.stats import Effect

PUBLISHED = evidence.ROOT / "reports" / "published"
DOCS = evidence.ROOT / "docs"
NOT_VERIFIED = (
    "Figures are derived from public MLPerf Training results; they are not verified by MLCommons. "
    "The MLPerf name is a trademark of MLCommons."
)
ANSWERED = {"llama31_8b": "Llama 3.1 8B", "llama31_405b": "Llama 3.1 405B", "llama2_70b_lora": "Llama 2 70B LoRA", "gpt3": "GPT-3 175B"}  # fmt: skip
FACTORS = {"fp8_format": "format ", "attention": "attention in ", "amax_history": "amax history ", "stochastic_rounding": "stochastic rounding "}  # fmt: skip
CANNOT = (
    "BF16 curves: no submission trains in BF16. BF16 is seen in the reference points alone, by samples to the target.",
    "Anything past the target: runs stop there. A gap that opens later is not in the logs.",
    "Which sets of runs were thrown away: submitters choose hyperparameters and the set that they submit, and no log counts the others.",
    "Precision alone: NVFP4 comes with FP8 attention and without random Hadamard transforms, and stacks, rounds and submitters differ. "
    "What differs stands in each row.",
    "Hardware against recipe: an amax history of 4 is AMD's or Blackwell's, one of 32 is Hopper's.",
    "Multiplicity: intervals and words are of single comparisons, and nothing is corrected for their number. Of {count} intervals at 95 %, "
    "one in twenty misses the truth by chance.",
)


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison with its number on the page.

    Attributes:
        number: from 1 on.
        of: what is compared.
        shares: numbers of other comparisons that use some of its runs.
    """

    number: int
    of: mlperf.Comparison
    shares: tuple[int, ...]

    @property
    def base(self) -> str:
        """What the base is."""
        return side_name(self.of, 0)

    @property
    def candidate(self) -> str:
        """What the candidate is."""
        return side_name(self.of, 1)

    @property
    def clusters(self) -> int:
        """Arms of both sides, a reference point counted as one."""
        return sum(max(1, len(side)) for side in self.of.sides)

    @property
    def scope(self) -> str:
        """What the words hold for."""
        base, candidate = (len(side) for side in self.of.sides)
        if self.clusters < 3:
            return "these two machines" if base else "one machine and the reference"
        return f"{plural(candidate, 'arm')} against {base or 'the reference'}"

    @property
    def outcome(self) -> str:
        """The word of the rule; "" without curves."""
        return self.of.verdict.outcome if self.of.verdict else ""

    @property
    def by_loss(self) -> str:
        """How the loss decides: equivalent, worse or better; "" where it does not."""
        found = self.of.verdict
        if found is None or not self.of.ways:
            return ""
        return found.codes[0] if found.codes[0] in ("equivalent", "worse", "better") else ""

    @property
    def by_samples(self) -> str:
        """How samples to the target decide, by the wider interval; "" where they do not, or where the grid shows one value of a side."""
        found = self.of.samples[1]
        if self.of.one_value:
            return ""
        if found.low > 1:
            return "more samples"
        if found.high < 1:
            return "fewer samples"
        inside = found.low > 1 / mlperf.SAME and found.high < mlperf.SAME
        return f"equal within {whole(mlperf.SAME - 1)}" if inside else ""

    @property
    def has_clusters(self) -> bool:
        """Whether arms count as clusters: at least three, one side of two."""
        return self.clusters >= 3


def side_name(of: mlperf.Comparison, side: int) -> str:
    """What one side is: a precision and, where the sides share it, the setting in which they differ."""
    if side == 0 and isinstance(of.base, mlperf.Reference):
        return "BF16 reference" if of.base.precision == "BF16" else "reference, precision not given"
    about = of.sides[side][0].about
    if of.factor in ("precision", "reference"):
        attention = about["attention"] if about["attention"] not in mlperf.UNKNOWN else "unknown"
        return (
            f"{about['precision']}, attention {attention}" if of.factor == "reference" else about["precision"]
        )
    return f"{about['precision']}, {FACTORS[of.factor]}{about[of.factor]}"


def setting(about: Mapping[str, str]) -> str:
    """Benchmark and hyperparameters, short."""
    schedule = f", schedule {float(about['schedule_steps']):,.0f}" if about["schedule_steps"] else ""
    warmup = (
        f", warm-up {float(about['warmup_steps']):,.0f}" if about["warmup_steps"] not in ("", "0") else ""
    )
    return f"batch {about['gbs']}, rate {float(about['lr']):.4g}{warmup}{schedule}, target {about['target']}"


@cache
def rows() -> tuple[Row, ...]:
    """Every comparison: those with curves first, then those with a reference point; 8B, LoRA, 405B, GPT-3."""
    between = {name: found.between for name, found in mlperf.spreads().items()}
    order = list(ANSWERED)
    found = [*mlperf.curve_comparisons(between), *mlperf.references()]
    found.sort(key=lambda c: (c.factor == "reference", order.index(c.about["benchmark"])))
    used = [{arm.name for side in c.sides for arm in side} for c in found]
    return tuple(
        Row(i + 1, each, tuple(j + 1 for j in range(len(found)) if j != i and used[i] & used[j]))
        for i, each in enumerate(found)
    )


def known() -> list[Row]:
    """Comparisons whose base has a known precision."""
    return [
        row
        for row in rows()
        if not isinstance(row.of.base, mlperf.Reference) or row.of.base.precision == "BF16"
    ]


def disjoint() -> int:
    """How many of `known` share no arm with another one that is counted, the smallest first."""
    taken: set[str] = set()
    count = 0
    for row in sorted(known(), key=lambda row: row.clusters):
        names = {arm.name for side in row.of.sides for arm in side}
        if not names & taken:
            taken |= names
            count += 1
    return count


def whole(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %"


def ratio(found: Effect) -> str:
    """A ratio with its interval."""
    return (
        f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        if math.isfinite(found.low)
        else f"{found.ratio:.3f}"
    )


def provenance(row: Row, side: int) -> str:
    """Where a side's precision is known from, with the number of arms."""
    if not row.of.sides[side]:
        return "reference point"
    counts = Counter(arm.about["provenance"] for arm in row.of.sides[side])
    return ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))


def because(row: Row) -> str:
    """What withholds a word, and at which step the comparison stands in a healing schedule."""
    found = row.of.verdict
    if found is None:
        return "no curves of the reference"
    lines = [f"{each.code}: {each.text}" for each in found.findings]
    lines = [f"{line} ({row.of.farthest})" if line.startswith("stray") else line for line in lines]
    lines += healing(row)
    left = [
        arm.name
        for side, kept in zip(row.of.sides, row.of.compared, strict=True)
        for arm in side
        if arm not in kept
    ]
    if left:
        lines.append(f"other evaluation grid, not in the gap: {', '.join(left)}")
    return "; ".join(lines)


def healing(row: Row) -> list[str]:
    """Where the end of the comparison lies in a schedule that leaves NVFP4."""
    steps = {arm.about["healing_step"] for arm in row.of.candidate} - {""}
    if not steps or row.of.verdict is None or not row.of.ways:
        return []
    switch = min(map(float, steps)) * float(row.of.about["gbs"])
    when = "before" if row.of.verdict.step < switch else "after"
    return [
        f"the losses are those at {row.of.verdict.step:,.0f} samples, {when} the switch to FP8 at {switch:,.0f}"
    ]


def decides(row: Row) -> str:
    """What would decide the loss; "" where it is decided."""
    found = row.of.verdict
    if row.by_loss:
        return ""
    if found is None:
        return "curves of BF16 runs"
    if "few_values" in found.codes:
        return "evaluations at the same samples, several before the target"
    sizes = [len(side) for side in row.of.compared]
    parts = []
    if row.of.ways and "not_shown" not in found.codes:
        parts.append("the end alone would pass: why the course differs")
    if min(sizes) == 1:
        parts.append("a second arm on the side of one")
    if found.needed:
        most = [str(n) if n else "over 200" for n in found.needed]
        parts.append(f"{most[0]} runs a side in as many more arms, {most[1]} at half a margin")
    if "stray" in found.codes:
        parts.append("the reason of the run that strays")
    return "; ".join(parts) or "more arms"


def record(row: Row) -> dict[str, str]:
    """A line of ledger.csv."""
    of, found = row.of, row.of.verdict
    runs, arms = of.samples

    def share(value: float) -> str:
        return "" if math.isnan(value) else f"{value:.6f}"

    def side(i: int) -> str:
        own = of.sides[i]
        return (
            " ".join(arm.name for arm in own)
            if own
            else of.base.name
            if isinstance(of.base, mlperf.Reference)
            else ""
        )

    ways = [w.interval() for w in of.ways] + [(math.nan, math.nan)] * 2
    counts = [sum(len(arm.runs) for arm in own) for own in of.compared] if found else ["", ""]
    samples = (
        of.base.samples.size
        if isinstance(of.base, mlperf.Reference)
        else sum(a.samples.size for a in of.base)
    )
    return {
        "number": str(row.number),
        "benchmark": of.about["benchmark"],
        **{name: of.about[name] for name in mlperf.HYPERPARAMETERS[1:]},
        "factor": of.factor,
        "base": row.base,
        "candidate": row.candidate,
        "base_arms": side(0),
        "candidate_arms": side(1),
        "base_provenance": provenance(row, 0),
        "candidate_provenance": provenance(row, 1),
        "scope": row.scope,
        "base_runs": str(counts[0]),
        "candidate_runs": str(counts[1]),
        "step": f"{found.step:.0f}" if found and of.ways else "",
        "gap": share(found.gap) if found else "",
        "gap_low_runs": share(ways[0][0]),
        "gap_high_runs": share(ways[0][1]),
        "gap_low_arms": share(ways[1][0]) if len(of.ways) > 1 else "",
        "gap_high_arms": share(ways[1][1]) if len(of.ways) > 1 else "",
        "margin": share(found.margin) if found else "",
        "within": share(of.within),
        "word": row.outcome,
        "codes": " ".join(found.codes) if found else "",
        "base_samples_runs": str(samples),
        "candidate_samples_runs": str(sum(arm.samples.size for arm in of.candidate)),
        "samples_ratio": f"{runs.ratio:.4f}",
        "samples_low_runs": f"{runs.low:.4f}",
        "samples_high_runs": f"{runs.high:.4f}",
        "samples_low_arms": f"{arms.low:.4f}" if row.has_clusters else "",
        "samples_high_arms": f"{arms.high:.4f}" if row.has_clusters else "",
        "samples_word": row.by_samples or ("within one cell" if row.of.one_value else ""),
        "time": "; ".join(times(row)),
        "differs": "; ".join(of.differs()),
        "because": because(row),
        "decides": decides(row),
        "shares_runs_with": " ".join(map(str, row.shares)),
    }  # fmt: skip


def times(row: Row) -> list[str]:
    """Time to the target on each machine that both sides used."""
    return [
        f"{machine}: {ratio(effect)}, {plural(len(candidate), 'arm')} against {len(base)}"
        for machine, base, candidate, effect in row.of.times
    ]


# Tables


def _what(row: Row) -> Cell:
    shown = f"{row.number}. {row.candidate} against {row.base}"
    notes = [ANSWERED[row.of.about["benchmark"]], setting(row.of.about), *healing(row)]
    return Cell(shown, row.number, note="; ".join(notes))


def _gap(row: Row) -> Cell:
    found = row.of.verdict
    return Cell(percent(found.gap), found.gap) if found and row.of.ways else Cell("none", None, "muted")


def _gap_over(row: Row, way: int) -> Cell:
    ways = row.of.ways
    return Cell(interval(*ways[way].interval())) if way < len(ways) else Cell("")


def _runs(row: Row) -> Cell:
    line = record(row)
    names = (
        ("candidate_runs", "base_runs") if row.of.verdict else ("candidate_samples_runs", "base_samples_runs")
    )
    return Cell(" against ".join(line[name] for name in names), note=row.scope)


def ends(found: Effect) -> str:
    """The interval of a ratio."""
    return f"{found.low:.3f} to {found.high:.3f}"


def _word(row: Row) -> Cell:
    if not row.of.verdict:
        return Cell("no curves", None, "muted")
    codes = ", ".join(row.of.verdict.codes)
    return word(row.outcome, f"{codes}; {row.scope}" if row.scope == "these two machines" else codes)


COLUMNS: Mapping[str, Column] = {
    "what": Column("candidate against base", _what),
    "runs": Column("runs", _runs, hint="candidate against base"),
    "gap": Column("gap", _gap, "candidate over base - 1 at the last sample that all runs reached", numeric=True),
    "gap, runs": Column("95 % over runs", lambda row: _gap_over(row, 0), numeric=True),
    "gap, arms": Column("over arms", lambda row: _gap_over(row, 1), "arms as clusters", numeric=True),
    "margin": Column("margin", lambda row: percent(row.of.verdict.margin)[1:] if row.of.verdict else "", numeric=True),
    "word": Column("word", _word, hint="of the rule, by the loss"),
    "samples": Column("samples", lambda row: f"{row.of.samples[0].ratio:.3f}", "candidate over base", numeric=True),
    "samples, runs": Column("95 % over runs", lambda row: ends(row.of.samples[0]), numeric=True),
    "samples, arms": Column("over arms", lambda row: ends(row.of.samples[1]) if row.has_clusters else "", "arms as clusters", numeric=True),
    "by samples": Column("by samples", lambda row: Cell(row.by_samples or ("within one cell" if row.of.one_value else "not shown"), note="these two machines" if row.by_samples and not row.has_clusters else "")),
    "time": Column("time to the target, equal machines", lambda row: Cell("; ".join(times(row)))),
    "precision": Column("precision known from", lambda row: Cell(f"base: {provenance(row, 0)}; candidate: {provenance(row, 1)}")),
    "differs": Column("differs too", lambda row: Cell("; ".join(row.of.differs()))),
    "decides": Column(
        "seen, and what would decide the loss",
        lambda row: Cell("; ".join(filter(None, (because(row), decides(row) and f"needed: {decides(row)}")))),
    ),
    "shares": Column("shares runs with", lambda row: Cell(", ".join(f"{n}" for n in row.shares))),
}  # fmt: skip


def table(key: str, columns: Sequence[Column], records: Sequence[Any], caption: str = "") -> Table:
    """A table that becomes cards on a narrow screen."""
    return replace(make_table(key, columns, records, caption, sortable=False), as_cards=True)


GAP, SAMPLES = (
    ("gap", "gap, runs", "gap, arms", "margin"),
    ("samples", "samples, runs", "samples, arms", "by samples"),
)


def chosen(*names: str) -> list[Column]:
    """Columns of comparisons, by name."""
    return [COLUMNS[name] for name in names]


def plain(names: Iterable[str]) -> list[Column]:
    """Columns of texts."""
    return [Column(name) for name in names]


def decided() -> list[Row]:
    """Comparisons that decide with arms as clusters, by loss or by samples."""
    return [row for row in rows() if row.has_clusters and (row.by_loss or row.by_samples)]


def row_of(benchmark: str, gbs: str, base: str, candidate: str) -> Row:
    """The comparison of that benchmark and batch, its sides by the beginning of their names."""
    found = [
        row
        for row in rows()
        if (row.of.about["benchmark"], row.of.about["gbs"]) == (benchmark, gbs)
        and row.base.startswith(base)
        and row.candidate.startswith(candidate)
    ]
    (only,) = found
    return only


def answer() -> list[dict[str, str]]:
    """FP8 and NVFP4 against BF16 at 8B: a line a question."""
    fp8, nvfp4 = (row_of("llama31_8b", "16", "BF16", name) for name in ("FP8-current", "NVFP4"))
    pair = row_of("llama31_8b", "16", "FP8-current", "NVFP4")
    amd = row_of("llama31_8b", "32", "BF16", "FP8-delayed")
    verdict = pair.of.verdict
    assert verdict is not None
    tokens = verdict.step * float(pair.of.about["seq"]) / 1e9
    lines = [
        _said(f"Samples to loss 3.3, {name}", row, row.of.samples[1], row.by_samples or "not shown")
        for name, row in (
            ("FP8 (current scaling) against BF16", fp8),
            ("NVFP4 package against BF16", nvfp4),
            ("NVFP4 package against FP8", pair),
            ("FP8 (delayed, AMD, batch 32) against BF16", amd),
        )
    ]
    over_arms = pair.of.ways[1].interval()
    gap = {
        "question": f"Loss at {tokens:.2f} billion tokens, NVFP4 package against FP8",
        "answer": percent(verdict.gap),
        "95 % interval, arms as clusters": interval(*over_arms),
        "runs (arms)": lines[2]["runs (arms)"],
        "word": f"{verdict.outcome}, {verdict.codes[0]}",
    }
    timed = [
        {
            "question": f"Time to loss 3.3 on {machine}, NVFP4 package against FP8",
            "answer": f"{effect.ratio:.3f}, {effect.speedup:.2f} times sooner",
            "95 % interval, arms as clusters": f"{effect.low:.3f} to {effect.high:.3f}",
            "runs (arms)": f"{count(candidate)} ({len(candidate)}) against {count(base)} ({len(base)})",
            "word": "sooner" if effect.high < 1 else "not shown",
        }
        for machine, base, candidate, effect in pair.of.times
    ]
    return [lines[0], lines[1], gap, lines[2], *timed, lines[3]]


def count(arms: Sequence[mlperf.Arm]) -> int:
    """Runs that reached the target."""
    return sum(arm.samples.size for arm in arms)


def _said(question: str, row: Row, effect: Effect, shown: str) -> dict[str, str]:
    line, arms = record(row), [len(side) for side in row.of.sides]
    base = (
        f"{line['base_samples_runs']} ({arms[0]})"
        if arms[0]
        else f"{line['base_samples_runs']} of the reference"
    )
    return {
        "question": question,
        "answer": f"{effect.ratio:.3f}",
        "95 % interval, arms as clusters": f"{effect.low:.3f} to {effect.high:.3f}",
        "runs (arms)": f"{line['candidate_samples_runs']} ({arms[1]}) against {base}",
        "word": shown,
    }


def sentence() -> str:
    """The answer at 8B in words."""
    counts = [line["runs (arms)"] for line in answer()]
    fp8, nvfp4 = (row_of("llama31_8b", "16", "BF16", name).of.samples[1] for name in ("FP8-current", "NVFP4"))
    pair = row_of("llama31_8b", "16", "FP8-current", "NVFP4").of
    words = [line["word"] for line in answer()]
    expected = [
        "equal within 5 %",
        "more samples",
        "FAIL, worse",
        "more samples",
        *["sooner"] * len(pair.times),
        "not shown",
    ]
    if words != expected or pair.verdict is None:
        raise ValueError(f"the sentence says {expected}, the comparisons {words}: write it anew")
    sooner = " and ".join(
        f"{effect.speedup:.2f} times ({1 / effect.high:.2f} to {1 / effect.low:.2f}) on {machine}"
        for machine, *_, effect in pair.times
    )
    tokens = pair.verdict.step * float(pair.about["seq"]) / 1e9
    return (
        f"To loss {float(pair.about['target'])}, FP8 needs as many samples as BF16 within 5 %: {fp8.ratio:.3f} times ({ends(fp8)}; runs (arms): {counts[0]}). "
        f"The NVFP4 package, with FP8 attention and no random Hadamard transform, needs {whole(nvfp4.ratio - 1)} more ({ends(nvfp4)}; {counts[1]}). "
        f"At {tokens:.2f} billion tokens its loss is {percent(pair.verdict.gap)[1:]} above FP8's ({interval(*pair.ways[1].interval())}; {counts[2]}). "
        f"It is still sooner at the target: {sooner}. "
        "BF16 has no curves and no times there, only reference points."
    )


def calibration() -> list[dict[str, str]]:
    """The lines of the calibration."""
    return [
        {
            "benchmark": ANSWERED.get(each.benchmark, each.benchmark),
            "pairs": str(each.pairs),
            "Welch at 5 % rejects": f"{each.welch} of {each.tested} ({100 * each.welch / each.tested:.1f} %)",
            "judged, both directions": str(sum(each.words.values())),
            "FAIL": str(each.words["FAIL"]),
            "PASS": str(each.words["PASS"]),
            "gap alone passes": str(each.within),
            "of these withheld": f"{each.withheld} ({100 * each.withheld / each.within:.1f} %)"
            if each.within
            else "0",
            "sd between machines": percent(each.between)[1:] if each.between else "not seen",
            "largest gap of a pair": f"{percent(max(each.gaps)[0])[1:]} ({max(each.gaps)[1]})",
        }
        for each in mlperf.calibration()
    ]


@cache
def _uses() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for row in rows():
        for side in row.of.sides:
            for arm in side:
                found.setdefault(arm.name, []).append(row.number)
    return found


ARM_COLUMNS = [
    Column("arm", lambda a: Cell(a.name, a.name, "id")),
    Column("submitter and system", lambda a: Cell(a.about["org"], a.about["org"], note=a.about["system"])),
    Column("round", lambda a: Cell(a.about["round"])),
    Column("machine", lambda a: Cell(a.machine)),
    Column("benchmark", lambda a: Cell(ANSWERED[a.about["benchmark"]], note=setting(a.about))),
    Column("precision", lambda a: Cell(a.about["precision"], note=_details(a))),
    Column("known from", lambda a: Cell(a.about["provenance"])),
    Column("runs", lambda a: Cell(str(len(a.runs)), len(a.runs)), numeric=True),
    Column("samples to the target, median", lambda a: Cell(f"{np.median(a.samples):,.0f}"), numeric=True),
    Column("comparisons", lambda a: Cell(", ".join(map(str, _uses().get(a.name, ()))) or ("copy" if a.name in mlperf.copies() else ""))),
]  # fmt: skip


def _details(arm: mlperf.Arm) -> str:
    names = (*list(mlperf.LEVELS)[1:], "rht", "quant_2d", "healing_step")
    return "; ".join(f"{name.replace('_', ' ')} {arm.about[name]}" for name in names if arm.about[name])


@styled
def courses() -> Chart:
    """The gap of every comparison with curves, along the way: a panel each."""
    shown = [row for row in rows() if row.of.verdict]
    across = 4
    down = math.ceil(len(shown) / across)
    drawn = sheet("courses", 1.75 * down + 0.4, across, down, grid="y")
    for panel, row in zip(drawn.panels, shown, strict=False):
        found = row.of.verdict
        assert found is not None
        steps, losses = found.evidence.whole
        n = len(found.evidence.base)
        level = np.median(losses[:n], axis=0)
        labels = np.array([label for side in found.evidence.clusters for label in side])
        sides = np.arange(labels.size) >= n
        style = "-" if steps.size > 1 else "o"
        panel.axhspan(-100 * found.margin, 100 * found.margin, color=BAND, label="margin")
        for i, (colour, name) in enumerate(
            ((MUTED, "arms of the base"), (SERIES[1], "arms of the candidate"))
        ):
            for j, label in enumerate(dict.fromkeys(labels[sides == bool(i)])):
                course = 100 * (np.median(losses[labels == label], axis=0) / level - 1)
                panel.plot(
                    steps / 1000,
                    course,
                    style,
                    color=colour,
                    linewidth=0.6,
                    markersize=2,
                    label="" if j else name,
                )
        gap = 100 * (np.median(losses[n:], axis=0) / level - 1)
        panel.plot(
            steps / 1000, gap, style, color=INK, linewidth=1.6, markersize=3, label="gap of the medians"
        )
        panel.set_title(f"#{row.number} {_short(row)}", fontsize=8)
        reach = max(float(np.abs(gap[gap.size // 3 :]).max()) * 1.6, 250 * found.margin)
        panel.set_ylim(-reach, reach)
        ticks(panel.yaxis, 5, signed=True)
        ticks(panel.xaxis, 4)
        panel.tick_params(labelsize=7.5)
    for panel in drawn.panels[len(shown) :]:
        panel.set_axis_off()
    drawn.figure.supxlabel("thousand samples", fontsize=8.5)
    drawn.figure.supylabel("over the base's median - 1, %", fontsize=8.5)
    return drawn.chart(
        "Courses of the comparisons with curves",
        "Numbers as in the tables. Scaled to the last two thirds of the common evaluations; early values may lie beyond. "
        "Few evaluations are common to all runs of LoRA, since the first runs stop early.",
    )


def _short(row: Row) -> str:
    names = {"llama31_8b": "8B", "llama2_70b_lora": "LoRA", "llama31_405b": "405B"}
    about, factor = row.of.about, row.of.factor
    base, candidate = (side[0].about[factor].partition("@")[0] for side in row.of.sides)
    kind = {
        "precision": "",
        "fp8_format": "",
        "attention": "attn ",
        "amax_history": "amax ",
        "stochastic_rounding": "SR ",
    }[factor]
    return f"{names[about['benchmark']]} {about['gbs']}: {kind}{candidate} v {base}".replace("-delayed", "")


def sections(calibrated: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]]) -> list[Section]:
    """The page."""
    found, curves = rows(), [row for row in rows() if row.of.verdict]
    counted = decided()
    losses, samples = (sum(bool(getattr(row, name)) for row in counted) for name in ("by_loss", "by_samples"))
    copied = [
        {"left out": again, "copy of": first, "system": mlperf.arms()[again].about["system"], "round": mlperf.arms()[again].about["round"], "the judge": said}
        for again, (first, said) in mlperf.copies().items()
    ]  # fmt: skip
    answers, cannot = answer(), [{"limit": line.format(count=len(found))} for line in CANNOT]
    inside = sum(row.of.within < MARGIN for row in curves)
    return [
        Section("answer", "FP8 and NVFP4 against BF16 at 8B", sentence(), first=[table("answer", plain(answers[0]), answers)]),
        Section(
            "decided",
            f"{len(counted)} of {len(found)} comparisons decide, with arms as clusters",
            f"{losses} by loss, {samples} by samples. Hyperparameters as logged are equal on both sides; runs of one arm count as a cluster. "
            f"By samples: the 95 % interval excludes 1, or lies within {whole(mlperf.SAME - 1)} of it, which is less than a cell of the grid at 8B. "
            "The cell is added to the error. By loss: PASS within 0.25 % or a twentieth of what was learned, FAIL above it with 99 %.",
            first=[table("decided", chosen("what", "runs", *GAP, "word", *SAMPLES), counted)],
        ),
        Section(
            "comparisons",
            f"All {len(found)} comparisons",
            f"{len(curves)} with curves on both sides, {len(found) - len(curves)} with a reference point, of which {len(found) - len(known())} give no precision. "
            f"No run is in two arms or on both sides. {disjoint()} of the {len(known())} with known precision share no arm with each other. "
            f"{inside} gaps lie within 0.25 %, but LoRA learns so little that its margin is 0.06 to 0.09 %.",
            charts=[courses()],
        ),
        Section(
            "losses",
            f"By loss: the {len(curves)} comparisons with curves",
            tables=[table("losses", chosen("what", "runs", *GAP, "word", "decides", "differs"), curves)],
        ),
        Section(
            "samples",
            f"By samples and time to the target: all {len(found)}",
            tables=[table("samples", chosen("what", "runs", *SAMPLES, "time", "precision", "shares"), found)],
        ),
        Section(
            "calibration",
            "Calibration: arms that differ in no logged setting",
            "A/A: equal in benchmark, batch, rates, warm-up, schedule and every precision column, copies left out, three runs or more a side. "
            "Where Welch's test rejects more than 5 %, machines differ. Few LoRA pairs pass, since the loss falls by 1.6 % and the margin is 0.08 %. "
            "The spread between machines is that of the pairs' gaps beyond the noise of their runs.",
            first=[table("calibration", plain(calibrated[0]), calibrated), table("copies", plain(copied[0]), copied)],
        ),
        Section("cannot", "What the data cannot say", first=[table("cannot", plain(cannot[0]), cannot)]),
        Section(
            "public",
            "Other public runs, by the same rule",
            "Reported in threads by others. One run a side decides nothing, and neither do means.",
            first=[table("public-runs", plain(n for n in others[0] if n not in ("shows", "runs needed")), others)],
        ),
        Section(
            "arms",
            f"{len(mlperf.arms())} arms, {sum(len(arm.runs) for arm in mlperf.arms().values()):,} runs with evaluations",
            "Known from: log, the configuration is printed in the run's own log; stated, the submission says so; config, one configuration of the "
            "submission fits; inferred, none fits, read from siblings. Every setting with its line stands in results/published/curves/mlperf.",
            tables=[table("arms", ARM_COLUMNS, list(mlperf.arms().values()))],
        ),
    ]  # fmt: skip


# Files


def markdown(title: str, shown: Sequence[Section]) -> str:
    """The twin of the page without figures."""
    lines = [
        f"# {title}",
        "",
        NOT_VERIFIED,
        "",
        "Courses are drawn in the HTML beside this file; every figure stands in ledger.csv.",
        "",
    ]
    for section in shown:
        lines += [f"## {section.title}", ""]
        if section.intro:
            lines += [section.intro, ""]
        for each in section.all_tables:
            lines.append(markdown_table(replace(each, caption="")))
    return "\n".join(lines).rstrip() + "\n"


def documented() -> dict[str, str]:
    """The tables of docs/evidence.md."""
    counted = [
        {
            "candidate against base": f"{row.candidate.partition(', att')[0]} against {row.base}, {ANSWERED[row.of.about['benchmark']]}",
            "arms": row.scope.replace("arms ", "").replace("the reference", "reference"),
            "gap of the loss": f"{row.outcome}, {percent(row.of.verdict.gap)} ({interval(*row.of.ways[-1].interval())})"
            if row.of.verdict and row.of.ways
            else "",
            "samples to the target": f"{row.by_samples or 'not shown'}, {ratio(row.of.samples[1])}",
        }
        for row in decided()
    ]
    return {
        "answer": textwrap.fill(sentence(), 140, break_on_hyphens=False),
        "decided": markdown_table(table("decided", plain(counted[0]), counted)).rstrip(),
        "public": evidence.markdown(evidence.ledger()),
    }


def write_csv(path: Path, lines: Sequence[Mapping[str, str]]) -> None:
    """Lines as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    """Writes the page, its twin, the data and the tables of the documentation."""
    others = evidence.ledger()
    title = "Does it train the same? Public FP8 and NVFP4 runs, judged by one rule"
    shown = sections(calibration(), others)
    kicker = "Ledger of public runs"
    page = render_sections(title, kicker, NOT_VERIFIED, shown)
    (PUBLISHED / "ledger.html").write_text(page, encoding="utf-8")
    (PUBLISHED / "ledger.md").write_text(markdown(title, shown), encoding="utf-8")
    records = [record(row) for row in rows()]
    write_csv(PUBLISHED / "ledger.csv", records)
    write_csv(losses.FILE, advised_losses.table(records))
    write_csv(four_bits.FILE, advised_losses.four_bits(records, ANSWERED))
    fill(DOCS / "evidence.md", documented())
    write_csv(DOCS / "evidence.csv", others)


if __name__ == "__main__":
    main()
