"""Verdicts: the three questions of someone who trains, each answered yes, partly, no or can't tell."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from harness.compare import AGAIN, FP8_DTYPES, TIMES, summary
from harness.report import text
from harness.report.runs import Machine
from harness.report.tables import Cell, Column, Table

Verdict = Literal["yes", "partly", "no", "can't tell"]

CPU_NOTICE = (
    "Measured on a CPU. These runs validate numerics, bytes moved and the harness itself. "
    "CPU timings say nothing about a GPU: read no speed claim into them."
)
WHAT = {
    "linear": "whole layers (forward and backward, casts included)",
    "gemm": "single GEMMs (operands already cast)",
}
NUMERICS = ("sqnr_db", "sqnr_row_min_db", "rel_err_max", "underflow_frac", "saturated_frac", "mismatches")


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
            "This machine cannot tell: CPU timings say nothing about a GPU.",
            ("Run the same sweep on the GPU in question; the report then answers here.",),
        )
    pairs = fp8_pairs(machine)
    if not pairs["speedup"].notna().any():
        return Answer(question, "can't tell", _no_pairs(machine), _reasons(machine))
    parts = [(_part(suite, mode), group) for (suite, mode), group in _by_part(pairs)]
    _, deciding = parts[0]
    evidence = [f"{name}: {_spread(group)}" for name, group in parts]
    missing = int((pairs["verdict"] == "missing").sum())
    if missing:
        evidence.append(f"{text.plural(missing, 'pair')} could not be formed; see Failed and skipped.")
    return Answer(question, _speed_verdict(deciding), _speed_sentence(parts[0][0], deciding), tuple(evidence))


def is_sound(machine: Machine) -> Answer:
    """Every figure that was checked is inside its bound, or the ones that are not are named."""
    question = "Is it numerically sound?"
    bad = _numerics_failures(machine)
    worst = numerics_by_arm(machine)
    fp8 = [w for w in worst if w["fp8"] and not math.isnan(w["sqnr"])]
    evidence = [
        f"{w['suite']} {w['arm']}: worst SQNR {text.number(w['sqnr'])} dB over {text.plural(w['cases'], 'case')}"
        + (f", bound {text.number(w['bound'])} dB" if not math.isnan(w["bound"]) else "")
        for w in fp8
    ]
    wrong = [w for w in worst if w["mismatches"] > 0]
    below = [w for w in fp8 if w["sqnr"] < w["bound"]]
    if bad or wrong or below:
        named = [f"{suite} {arm}: {reason}" for suite, arm, reason in bad]
        named += [f"{w['suite']} {w['arm']}: {text.number(w['mismatches'])} codes differ" for w in wrong]
        named += [f"{w['suite']} {w['arm']}: SQNR below its bound" for w in below]
        return Answer(question, "no", f"{text.plural(len(named), 'finding')} outside the bound.", (*named, *evidence))
    exact = sum(w["checked_codes"] for w in worst)
    if not fp8 and not exact:
        return Answer(question, "can't tell", "No FP8 result was checked in these runs.", _reasons(machine))
    said = []
    if fp8:
        low = min(fp8, key=lambda w: w["sqnr"])
        said.append(f"Every FP8 result is inside its bound; the worst SQNR is {text.number(low['sqnr'])} dB ({low['arm']}).")
    if exact:
        said.append(f"Casts agree with the reference code for code in {text.plural(exact, 'check')}.")
    return Answer(question, "yes", " ".join(said), tuple(evidence))


def did_fp8_run(machine: Machine) -> Answer:
    """The GEMMs that a profiler saw in FP8 against those that the recipe should run in FP8."""
    question = "Did FP8 really run?"
    seen: dict[tuple[str, str], Counter[str]] = {}
    short: list[str] = []
    proven = unproven = 0
    for row in _fp8_rows(machine).to_dict("records"):
        resolved = json.loads(row["resolved"] or "{}")
        counted, expected = resolved.get("fp8_gemms"), resolved.get("fp8_gemms_expected")
        if counted is None or expected is None:
            unproven += 1
            continue
        tally = seen.setdefault((row["suite"], row["arm"]), Counter())
        tally["cases"] += 1
        tally["counted"] += counted
        tally["expected"] += expected
        if counted < expected:
            short.append(f"{row['suite']} {row['arm']}, case {row['case_id']}: {counted} of {expected} GEMMs in FP8")
        proven += counted >= expected
    evidence = [
        f"{suite} {arm}: {t['counted']} of {t['expected']} GEMMs in FP8 over {text.plural(t['cases'], 'case')}"
        for (suite, arm), t in seen.items()
    ]
    evidence += [f"{key}: {', '.join(values)}" for key, values in _what_ran(machine) if values]
    if short:
        return Answer(question, "no", f"{text.plural(len(short), 'arm')} ran fewer FP8 GEMMs than its recipe has.", (*short, *evidence))
    if not proven:
        what = f"{text.plural(unproven, 'FP8 arm')} ran without a count of its GEMMs." if unproven else "No FP8 GEMM ran."
        return Answer(question, "can't tell", what, (*evidence, *_reasons(machine)))
    sentence = f"In {text.plural(proven, 'measured arm')} every GEMM that should be FP8 was seen in FP8 by the profiler."
    skipped = _reasons(machine)
    if unproven:
        sentence += f" {text.plural(unproven, 'arm')} carried no count."
    return Answer(question, "yes", sentence, (*evidence, *skipped))


def gains(machine: Machine) -> Table:
    """FP8 against bf16 by suite, arm and regime: geometric mean, extremes with their intervals, verdict counts."""
    pairs = fp8_pairs(machine)
    columns = (
        *(Column(t) for t in ("suite", "arm", "against", "regime")),
        *(Column(t, numeric=True) for t in ("geometric mean", "slowest pair", "fastest pair")),
        *(Column(t, numeric=True) for t in ("faster", "same", "slower", "unclear", "missing")),
    )
    rows = []
    for s in summary(pairs).to_dict("records"):
        own = pairs[(pairs[["suite", "arm", "baseline", "regime"]] == [s["suite"], s["arm"], s["baseline"], s["regime"]]).all(axis=1)]
        low, high = _extremes(own)
        mean = s["geometric_mean"]
        rows.append(
            (
                *(Cell(s[k], s[k]) for k in ("suite", "arm", "baseline", "regime")),
                Cell(text.ratio(mean), mean),
                low,
                high,
                *(Cell(str(s[k]), s[k], "" if s[k] else "muted") for k in ("faster", "same", "slower", "unclear", "missing")),
            )
        )
    return Table(f"gains-{machine.env_id}", columns, tuple(rows), sortable=False)


def fp8_pairs(machine: Machine) -> pd.DataFrame:
    """Paired ratios of arms that ran FP8 against baselines that did not; those that are missing included."""
    ratios = machine.ratios
    arms = set(zip(ratios["suite"][ratios["fp8"]], ratios["arm"][ratios["fp8"]], strict=True))
    same_arm = [(s, a) in arms for s, a in zip(ratios["suite"], ratios["arm"], strict=True)]
    return ratios[ratios["fp8"] | (pd.Series(same_arm, index=ratios.index, dtype=bool) & (ratios["verdict"] == "missing"))]


def numerics_by_arm(machine: Machine) -> list[dict[str, Any]]:
    """Worst figures of each arm of each suite, with the bound that its suite stored for them."""
    frame = machine.frame
    checked = frame[frame["metric"].isin(NUMERICS) & (frame["status"] == "ok")]
    fp8 = {(s, a) for s, a in zip(_fp8_rows(machine)["suite"], _fp8_rows(machine)["arm"], strict=True)}
    out = []
    for (suite, arm), group in checked.groupby(["suite", "arm"], sort=False):
        values = {metric: g["value"] for metric, g in group.groupby("metric")}
        bounds = [json.loads(r or "{}").get("sqnr_bound_db") for r in group["resolved"]]
        out.append(
            {
                "suite": suite,
                "arm": arm,
                "fp8": (suite, arm) in fp8,
                "cases": group["case_id"].nunique(),
                "sqnr": float(values["sqnr_db"].min()) if "sqnr_db" in values else math.nan,
                "row_min": float(values["sqnr_row_min_db"].min()) if "sqnr_row_min_db" in values else math.nan,
                "underflow": float(values["underflow_frac"].max()) if "underflow_frac" in values else math.nan,
                "bound": max((float(b) for b in bounds if b is not None), default=math.nan),
                "mismatches": float(values["mismatches"].max()) if "mismatches" in values else 0.0,
                "checked_codes": len(values["mismatches"]) if "mismatches" in values else 0,
            }
        )
    return out


def numerics_table(machine: Machine) -> Table:
    """Worst figures by arm against the bound."""
    columns = (
        *(Column(t) for t in ("suite", "arm")),
        *(Column(t, numeric=True) for t in ("cases", "worst SQNR (dB)", "bound (dB)", "worst row (dB)", "underflow", "codes that differ")),
    )
    rows = tuple(
        (
            Cell(w["suite"], w["suite"]),
            Cell(w["arm"], w["arm"]),
            Cell(str(w["cases"]), w["cases"]),
            Cell(text.number(w["sqnr"]), w["sqnr"], "bad" if w["sqnr"] < w["bound"] else ""),
            Cell(text.number(w["bound"]), w["bound"]),
            Cell(text.number(w["row_min"]), w["row_min"]),
            Cell(text.percent(w["underflow"]), w["underflow"]),
            Cell(text.number(w["mismatches"]) if w["checked_codes"] else text.NONE, w["mismatches"]),
        )
        for w in numerics_by_arm(machine)
    )
    return Table(f"numerics-{machine.env_id}", columns, rows, sortable=False)


def _fp8_rows(machine: Machine) -> pd.DataFrame:
    frame = machine.frame
    timed = frame[frame["metric"].isin(TIMES) & (frame["status"] == "ok") & ~frame["arm"].str.endswith(AGAIN)]
    fp8 = timed["flops"].map(lambda t: any(str(k).startswith(FP8_DTYPES) for k in json.loads(t or "{}")))
    return timed[fp8.astype(bool)].drop_duplicates(["run_id", "case_id", "arm"])


def _by_part(pairs: pd.DataFrame) -> list[tuple[tuple[str, str], pd.DataFrame]]:
    """Pairs by suite and mode, the part that decides the question first; isolated ones where there are any."""
    regime = "isolated" if (pairs["regime"] == "isolated").any() else pairs["regime"].iloc[0]
    own = pairs[pairs["regime"] == regime]
    mode = own["baseline"].map(lambda b: next((m for m in ("compile", "eager") if str(b).endswith(f"_{m}")), ""))
    groups = [((str(s), str(m)), g) for (s, m), g in own.groupby([own["suite"], mode], sort=False)]
    ranked = sorted(groups, key=lambda item: (list(WHAT).index(item[0][0]) if item[0][0] in WHAT else 9, item[0][1] != "compile"))
    return [item for item in ranked if item[1]["speedup"].notna().any()]


def _part(suite: str, mode: str) -> str:
    return f"{suite}, {mode} against {mode}" if mode else suite


def _speed_verdict(pairs: pd.DataFrame) -> Verdict:
    count = Counter(pairs["verdict"])
    decided = count["faster"] + count["slower"] + count["same"]
    if not decided or count["unclear"] > decided:
        return "can't tell"
    if not count["faster"]:
        return "no"
    return "yes" if not count["slower"] and 2 * count["faster"] >= decided else "partly"


def _speed_sentence(part: str, pairs: pd.DataFrame) -> str:
    suite = part.partition(",")[0]
    mean = summary(pairs.assign(arm="", baseline=""))["geometric_mean"].iloc[0]
    count = Counter(pairs["verdict"])
    told = ", ".join(f"{count[v]} {v}" for v in ("faster", "same", "slower", "unclear") if count[v])
    what = f"{WHAT[suite]}{part.removeprefix(suite)}" if suite in WHAT else part
    word = "as fast as bf16" if abs(mean - 1) < 0.005 else "the speed of bf16"
    return f"{what[0].upper()}{what[1:]}: {text.ratio(mean)} {word} in the geometric mean of {text.plural(int(pairs['speedup'].notna().sum()), 'pair')} ({told})."


def _spread(pairs: pd.DataFrame) -> str:
    low, high = _extremes(pairs)
    mean = summary(pairs.assign(arm="", baseline=""))["geometric_mean"].iloc[0]
    return f"geometric mean {text.ratio(mean)}, from {low.text} ({low.note}) to {high.text} ({high.note})"


def _extremes(pairs: pd.DataFrame) -> tuple[Cell, Cell]:
    known = pairs[pairs["speedup"].notna()]
    if not len(known):
        return Cell(text.NONE, None, "muted"), Cell(text.NONE, None, "muted")
    return _pair_cell(known.loc[known["speedup"].idxmin()]), _pair_cell(known.loc[known["speedup"].idxmax()])


def _pair_cell(pair: pd.Series[Any]) -> Cell:
    note = f"{text.interval(pair['low'], pair['high'])}, {text.case_label(text.axes_of(pair['axes']))}"
    return Cell(text.ratio(pair["speedup"]), float(pair["speedup"]), str(pair["verdict"]), note)


def _numerics_failures(machine: Machine) -> list[tuple[str, str, str]]:
    frame = machine.frame
    failed = frame[frame["status"] == "failed"]
    bad = failed[failed["reason"].str.startswith("numerics:") | failed["metric"].isin(NUMERICS)]
    first = bad.drop_duplicates(["suite", "arm", "case_id"])
    return [
        (s, a, f"{text.case_label(text.axes_of(x))}: {r.removeprefix('numerics: ')}")
        for s, a, x, r in zip(first["suite"], first["arm"], first["axes"], first["reason"], strict=True)
    ]


def _what_ran(machine: Machine) -> Iterable[tuple[str, list[str]]]:
    resolved = [json.loads(r or "{}") for r in _fp8_rows(machine)["resolved"]]
    for key, name in (("backend", "backend"), ("kernels", "kernels")):
        values: list[str] = []
        for r in resolved:
            value = r.get(key, [])
            values += [str(v) for v in value] if isinstance(value, list) else [str(value)]
        yield name, list(dict.fromkeys(values))


def _no_pairs(machine: Machine) -> str:
    if len(_fp8_rows(machine)):
        return "FP8 ran, but no arm could be paired with its bf16 baseline."
    return "No FP8 arm was timed in these runs."


def _reasons(machine: Machine, most: int = 4) -> tuple[str, ...]:
    """Arms that did not run, by reason, the most frequent first."""
    frame = machine.frame
    bad = frame[(frame["status"] != "ok") & frame["metric"].isin(TIMES)]
    counts = Counter(zip(bad["status"], bad["suite"], bad["arm"], bad["reason"], strict=True))
    lines = [f"{status}: {suite} {arm}, {text.plural(n, 'case')}: {why}" for (status, suite, arm, why), n in counts.most_common()]
    return tuple(_shortened(lines, most))


def _shortened(lines: Sequence[str], most: int) -> list[str]:
    more = len(lines) - most
    return [*lines[:most], *([f"and {more} more; see Failed and skipped."] if more > 0 else [])]
