"""Report of training runs: verdicts, curves, steps and findings. Oracles: the rows that were written, and arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from curves_for_tests import AXES, SEEDS, STEPS, control, rows_of_runs, shifted, whole_suite
from diagnosed import look
from report_cases import train_cases
from report_fixtures import CPU, Invented, write_run
from report_pages import machine, run_of, table

from harness.report import training, training_charts, verdicts, write_report
from harness.report.tables import every_row

BASE = control()


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    rows = [
        *whole_suite(),
        look("tensorwise", "sqnr_db", "layers.0.q:input", [31.5, 30.0]),
        look("tensorwise", "sqnr_db", "layers.0.q:input", [29.5], seed=1),
        look("tensorwise", "scale_log2", "layers.0.q:input", [8.0, 5.5]),
        look("tensorwise", "underflow_frac", "layers.0.q:input", [1e-4, 3e-4]),
        look("base_to_tensorwise", "sqnr_db", "layers.0.q:input", [28.5]),
    ]
    return write_run(folder, [rows], env=CPU, sweep="divergence"), folder


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return write_run(folder, [*train_cases(Invented()), whole_suite()], sweep="train"), folder


# The answer


def test_training_runs_add_a_fourth_answer(cpu):
    answer = training.trains_the_same(machine(cpu[0]))
    assert answer.verdict == "yes"
    assert answer.sentence == "3 FP8 arms against base, margin 0.25 % of the loss: 3 PASS."
    assert any("300 steps, 153,600 tokens a seed" in e for e in answer.evidence)


@pytest.mark.parametrize(
    ("arms", "verdict"),
    [
        ({"tensorwise": shifted(BASE, 0.1), "rowwise": shifted(BASE)}, "partly"),
        ({"tensorwise": shifted(BASE, 0.1)}, "no"),
        ({"tensorwise": shifted({s: BASE[s] for s in (0, 1)})}, "can't tell"),
        ({"tensorwise": shifted({s: BASE[s] for s in (0, 1)}), "rowwise": shifted(BASE)}, "partly"),
        ({}, "can't tell"),
        ({"tensorwise": shifted(BASE)}, "partly"),  # no negative control
        ({"tensorwise": shifted(BASE), "negative_control": shifted(BASE, 1.0)}, "yes"),
    ],
)
def test_the_answer_follows_from_the_verdicts(tmp_path, arms, verdict):
    rows = rows_of_runs("base", BASE)
    for arm, runs in arms.items():
        rows += rows_of_runs(arm, runs, recipe=arm)
    assert training.trains_the_same(run_of(tmp_path, rows)).verdict == verdict


def test_a_training_run_alone_can_prove_fp8(tmp_path):
    """Oracle: the sums by hand; the golden arm is emulated and counts for nothing."""
    fp8 = {
        "recipe": "tensorwise",
        "fp8_layers": ["q"],
        "emulated": False,
        "fp8_gemms": 27,
        "fp8_gemms_expected": 27,
    }
    proved = {**fp8, "verify": "FP8 verified: 9 of 9"}
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", shifted(BASE), **proved)
    rows += rows_of_runs(
        "tensorwise_golden", shifted(BASE), recipe="tensorwise", fp8_layers=["q"], emulated=True
    )
    answer = verdicts.did_fp8_run(run_of(tmp_path / "proved", rows))
    assert (answer.verdict, answer.sentence) == ("yes", "The profiler saw 27 of 27 expected FP8 GEMMs.")
    assert answer.evidence[0] == "divergence: 27 of 27 FP8 GEMMs seen in 1 measured arm"
    rows += rows_of_runs("rowwise", shifted(BASE), **{**fp8, "verify": "FP8 NOT verified: a scale is wrong"})
    answer = verdicts.did_fp8_run(run_of(tmp_path / "disproved", rows))
    assert (answer.verdict, answer.sentence) == (
        "no",
        f"{len(BASE)} training runs did not run in FP8 as asked.",
    )
    assert "divergence rowwise, seed 0: FP8 NOT verified: a scale is wrong" in answer.evidence
    unproven = {**fp8, "verify": "FP8 verified? perhaps", "verify_outcome": "unproven"}
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", shifted(BASE), **unproven)
    answer = verdicts.did_fp8_run(run_of(tmp_path / "unproven", rows))
    assert answer.verdict == "can't tell"
    assert answer.sentence == f"{len(BASE)} measured arms could not be proved to run in FP8."


# Tables


def test_the_verdict_table_has_a_row_an_arm_and_words_in_each_gate(cpu):
    rows = {r["arm"]: r for r in table(training.verdict_table(machine(cpu[0])))}
    assert len(rows) == 8
    assert rows["tensorwise"]["verdict"] == "PASS"
    assert rows["negative_control"]["verdict"] == "FAIL"
    assert rows["negative_control"]["L4 late"] == "FAIL"
    assert rows["base_to_tensorwise"]["first phase"] == "PASS"
    assert rows["base_other"]["seed band"] == "PASS"
    assert rows["base_other"]["L4 late"] == ""
    caption = training.verdict_table(machine(cpu[0])).caption
    assert "model nano" in caption
    assert "Missing" not in caption
    styles = {c.text: c.style for row in training.verdict_table(machine(cpu[0])).rows for c in row}
    assert (styles["PASS"], styles["can't tell"]) == ("pass", "muted")


@pytest.mark.parametrize(("where", "told"), [("element 1 of 2", True), ("the output", False)])
def test_a_loss_that_is_a_part_of_the_output_is_named_beside_its_verdict(cpu, where, told):
    found = machine(cpu[0])
    found.trainings[0].resolved["tensorwise"]["loss_from"] = where
    caption = training.verdict_table(found).caption
    assert ("Loss judged: element 1 of 2." in caption) == told
    assert ("Loss judged" in caption) == told


def test_fp8_arms_show_from_which_step_on_they_stay_in_the_noise(cpu):
    """Oracle: the verdicts' own figure; controls have none, and the sentence stands below the gates."""
    found = machine(cpu[0])
    settled = {v.arm: v.verdict.settled for v in found.verdicts}
    rows = {r["arm"]: r for r in table(training.verdict_table(found))}
    told = settled["tensorwise"]
    assert told.noise_runs == 5
    assert rows["tensorwise"]["gap stays small from step"] == f"{told.step:,.0f}"
    assert (rows["base_eps"]["gap stays small from step"], settled["base_eps"]) == ("", None)
    gates = [r for r in table(training.gates_table(found)) if r["arm"] == "tensorwise"]
    assert told.sentence in [r["what it says"] for r in gates]


def test_a_gap_that_never_settles_is_shown_as_such(tmp_path):
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", shifted(BASE, 0.1))
    rows += rows_of_runs("rowwise", {s: r for s, r in shifted(BASE).items() if s < 2})
    shown = {r["arm"]: r for r in table(training.verdict_table(run_of(tmp_path, rows)))}
    assert shown["tensorwise"]["gap stays small from step"] == "not reached"
    assert shown["rowwise"]["gap stays small from step"] == "can't tell"


def test_set_ups_get_columns_and_labels_of_their_own(tmp_path):
    rows = []
    for lr in (1e-3, 3e-3):
        axes = {**AXES, "lr": lr}
        rows += rows_of_runs("base", BASE, axes) + rows_of_runs("tensorwise", shifted(BASE), axes)
    found = run_of(tmp_path, rows)
    assert [r["lr"] for r in table(training.verdict_table(found))] == ["0.001", "0.003"]
    assert {r["arm"] for r in table(training.gates_table(found))} == {
        "tensorwise, lr 0.001",
        "tensorwise, lr 0.003",
    }
    assert [c.title for c in training_charts.losses(found)] == [
        "Loss: lr 0.001",
        "Paired gap: lr 0.001",
        "Loss: lr 0.003",
        "Paired gap: lr 0.003",
    ]


def test_findings_name_what_would_help(gpu):
    assert any(
        "axes.checkpointing=full" in r["change"] for r in table(training.findings_table(machine(gpu[0])))
    )


def test_seconds_to_loss_are_a_gpus_only(cpu, gpu):
    on_cpu, on_gpu = training.reach_table(machine(cpu[0])), training.reach_table(machine(gpu[0]))
    assert "second" not in [c.title for c in on_cpu.columns]
    assert "Seconds are left out" in on_cpu.caption
    rows = {r["arm"]: r for r in table(on_gpu)}
    # A step takes 0.01 s, and its loss is that before its update, which it ends with.
    assert float(rows["base"]["second"]) == pytest.approx(0.01 * (float(rows["base"]["step"]) + 1), abs=0.02)
    assert rows["negative_control"]["reached"] == f"0 of {SEEDS}"
    assert rows["negative_control"]["second"] == "not reached"
    assert "base_other" not in rows


def test_seconds_of_runs_that_shared_a_gpu_are_left_out(gpu):
    shared = machine(gpu[0])
    shared.trainings[0].resolved["base"]["runs_on_this_gpu"] = 3
    rows = table(training.reach_table(shared))
    assert {(r["second"], r["sooner, seconds"]) for r in rows} == {("N/A", "N/A")}
    assert rows[0]["step"] != "N/A"


def test_layers_show_their_worst_look_of_any_seed(cpu):
    (row,) = table(training.layers_table(machine(cpu[0])))
    assert row["tensor"] == "layers.0.q:input"
    assert row["SQNR (dB)"] == "29.5"
    assert row["underflow"] == "0.030 %"
    assert row["drift (log2)"] == "2.50"
    assert row["most amax"] == ""


def test_rows_of_layers_are_in_no_other_table(cpu):
    found = machine(cpu[0])
    assert len(every_row(found).rows) == int((found.frame["part"] == "").sum())
    curve = next(r for r in table(every_row(found)) if r["metric"] == "loss" and r["arm"] == "base")
    assert (curve["samples"], curve["q1"]) == (str(STEPS), "")
    assert float(curve["value"]) == pytest.approx(BASE[0].loss.values[-1], abs=1e-3)


# Charts


def test_charts_name_every_arm_and_say_what_lies_beyond_the_scale(cpu):
    loss, gap = training_charts.losses(machine(cpu[0]))
    for arm in ("base", "tensorwise", "base_to_tensorwise", "negative_control"):
        assert f">{arm}<" in loss.svg
    assert "other seeds, 95 %" in loss.svg
    assert ">margin<" in gap.svg
    assert "base_eps, 3 sd" in gap.svg
    assert "Beyond the scale: negative_control reaches +25." in gap.caption
    assert "base_to_tensorwise switches at step 60" in gap.caption


@pytest.mark.parametrize("lost", ["base", "tensorwise"])
def test_a_run_cut_at_its_first_steps_still_gives_a_report(tmp_path, lost):
    runs = {"base": BASE, "tensorwise": shifted(BASE)}
    loss = np.array([2.0, np.nan])
    broken = {s: type(r)(type(r.loss).of(loss)) for s, r in runs[lost].items()}
    rows = [m for arm, own in (runs | {lost: broken}).items() for m in rows_of_runs(arm, own)]
    written = write_report([write_run(tmp_path, [rows])], tmp_path / "report.html")
    assert "Can&#39;t tell" in written.html.read_text() or "No" in written.html.read_text()


# The page
