"""JSON of results: no key leaves, each keeps its meaning and unit. Oracle: values written down here, all keys in data/result_keys.json.

A key that is added is added there too, or the next change could rename it unseen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.advise.command import answer, parse
from harness.advise.views import AdviceView
from harness.cli.doctor import ProbeResult, Tried
from harness.cli.runs import ListedRun, RunList
from harness.judge.diagnosis import Diagnosis, Finding
from harness.judge.diff import KernelTime, Resolved, RunChanges, Timed
from harness.judge.fleet import Fleet, Score
from harness.judge.verdict import ArmVerdict, StoredVerdicts, Verdict
from harness.judge.verdict.rule import CurveVerdict
from harness.judge.verdict.rule import verdict as of_curves
from harness.judge.verdict.stored_noise import Noise, SeedsNeeded
from harness.report.first_screen import FirstScreen
from harness.report.standings import Standing
from harness.report.verdicts import Answer
from harness.store.case import Arm
from harness.store.printer import as_json
from harness.training.ab.result import AGAIN, BASE, FP8, TrialResult, TrialRound


def trial() -> TrialResult:
    """Steps of 100 and 50 ms with 1,000 tokens and 2 GiB."""
    rounds = [
        TrialRound(i, {BASE: (100.0,), AGAIN: (100.0 + 0.01 * i,), FP8: (50.0,)}, peak_bytes={BASE: (2**31,)})
        for i in range(6)
    ]
    return TrialResult("rowwise", "cuda", tuple(rounds), proved=True, proof="FP8 verified", tokens=1000.0)


def changes() -> RunChanges:
    timed = Timed("train", "c", "{}", "a", "", "time_ms", 1.0, 0.5, 0.5, 0.4, 0.6, "faster", "", 8, 1.02)
    resolved, part = (
        Resolved("train", "a", "gemm", "torch", "triton", 2),
        KernelTime("c", "a", "gemm", 3.0, 2.0),
    )
    return RunChanges({"torch": (1, 2)}, (resolved,), (), (), (), (timed,), (part,), ())


def fleet() -> Fleet:
    """One card of two takes a tenth longer."""
    slow = Score("2 cards: H200", "a", "gemm", "isolated", "slow", "limit 6 %", 0.1, 0.02)
    return Fleet([slow, slow._replace(card="b", kind="", off=0.0)], (), ())


def doctor() -> Tried:
    return Tried("cpu", [ProbeResult("gemm", "torch", "28 dB")])


def stored() -> StoredVerdicts:
    verdict = Verdict("FAIL", (), ("n",), "limits")
    return StoredVerdicts([ArmVerdict("r", {"steps": 3}, "rowwise", Arm("rowwise"), "base", verdict, "PASS")])


def advice() -> AdviceView:
    return AdviceView(answer(parse(["model=llama3_1b", "gpu=h200", "checkpointing=full"])))


def curves() -> CurveVerdict:
    """One run against itself, of which nothing can be said."""
    curve = pd.DataFrame({"step": range(8), "val_loss": range(10, 2, -1)})
    return of_curves([curve], [curve])


def seeds_needed() -> SeedsNeeded:
    """A spread of a tenth of the margin, whose fewest seeds are the least that are judged."""
    return SeedsNeeded([({"steps": 3}, "rowwise", Noise("r", 5, 0.00025, None, ("steps=4",)))], 6, 3, 90.0)


def first_screen() -> FirstScreen:
    answers = [Answer("speed", "yes", "1 faster"), Answer("sound", "no", "1 result is wrong")]
    arm = Standing(Arm("rowwise", "eager"), "train", [], 1.3)
    return FirstScreen(answers, arm=arm, unfinished=["r"], doubted={"why": ["rowwise_eager"]}, failed=2)


def diagnosis() -> Diagnosis:
    return Diagnosis([Finding("symptom", ("1 of 3",), "cause", "change")])


def runs() -> RunList:
    return RunList(
        [ListedRun("r", "2026-01-01 00:00", "finished", "mine", "toy", "yes", "r.html")], 2, Path("i")
    )


# What is made -> dotted key -> its value
CONTRACT: dict[Any, dict[str, Any]] = {
    trial: {
        "decision": "on", "recipe": "rowwise", "device": "cuda", "speedup": 2.0, "low": 2.0, "high": 2.0, "rounds": 6,
        "doubt": "", "proved": True, "proof": "FP8 verified", "notes": [], "ranks": 1, "loss_gap": None,
        "arms.base.step_ms": 100.0, "arms.fp8.step_ms": 50.0, "arms.fp8.tokens_per_s": 20000.0, "arms.base.peak_gib": 2.0,
        "arms.fp8.joules": None, "arms.fp8.mfu_mixed": None, "arms.fp8.mfu_bf16_peak": None,
    },
    changes: {
        "environment.torch": [1, 2], "only_before": [], "only_after": [], "broken": [], "figures": [], "cpu": False,
        "times.0.before": 1.0, "times.0.after": 0.5, "times.0.ratio": 0.5, "times.0.verdict": "faster", "times.0.rounds": 8,
        "caution": "",
    },
    fleet: {"code": "out", "unread": [], "missing": [], "outliers.0.card": "a", "outliers.0.off": 0.1, "outliers.0.kind": "slow",
            "scores.1.card": "b", "scores.1.off": 0.0, "scores.1.spread": 0.02, "scores.1.kind": "", "scores.1.alike": "2 cards: H200"},
    stored: {
        "answer": "no", "verdicts.0.arm": "rowwise", "verdicts.0.outcome": "FAIL", "verdicts.0.notes": ["n"],
        "verdicts.0.axes.steps": 3, "verdicts.0.against": "base", "verdicts.0.expected": "PASS",
    },
    doctor: {
        "device": "cpu", "findings.0.area": "gemm", "findings.0.name": "torch", "findings.0.works": True,
        "findings.0.code": "", "findings.0.detail": "28 dB",
    },
    curves: {"outcome": "INCONCLUSIVE", "codes": ["few_runs"], "margin": 0.0025, "gap": None},
    seeds_needed: {
        "runs": 6, "timed": 3, "seconds": 90.0, "arms.0.axes.steps": 3, "arms.0.arm": "rowwise", "arms.0.seeds": 3,
        "arms.0.seeds_at_half_a_margin": 3, "arms.0.noise.late": 0.00025, "arms.0.noise.differs": ["steps=4"],
    },
    first_screen: {
        "answers.speed.verdict": "yes", "answers.sound.sentence": "1 result is wrong.", "arm": "rowwise_eager", "speedup": 1.3,
        "against": [], "in_doubt.rowwise_eager": "why", "not_judged": [], "under_way": False, "unfinished": ["r"], "failed": 2,
        "findings": 0,
    },
    diagnosis: {
        "findings.0.symptom": "symptom", "findings.0.evidence": ["1 of 3"], "findings.0.cause": "cause", "findings.0.change": "change",
    },
    runs: {"older": 2, "runs.0.run_id": "r", "runs.0.state": "finished", "runs.0.whose": "mine"},
    advice: {
        "model": "llama3_1b", "gpu": "H200 SXM", "tokens": 16384, "decision": "on", "decision_by_time": "on",
        "recipe": "tensorwise", "library": "fp8core", "schedule": "", "loss.word": "FAIL", "memory.word": "fits",
        "memory.device": 150_109_106_995, "memory.bf16.weights": 4 * 1_235_814_400, "recipes.0.name": "tensorwise",
        "filter.left_out.words": ["head"], "rates.bf16.kind": "typical", "checks": [], "reasons.0.question": "GPU generation",
        "plan.dp": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("make", CONTRACT)
def test_a_key_that_stays_keeps_its_meaning_and_unit(make: Any) -> None:
    found = json.loads(as_json(make()))
    for key, value in CONTRACT[make].items():
        at = found
        for name in key.split("."):
            at = at[int(name)] if isinstance(at, list) else at[name]
        assert at == (pytest.approx(value) if isinstance(value, float) else value), key


@pytest.mark.parametrize("make", CONTRACT)
def test_every_key_is_written_down(make: Any) -> None:
    known = json.loads(Path(__file__).with_name("data").joinpath("result_keys.json").read_text())
    assert sorted(keys(json.loads(as_json(make())))) == known[make.__name__]


def test_the_page_names_every_list_of_keys() -> None:
    """Oracle: the lists themselves."""
    known = json.loads(Path(__file__).with_name("data").joinpath("result_keys.json").read_text())
    page = Path(__file__).parents[2].joinpath("docs", "command-line.md").read_text()
    _, _, about = page.partition("## JSON of results")
    assert [name for name in known if f"`{name}`" not in about.partition("##")[0]] == []


def keys(value: Any, at: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys of all values, of a list those of its first."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from keys(each, (*at, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield from keys(value[0], (*at, "0"))
    else:
        yield ".".join(at)


def test_figures_of_an_advice_are_in_milliseconds_bytes_and_flops() -> None:
    """Oracle: speedups are ratios of their times, and a bf16 step of the 1B model on an H200 of 989 TFLOP/s takes 0.1 to 1 s."""
    found = json.loads(as_json(advice()))
    bf16, fp8 = (found["step_ms"][name]["total"] for name in ("bf16", "fp8"))
    assert found["step_speedup"]["value"] == pytest.approx(bf16 / fp8, rel=0.02)
    assert 100 < bf16 < 1000
    each = [
        {name: sum(one[f"{name}_ms"].values()) for name in ("bf16", "fp8", "cast")} for one in found["layers"]
    ]
    assert (
        1 <= found["step_ms"]["bf16"]["linear"] / sum(ms["bf16"] for ms in each) < 1.5
    )  # products are made again
    first, speedup = each[0], found["layers"][0]["speedup"]["value"]
    assert speedup == pytest.approx(first["bf16"] / (first["fp8"] + first["cast"]), rel=0.02)
    assert 0.5e15 < found["rates"]["bf16"]["value"] < 0.989e15
