"""Report of training runs: verdicts, curves, steps and findings. Oracles: the rows that were written, and arithmetic."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from curves_for_tests import AXES, SEEDS, STEPS, case_of, control, rows_of_runs, shifted, whole_suite
from report_fixtures import CPU, KERNELS, Invented, absent, figure, train_cases, write_run
from test_diagnosis import look

from harness.report import steps, training, training_charts, verdicts, write_report
from harness.report.runs import load
from harness.report.tables import every_row
from harness.store.case import Case
from harness.store.cause import Cause

BASE = control()


def machine(path):
    """The only machine of a run."""
    (found,) = load([path], Path()).machines
    return found


def run_of(tmp_path, *cases, **more):
    return machine(write_run(tmp_path, cases, **more))


def table(made):
    """Rows as {column title: text}."""
    titles = [c.title for c in made.columns]
    return [{t: cell.text for t, cell in zip(titles, row, strict=True)} for row in made.rows]


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


def test_converted_layers_alone_do_not_prove_fp8(tmp_path):
    """Nothing counted their GEMMs, and the report does not claim that none ran."""
    rows = rows_of_runs("base", BASE) + rows_of_runs(
        "tensorwise", shifted(BASE), recipe="tensorwise", fp8_layers=["q"]
    )
    answer = verdicts.did_fp8_run(run_of(tmp_path, rows))
    assert answer.verdict == "can't tell"
    assert answer.sentence == "FP8 arms ran, but nothing counted their GEMMs."


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


def test_missing_controls_stand_in_the_caption(tmp_path):
    found = run_of(tmp_path, rows_of_runs("base", BASE) + rows_of_runs("tensorwise", shifted(BASE)))
    assert (
        "negative_control (that a broken arm would fail here was not shown)"
        in training.verdict_table(found).caption
    )


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


def test_every_gate_stands_in_words(cpu):
    rows = table(training.gates_table(machine(cpu[0])))
    late = next(r for r in rows if (r["arm"], r["gate"]) == ("tensorwise", "L4 late"))
    assert re.search(
        r"90 % interval .* margin 0.250 %, sd .*, 5 seeds: inside the margin", late["what it says"]
    )
    notes = [r for r in rows if r["gate"] == "note"]
    assert any("late gap after the cool-down" in r["what it says"] for r in notes)


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


def test_charts_of_long_curves_are_thinned(tmp_path):
    long = control(range(3), steps=3000)
    axes = {**AXES, "steps": 3000}
    found = run_of(
        tmp_path, rows_of_runs("base", long, axes) + rows_of_runs("tensorwise", shifted(long), axes)
    )
    assert all(len(c.svg) < 60_000 for c in training_charts.losses(found))


@pytest.mark.parametrize("lost", ["base", "tensorwise"])
def test_a_run_cut_at_its_first_steps_still_gives_a_report(tmp_path, lost):
    runs = {"base": BASE, "tensorwise": shifted(BASE)}
    loss = np.array([2.0, np.nan])
    broken = {s: type(r)(type(r.loss).of(loss)) for s, r in runs[lost].items()}
    rows = [m for arm, own in (runs | {lost: broken}).items() for m in rows_of_runs(arm, own)]
    written = write_report([write_run(tmp_path, [rows])], tmp_path / "report.html")
    assert "Can&#39;t tell" in written.html.read_text() or "No" in written.html.read_text()


# Training steps


def test_speed_and_cost_of_a_step(gpu):
    """Oracles: tokens / median time; cold compile time / what a compiled step gains over the eager one."""
    found = machine(gpu[0])
    speed, cost = (table(t) for t in steps.steps_tables(found))
    times = found.frame[(found.frame["suite"] == "train") & (found.frame["metric"] == "time_ms")]
    own = times[times["axes"].str.contains("llama3_1b") & (times["status"] == "ok")].set_index("arm")["value"]
    row = next(r for r in speed if (r["model"], r["arm"]) == ("llama3_1b", "tensorwise_compile"))
    assert float(row["tokens/s"].replace(",", "")) == pytest.approx(
        16384 / own["tensorwise_compile"] * 1e3, rel=5e-3
    )
    assert row["speedup"] == "1.27x"
    row = next(r for r in cost if (r["model"], r["arm"]) == ("llama3_1b", "tensorwise_compile"))
    assert (row["compile cold (s)"], row["warm (s)"], row["graph breaks"]) == ("51.0", "9.00", "0")
    gain = (own["tensorwise_eager"] - own["tensorwise_compile"]) / 1e3
    assert float(row["pays after (calls)"].replace(",", "")) == pytest.approx(51 / gain, abs=1)
    assert row["peak memory"] == "35.02 GiB"
    failed = next(r for r in speed if (r["model"], r["arm"]) == ("llama3_1b", "rowwise_eager"))
    assert (failed["step (ms)"], failed["tokens/s"]) == ("failed", "")


def test_compiling_that_gains_nothing_never_pays(tmp_path):
    case = Case.of("train", {"model": "nano"})
    rows = Invented().times(case, {"bf16_eager": {"ms": 1.0}, "bf16_compile": {"ms": 2.0}})
    rows.append(
        figure(
            case,
            "bf16_compile",
            "compile_s",
            30.0,
            resolved={"compile_cache": "cold", "compile_graphs": 3, "compile_graph_breaks": 2},
        )
    )
    cost = table(steps.steps_tables(run_of(tmp_path, rows))[1])
    assert [r["pays after (calls)"] for r in cost if r["arm"] == "bf16_compile"] == ["never"]
    assert [r["graph breaks"] for r in cost if r["arm"] == "bf16_compile"] == ["2"]


def test_advised_arms_stand_first_with_their_bar(tmp_path):
    """Oracle: an arm of 0.9 with the layers that were advised, planted; the run's control that nothing is converted in."""
    advised = Case.of("train", {"model": "gpt2", "convert": "advised"})
    on = {"converted": ["up"], "left_in_bf16": {"proj": ""}, "predicted_step": [1.1, 1.0, 1.2]}
    off = {"converted": [], "left_in_bf16": {"up": "", "proj": ""}, "predicted_step": None}
    arms = {"bf16_eager": {"ms": 10.0, "flops": {"bf16": 1e9}}}
    for arm, ms, advice in (("tensorwise_eager", 10 / 0.9, on), ("rowwise_eager", 10.0, off)):
        arms[arm] = {"ms": ms, "baseline": "bf16_eager", "resolved": {"advice": advice}}
    found = run_of(tmp_path, Invented(spread=0.001).times(advised, arms))
    made = steps.advised_table(found)
    below, control = table(made)
    assert (below["arm"], below["predicted"], below["layers in FP8"]) == (
        "tensorwise_eager",
        "1.10x",
        "1 of 2",
    )
    assert below["not below 0.98"] == "below"
    assert (control["predicted"], control["not below 0.98"]) == ("its control", "holds")
    assert made.caption.startswith(
        "advised filter: 1 of 2 arms below 0.98 of bf16 beyond noise (gpt2, tensorwise"
    )
    page = write_report([tmp_path], tmp_path / "r.html")
    assert made.caption in page.markdown.read_text()
    assert not steps.advised_table(run_of(tmp_path / "other", *train_cases(Invented()))).rows


def test_a_prediction_of_memory_is_shown_where_nothing_else_is_known(tmp_path):
    """A CPU's allocator keeps no peak."""
    case = Case.of("train", {"model": "nano"})
    rows = Invented().times(case, {"bf16_eager": {"ms": 1.0}})
    rows.append(figure(case, "bf16_eager", "predicted_memory_bytes", float(3 << 20)))
    _, cost = (table(t) for t in steps.steps_tables(run_of(tmp_path, rows)))
    assert cost == [{"arm": "bf16_eager", "predicted": "3 MiB"}]


def test_the_breakdown_adds_up(gpu):
    """Oracle: the sum of the classes that the fixture gives to an arm, nine times."""
    (chart,) = steps.breakdown(machine(gpu[0]))
    for precision in KERNELS:
        assert f"{9 * sum(KERNELS[precision].values()):.0f} ms" in chart.svg
    for name in ("fp8_gemm", "bf16_gemm", "cast", "attention", "other"):
        assert f">{name}<" in chart.svg


def test_a_run_of_training_steps_only_has_no_training_answer(tmp_path):
    found = run_of(tmp_path, *train_cases(Invented()))
    assert found.trainings == found.verdicts == []
    html = write_report(
        [write_run(tmp_path / "x", train_cases(Invented()))], tmp_path / "r.html"
    ).html.read_text()
    assert "Does it train the same" not in html
    assert "Training steps" in html


# What was proved of a step before it was timed


def first_step(arm="tensorwise_eager", **changes):
    """One FP8 arm of a training case, timed, as the suite `train` stores it."""
    resolved = {
        "first_loss": 5.501, "first_loss_control": 5.5, "first_grad_norm_ratio": 1.01, "fp8_layers": 9,
        "fp8_gemms": 27, "fp8_gemms_expected": 27, "verify": "FP8 verified: 27 of 27", **changes,
    }  # fmt: skip
    return {arm: {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": resolved}}


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "yes", "largest gap of a first loss 0.0010 nats, of tensorwise_eager; norm of the first gradients at worst 1.01"),
        ({"verify": ""}, "yes", "largest gap of a first loss 0.0010 nats"),
        ({"verify_warnings": ["head: 2 % underflow"]}, "yes", "warning: head: 2 % underflow (tensorwise_eager)"),
        ({"verify": "FP8 NOT verified: nothing"}, "no", "train tensorwise_eager: FP8 NOT verified: nothing"),
        ({"first_loss": None}, "no", "train tensorwise_eager: its first loss, or the control's, is no number"),
        ({"fp8_layers": 0}, "can't tell", None),
    ],
)  # fmt: skip
def test_checks_of_a_training_step_answer_whether_it_is_sound(tmp_path, changes, verdict, said):
    case = Case.of("train", {"model": "nano"})
    answer = verdicts.is_sound(run_of(tmp_path, Invented().times(case, first_step(**changes))))
    assert answer.verdict == verdict
    if said is not None:
        assert any(said in line for line in answer.evidence)
    if verdict == "yes":
        assert answer.sentence.startswith(
            "The first training step of tensorwise_eager agrees with the control's"
        )


def test_a_step_that_failed_its_check_is_a_no(tmp_path):
    case = Case.of("train", {"model": "nano"})
    rows = Invented().times(case, first_step())
    why = "numerics: first loss 9.0000, the baseline's is 5.5000: 3.5000 apart, 0.02 allowed"
    wrong = absent(case, "rowwise_eager", "failed", why, cause=Cause.NUMERICS)
    answer = verdicts.is_sound(run_of(tmp_path, [*rows, wrong]))
    assert answer.verdict == "no"
    assert answer.evidence[0].startswith("train rowwise_eager: nano: first loss 9.0000")


def test_traces_are_named_as_they_lie_in_the_run_folder(tmp_path):
    case = Case.of("train", {"model": "nano"})
    rows = Invented().times(case, first_step(trace="trace-x.json.gz", trace_steps=[2, 3]))
    found = run_of(tmp_path, rows + Invented().times(case, first_step("rowwise_eager")))
    made = steps.traces_table(found)
    assert table(made) == [{"arm": "tensorwise_eager", "steps": "2 to 3", "trace": "trace-x.json.gz"}]
    assert found.runs[0].run_id in made.caption


# The page


def test_the_pages_of_cpu_and_gpu_stay_honest(cpu, gpu):
    on_cpu = write_report([cpu[0]], cpu[1] / "cpu.html")
    on_gpu = write_report([gpu[0]], gpu[1] / "gpu.html")
    assert "Measured on a CPU" in on_cpu.html.read_text()
    page = on_gpu.html.read_text()
    assert "Findings" in page
    assert "axes.checkpointing=full, which frees at most 60.00 GiB" in page
    twin = on_cpu.markdown.read_text()
    assert "**Does it train the same? Yes.**" in twin
    assert "| negative_control | FAIL; as it should |" in twin
    for written in (on_cpu, on_gpu):
        assert written.html.stat().st_size < 2_000_000


def test_the_same_rows_give_the_same_bytes(cpu):
    one = write_report([cpu[0]], cpu[1] / "one.html").html.read_bytes()
    two = write_report([cpu[0]], cpu[1] / "one.html").html.read_bytes()
    assert one == two


def test_the_seed_of_a_case_is_no_set_up(cpu):
    assert len(machine(cpu[0]).trainings) == 1
    assert case_of(0).case_id != case_of(1).case_id
