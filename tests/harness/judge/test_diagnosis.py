"""Diagnosis. Oracle: each symptom is planted in rows; its finding must appear with the planted figures, else nothing."""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
import re

import numpy as np
import pytest
from curves_for_tests import AXES, STEPS, case_of, control, rows_of_runs, shifted
from diagnosed import found, look
from report_fixtures import CPU, H200, Invented, absent, figure

import fp8core
from harness.advise.fp8_break_even import ReachedRates
from harness.judge import diagnosis
from harness.judge.verdict import Curve
from harness.store.case import Case
from harness.store.errors import Cause

BASE = control()
SCHEDULE = {"rise_steps": 30, "lr": 1e-3}


# FP8 that did not run


DISPROVED = "FP8 NOT verified: recipe rowwise was asked for, tensorwise runs"


@pytest.mark.parametrize(
    ("moved", "facts", "evidence"),
    [
        (True, {"fp8_layers": [], "skipped_layers": {"head": "65 outputs"}}, "head: 65 outputs"),
        (False, {"fp8_layers": ["q"]}, "bitwise equal to base"),
        (True, {"fp8_layers": ["q"], "verify": DISPROVED}, DISPROVED),
    ],
)
def test_an_arm_that_did_not_run_in_fp8_is_found_with_the_reason(tmp_path, moved, facts, evidence):
    runs = shifted(BASE) if moved else BASE
    rows = rows_of_runs("base", BASE) + rows_of_runs("rowwise", runs, recipe="rowwise", **facts)
    (finding,) = found(tmp_path, rows, "did not run in FP8")
    assert finding.symptom.startswith("divergence rowwise ")
    assert evidence in finding.evidence[0]
    assert "fp8core.audit" in finding.change


def test_fp8_that_could_not_be_proved_is_a_finding_of_its_own(tmp_path):
    """By its field, whatever the line says; a failed time by its cause. Neither "did not run"."""
    rows = rows_of_runs("base", BASE)
    about = {"recipe": "rowwise", "fp8_layers": ["q"], "verify": "any words", "verify_outcome": "unproven"}
    rows += rows_of_runs("rowwise", shifted(BASE), **about)
    rows.append(
        absent(Case.of("train", {}), "tensorwise_eager", "failed", "not compared", cause=Cause.UNPROVEN)
    )
    for symptom, evidence in (
        ("divergence rowwise could not be proved to run in FP8", "any words"),
        ("train tensorwise_eager could not be proved to run in FP8", "not compared"),
    ):
        (finding,) = found(tmp_path, rows, symptom)
        assert finding.evidence == (evidence,)
    assert not found(tmp_path, rows, "did not run in FP8")


def test_fewer_fp8_gemms_than_expected(tmp_path):
    case = Case.of("linear", {"M": 8192, "K": 4096, "N": 4096})
    rows = Invented().times(
        case,
        {
            "bf16_eager": {"ms": 1.0},
            "rowwise_eager": {
                "ms": 0.8,
                "resolved": {"recipe": "rowwise", "fp8_gemms": 2, "fp8_gemms_expected": 3},
            },
        },
    )
    (finding,) = found(tmp_path, rows, "did not run in FP8")
    assert finding.evidence == ("2 of 3 GEMMs in FP8",)


# Hardware


def test_a_gpu_without_fp8_is_found_and_a_cpu_is_not(tmp_path):
    case = Case.of("gemm", {"M": 1, "K": 16, "N": 16})
    rows = [
        *Invented().times(case, {"bf16": {"ms": 1.0}}),
        absent(case, "rowwise_eager", "skipped", "no FP8", "bf16"),
    ]
    a100 = {**H200, "gpu": "NVIDIA A100-SXM4-80GB", "gpu_capability": "8.0"}
    (finding,) = found(tmp_path / "a", rows, "no FP8 tensor cores", env=a100)
    assert finding.evidence == ("compute capability 8.0; 0 arms emulated, 1 skipped",)
    assert "=" not in finding.change, "no key that the suite lacks"
    assert found(tmp_path / "b", rows, "no FP8 tensor cores", env=CPU) == []
    assert found(tmp_path / "c", rows, "no FP8 tensor cores") == []


# Early divergence


def test_early_divergence_names_rate_warm_up_and_the_worst_layer(tmp_path):
    loss = BASE[1].loss.values.copy()
    loss[17:] = math.nan
    runs = shifted(BASE)
    runs[1] = dataclasses.replace(runs[1], loss=Curve.of(loss))
    rows = rows_of_runs("base", BASE) + rows_of_runs(
        "tensorwise", runs, recipe="tensorwise", lr_schedule=SCHEDULE
    )
    rows += [
        look("tensorwise", "saturated_frac", "layers.1.down:input", [0.0, 0.031]),
        look("tensorwise", "saturated_frac", "layers.0.q:input", [0.0, 0.002]),
        look("tensorwise", "underflow_frac", "layers.0.q:grad_output", [0.4]),
    ]
    (finding,) = found(tmp_path, rows, "diverges within the first 50 steps")
    told = " ".join(finding.evidence)
    assert "1 of 5 seeds: seed 1 is NaN or infinite from step 17" in told
    assert "learning rate 0.001, warm-up 30 steps" in told
    assert "most saturation: layers.1.down:input, 3.1 %" in told
    assert "most underflow: layers.0.q:grad_output, 40 %" in told
    assert "axes.lr=0.0005" in finding.change
    assert "schedule=warmup_bf16" in finding.change


def test_a_loss_that_runs_away_early_is_found_and_one_that_does_so_late_is_not(tmp_path):
    for name, start, expected in (("early", 20, 1), ("late", 150, 0)):
        runs = shifted(BASE, lambda t, start=start: np.where(t >= start, 1.5, 0.0))
        rows = rows_of_runs("base", BASE) + rows_of_runs("rowwise", runs, recipe="rowwise")
        got = found(tmp_path / name, rows, "diverges")
        assert len(got) == expected
        if got:
            assert "layers were not diagnosed" in " ".join(got[0].evidence)


def test_a_run_that_breaks_at_its_very_first_step_diverges(tmp_path):
    rows = rows_of_runs("base", BASE)
    rows += [
        absent(case_of(s), "rowwise", "failed", "nothing was trained", "base", "loss", Cause.DIVERGED)
        for s in BASE
    ]
    (finding,) = found(tmp_path, rows, "diverges")
    assert "5 of 5 seeds: seed 0 is NaN or infinite from step 0" in finding.evidence[0]


def test_where_the_control_breaks_too_the_learning_rate_is_named(tmp_path):
    loss = BASE[1].loss.values.copy()
    loss[17:] = math.nan
    broken = {**BASE, 1: dataclasses.replace(BASE[1], loss=Curve.of(loss))}
    rows = rows_of_runs("base", broken) + rows_of_runs("rowwise", broken, recipe="rowwise")
    (finding,) = found(tmp_path, rows, "diverges")
    assert finding.symptom == "base diverges within the first 50 steps, and rowwise with it"
    assert "1 of 5 seeds: seed 1 is NaN or infinite from step 17" in finding.evidence[0]
    assert finding.cause.endswith("FP8 has no part in it")
    assert "schedule" not in finding.change


@pytest.mark.parametrize("finite", [False, True], ids=["NaN", "a loss that rises"])
def test_an_absurd_learning_rate_is_the_cause(tmp_path, finite):
    """What lr=500000 does: a loss of 3e9 after one step. One finding for all arms."""
    loss = np.full(STEPS, 3e9)
    loss[0] = 5.4
    loss[2:] = 3e9 if finite else math.nan
    axes = {**AXES, "lr": 500000.0}
    runs = {s: dataclasses.replace(r, loss=Curve.of(loss)) for s, r in BASE.items()}
    rows = rows_of_runs("base", runs, axes)
    for arm in ("tensorwise", "rowwise"):
        rows += rows_of_runs(arm, runs, axes, recipe=arm, lr_schedule={**SCHEDULE, "lr": 500000.0})
    (finding,) = found(tmp_path, rows, "diverges")
    assert finding.symptom == "base diverges within the first 50 steps, and tensorwise, rowwise with it"
    assert finding.cause.startswith(
        "the learning rate 500000: AdamW moves each weight by about that much in a step"
    )
    assert finding.change.startswith("axes.lr=0.001 or less or a longer warm-up")
    assert "learning rate 500000, warm-up 30 steps" in finding.evidence


@pytest.mark.parametrize("loss", [[3.4, 3.0, 4.2, 3.9, 4.6], 60 * [3.4, 4.6]], ids=["a short run", "noise"])
def test_a_noisy_loss_is_no_divergence(tmp_path, loss):
    runs = {s: dataclasses.replace(r, loss=Curve.of(loss), planned_steps=len(loss)) for s, r in BASE.items()}
    rows = rows_of_runs("base", runs) + rows_of_runs("rowwise", shifted(runs), recipe="rowwise")
    assert found(tmp_path, rows, "diverges") == []


@pytest.mark.parametrize(("steps", "proposed"), [(100, False), (200, False), (201, True)])
def test_a_schedule_is_proposed_only_where_it_leaves_steps_in_fp8(tmp_path, steps, proposed):
    base = control(steps=steps)
    runs = shifted(base, lambda t: np.where(t >= 20, 1.5, 0.0))
    rows = rows_of_runs("base", base) + rows_of_runs("rowwise", runs, recipe="rowwise", lr_schedule=SCHEDULE)
    (finding,) = found(tmp_path, rows, "diverges")
    assert ("schedule=warmup_bf16:100" in finding.change) == proposed


# Memory


LACKS = "out of memory: tried to allocate 2.00 GiB"
STEP = Case.of("train", {"model": "gpt2", "batch": 16, "checkpointing": "none"})


@pytest.mark.parametrize(
    ("recipe", "known"), [("", ()), ("rowwise", ()), ("rowwise", ("arm",)), ("rowwise", ("arm", "base"))]
)
def test_what_did_not_fit_is_said_only_where_rows_say_it(tmp_path, recipe, known):
    """FP8 copies are blamed for no shortage: not where the arm has no FP8, and not where nothing was counted."""
    case = Case.of("cast", {"M": 16384, "K": 4096})
    held = {"weights": 2**30, "activations": 4 * 2**30}
    base, *rest = Invented().times(case, {"eager": {"ms": 1.0}})
    if "base" in known:
        base = dataclasses.replace(base, resolved={**base.resolved, "memory": {**held, "weights": 2**29}})
    failed = absent(case, "compile", "failed", "out of memory: 2 GiB", "eager", cause=Cause.OOM)
    failed = dataclasses.replace(failed, resolved={"recipe": recipe} | ({"memory": held} if known else {}))
    (finding,) = found(tmp_path, [base, *rest, failed], "runs out of memory")
    assert "FP8" not in f"{finding.symptom} {finding.cause}"
    assert not any(key in finding.change for key in ("batch", "axes.")), "no key that the suite lacks"
    if len(known) == 2:
        assert finding.cause == "by prediction it holds more than eager: weights 512 MiB"
    else:
        lacking = "eager" if known else "compile and eager"
        assert finding.cause.startswith(f"not known: the rows of {lacking} do not say")


def test_a_baseline_that_says_bf16_is_one_without_fp8(tmp_path):
    """Stored as suite train does; its FP8 arm lacks memory where the baseline fits."""
    base, *rest = Invented().times(STEP, {"bf16_eager": {"ms": 1.0}})
    base = dataclasses.replace(base, resolved={**base.resolved, "recipe": "bf16"})
    failed = absent(STEP, "rowwise_eager", "failed", LACKS, "bf16_eager", cause=Cause.OOM)
    assert found(tmp_path, [base, *rest, failed], "runs out of memory")


def test_out_of_memory_of_both_arms_is_not_fp8s(tmp_path):
    arms = {"bf16_eager": "", "rowwise_eager": "bf16_eager"}
    rows = [absent(STEP, arm, "failed", LACKS, base, cause=Cause.OOM) for arm, base in arms.items()]
    assert found(tmp_path, rows, "memory") == []


# Spikes


def test_spikes_are_told_with_their_counts(tmp_path):
    runs = shifted(BASE)
    loss = runs[2].loss.values.copy()
    loss[200:206] += 1.0
    runs[2] = dataclasses.replace(runs[2], loss=Curve.of(loss))
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", runs, recipe="tensorwise")
    (finding,) = found(tmp_path, rows, "spikes more than base")
    assert "6 against 0 of the control" in finding.evidence[0]


# Whether it can pay


@pytest.mark.parametrize(("cast_bytes", "size"), [(4, 663), (19, 3409), (68, 16672)])
def test_break_even_sizes_of_the_published_table(cast_bytes, size):
    """Oracle: the table of the break-even formula for 780 and 1,300 TFLOP/s, 4.0 TB/s and 16,384 tokens."""
    h200 = ReachedRates(780e12, 1300e12, 4e12, "round numbers")
    assert h200.break_even(16384, cast_bytes) == pytest.approx(size, abs=1)
    assert h200.break_even(300) == math.inf


def test_layers_below_the_break_even_are_named_on_a_gpu_only(tmp_path):
    case = Case.of("linear", {"M": 512, "K": 384, "N": 384})
    flops = 6.0 * 512 * 384 * 384
    arms = {
        "bf16_eager": {"ms": 0.1, "flops": {"bf16": flops}},
        "bf16_eager:again": {"ms": 0.1, "flops": {"bf16": flops}, "baseline": "bf16_eager"},
        "rowwise_eager": {
            "ms": 0.2,
            "flops": {"e4m3": flops},
            "baseline": "bf16_eager",
            "resolved": {"recipe": "rowwise"},
        },
    }
    rows = Invented().times(case, arms)
    (finding,) = found(tmp_path / "gpu", rows, "too small for FP8")
    assert any("512x384x384: 0.500x" in e for e in finding.evidence)
    rows += Invented(seed=1).times(case, arms, "sustained")
    (finding,) = found(tmp_path / "both", rows, "too small for FP8")
    assert " in 1 layers " in finding.symptom, "alone and under load it is one layer"
    assert len(finding.evidence) == 2
    assert found(tmp_path / "cpu", rows, "too small", env=CPU) == []


def test_a_slow_training_step_says_what_fp8_could_save(tmp_path):
    """Oracle: H200 peaks of 989 and 1,979 TFLOP/s: 1 TFLOP takes 1.011 and 0.505 ms."""
    case = Case.of("train", {"model": "nanogpt_char", "batch": 64})
    arms = {
        "bf16_eager": {"ms": 20.0, "flops": {"bf16": 1e12}},
        "bf16_eager:again": {"ms": 20.0, "flops": {"bf16": 1e12}, "baseline": "bf16_eager"},
        "rowwise_eager": {
            "ms": 30.0,
            "flops": {"e4m3": 1e12},
            "baseline": "bf16_eager",
            "resolved": {"recipe": "rowwise", "tokens_per_step": 16384},
        },
    }
    rows = Invented().times(case, arms)
    rows.append(figure(case, "rowwise_eager", "kernel_time_ms", 8.5, part="cast"))
    (finding,) = found(tmp_path, rows, "is slower than")
    assert finding.symptom == "rowwise_eager is slower than bf16_eager (nanogpt_char)"
    told = " ".join(finding.evidence)
    assert "can save at most 0.506 ms" in told
    assert "its casts take 8.5 ms" in told
    assert "with 16384 tokens a pass only layers wider than about" in told


# Casts


def test_delayed_scales_that_never_move(tmp_path):
    """Where the tensor does; a scale that stands still because the tensor does is healthy."""
    looks, still = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0], [6.0] * 6
    rows = rows_of_runs("base", BASE) + rows_of_runs("delayed", shifted(BASE), recipe="delayed")
    for part, scales, amax in (
        ("q:input", still, looks), ("q:weight", [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], looks), ("k:input", still, [1.0] * 6),
    ):  # fmt: skip
        rows.append(look("delayed", "scale_log2", part, scales, "delayed"))
        rows.append(look("delayed", "amax", part, amax, "delayed"))
    (finding,) = found(tmp_path, rows, "never move")
    assert finding.symptom == "delayed: 1 delayed scale never moves"
    assert finding.evidence == ("q:input: scale 2^6 at all 6 looks, amax 1 to 30",)
    assert "update_scales" in finding.change


@pytest.mark.parametrize("scaling", ["dynamic", "delayed", "static"])
@pytest.mark.parametrize("recipe", ["somebodys", "not_delayed", "statics_of_mine"])
def test_how_a_recipe_scales_is_read_from_its_rows(tmp_path, scaling, recipe):
    """Whatever it is called: a frozen scale is a finding of delayed scaling, saturation one of dynamic scaling."""
    rows = [
        look(recipe, "scale_log2", "q:input", [6.0] * 6, recipe, scaling=scaling),
        look(recipe, "amax", "q:input", [1.0, 2.0, 4.0, 8.0, 16.0, 30.0], recipe, scaling=scaling),
        look(recipe, "saturated_frac", "q:input", [1e-5], recipe, scaling=scaling),
    ]
    assert bool(found(tmp_path, rows, "never move")) == (scaling == "delayed")
    assert bool(found(tmp_path / "again", rows, "saturated")) == (scaling == "dynamic")


@pytest.mark.parametrize(
    ("metric", "part", "values", "recipe", "kind"),
    [
        ("saturated_frac", "q:input", [0.0, 1e-5], "tensorwise", "saturated"),
        ("saturated_frac", "q:input", [1e-5], "delayed", ""),  # clipping between two updates is its nature
        ("underflow_frac", "q:input", [0.02], "tensorwise", "underflow"),
        ("underflow_frac", "q:input", [0.009], "tensorwise", ""),
        ("sqnr_db", "q:input", [31.0, 27.0], "tensorwise", "SQNR"),
        ("sqnr_db", "q:input", [math.inf], "tensorwise", ""),
        ("sqnr_db", "q:grad_output", [21.0], "tensorwise", "SQNR"),
        ("sqnr_db", "q:grad_output", [25.0], "tensorwise", ""),
    ],
)
def test_alarms_of_single_tensors(tmp_path, metric, part, values, recipe, kind):
    alarms = found(tmp_path, [look(recipe, metric, part, values, recipe)], "alarm")
    assert [f.symptom for f in alarms] == ([f"{recipe}: {kind} alarm in 1 tensor"] if kind else [])
    assert all(part in f.evidence[0] for f in alarms)


# All of them


def test_remedies_name_functions_with_the_arguments_that_they_take():
    """Oracle: the signatures themselves; every call of fp8core in the text of a finding."""
    calls = set(re.findall(r"fp8core\.(\w+)\((.*?)\)", pathlib.Path(diagnosis.__file__).read_text()))
    assert {name for name, _ in calls} >= {"audit", "verify"}
    for name, arguments in calls:
        names = [a.strip() for a in arguments.split(",")]
        assert names == list(inspect.signature(getattr(fp8core, name)).parameters)[: len(names)], name
