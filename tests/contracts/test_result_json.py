"""JSON of results: a key that stays keeps its meaning and unit; keys may be added. Oracle: the keys and values written down here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.advise.command import answer, parse
from harness.advise.views import AdviceView
from harness.cli.doctor import ProbeResult, Tried
from harness.judge.diff import Changes, Timed
from harness.judge.fleet import Fleet
from harness.judge.fleet.judge import Group
from harness.judge.verdict import ArmVerdict, StoredVerdicts, Verdict
from harness.store.case import Arm
from harness.store.printer import as_json
from harness.training.ab.result import AGAIN, BASE, FP8, Round, TrialResult


def trial() -> TrialResult:
    """Steps of 100 and 50 ms with 1,000 tokens and 2 GiB."""
    rounds = [
        Round(i, {BASE: (100.0,), AGAIN: (100.0 + 0.01 * i,), FP8: (50.0,)}, peak_bytes={BASE: (2**31,)})
        for i in range(6)
    ]
    return TrialResult("rowwise", "cuda", tuple(rounds), proved=True, proof="FP8 verified", tokens=1000.0)


def changes() -> Changes:
    timed = Timed("train", "c", "{}", "a", "", "time_ms", 1.0, 0.5, 0.5, 0.4, 0.6, "faster", "", 8, 1.02)
    return Changes({"torch": (1, 2)}, (), (), (), (), (timed,), (), ())


def fleet() -> Fleet:
    return Fleet([Group("H200", "torch", ["a"], "", [], [], {}, 4, ["a"], ["a"], {"a": 0.9}, {})])


def stored() -> StoredVerdicts:
    verdict = Verdict("FAIL", (), ("n",), "limits")
    return StoredVerdicts([ArmVerdict("r", {"steps": 3}, "rowwise", Arm("rowwise"), "base", verdict, "PASS")])


# What is made -> dotted key -> its value; ... where any will do
CONTRACT: dict[Any, dict[str, Any]] = {
    trial: {
        "decision": "on", "recipe": "rowwise", "device": "cuda", "speedup": 2.0, "low": 2.0, "high": 2.0, "rounds": 6,
        "floor": ..., "doubt": "", "proved": True, "proof": "FP8 verified", "notes": [], "ranks": 1, "loss_gap": None,
        "arms.base.step_ms": 100.0, "arms.fp8.step_ms": 50.0, "arms.fp8.tokens_per_s": 20000.0, "arms.base.peak_gib": 2.0,
        "arms.fp8.joules": None, "arms.fp8.mfu_mixed": None, "arms.fp8.mfu_bf16_peak": None,
    },
    changes: {
        "environment.torch": [1, 2], "only_before": [], "only_after": [], "broken": [], "figures": [], "cpu": False,
        "times.0.before": 1.0, "times.0.after": 0.5, "times.0.ratio": 0.5, "times.0.verdict": "faster", "times.0.rounds": 8,
        "caution": "", "policy": ...,
    },
    fleet: {"code": "in_line", "unread": [], "missing": [], "outliers": [], "groups.0.cards": ["a"]},
    stored: {
        "answer": "no", "verdicts.0.arm": "rowwise", "verdicts.0.outcome": "FAIL", "verdicts.0.notes": ["n"],
        "verdicts.0.axes.steps": 3, "verdicts.0.against": "base", "verdicts.0.expected": "PASS",
    },
    (lambda: Tried("cpu", [ProbeResult("gemm", "torch", "28 dB")])): {
        "device": "cpu", "findings.0.area": "gemm", "findings.0.name": "torch", "findings.0.works": True,
        "findings.0.code": "", "findings.0.detail": "28 dB",
    },
    (lambda: AdviceView(answer(parse(["model=llama3_1b", "gpu=h200", "checkpointing=full"])))): {
        "model": "llama3_1b", "gpu": "H200 SXM", "tokens": 16384, "decision": "on", "decision_by_time": "on",
        "recipe": "tensorwise", "library": "fp8core", "fp8_all_gather": ..., "schedule": "", "not_measured": ...,
        "loss.word": "FAIL", "step_speedup.value": ..., "step_speedup.low": ..., "step_speedup.high": ...,
        "step_ms.bf16.total": ..., "step_ms.fp8.total": ..., "memory.device": ..., "memory.word": "fits", "warnings": ...,
        "recipes.0.name": "tensorwise", "recipes.0.step_speedup.value": ..., "layers.0.fqn": ..., "layers.0.bf16_ms.output": ...,
        "filter.left_out.words": ["head"], "filter.code": ..., "pays_from_tokens": ..., "gather_matters_from_gpus": ...,
        "rates.bf16.value": ..., "rates.bf16.kind": "typical", "checks": [], "reasons.0.question": "GPU generation",
        "plan.dp": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("make", CONTRACT, ids=["trial", "diff", "fleet", "verdicts", "doctor", "advise"])
def test_a_key_that_stays_keeps_its_meaning_and_unit(make: Any) -> None:
    found = json.loads(as_json(make()))
    for key, value in CONTRACT[make].items():
        at = found
        for name in key.split("."):
            at = at[int(name)] if isinstance(at, list) else at[name]
        assert value is ... or at == (pytest.approx(value) if isinstance(value, float) else value), key


def test_times_of_an_advice_are_milliseconds() -> None:
    """Oracle: the step's speedup is the ratio of its two totals, and a bf16 step of the 1B model on an H200 takes 0.1 to 1 s."""
    found = json.loads(
        as_json(AdviceView(answer(parse(["model=llama3_1b", "gpu=h200", "checkpointing=full"]))))
    )
    bf16, fp8 = (found["step_ms"][name]["total"] for name in ("bf16", "fp8"))
    assert found["step_speedup"]["value"] == pytest.approx(bf16 / fp8, rel=0.02)
    assert 100 < bf16 < 1000
