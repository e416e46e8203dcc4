"""Training steps in the report. Oracle: rows with planted times, checks and memory."""

from __future__ import annotations

import pytest
from curves_for_tests import whole_suite
from report_cases import KERNELS, train_cases
from report_fixtures import Invented, absent, figure, write_run
from report_pages import machine, run_of, table

from harness.report import steps, verdicts, write_report
from harness.store.case import Case
from harness.store.cause import Cause


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return write_run(folder, [*train_cases(Invented()), whole_suite()], sweep="train"), folder


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


# What was proved of a step before it was timed


def first_step(arm="tensorwise_eager", **changes):
    """One FP8 arm of a training case, timed, as the suite `train` stores it."""
    resolved = {
        "first_loss": 5.501, "first_loss_control": 5.5, "first_grad_norm_ratio": 1.01, "fp8_layers": 9,
        "fp8_gemms": 27, "fp8_gemms_expected": 27, "verify": "FP8 verified: 27 of 27", "verify_outcome": "proved", **changes,
    }  # fmt: skip
    return {arm: {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": resolved}}


@pytest.mark.parametrize(
    ("changes", "verdict", "said"),
    [
        ({}, "yes", "largest gap of a first loss 0.0010 nats, of tensorwise_eager; norm of the first gradients at worst 1.01"),
        ({"verify": "", "verify_outcome": ""}, "yes", "largest gap of a first loss 0.0010 nats"),
        ({"verify_warnings": ["head: 2 % underflow"]}, "yes", "warning: head: 2 % underflow (tensorwise_eager)"),
        ({"verify": "FP8 NOT verified: nothing", "verify_outcome": "disproved"}, "no", "train tensorwise_eager: FP8 NOT verified: nothing"),
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
