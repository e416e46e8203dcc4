"""The rule of words: nothing that a record holds against a positive word is left out beside it.

Each result is made positive and clean; then every field that is empty in it is filled in turn. Oracle: the clean result's own
text. What was filled must stand in the lines, or change the line that begins with the positive word, which then counts it. What
stands in `data()` alone is not printed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from gate_fixtures import run, slowed
from noises import quiet, simulated

from fp8core.proof.audit import Audit, LayerAudit
from fp8core.proof.expert_rows import ExpertsAudit
from fp8core.proof.other_weights import WeightAudit
from fp8core.proof.verify.proof import Proof
from fp8core.proof.verify.records import GemmProof, LayerProof
from fp8core.recipe import GEMMS
from harness.advise.command import answer, parse
from harness.advise.views import AdviceView
from harness.cli.doctor import ProbeResult, Tried
from harness.gate import render as gate_render
from harness.gate.options import Exit
from harness.judge.diagnosis import Diagnosis, Finding
from harness.judge.diff import RunChanges, Timed
from harness.judge.fleet import LACKING, PEAKS, Fleet, Score
from harness.judge.verdict.paired import Verdict
from harness.judge.verdict.result import GateResult
from harness.judge.verdict.rows import ArmVerdict, StoredVerdicts
from harness.judge.verdict.rule import CurveVerdict, verdict
from harness.judge.verdict.stored_noise import SeedsNeeded
from harness.report.first_screen import FirstScreen
from harness.report.standings import NO_LOSS, Checks, Standing
from harness.report.verdicts import Answer
from harness.store.case import NEGATIVE, Arm
from harness.store.printer import MOST, Tone, as_text
from harness.training.ab.result import FP8, TrialResult

if TYPE_CHECKING:
    from harness.advise.advice import Advice
    from harness.gate.unit import Judgement

TOLD = "planted words"


@dataclass
class Shown:
    """A result of which only the lines are known."""

    said: list[str]
    tone: Tone = ""

    def lines(self) -> list[str]:
        return self.said

    def tables(self) -> list[Any]:
        return []

    def data(self) -> dict[str, Any]:
        return {}


def trial() -> TrialResult:
    return simulated(quiet, 1.3, 0)


def doctor() -> Tried:
    return Tried("cuda", [ProbeResult("gemm", "torch", "28 dB"), ProbeResult("recipe", "rowwise", "28 dB")])


TIMED = Timed("train", "c", "{}", "a_eager", "", "time_ms", 1.0, 0.9, 0.9, 0.89, 0.91, "faster", "", 8, 1.02)


def changes() -> RunChanges:
    return RunChanges({}, (), (), (), (), (TIMED,), (), ())


@cache
def advice() -> Advice:
    return answer(parse(["model=llama3_1b", "gpu=h200", "checkpointing=full"]))


CHECKED = LayerProof("a", "rowwise", "", gemms={name: GemmProof(True, calls=1, telling=1) for name in GEMMS})
SCORES = [Score("2 cards", card, PEAKS, "", "", "93 %", 0.07) for card in ("a", "b")]


@cache
def judgement() -> Judgement:
    with tempfile.TemporaryDirectory() as folder:
        return replace(run(Path(folder), *slowed(1.0)), notes=())


def arm(verdict: Verdict, name: str = "tensorwise", variant: str = "") -> ArmVerdict:
    return ArmVerdict("r", {}, name, Arm("tensorwise", variant=variant), "base", verdict, verdict.outcome)


PAIR = {"speedup": 1.3, "low": 1.2, "high": 1.4, "verdict": "faster", "condition": "", "baseline": "bf16_eager", "case_id": "c",
        "clock_mhz": 1.0, "baseline_clock_mhz": 1.0}  # fmt: skip


def first_screen() -> FirstScreen:
    every = [Answer(about, "yes", "3 of 3") for about in ("speed", "sound", "ran", "same")]
    return FirstScreen(every, arm=Standing(Arm("rowwise"), "train", [PAIR], 1.3), passed=Checks("", "", ""))


FAULT = arm(Verdict("FAIL", (), (), "limits"), NEGATIVE, NEGATIVE)


@dataclass
class Kind:
    """How a result is made, what is planted in which of its fields, and which empty fields are no trouble, with the reason."""

    make: Callable[[], Any]
    plants: Mapping[str, Any]
    no_trouble: Mapping[str, str]
    show: Callable[[Any], Any] = lambda found: found


KINDS = {
    "trial": Kind(
        trial,
        {
            "problem": TOLD,
            "under_way": True,
            "unmetered": TOLD,
            "not_restored": TOLD,
            "notes": (TOLD,),
            "rounds": tuple(replace(r, faults={FP8: TOLD} if r.index == 0 else {}) for r in trial().rounds),
            "restored": (TOLD,),
        },
        {
            "flops": "of MFU, which is then not stated",
            "gpu": "of MFU, which is then not stated",
            "tokens": "without it no tokens/s are shown",
            "facts": "for the store",
            "method": "for the store",
            "layers": "counted in the proof",
            "proof": "a proof without words",
        },
    ),
    "advice": Kind(
        advice,
        {"warnings": (TOLD,), "made_up": TOLD},
        {
            "careful": "the last of the evaluation loss, as asked",
            "checks": "stored measurements: compared in the tables",
            "with_head": "an offer",
            "four_bits": "public runs and verdicts, each with its word, where asked",
            "train_tokens": "what was asked",
            "gather_from": "no number of GPUs",
        },
        AdviceView,
    ),
    **{
        f"fleet, {kind}": Kind(
            lambda: Fleet(SCORES, (), ()),
            {
                "scores": [*SCORES, Score("2 cards", "a", "gemm", "isolated", kind, TOLD)],
                "unread": (TOLD,),
                "missing": (TOLD,),
            },
            {},
        )
        for kind in ("slow", LACKING)
    },
    "gate": Kind(
        judgement,
        {"notes": (TOLD,), "could_not_judge": True, "code": Exit.REGRESSED},
        {},
        gate_render.GateAnswer.of,
    ),
    "stored verdict": Kind(
        lambda: Verdict("PASS", (), (), "limits"),
        {"notes": (TOLD,), "gates": (GateResult("L4", "WARN", TOLD),)},
        {"not_fp8": "stands among the notes"},
        lambda verdict: StoredVerdicts([arm(verdict), FAULT]),
    ),
    "arm of a stored verdict": Kind(
        lambda: arm(Verdict("PASS", (), (), "limits")),
        {"missing": (TOLD,)},
        {"axes": "constant over the set-up", "env_id": "named where there are several"},
        lambda judged: StoredVerdicts([judged, FAULT]),
    ),
    "proof": Kind(
        lambda: Proof((), (), (), 3, 3, "cuda", 1.0, {}),
        {
            "problems": (TOLD,),
            "not_checked": (TOLD,),
            "warnings": (TOLD,),
            "emulated_in": TOLD,
            "unjudged": (TOLD,),
            "compiled": 3,
        },
        {
            "layers": "counted in the line",
            "experts": "counted in the line",
            "all_gathers": "empty where nothing is sharded",
            "probed": "what was tested beside",
            "shared_weights": "empty where nothing is shared",
        },
        lambda proof: Shown([proof.line], "good" if proof.ok else "bad"),
    ),
    "first screen": Kind(
        first_screen,
        {
            "answers": [*first_screen().answers[:2], Answer("ran", "partly", TOLD)],
            "on_cpu": True,
            "under_way": True,
            "unfinished": (TOLD,),
            "failed": 1,
            "findings": 1,
            "against": (TOLD,),
            "passed": Checks("", "", NO_LOSS, 2),
            "is_gain": False,
            "fault_unseen": True,
            "doubted": {TOLD: ["tensorwise"]},
            "absent": (TOLD,),
        },
        {},
    ),
    "proof of layers of which one was not checked": Kind(
        lambda: Proof((), (), (CHECKED,), 3, 3, "cuda", 1.0, {}, not_checked=("head: its output is a view",)),
        {
            "problems": (TOLD,),
            "warnings": (TOLD,),
            "emulated_in": TOLD,
            "unjudged": (TOLD,),
            "compiled": 3,
        },
        {
            "experts": "counted in the line",
            "all_gathers": "empty where nothing is sharded",
            "probed": "what was tested beside",
            "shared_weights": "empty where nothing is shared",
        },
        lambda proof: Shown([proof.line], "good" if proof.ok else "bad"),
    ),
    "audit": Kind(
        lambda: Audit((LayerAudit("a", "Float8Linear", 16, 16, True, "rowwise", "", 3, 3, "kernels"),)),
        {
            "layers": (LayerAudit("a", "Linear", 16, 16, False, "", TOLD, 3, 0, ""),),
            "experts": (ExpertsAudit("e", 2, (16, 16), 1, "", TOLD, 3, 0, ""),),
            "weights": (WeightAudit("w", "Embedding", (16, 16), TOLD, 1, 512),),
            "not_trained": (TOLD,),
        },
        {"count": "of a step, without which the last line says that other products are not known"},
        lambda found: Shown(str(found).splitlines()[::-1], "good"),
    ),
    "findings of a run": Kind(
        lambda: Diagnosis([Finding("a symptom", (), "a cause", "a change")]),
        {"found": [Finding(TOLD, ("1 of 3",), "a cause", "a change")]},
        {},
    ),
    "seeds needed": Kind(lambda: SeedsNeeded([], 6, 6, 90.0), {"arms": [({}, TOLD, None)]}, {}),
    "doctor": Kind(
        doctor, {"findings": [*doctor().findings, ProbeResult("peer", TOLD, "absent", "missing")]}, {}
    ),
    "diff": Kind(
        changes,
        {
            "environment": {TOLD: (1, 2)},
            "only_before": (("train", "c", TOLD),),
            "only_after": (("train", "c", TOLD),),
            "broken": (("train", "c", "a", TOLD),),
            "figures": (("train", "c", "a", TOLD, 1.0, 2.0),),
            "cpu": True,
        },
        {"resolved": "a record of its own: test_diff", "parts": "a record of its own: test_diff"},
    ),
}


def empty(record: Any) -> set[str]:
    return {f.name for f in fields(record) if getattr(record, f.name) in ("", None, False, (), [], {})}


@pytest.mark.parametrize("name", KINDS)
def test_every_field_that_may_hold_a_trouble_is_planted(name: str) -> None:
    """A field that is added to a record is planted here, or is no trouble for a reason that is given."""
    kind = KINDS[name]
    assert empty(kind.make()) <= {*kind.plants, *kind.no_trouble}


@pytest.mark.parametrize(
    ("name", "field"), [(name, field) for name, kind in KINDS.items() for field in kind.plants]
)
def test_what_stands_against_a_positive_word_is_printed_or_counted(name: str, field: str) -> None:
    kind = KINDS[name]
    clean, planted = kind.make(), replace(kind.make(), **{field: kind.plants[field]})
    planted, clean = kind.show(planted), kind.show(clean)
    assert clean.lines()[0]
    text = as_text(planted)
    assert text != as_text(clean), "neither printed nor counted"
    is_same = planted.tone == "good" and planted.lines()[0] == clean.lines()[0]
    assert not is_same or TOLD in " ".join(text.split())


@pytest.mark.parametrize("field", ["rounds", "not_restored", "notes"])
def test_a_trial_that_is_on_counts_in_that_line_what_stands_below_it(field: str) -> None:
    clean, planted = trial(), replace(trial(), **{field: KINDS["trial"].plants[field]})
    assert (clean.tone, planted.tone) == ("good", "good")
    assert planted.lines()[0].startswith(f"{clean.lines()[0]}; ")


def test_a_pass_counts_its_notes() -> None:
    curves = [pd.DataFrame({"step": range(8), "val_loss": range(10, 2, -1)})] * 2
    made = verdict(curves, curves)
    (clean, *_) = replace(made, outcome="PASS", reasons=["the same"], notes=[]).lines()
    found = replace(made, outcome="PASS", reasons=["the same"], notes=[TOLD, TOLD]).lines()
    assert (clean, found[:3]) == ("PASS: the same", ["PASS: the same; 2 notes", TOLD, TOLD])
    assert found[3:] == made.read


@pytest.mark.parametrize("name", KINDS)
def test_no_line_is_longer_than_the_rule_allows(name: str) -> None:
    kind = KINDS[name]
    assert all(
        len(line) <= MOST
        for line in as_text(Shown([*kind.show(kind.make()).lines(), "x " * 400])).splitlines()
    )


def asked(words: str) -> AdviceView:
    return AdviceView(answer(parse(words.split())))


def trained(*outcomes: str) -> StoredVerdicts:
    return StoredVerdicts([*(arm(Verdict(outcome, (), (), "limits")) for outcome in outcomes), FAULT])


def tried(**of_a_kernel: Any) -> Tried:
    return Tried("cuda", [*doctor().findings, ProbeResult("kernel", "cast", "seen", **of_a_kernel)])


def gated(**fields: Any) -> gate_render.GateAnswer:
    return gate_render.GateAnswer.of(replace(judgement(), **fields))


def of_curves(outcome: str) -> CurveVerdict:
    curves = [pd.DataFrame({"step": range(8), "val_loss": range(10, 2, -1)})] * 2
    return replace(verdict(curves, curves), outcome=outcome)


# Oracle: the words of each answer and the exit code of its command, by hand
TONES: dict[str, tuple[Callable[[], Any], Tone]] = {
    "FP8 is faster": (trial, "good"),
    "FP8 is slower": (lambda: simulated(quiet, 0.7, 0), "bad"),
    "on a CPU": (lambda: replace(trial(), device="cpu"), ""),
    "advice on": (lambda: AdviceView(advice()), "good"),
    "advice off": (lambda: asked("model=llama3_8b gpu=a100 dp=8 checkpointing=full"), "bad"),
    "too large": (lambda: asked("model=llama3_8b gpu=h100"), "bad"),
    "undecided": (lambda: asked("model=llama3_8b gpu=h100 gpus=1024 seq=8192 batch=1 recipe=rowwise"), ""),
    "all works": (tried, "good"),
    "a kernel is wrong": (lambda: tried(code="wrong"), "bad"),
    "a kernel raised": (lambda: tried(code="raised"), "bad"),
    "a kernel was not reached": (lambda: tried(code="unchecked"), ""),
    "all train the same": (lambda: trained("PASS", "PASS"), "good"),
    "one does not": (lambda: trained("PASS", "FAIL"), ""),
    "none does": (lambda: trained("FAIL"), "bad"),
    "no fault was seen to fail": (lambda: StoredVerdicts(trained("PASS").verdicts[:1]), ""),
    "none is judged": (lambda: trained("INCONCLUSIVE"), ""),
    "first screen faster": (first_screen, "good"),
    **{f"first screen, {name}": (partial(replace, first_screen(), **{name: value}), "") for name, value in KINDS["first screen"].plants.items()},
    "first screen refuted": (lambda: replace(first_screen(), answers=[Answer("speed", "yes", ""), Answer("sound", "no", "")]), "bad"),
    "pass": (lambda: of_curves("PASS"), "good"),
    "fail": (lambda: of_curves("FAIL"), "bad"),
    "inconclusive": (lambda: of_curves("INCONCLUSIVE"), ""),
    **{f"gate {code.name}": (partial(gated, code=code), "bad") for code in (Exit.REGRESSED, Exit.INVALID, Exit.NUMERICS)},
    "gate ok": (gated, "good"),
    "gate inconclusive": (partial(gated, code=Exit.INCONCLUSIVE), ""),
    "gate judged too little": (partial(gated, could_not_judge=True), ""),
    "gate without a judgement": (lambda: gate_render.GateAnswer(Exit.OK, "OK"), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", TONES)
def test_a_tone_is_that_of_the_answer(name: str) -> None:
    make, tone = TONES[name]
    assert make().tone == tone
