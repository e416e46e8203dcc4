"""Verdicts: the three questions of someone who trains, each answered yes, partly, no or can't tell."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from harness.compare import AGAIN, FP8_DTYPES, MODES, TIMES, summary
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
VERDICTS = ("faster", "same", "slower", "unclear", "missing")
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
    parts = _by_part(pairs)
    evidence = [_spread(*part, machine.constant_axes(part[0])) for part in parts]
    missing = int((pairs["verdict"] == "missing").sum())
    if missing:
        evidence.append(f"{text.plural(missing, 'pair')} could not be formed; see Failed and skipped.")
    return Answer(question, _speed_verdict(parts[0][2]), _speed_sentence(*parts[0]), tuple(evidence))


def is_sound(machine: Machine) -> Answer:
    """Every figure that was checked is inside its bound, or the ones that are not are named."""
    question = "Is it numerically sound?"
    bad = _numerics_failures(machine)
    worst = numerics_by_arm(machine)
    fp8 = [w for w in worst if w["fp8"] and not math.isnan(w["sqnr"])]
    evidence = [_worst_of(suite, [w for w in fp8 if w["suite"] == suite]) for suite in dict.fromkeys(w["suite"] for w in fp8)]
    wrong = [w for w in worst if w["mismatches"] > 0]
    below = [w for w in fp8 if w["sqnr"] < w["bound"]]
    if bad or wrong or below:
        named = [f"{suite} {arm}: {reason}" for suite, arm, reason in bad]
        named += [f"{w['suite']} {w['arm']}: {text.number(w['mismatches'])} codes differ" for w in wrong]
        named += [f"{w['suite']} {w['arm']}: SQNR below its bound" for w in below]
        sentence = f"{text.plural(len(named), 'result')} outside of what the format allows; each is named below."
        return Answer(question, "no", sentence, (*_shortened(named, 6), *evidence))
    exact = sum(w["checked_codes"] for w in worst)
    if not fp8 and not exact:
        return Answer(question, "can't tell", "No FP8 result was checked in these runs.", _reasons(machine))
    said = []
    if fp8:
        low = min(fp8, key=lambda w: w["sqnr"])
        said.append(f"Every FP8 result passed its check; the worst SQNR is {text.number(low['sqnr'])} dB ({low['arm']}).")
    if exact:
        said.append(f"Casts agree with the reference code for code in {text.plural(exact, 'check')}.")
    return Answer(question, "yes", " ".join(said), tuple(evidence))


def did_fp8_run(machine: Machine) -> Answer:
    """The GEMMs that a profiler saw in FP8 against those that the recipe should run in FP8.

    An arm without a count is taken as FP8 only where its own operands were float8 and went to the GEMM directly.
    """
    question = "Did FP8 really run?"
    tally: dict[str, Counter[str]] = {}
    short: list[str] = []
    for row in _fp8_rows(machine).to_dict("records"):
        resolved = json.loads(row["resolved"] or "{}")
        counted, expected = resolved.get("fp8_gemms"), resolved.get("fp8_gemms_expected")
        count = tally.setdefault(row["suite"], Counter())
        if counted is None or expected is None:
            count["direct" if "float8" in str(resolved.get("a_dtype")) else "unproven"] += 1
            continue
        count.update(arms=1, counted=counted, expected=expected)
        if counted < expected:
            short.append(f"{row['suite']} {row['arm']}, case {row['case_id']}: {counted} of {expected} GEMMs in FP8")
    evidence = [line for suite, count in tally.items() for line in _proof(suite, count)]
    evidence += [f"{key}: {', '.join(values)}" for key, values in _what_ran(machine) if values]
    evidence += _reasons(machine)
    total = sum(tally.values(), Counter[str]())
    if short:
        sentence = f"{text.plural(len(short), 'measured arm')} ran fewer FP8 GEMMs than the recipe has."
        return Answer(question, "no", sentence, (*_shortened(short, 6), *evidence))
    if not total["arms"] and not total["direct"]:
        sentence = "FP8 arms ran, but nothing counted their GEMMs." if total["unproven"] else "No FP8 GEMM ran."
        return Answer(question, "can't tell", sentence, tuple(evidence))
    said = []
    if total["arms"]:
        said.append(f"The profiler saw {total['counted']} of {total['expected']} expected FP8 GEMMs.")
    if total["direct"]:
        said.append(f"{text.plural(total['direct'], 'measured arm')} passed float8 operands to the GEMM directly.")
    return Answer(question, "yes", " ".join(said), tuple(evidence))


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
    for s in summary(pairs).to_dict("records"):
        own = pairs[(pairs[keys] == [s[k] for k in keys]).all(axis=1)]
        low, high = _extremes(own, machine.constant_axes(s["suite"]))
        mean = s["geometric_mean"]
        told = ", ".join(f"{s[v]} {v}" for v in VERDICTS if s[v])
        rows.append((*(Cell(s[k], s[k]) for k in keys), Cell(text.ratio(mean), mean), low, high, Cell(told)))
    rank = {suite: i for i, suite in enumerate(WHAT)}
    rows.sort(key=lambda row: (rank.get(row[0].text, len(rank)), row[3].text))
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
    kept = [i for i in range(len(columns)) if any(row[i].text != text.NONE for row in rows)]
    return Table(
        f"numerics-{machine.env_id}",
        tuple(columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in rows),
        sortable=False,
    )


def _fp8_rows(machine: Machine) -> pd.DataFrame:
    frame = machine.frame
    timed = frame[frame["metric"].isin(TIMES) & (frame["status"] == "ok") & ~frame["arm"].str.endswith(AGAIN)]
    fp8 = timed["flops"].map(lambda t: any(str(k).startswith(FP8_DTYPES) for k in json.loads(t or "{}")))
    return timed[fp8.astype(bool)].drop_duplicates(["run_id", "case_id", "arm"])


def _by_part(pairs: pd.DataFrame) -> list[tuple[str, str, pd.DataFrame]]:
    """(suite, how the arms were run, pairs), the part that decides the question first."""
    mode = pairs["baseline"].map(lambda b: next((m for m in MODES if str(b).endswith(f"_{m}")), ""))
    parts = []
    for (suite, how, regime), group in pairs.groupby([pairs["suite"], mode, pairs["regime"]]):
        if group["speedup"].notna().any():
            said = [*([f"{how} against {how}"] if how else []), *(["sustained load"] if regime == "sustained" else [])]
            rank = (list(WHAT).index(suite) if suite in WHAT else len(WHAT), regime == "sustained", how != "compile")
            parts.append((rank, str(suite), ", ".join(said), group))
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
    known = pairs[pairs["speedup"].notna()]
    if not len(known):
        return Cell(text.NONE, None, "muted"), Cell(text.NONE, None, "muted")
    first, last = (known.loc[i] for i in (known["speedup"].idxmin(), known["speedup"].idxmax()))
    return _pair_cell(first, constant), _pair_cell(last, constant)


def _pair_cell(pair: pd.Series[Any], constant: Collection[str]) -> Cell:
    note = f"{text.interval(pair['low'], pair['high'])}, {text.case_label(text.axes_of(pair['axes']), constant)}"
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


def _proof(suite: str, count: Counter[str]) -> Iterable[str]:
    if count["arms"]:
        yield f"{suite}: {count['counted']} of {count['expected']} FP8 GEMMs seen in {text.plural(count['arms'], 'measured arm')}"
    if count["direct"]:
        yield f"{suite}: {text.plural(count['direct'], 'measured arm')} on float8 operands"
    if count["unproven"]:
        yield f"{suite}: {text.plural(count['unproven'], 'measured arm')} without a count"


def _worst_of(suite: str, worst: Sequence[dict[str, Any]]) -> str:
    low = min(worst, key=lambda w: w["sqnr"])
    checks = sum(w["cases"] for w in worst)
    bound = "" if math.isnan(low["bound"]) else f", bound {text.number(low['bound'])} dB"
    return f"{suite}: worst SQNR {text.number(low['sqnr'])} dB ({low['arm']}{bound}) of {text.plural(checks, 'result')}"


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
    counts = Counter(zip(bad["status"], bad["suite"], bad["reason"], strict=True))
    lines = [f"{status}, {suite}, {text.plural(n, 'arm')}: {why}" for (status, suite, why), n in counts.most_common()]
    return tuple(_shortened(lines, most))


def _shortened(lines: Sequence[str], most: int) -> list[str]:
    more = len(lines) - most
    return [*lines[:most], *([f"and {more} more; see Failed and skipped."] if more > 0 else [])]
