"""Verdict on stored rows: every arm of an invented sweep after one trip through the real store."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest
from curves_for_tests import case_of, control, rows_of_runs, shifted, whole_suite
from report_fixtures import H200, absent, frame, write_run

from harness.cli.measure import _print_findings
from harness.judge.verdict import Curve, StoredVerdicts, judge
from harness.judge.verdict.rows import by_setup, setups
from harness.store.outside import parse

BASE = control()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return judge(frame(tmp_path_factory.mktemp("whole"), whole_suite()))


def by_arm(verdicts):
    return {v.arm: v for v in verdicts}


def test_each_arm_is_held_against_the_arm_that_its_name_says(whole):
    against = {v.arm: v.against for v in whole}
    assert against["tensorwise_eps"] == "tensorwise"
    assert {against[a] for a in against if a != "tensorwise_eps"} == {"base"}
    arms = by_arm(whole)
    assert "golden arm" in arms["tensorwise"].verdict.gate("L6").sentence
    assert arms["base_to_tensorwise"].verdict.gate("prefix").sentence.startswith("bitwise equal to base in ")
    assert (
        arms["tensorwise_to_base"].verdict.gate("prefix").sentence.startswith("bitwise equal to tensorwise")
    )
    assert arms["base_other"].verdict.gate("L4") is None


@pytest.mark.parametrize(
    ("arm", "runs"),
    [("negative_control", shifted(BASE, 0.0001)), ("base_eps", shifted(BASE, 0.1))],
    ids=["a negative control that passes", "a perturbed control that fails"],
)
def test_where_a_control_is_wrong_nothing_passes(tmp_path, arm, runs):
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", shifted(BASE)) + rows_of_runs(arm, runs)
    arms = by_arm(judge(frame(tmp_path, rows)))
    assert arms[arm].surprising
    assert arms["tensorwise"].verdict.outcome == "INCONCLUSIVE"
    assert any("this set-up cannot tell" in n for n in arms["tensorwise"].verdict.notes)


@pytest.mark.parametrize(
    "elsewhere", [lambda seed, arm: seed > 3, lambda seed, arm: arm == "base"], ids=["seeds", "the control"]
)
def test_a_run_of_two_machines_is_judged_machine_by_machine(tmp_path, elsewhere):
    """Oracle: the page, which has a section for each machine: seeds of another are not added, nor is its control taken."""
    base = control(range(8))
    rows = rows_of_runs("base", base) + rows_of_runs("tensorwise", shifted(base))
    places = {
        where: [r for r in rows if elsewhere(parse(r.axes)["seed"], r.arm) is where]
        for where in (False, True)
    }
    stored = pd.concat(
        [
            frame(tmp_path / str(where), own, env=H200 | {"driver": str(where)}, env_id=str(where))
            for where, own in places.items()
        ]
    )
    verdicts = judge(stored)
    apart = [v for where in places for v in judge(stored[stored["env_id"] == str(where)])]
    told = [
        [(v.env_id, v.arm, v.verdict.outcome, v.verdict.reasons) for v in each] for each in (verdicts, apart)
    ]
    assert told[0] == told[1]
    assert {v.verdict.gate("L4").seeds for v in verdicts if v.verdict.gate("L4")} <= {4}
    assert len(by_setup(verdicts)) == len({v.env_id for v in verdicts})


def test_what_all_arms_say_is_said_once(tmp_path):
    """Two seeds: no gate has an interval, in any arm."""
    few = {s: run for s, run in BASE.items() if s < 2}
    rows = (
        rows_of_runs("base", few)
        + rows_of_runs("base_eps", shifted(few))
        + rows_of_runs("tensorwise", shifted(few))
    )
    told = StoredVerdicts(judge(frame(tmp_path, rows))).lines()
    assert len(told) == len(set(told))
    (why,) = [line for line in told if "2 paired seeds" in line]
    assert why.startswith("  base_eps, tensorwise: L2, L3, L4, L4h, L5, L6: 2 paired seeds; 3 are the least")


@pytest.mark.parametrize("backwards", [False, True])
def test_a_seed_that_was_emulated_excuses_no_other_from_its_proof(tmp_path, backwards):
    runs = shifted(BASE)
    last = max(runs)
    others = {s: r for s, r in runs.items() if s != last}
    parts = [
        rows_of_runs("tensorwise", others, verify="", emulated=False),
        rows_of_runs("tensorwise", {last: runs[last]}, verify="", emulated=True),
    ]
    rows = rows_of_runs("base", BASE) + [row for part in parts[:: -1 if backwards else 1] for row in part]
    rows += rows_of_runs("mxfp8", runs, verify="", emulated=True)
    rows += rows_of_runs("rowwise", others) + rows_of_runs("rowwise", {last: runs[last]}, verify="")
    arms = by_arm(judge(frame(tmp_path, rows)))
    assert arms["tensorwise"].verdict.outcome == "INCONCLUSIVE"
    assert arms["mxfp8"].verdict.outcome == "PASS"
    assert any(note.startswith("emulated: ") for note in arms["mxfp8"].verdict.notes)
    assert arms["rowwise"].verdict.outcome == "INCONCLUSIVE"
    assert any(note.startswith(f"seed {last}: no row says") for note in arms["rowwise"].verdict.notes)


@pytest.mark.parametrize("arm", ["base_eps", "base_other"])
def test_a_control_that_must_pass_and_cannot_tell_is_told_and_demotes_nothing(tmp_path, arm):
    """Too little data in it shows no fault; what the candidate's own data shows stands."""
    few = {s: r for s, r in shifted(BASE).items() if s < 2}
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", shifted(BASE)) + rows_of_runs(arm, few)
    arms = by_arm(judge(frame(tmp_path, rows)))
    assert arms[arm].verdict.outcome == "INCONCLUSIVE"
    assert not arms[arm].surprising
    assert arms["tensorwise"].verdict.outcome == "PASS"
    assert arms["tensorwise"].verdict.notes == (
        f"{arm} is INCONCLUSIVE: that this set-up passes what it must was not shown",
    )


@pytest.mark.parametrize(
    ("schedule", "phase"),
    [("warmup_bf16:60", "PASS"), ("cooldown_bf16:0.2", None), ("warmup_bf16:60@layers.0.*", None)],
)
def test_an_arm_with_a_schedule_of_its_own(tmp_path, schedule, phase):
    """A warm-up of the whole model is bitwise base at first; what other schedules equal is in no row of this set-up."""
    warm = {}
    for seed, run in shifted(BASE).items():
        loss, switch = run.loss.values.copy(), 240 if "cool" in schedule else 60
        if phase:
            loss[:switch] = BASE[seed].loss.values[:switch]
            run.grad_norm.values[:switch] = BASE[seed].grad_norm.values[:switch]
        warm[seed] = dataclasses.replace(run, loss=Curve.of(loss), switch_step=switch)
    eps = shifted(warm)
    rows = rows_of_runs("base", BASE) + rows_of_runs("tensorwise", warm, schedule=schedule)
    rows += rows_of_runs("tensorwise_eps", eps, schedule=schedule, switch_steps=[60])
    arms = by_arm(judge(frame(tmp_path, rows)))
    found = arms["tensorwise"].verdict.gate("prefix")
    assert (found and found.status) == phase
    assert arms["tensorwise_eps"].verdict.gate("prefix") is None
    assert arms["tensorwise"].verdict.outcome == "PASS"
    noted = any("first phase was not compared" in n for n in arms["tensorwise"].verdict.notes)
    assert noted == (phase is None)


def test_rows_of_other_suites_and_of_layers_are_passed_over(tmp_path):
    rows = rows_of_runs("base", BASE)
    layer = dataclasses.replace(rows[0], part="layers.0.q:input", samples=(9.0,), rounds=(0,))
    stored = frame(tmp_path, [*rows, layer])
    (setup,) = setups(stored)
    np.testing.assert_array_equal(setup.arms["base"][0].loss.values, BASE[0].loss.values)
    assert judge(stored[stored["suite"] == "linear"]) == []


def test_the_end_of_a_run_prints_verdicts_and_findings(tmp_path, capsys):
    rows = rows_of_runs("base", BASE) + rows_of_runs("rowwise", BASE, recipe="rowwise")
    folder = write_run(tmp_path, [rows])
    _print_findings(folder)
    printed = capsys.readouterr().out
    assert "INCONCLUSIVE rowwise against base" in printed
    assert "finding  divergence rowwise did not run in FP8" in printed
    _print_findings(folder, judged=False)
    printed = capsys.readouterr().out
    assert "not judged: train.judge=false" in printed
    assert not any(outcome in printed for outcome in ("PASS", "INCONCLUSIVE", "FAIL "))


@pytest.mark.parametrize(("layers", "outcome"), [(["up", "head"], "PASS"), (["up"], "FAIL")])
def test_a_golden_arm_that_rounds_other_layers_is_not_compared(tmp_path, layers, outcome):
    """Seen in nanoGPT's character setting: the emulation took the head (65 wide) that no kernel takes, and gradients seemed
    0.68 times the golden arm's. The twin has the same layers, so there the size is a fault."""
    rows = rows_of_runs("base", BASE)
    rows += rows_of_runs("tensorwise", shifted(BASE, 0.0003), recipe="tensorwise", fp8_layers=["up"])
    golden = shifted(BASE, 0.0003, sd=3e-4, ratio=1 / 0.68)
    rows += rows_of_runs("tensorwise_golden", golden, fp8_layers=layers)
    found = by_arm(judge(frame(tmp_path, rows)))["tensorwise"].verdict
    assert found.gate("L6").status == outcome
    told = any("it rounds other layers (head)" in note for note in found.notes)
    assert told == (outcome == "PASS")


@pytest.mark.parametrize(
    ("mine", "golden", "outcome"),
    [
        ({"verify_outcome": "proved", "emulated": False}, {"emulated": True}, "PASS"),
        ({"verify_outcome": "proved", "emulated": True}, {"emulated": True}, "INCONCLUSIVE"),
        ({"verify_outcome": "proved", "emulated": False}, {"emulated": False}, "INCONCLUSIVE"),
        ({"verify_outcome": "unproven", "emulated": False}, {"emulated": True}, "INCONCLUSIVE"),
        ({"verify": "", "emulated": False}, {"emulated": True}, "INCONCLUSIVE"),
    ],
)
def test_losses_of_the_golden_arm_are_no_doubt_where_the_kernels_were_proved(tmp_path, mine, golden, outcome):
    """Seen on a CPU, `rowwise` in a small Llama: 42 of 42 FP8 GEMMs, and the emulation's sums bit for bit."""
    losses = shifted(BASE, 0.0003)
    rows = rows_of_runs("base", BASE) + rows_of_runs("rowwise", losses, recipe="rowwise", **mine)
    found = by_arm(judge(frame(tmp_path, rows + rows_of_runs("rowwise_golden", losses, **golden))))[
        "rowwise"
    ].verdict
    assert found.outcome == outcome
    assert any("every loss is bitwise equal to rowwise_golden" in note for note in found.notes)


def test_without_a_control_or_a_run_nothing_is_judged_as_passed(tmp_path):
    rows = rows_of_runs("tensorwise", shifted(BASE))
    rows.append(absent(case_of(0), "rowwise", "failed", "no kernel", "base", "loss"))
    arms = by_arm(judge(frame(tmp_path, rows)))
    assert arms["tensorwise"].verdict.outcome == arms["rowwise"].verdict.outcome == "INCONCLUSIVE"
    assert "no finished run of base" in arms["tensorwise"].verdict.gate("L1").sentence
    assert arms["rowwise"].verdict.notes == ("seed 0: no kernel",)
