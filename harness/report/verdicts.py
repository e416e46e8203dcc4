"""Verdicts: the three questions of someone who trains, each answered yes, partly, no or can't tell."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from harness.report.first_steps import evidence_of, first_steps, runs_in_fp8, summary_of
from harness.report.numerics import SQNR, Worst, fp8_rows, numerics_by_arm
from harness.report.runs import once
from harness.report.table import Cell, Column, Table
from harness.store import text
from harness.store.arm import baseline_of
from harness.store.cause import REFUTED, Cause
from harness.store.compare import MODES, TIMES, rows_of, summary
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from harness.report.runs import Machine

Verdict = Literal["yes", "partly", "no", "can't tell"]

CPU_NOTICE = (
    "Measured on a CPU. These runs validate numerics, bytes moved and the harness itself. "
    "CPU timings are no evidence about a GPU's speed."
)
WHAT = {
    "train": "training steps (forward, backward, update)",
    "linear": "whole layers (forward and backward, casts included)",
    "gemm": "single GEMMs (operands already cast)",
}
VERDICTS = ("faster", "same", "slower", "unclear", "missing")


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its verdict in one sentence, and what the verdict rests on."""

    question: str
    verdict: Verdict
    sentence: str
    evidence: tuple[str, ...] = ()


def answers(machine: Machine) -> tuple[Answer, Answer, Answer]:
    """The headline of one machine."""
    return is_faster(machine), is_sound(machine), did_fp8_run(machine)


def is_faster(machine: Machine) -> Answer:
    """Whole layers decide where they were measured, compiled ones first, since that is how models are trained."""
    question = "Is FP8 faster here?"
    if not machine.is_gpu:
        return Answer(
            question,
            "can't tell",
            "Undecided on this machine: CPU timings are no evidence about a GPU.",
            ("Run the same sweep on the GPU in question; the report then answers here.",),
        )
    pairs = fp8_pairs(machine)
    if not pairs["speedup"].notna().any():
        return Answer(question, "can't tell", _no_pairs(machine), _reasons(machine))
    parts = _by_part(pairs)
    evidence = [_spread(*part, machine.constant_axes(part[0])) for part in parts]
    missing = int((pairs["verdict"] == "missing").sum())
    if missing:
        evidence.append(f"{text.plural(missing, 'pair')} could not be computed; see Failed and skipped.")
    return Answer(question, _speed_verdict(parts[0][2]), _speed_sentence(*parts[0]), tuple(evidence))


def is_sound(machine: Machine) -> Answer:
    """Every FP8 result passed the check that precedes its timing, or the ones that did not are named.

    Of a training step that check is its first loss and gradients against the control's, and the proof of its layers.
    """
    question = "Is it numerically sound?"
    worst = [w for w in numerics_by_arm(machine) if w.judged]
    fp8 = [w for w in worst if w.fp8 and w.sqnr]
    evidence = [
        _worst_of(suite, [w for w in fp8 if w.suite == suite])
        for suite in dict.fromkeys(w.suite for w in fp8)
    ]
    bad = [f"{suite} {arm}: {reason}" for suite, arm, reason in _numerics_failures(machine)]
    bad += [f"{w.suite} {w.arm}: {text.count(w.mismatches)} codes differ" for w in worst if w.mismatches]
    bad += [
        f"{w.suite} {w.arm}: SQNR of {SQNR[m]} below its bound" for w in fp8 for m in w.sqnr if w.below(m)
    ]
    bad += [
        f"{w.suite} {w.arm}: SQNR of {SQNR[m]} is no number"
        for w in fp8
        for m in w.sqnr
        if math.isnan(w.sqnr[m])
    ]
    trained = first_steps(machine)
    bad += [f"train {s.arm}: {s.fault}" for s in trained if s.fault]
    sound = [s for s in trained if not s.fault]
    evidence += _shortened(evidence_of(sound), 5) if sound else []
    if bad:
        sentence = f"{text.plural(len(bad), 'result')} outside of what the format allows."
        return Answer(question, "no", sentence, (*_shortened(bad, 6), *evidence))
    exact = sum(w.checked_codes for w in worst)
    if not fp8 and not exact and not trained:
        return Answer(question, "can't tell", "No FP8 result was checked in these runs.", _reasons(machine))
    sentences = []
    if fp8:
        low = min(fp8, key=lambda w: w.worst[1])
        sentences.append(
            f"Every FP8 result passed its check; the worst SQNR is {text.number(low.worst[1])} dB ({low.arm})."
        )
    if exact:
        sentences.append(f"Casts agree with the reference code for code in {text.plural(exact, 'check')}.")
    if trained:
        sentences.append(summary_of(trained))
    return Answer(question, "yes", " ".join(sentences), tuple(evidence))


def did_fp8_run(machine: Machine) -> Answer:
    """The GEMMs that a profiler saw in FP8 against those that the recipe should run in FP8.

    An arm without a count is taken as FP8 only where its own operands were float8 and went to the GEMM directly.
    """
    question = "Did FP8 really run?"
    tally: dict[str, Counter[str]] = {}
    short: list[str] = []
    frame = machine.frame
    fell_short = frame[(frame["cause"] == Cause.NOT_FP8) & frame["metric"].isin(TIMES)]
    short += [f"{r['suite']} {r['arm']}, case {r['case_id']}: {r['reason']}" for r in rows_of(fell_short)]
    for row in rows_of(fp8_rows(machine)):
        resolved = parse(row["resolved"])
        counted = resolved.get("fp8_gemms")
        # A suite that counts gives no time to an arm that falls short, so a time without an expectation met it.
        expected = resolved.get("fp8_gemms_expected", counted)
        count = tally.setdefault(row["suite"], Counter())
        if counted is None:
            count["direct" if "float8" in str(resolved.get("a_dtype")) else "unproven"] += 1
            continue
        count.update(arms=1, counted=counted, expected=expected)
        if counted < expected or not counted:  # 0 of 0 is none, not all
            short.append(
                f"{row['suite']} {row['arm']}, case {row['case_id']}: {counted} of {expected} GEMMs in FP8"
            )
    tally["divergence"], disproved, unproven = runs_in_fp8(machine)
    rows = frame[(frame["cause"] == Cause.UNPROVEN) & frame["metric"].isin(TIMES)]
    unproven += [f"{r['suite']} {r['arm']}, case {r['case_id']}: {r['reason']}" for r in rows_of(rows)]
    evidence = [line for suite, count in tally.items() for line in _proof(suite, count)]
    evidence += [f"{key}: {', '.join(values)}" for key, values in _what_ran(machine) if values]
    evidence += _reasons(machine)
    total = sum(tally.values(), Counter[str]())
    if short:
        sentence = f"{text.plural(len(short), 'measured arm')} ran fewer FP8 GEMMs than the recipe has."
        return Answer(question, "no", sentence, (*_shortened(short + disproved, 6), *evidence))
    if disproved:
        sentence = f"{text.plural(len(disproved), 'training run')} did not run in FP8 as asked."
        return Answer(question, "no", sentence, (*_shortened(disproved, 6), *evidence))
    if unproven:
        sentence = f"{text.plural(len(unproven), 'measured arm')} could not be proved to run in FP8."
        return Answer(question, "can't tell", sentence, (*_shortened(unproven, 6), *evidence))
    if not total["arms"] and not total["direct"]:
        sentence = (
            "FP8 arms ran, but nothing counted their GEMMs." if total["unproven"] else "No FP8 GEMM ran."
        )
        return Answer(question, "can't tell", sentence, tuple(evidence))
    sentences = []
    if total["arms"]:
        sentences.append(f"The profiler saw {total['counted']} of {total['expected']} expected FP8 GEMMs.")
    if total["direct"]:
        sentences.append(
            f"{text.plural(total['direct'], 'measured arm')} passed float8 operands to the GEMM directly."
        )
    return Answer(question, "yes", " ".join(sentences), tuple(evidence))


def gains(machine: Machine) -> Table:
    """FP8 against bf16 by suite, arm and regime: geometric mean, extremes with their intervals, verdict counts."""
    pairs = fp8_pairs(machine)
    columns = (
        *(Column(t) for t in ("suite", "arm", "against", "regime")),
        *(Column(t, numeric=True) for t in ("geometric mean", "slowest pair", "fastest pair")),
        Column("verdicts"),
    )
    keys = ["suite", "arm", "baseline", "regime"]
    rows = []
    for s in rows_of(summary(pairs)):
        own = pairs[(pairs[keys] == [s[k] for k in keys]).all(axis=1)]
        low, high = _extremes(own, machine.constant_axes(s["suite"]))
        mean = s["geometric_mean"]
        told = ", ".join(f"{s[v]} {v}" for v in VERDICTS if s[v])
        rows.append((*(Cell(s[k], s[k]) for k in keys), Cell(text.ratio(mean), mean), low, high, Cell(told)))
    rank = {suite: i for i, suite in enumerate(WHAT)}
    rows.sort(key=lambda row: (rank.get(row[0].text, len(rank)), row[3].text))
    return Table(f"gains-{machine.env_id}", columns, tuple(rows), sortable=False)


@once
def fp8_pairs(machine: Machine) -> pd.DataFrame:
    """Paired ratios of arms that ran FP8 against baselines that did not; those that are missing included."""
    ratios = machine.ratios
    arms = set(zip(ratios["suite"][ratios["fp8"]], ratios["arm"][ratios["fp8"]], strict=True))
    same_arm = [(s, a) in arms for s, a in zip(ratios["suite"], ratios["arm"], strict=True)]
    return ratios[
        ratios["fp8"]
        | (pd.Series(same_arm, index=ratios.index, dtype=bool) & (ratios["verdict"] == "missing"))
    ]


def _by_part(pairs: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(suite, how the arms were run, pairs), the part that decides the question first."""
    modes = (*MODES, "graph")
    mode = pd.Series(
        [m if (m := baseline_of(r).mode) in modes else "" for r in rows_of(pairs)], pairs.index, dtype=str
    )
    parts = []
    for (suite, how, regime), group in pairs.groupby([pairs["suite"], mode, pairs["regime"]]):
        if group["speedup"].notna().any():
            sentences = [
                *([f"{how} against {how}"] if how else []),
                *(["sustained load"] if regime == "sustained" else []),
            ]
            rank = (
                list(WHAT).index(suite) if suite in WHAT else len(WHAT),
                regime == "sustained",
                how != "compile",
            )
            parts.append((rank, str(suite), ", ".join(sentences), group))
    return [(suite, how, group) for _, suite, how, group in sorted(parts, key=lambda part: part[:3])]


def _speed_verdict(pairs: pd.DataFrame) -> Verdict:
    count = Counter(pairs["verdict"])
    decided = count["faster"] + count["slower"] + count["same"]
    if not decided or count["unclear"] > decided:
        return "can't tell"
    if not count["faster"]:
        return "no"
    return "yes" if not count["slower"] and 2 * count["faster"] >= decided else "partly"


def _speed_sentence(suite: str, how: str, pairs: pd.DataFrame) -> str:
    count = Counter(pairs["verdict"])
    told = ", ".join(f"{count[v]} {v}" for v in VERDICTS if count[v])
    what = ", ".join(filter(None, (WHAT.get(suite, f"suite {suite}"), how)))
    best = summary(pairs).sort_values("geometric_mean", ascending=False).iloc[0]
    sentence = f"{what[0].upper()}{what[1:]}: {text.ratio(_mean(pairs))} the speed of bf16 in the geometric mean ({told})."
    if pairs["arm"].nunique() > 1:
        sentence += f" Best arm: {best['arm']}, {text.ratio(best['geometric_mean'])}."
    return sentence


def _mean(pairs: pd.DataFrame) -> float:
    return float(summary(pairs.assign(arm="", baseline=""))["geometric_mean"].iloc[0])


def _spread(suite: str, how: str, pairs: pd.DataFrame, constant: Collection[str]) -> str:
    low, high = _extremes(pairs, constant)
    name = ", ".join(filter(None, (suite, how)))
    return f"{name}: {text.ratio(_mean(pairs))}; from {low.text} ({low.note}) to {high.text} ({high.note})"


def _extremes(pairs: pd.DataFrame, constant: Collection[str]) -> tuple[Cell, Cell]:
    known = rows_of(pairs[pairs["speedup"].notna()])
    if not known:
        return Cell(text.NONE, None, "muted"), Cell(text.NONE, None, "muted")
    known.sort(key=lambda pair: pair["speedup"])
    several = len({pair["case_id"] for pair in known}) > 1
    low, high = (_pair_cell(pair, constant if several else None) for pair in (known[0], known[-1]))
    return low, high


def _pair_cell(pair: Mapping[str, Any], constant: Collection[str] | None) -> Cell:
    """A speedup with its interval and, unless `constant` is None, its case."""
    note = text.interval(pair["low"], pair["high"])
    if constant is not None:
        note += f", {text.case_label(text.axes_of(pair['axes']), constant)}"
    return Cell(text.ratio(pair["speedup"]), float(pair["speedup"]), str(pair["verdict"]), note)


def _numerics_failures(machine: Machine) -> list[tuple[str, str, str]]:
    frame = machine.frame
    bad = frame[(frame["status"] == "failed") & frame["cause"].isin(REFUTED)]
    first = bad.drop_duplicates(["suite", "arm", "case_id"])
    constant = {suite: machine.constant_axes(suite) for suite in first["suite"]}
    return [
        (s, a, f"{text.case_label(text.axes_of(x), constant[s])}: {r.removeprefix('numerics: ')}")
        for s, a, x, r in zip(first["suite"], first["arm"], first["axes"], first["reason"], strict=True)
    ]


def _proof(suite: str, count: Counter[str]) -> Iterable[str]:
    if count["arms"]:
        yield f"{suite}: {count['counted']} of {count['expected']} FP8 GEMMs seen in {text.plural(count['arms'], 'measured arm')}"
    if count["direct"]:
        yield f"{suite}: {text.plural(count['direct'], 'measured arm')} on float8 operands"
    if count["unproven"]:
        yield f"{suite}: {text.plural(count['unproven'], 'measured arm')} without a count"


def _worst_of(suite: str, worst: Sequence[Worst]) -> str:
    low = min(worst, key=lambda w: w.worst[1])
    metric, value = low.worst
    bound = f", bound {text.number(low.bounds[metric], 4)} dB" if metric in low.bounds else ""
    checks = text.plural(sum(w.cases for w in worst), "check")
    return f"{suite}: worst SQNR {text.number(value)} dB ({low.arm}, {SQNR[metric]}{bound}) in {checks}"


def _what_ran(machine: Machine) -> Iterable[tuple[str, list[str]]]:
    """Backends and kernels that the FP8 arms report; of the kernels those whose name says FP8, if any does."""
    resolved = [parse(r) for r in fp8_rows(machine)["resolved"]]
    yield "backend", list(dict.fromkeys(str(r["backend"]) for r in resolved if r.get("backend")))
    kernels = list(dict.fromkeys(str(k) for r in resolved for k in r.get("kernels") or ()))
    named = [k for k in kernels if re.search("e4m3|e5m2|fp8|f8", k, re.IGNORECASE)]
    yield ("FP8 kernels" if named else "kernels"), _shortened([k[:72] for k in named or kernels], 3)


def _no_pairs(machine: Machine) -> str:
    if len(fp8_rows(machine)):
        return "FP8 ran, but no arm could be paired with its bf16 baseline."
    return "No FP8 arm was timed in these runs."


def _reasons(machine: Machine, most: int = 4) -> tuple[str, ...]:
    """Arms that did not run, by reason, the most frequent first."""
    frame = machine.frame
    bad = frame[(frame["status"] != "ok") & frame["metric"].isin(TIMES)]
    counts = Counter(zip(bad["status"], bad["suite"], bad["reason"], strict=True))
    lines = [
        f"{status}, {suite}, {text.plural(n, 'arm')}: {why}"
        for (status, suite, why), n in counts.most_common()
    ]
    return tuple(_shortened(lines, most))


def _shortened(lines: Sequence[str], most: int) -> list[str]:
    more = len(lines) - most
    return [*lines[:most], *([f"and {more} more in the tables below"] if more > 0 else [])]
