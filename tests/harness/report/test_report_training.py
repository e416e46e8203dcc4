"""Report of training runs. Oracles: the rows that were written, scipy's t interval of the planted gaps, and arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from curves_for_tests import AXES, SEEDS, control, rows_of_runs, shifted, whole_suite
from diagnosed import look
from report_cases import train_cases
from report_fixtures import CPU, Invented, write_run
from report_pages import by_arm, machine, run_of, table

from harness.report import training, verdicts, write_report

BASE = control()


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    rows = [
        *whole_suite(),
        look("tensorwise", "sqnr_db", "layers.0.q:input", [31.5, 30.0]),
        look("tensorwise", "sqnr_db", "layers.0.q:input", [29.5], seed=1),
        look("tensorwise", "scale_log2", "layers.0.q:input", [8.0, 5.5]),
        look("tensorwise", "underflow_frac", "layers.0.q:input", [1e-4, 3e-4]),
        look("base_to_tensorwise", "sqnr_db", "layers.0.q:input", [28.5]),
    ]
    return write_run(tmp_path_factory.mktemp("cpu"), [rows], env=CPU, sweep="divergence")


@pytest.fixture
def gpu(tmp_path):
    return run_of(tmp_path, *train_cases(Invented()), whole_suite(), sweep="train")


def runs_of(base, **arms):
    return [
        *rows_of_runs("base", base),
        *(row for arm, runs in arms.items() for row in rows_of_runs(arm, runs, recipe=arm)),
    ]


def test_a_set_up_is_named_by_what_is_set_and_differs(tmp_path):
    """Where its data lies is no part of it; what differs is said of no row but its own."""
    both = [
        rows_of_runs(arm, BASE, {**AXES, "steps": steps, "diagnose_every": steps // 4, "data_path": path})
        for arm in ("base", "base_eps")
        for steps, path in ((300, "a"), (600, ""))
    ]
    found = run_of(tmp_path, *both)
    labels = {training.setup_label(found, setup.axes) for setup in found.trainings}
    assert labels == {"steps 300", "steps 600"}
    made = training.verdict_table(found)
    assert "diagnose_every" not in made.caption
    assert "data_path" not in made.caption + str(made.columns)


def test_a_control_that_one_of_two_set_ups_lacks_is_not_said_to_be_missing(tmp_path):
    """Oracle: the runs; `negative_control` was run with 300 steps alone."""
    both = [
        rows_of_runs(a, b, {**AXES, "steps": n})
        for n in (300, 600)
        for a, b in (("base", BASE), ("tensorwise", shifted(BASE)))
    ]
    broken = rows_of_runs("negative_control", shifted(BASE, 1.0), {**AXES, "steps": 300})
    found = run_of(tmp_path, *both, broken)
    everywhere, _, in_some = training.verdict_table(found).caption.partition(
        "Missing in some of these set-ups: "
    )
    assert "negative_control" in in_some
    assert "negative_control" not in everywhere
    *_, answer = verdicts.answers(found)
    assert answer.clause.endswith("no negative_control in 1 of 2 set-ups")


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
def test_the_fourth_answer_follows_from_the_verdicts(tmp_path, arms, verdict):
    *_, answer = verdicts.answers(run_of(tmp_path, runs_of(BASE, **arms)))
    assert (answer.about, answer.verdict) == ("same", verdict)


FP8 = {
    "recipe": "tensorwise",
    "fp8_layers": ["q"],
    "emulated": False,
    "fp8_gemms": 27,
    "fp8_gemms_expected": 27,
}


@pytest.mark.parametrize(
    ("proof", "verdict", "line"),
    [
        ({"verify": "FP8 verified: 9 of 9"}, "yes", "27 of 27 expected FP8 GEMMs seen."),
        (
            {"verify": "FP8 NOT verified: wrong"},
            "no",
            f"{SEEDS} training runs did not run in FP8 as asked: divergence tensorwise.",
        ),
        (
            {"verify": "perhaps", "verify_outcome": "unproven"},
            "can't tell",
            f"{SEEDS} measured arms could not be proved to run in FP8: divergence tensorwise.",
        ),
    ],
)
def test_a_training_run_alone_can_prove_fp8(tmp_path, proof, verdict, line):
    """The golden arm is emulated and counts for nothing."""
    golden = rows_of_runs(
        "tensorwise_golden", shifted(BASE), recipe="tensorwise", fp8_layers=["q"], emulated=True
    )
    rows = runs_of(BASE) + rows_of_runs("tensorwise", shifted(BASE), **FP8, **proof)
    answer = verdicts.did_fp8_run(run_of(tmp_path, rows + golden))
    assert (answer.verdict, answer.sentence) == (verdict, line)


def test_a_verdict_with_its_gates_and_limits(cpu):
    found = machine(cpu)
    made = training.verdict_table(found)
    rows = by_arm(made)
    assert {a: rows[a]["verdict"] for a in ("tensorwise", "negative_control")} == {
        "tensorwise": "PASS",
        "negative_control": "FAIL",
    }
    shown = [("negative_control", "L4 late", "FAIL"), ("base_to_tensorwise", "first phase", "PASS"),
             ("base_other", "seed band", "PASS"), ("base_other", "L4 late", "")]  # fmt: skip
    assert [(arm, gate, rows[arm][gate]) for arm, gate, _ in shown] == shown
    for where, told in (("the output", False), ("element 1 of 2", True)):
        found.trainings[0].resolved["tensorwise"]["loss_from"] = where
        assert ("Loss judged: element 1 of 2." in training.verdict_table(found).caption) == told


def test_seconds_to_loss_are_those_of_a_gpu_that_nobody_shares(cpu, gpu):
    """A step takes 0.01 s, and its loss is that before its update, which it ends with."""
    assert "second" not in table(training.reach_table(machine(cpu)))[0]
    rows = by_arm(training.reach_table(gpu))
    assert float(rows["base"]["second"]) == pytest.approx(0.01 * (float(rows["base"]["step"]) + 1), abs=0.02)
    negative = rows["negative_control"]
    assert (negative["reached"], negative["second"]) == (f"0 of {SEEDS}", "not reached")
    assert "base_other" not in rows
    gpu.trainings[0].resolved["base"]["runs_on_this_gpu"] = 3
    assert {(r["second"], r["sooner, seconds"]) for r in table(training.reach_table(gpu))} == {("N/A", "N/A")}


@pytest.mark.parametrize("lost", ["base", "tensorwise"])
def test_a_run_cut_at_its_first_steps_still_gives_a_report(tmp_path, lost):
    runs = {"base": BASE, "tensorwise": shifted(BASE)}
    runs[lost] = {s: type(r)(type(r.loss).of(np.array([2.0, np.nan]))) for s, r in runs[lost].items()}
    rows = [m for arm, own in runs.items() for m in rows_of_runs(arm, own)]
    page = write_report([write_run(tmp_path, [rows])], tmp_path / "report.html").html.read_text()
    assert "It trains the same" not in page


# What arms cost in loss
