"""Verdicts: the three questions of someone who trains, each answered yes, partly, no or can't tell."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.report.answer import MOST_BRIEF, Answer, Verdict, reasons, shortened
from harness.report.numerics import fp8_rows
from harness.report.runs import once
from harness.report.soundness import is_sound
from harness.report.table import Cell, Column, Table, make_table, number
from harness.report.training_proof import runs_in_fp8
from harness.store import text
from harness.store.arm import baseline_of
from harness.store.cause import Cause
from harness.store.compare import MODES, TIMES, rows_of, summary
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from harness.report.runs import Machine

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


def what_of(suite: str) -> str:
    """What a suite times, in two words."""
    return WHAT.get(suite, f"suite {suite}").partition(" (")[0]


def answers(machine: Machine) -> tuple[Answer, Answer, Answer]:
    """The headline of one machine."""
    return is_faster(machine), is_sound(machine), did_fp8_run(machine)


def is_faster(machine: Machine) -> Answer:
    """Whole layers decide where they were measured, compiled ones first, since that is how models are trained.

    Each arm is judged by itself, against the baseline of its own mode: a pool of a fast arm and a slow one is neither.
    """
    question = "Is FP8 faster here?"
    if not machine.is_gpu:
        return Answer(
            question,
            "can't tell",
            "Undecided on this machine: CPU timings are no evidence about a GPU.",
            ("Run the same sweep on the GPU in question; the report then answers here.",),
            brief="CPU timings are no evidence about a GPU: run the same sweep there.",
        )
    pairs = fp8_pairs(machine)
    if not pairs["speedup"].notna().any():
        return Answer(question, "can't tell", _no_pairs(machine), reasons(machine))
    parts = _by_part(pairs)
    evidence = [line for part in parts for line in _spreads(*part, machine.constant_axes(part[0]))]
    missing = int((pairs["verdict"] == "missing").sum())
    if missing:
        evidence.append(f"{text.plural(missing, 'pair')} could not be computed; see Failed and skipped.")
    suite, how, first = parts[0]
    arms = _by_arm(first)
    slower = _slower_under_load(pairs[pairs["suite"] == suite], [arm for arm, _ in arms])
    judged = [_under_load(_speed_verdict(own), arm in slower) for arm, own in arms]
    sentence = _speed_sentence(suite, how, arms) + (
        f" Slower under sustained load: {', '.join(slower)}." if slower else ""
    )
    brief = _speed_brief(suite, how, judged, len(slower))
    return Answer(question, _together(judged), sentence, tuple(evidence), brief)


def deciding(machine: Machine) -> tuple[str, str, pd.DataFrame] | None:
    """The part that `is_faster` decides on: (suite, how its arms were run, pairs); None where there is no ratio."""
    return next(iter(_by_part(fp8_pairs(machine))), None)


def did_fp8_run(machine: Machine) -> Answer:
    """The GEMMs that a profiler saw in FP8 against those that the recipe should run in FP8.

    An arm without a count is taken as FP8 only where its own operands were float8 and went to the GEMM directly.
    """
    question = "Did FP8 really run?"
    tally: dict[str, Counter[str]] = {}
    arms: dict[str, dict[str, None]] = {}  # suite -> arms that were counted or ran on float8 operands
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
        direct = "float8" in str(resolved.get("a_dtype"))
        if counted is not None or direct:
            arms.setdefault(row["suite"], {})[row["arm"]] = None
        if counted is None:
            count["direct" if direct else "unproven"] += 1
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
    evidence += [f"{suite}, arms that ran in FP8: {', '.join(own)}" for suite, own in arms.items()]
    evidence += [f"{key}: {', '.join(values)}" for key, values in _what_ran(machine) if values]
    evidence += reasons(machine)
    total = sum(tally.values(), Counter[str]())
    if short:
        sentence = f"{text.plural(len(short), 'measured arm')} ran fewer FP8 GEMMs than the recipe has."
        return Answer(question, "no", sentence, (*shortened(short + disproved, 6), *evidence))
    if disproved:
        sentence = f"{text.plural(len(disproved), 'training run')} did not run in FP8 as asked."
        return Answer(question, "no", sentence, (*shortened(disproved, 6), *evidence))
    if unproven:
        sentence = f"{text.plural(len(unproven), 'measured arm')} could not be proved to run in FP8."
        return Answer(question, "can't tell", sentence, (*shortened(unproven, 6), *evidence))
    if not total["arms"] and not total["direct"]:
        sentence = (
            "FP8 arms ran, but nothing counted their GEMMs." if total["unproven"] else "No FP8 GEMM ran."
        )
        return Answer(question, "can't tell", sentence, tuple(evidence))
    sentences, briefs = [], []
    if total["arms"]:
        briefs.append(f"{total['counted']} of {total['expected']} expected FP8 GEMMs seen")
        sentences.append(f"The profiler saw {total['counted']} of {total['expected']} expected FP8 GEMMs.")
    if total["direct"]:
        sentences.append(
            f"{text.plural(total['direct'], 'measured arm')} passed float8 operands to the GEMM directly."
        )
        briefs.append(f"{text.plural(total['direct'], 'arm')} on float8 operands")
    uncounted = sum(tally[suite]["unproven"] for suite in WHAT if suite in tally)
    if uncounted:  # of the suites that answer for speed: a time that nobody saw run in FP8
        sentences.append(f"{text.plural(uncounted, 'measured arm')} had no count.")
        briefs.append(f"{uncounted} without a count")
    return Answer(
        question,
        "partly" if uncounted else "yes",
        " ".join(sentences),
        tuple(evidence),
        f"{'; '.join(briefs)}.",
    )


def gains(machine: Machine) -> Table:
    """FP8 against bf16 by suite, arm and regime: geometric mean, extremes with their intervals, verdict counts."""
    pairs = fp8_pairs(machine)
    keys = ["suite", "arm", "baseline", "regime"]
    records = rows_of(summary(pairs))
    for s in records:
        own = pairs[(pairs[keys] == [s[k] for k in keys]).all(axis=1)]
        s["slowest"], s["fastest"] = _extremes(own, machine.constant_axes(s["suite"]))
    rank = {suite: i for i, suite in enumerate(WHAT)}
    records.sort(key=lambda s: (rank.get(s["suite"], len(rank)), s["regime"]))
    columns = (
        *(Column("against" if key == "baseline" else key, key) for key in keys),
        number("geometric mean", lambda s: Cell(text.ratio(s["geometric_mean"]), s["geometric_mean"])),
        number("slowest pair", "slowest"),
        number("fastest pair", "fastest"),
        Column("verdicts", lambda s: ", ".join(f"{s[v]} {v}" for v in VERDICTS if s[v])),
    )
    return make_table(f"gains-{machine.env_id}", columns, records, sortable=False)


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


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """The answer over arms: yes where it is yes for each of them, partly where it is for some."""
    if all(v == "yes" for v in verdicts):
        return "yes"
    if any(v in ("yes", "partly") for v in verdicts):
        return "partly"
    return "no" if all(v == "no" for v in verdicts) else "can't tell"


def _by_arm(pairs: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Each arm with its pairs, the fastest first; arms without a ratio are left out."""
    means = summary(pairs).dropna(subset="geometric_mean").sort_values("geometric_mean", ascending=False)
    return [(str(arm), pairs[pairs["arm"] == arm]) for arm in dict.fromkeys(means["arm"])]


def _speed_sentence(suite: str, how: str, arms: Sequence[tuple[str, pd.DataFrame]]) -> str:
    what = ", ".join(filter(None, (WHAT.get(suite, f"suite {suite}"), how)))
    words = [_arm_words(arm, own) for arm, own in arms]
    of = counted(rows_of(arms[0][1]))
    mean = f" Each a geometric mean over {text.plural(*of)}." if of[0] > 1 else ""
    return f"{what[0].upper()}{what[1:]}, speed over bf16: {'; '.join(words)}.{mean}"


def _slower_under_load(pairs: pd.DataFrame, arms: Collection[str]) -> list[str]:
    """Arms that are slower than bf16 under sustained load in a case in which they are not slower alone."""
    alone = pairs[(pairs["regime"] != "sustained") & pairs["verdict"].isin(["faster", "same", "unclear"])]
    loaded = pairs[(pairs["regime"] == "sustained") & (pairs["verdict"] == "slower")]
    both = set(zip(alone["arm"], alone["case_id"], strict=True)) & set(
        zip(loaded["arm"], loaded["case_id"], strict=True)
    )
    return [arm for arm in arms if any(arm == other for other, _ in both)]


def _under_load(verdict: Verdict, slower: bool) -> Verdict:
    """A gain that is lost under sustained load holds in part."""
    return "partly" if slower and verdict == "yes" else verdict


def _speed_brief(suite: str, how: str, judged: Sequence[Verdict], slower: int) -> str:
    """How many of the deciding arms are faster, and how many lose that under load; shorter where it does not fit."""
    count = Counter(judged)
    words: dict[Verdict, str] = {
        "yes": "faster",
        "partly": "partly faster",
        "no": "not faster",
        "can't tell": "unclear",
    }
    what = what_of(suite)
    mode = {"compile": "compiled "}.get(how.partition(" ")[0], "")
    arms = f"{what[0].upper()}{what[1:]}, {text.plural(len(judged), f'{mode}FP8 arm')}"
    load = f"; {slower} slower under load" if slower else ""
    whole = f"{arms}: {', '.join(f'{count[v]} {word}' for v, word in words.items() if count[v])}{load}."
    return whole if len(whole) <= MOST_BRIEF else f"{arms}: {count['yes']} faster{load}."


def _arm_words(arm: str, pairs: pd.DataFrame) -> str:
    """One arm's ratio, its interval where it is one pair, and how many pairs are faster, same, slower."""
    known = rows_of(pairs[pairs["speedup"].notna()])
    interval = f" ({text.interval(known[0]['low'], known[0]['high'])})" if len(known) == 1 else ""
    count = Counter(pairs["verdict"])
    return f"{arm} {text.ratio(_mean(pairs))}{interval}, " + ", ".join(
        f"{count[v]} {v}" for v in VERDICTS if count[v]
    )


def counted(pairs: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """What a range or a mean over pairs is over: models where each case has another one, else cases."""
    cases = {p["case_id"] for p in pairs}
    models = {text.axes_of(p["axes"]).get("model") for p in pairs} - {None}
    only_models = all(p["suite"] == "train" for p in pairs) and len(models) == len(cases)
    return (len(models), "model") if only_models else (len(cases), "case")


def _mean(pairs: pd.DataFrame) -> float:
    return float(summary(pairs.assign(arm="", baseline=""))["geometric_mean"].iloc[0])


def _spreads(suite: str, how: str, pairs: pd.DataFrame, constant: Collection[str]) -> Iterable[str]:
    """A line an arm: geometric mean, slowest and fastest pair with their intervals."""
    for arm, own in _by_arm(pairs):
        low, high = (
            f"{cell.text} ({cell.interval})" + (f" at {cell.note}" if cell.note else "")
            for cell in _extremes(own, constant)
        )
        name = ", ".join(filter(None, (suite, how, arm)))
        yield f"{name}: {text.ratio(_mean(own))}; from {low} to {high}"


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
    note = "" if constant is None else text.case_label(text.axes_of(pair["axes"]), constant)
    interval = text.interval(pair["low"], pair["high"])
    return Cell(text.ratio(pair["speedup"]), float(pair["speedup"]), str(pair["verdict"]), note, interval)


def _proof(suite: str, count: Counter[str]) -> Iterable[str]:
    if count["arms"]:
        yield f"{suite}: {count['counted']} of {count['expected']} FP8 GEMMs seen in {text.plural(count['arms'], 'measured arm')}"
    if count["direct"]:
        yield f"{suite}: {text.plural(count['direct'], 'measured arm')} on float8 operands"
    if count["unproven"]:
        yield f"{suite}: {text.plural(count['unproven'], 'measured arm')} without a count"


def _what_ran(machine: Machine) -> Iterable[tuple[str, list[str]]]:
    """Backends and kernels that the FP8 arms report; of the kernels those whose name says FP8, if any does."""
    resolved = [parse(r) for r in fp8_rows(machine)["resolved"]]
    yield "backend", list(dict.fromkeys(str(r["backend"]) for r in resolved if r.get("backend")))
    kernels = list(dict.fromkeys(str(k) for r in resolved for k in r.get("kernels") or ()))
    named = [k for k in kernels if re.search("e4m3|e5m2|fp8|f8", k, re.IGNORECASE)]
    yield ("FP8 kernels" if named else "kernels"), shortened([k[:72] for k in named or kernels], 3)


def _no_pairs(machine: Machine) -> str:
    if len(fp8_rows(machine)):
        return "FP8 ran, but no arm could be paired with its bf16 baseline."
    return "No FP8 arm was timed in these runs."
