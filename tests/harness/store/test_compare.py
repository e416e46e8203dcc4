"""compare: paired ratios, noise floor, verdicts, rates, the square. Oracles: scipy, and figures worked out by hand."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import scipy.stats
from report_cases import linear_cases
from report_fixtures import TIMING, Invented, absent, frame

from harness.store.case import Case
from harness.store.compare import PRECISIONS, paired_ratios, square, summary, with_rates
from harness.store.measurement import Measurement

CASE = Case.of("gemm", {"M": 16, "K": 32, "N": 48})


def timed(arm, samples, baseline="", rounds=None, regime="isolated", case=CASE, **more):
    """A time row; one sample a round unless `rounds` says otherwise."""
    return Measurement(
        case.suite,
        case.case_id,
        arm,
        case.axes_json,
        "time_ms",
        "ok",
        baseline=baseline,
        regime=regime,
        samples=tuple(samples),
        rounds=tuple(range(len(samples)) if rounds is None else rounds),
        timing=more.pop("timing", TIMING),
        **more,
    )


def only(ratios, arm="fp8"):
    """The single row of an arm as a dictionary."""
    rows = ratios[ratios["arm"] == arm].to_dict("records")
    assert len(rows) == 1
    return rows[0]


def around(level, spread, n=10, seed=0):
    """n values around a level with a given relative spread."""
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, spread)) for _ in range(n)]


def test_steps_of_different_batches_compare_by_the_token(tmp_path):
    """By hand: a step of three times the tokens in twice the time is 1.5 times as fast."""
    rows = [
        timed("bf16", [4.0] * 8, resolved={"tokens_per_step": 1000}),
        timed("fp8", [8.0] * 8, "bf16", resolved={"tokens_per_step": 3000}),
        timed("plain", [8.0] * 8, "bf16"),
    ]
    ratios = paired_ratios(frame(tmp_path, rows))
    assert only(ratios)["speedup"] == pytest.approx(1.5)
    assert only(ratios, "plain")["speedup"] == pytest.approx(0.5)


def test_speedup_is_baseline_over_arm(tmp_path):
    """By hand: an arm of half the time has a speedup of 2, one of double the time 0.5."""
    rows = [timed("bf16", [4.0] * 8), timed("fp8", [2.0] * 8, "bf16"), timed("slow", [8.0] * 8, "bf16")]
    ratios = paired_ratios(frame(tmp_path, rows))
    assert only(ratios)["speedup"] == pytest.approx(2.0)
    assert only(ratios, "slow")["speedup"] == pytest.approx(0.5)
    assert [only(ratios)["verdict"], only(ratios, "slow")["verdict"]] == ["faster", "slower"]


def test_interval_is_students_on_logs_of_round_medians(tmp_path):
    """Oracle: scipy.stats.t.interval on log ratios of medians, computed here from the raw samples."""
    rng = np.random.default_rng(3)
    rounds = np.repeat(np.arange(6), 5)
    a, b = (rng.lognormal(0.7, 0.1, 30), rng.lognormal(0.2, 0.1, 30))
    rows = [timed("bf16", a, rounds=rounds.tolist()), timed("fp8", b, "bf16", rounds.tolist())]
    got = only(paired_ratios(frame(tmp_path, rows)))
    logs = np.log([np.median(a[rounds == r]) / np.median(b[rounds == r]) for r in range(6)])
    low, high = scipy.stats.t.interval(0.95, 5, loc=logs.mean(), scale=scipy.stats.sem(logs))
    assert [got["speedup"], got["low"], got["high"]] == pytest.approx(np.exp([logs.mean(), low, high]))
    assert got["rounds"] == 6


def test_drift_shared_by_a_round_cancels(tmp_path):
    """By hand: both arms drift by a factor of three over the rounds; each round's ratio is 1.1 exactly."""
    level = [1.0, 1.4, 2.0, 3.0]
    rows = [timed("bf16", [1.1 * x for x in level]), timed("fp8", level, "bf16")]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert [got["speedup"], got["low"], got["high"]] == pytest.approx([1.1, 1.1, 1.1])


def test_only_shared_rounds_are_paired(tmp_path):
    rows = [timed("bf16", [2.0, 2.0, 2.0, 9.0]), timed("fp8", [7.0, 1.0, 1.0, 1.0], "bf16", [9, 0, 1, 2])]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert got["rounds"] == 3
    assert got["speedup"] == pytest.approx(2.0)


def test_floor_is_the_far_end_of_the_controls_interval(tmp_path):
    """Oracle: scipy on the control's log ratios; the control itself is no row of the result."""
    base, again = around(1.0, 0.01), around(1.0, 0.01, seed=1)
    rows = [
        timed("bf16", base),
        timed("bf16:again", again, "bf16"),
        timed("fp8", around(0.5, 0.01, seed=2), "bf16"),
    ]
    ratios = paired_ratios(frame(tmp_path, rows))
    logs = np.log(np.array(base) / np.array(again))
    ends = scipy.stats.t.interval(0.95, 9, loc=logs.mean(), scale=scipy.stats.sem(logs))
    assert only(ratios)["floor"] == pytest.approx(math.exp(max(abs(e) for e in ends)))
    assert list(ratios["arm"]) == ["fp8"]


@pytest.mark.parametrize(
    ("gain", "verdict"), [(1.005, "same"), (1 / 1.005, "same"), (1.05, "faster"), (0.95, "slower")]
)
def test_a_difference_below_the_floor_is_a_tie(tmp_path, gain, verdict):
    """The arm's own interval is all but a point; what decides is how far two equal arms lay apart (2 %)."""
    base = around(1.0, 0.01)
    control = [x * y for x, y in zip(base, around(1.02, 0.0005, seed=1), strict=True)]
    arm = [x / gain * y for x, y in zip(base, around(1.0, 0.0005, seed=2), strict=True)]
    rows = [timed("bf16", base), timed("bf16:again", control, "bf16"), timed("fp8", arm, "bf16")]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert got["verdict"] == verdict
    assert "A/A noise floor" in got["reason"]


def test_a_noisy_machine_says_unclear_not_same(tmp_path):
    rows = [timed("bf16", around(1.0, 0.3)), timed("bf16:again", around(1.0, 0.3, seed=1), "bf16")]
    rows.append(timed("fp8", around(1.0, 0.3, seed=2), "bf16"))
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert got["floor"] > 1.1
    assert got["verdict"] == "unclear"
    assert "too noisy" in got["reason"]


def test_an_interval_that_holds_one_is_unclear(tmp_path):
    """Without a control there is no floor to call it a tie by."""
    rows = [timed("bf16", around(1.0, 0.1)), timed("fp8", around(0.98, 0.1, seed=1), "bf16")]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert got["low"] < 1 < got["high"]
    assert got["verdict"] == "unclear"
    assert "no A/A control" in got["reason"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_too_few_rounds_give_no_interval(tmp_path, rounds):
    rows = [timed("bf16", [4.0] * rounds), timed("fp8", [2.0] * rounds, "bf16")]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert got["verdict"] == "unclear"
    assert got["speedup"] == pytest.approx(2.0)
    assert math.isnan(got["low"])
    assert math.isnan(got["high"])


def test_arms_without_a_common_round_are_unclear(tmp_path):
    rows = [timed("bf16", [4.0] * 3), timed("fp8", [2.0] * 3, "bf16", [3, 4, 5])]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert (got["verdict"], got["rounds"]) == ("unclear", 0)
    assert math.isnan(got["speedup"])


def test_missing_pairs_carry_their_reason(tmp_path):
    other = Case.of("gemm", {"M": 1})
    third = Case.of("gemm", {"M": 2})
    rows = [
        timed("bf16_eager", [1.0] * 4),
        absent(CASE, "fp8", "skipped", "K=100 is no multiple of 16", "bf16_eager"),
        absent(other, "bf16_eager", "failed", "out of memory"),
        timed("fp8", [1.0] * 4, "bf16_eager", case=other),
        timed("fp8", [1.0] * 4, "bf16_eager", case=third),
    ]
    ratios = paired_ratios(frame(tmp_path, rows))
    assert set(ratios["verdict"]) == {"missing"}
    assert ratios["speedup"].isna().all()
    reasons = dict(zip(ratios["case_id"], ratios["reason"], strict=True))
    assert reasons[CASE.case_id] == "skipped: K=100 is no multiple of 16"
    assert reasons[other.case_id] == "its baseline bf16_eager was failed: out of memory"
    assert reasons[third.case_id] == "its baseline bf16_eager was not measured in this run"


def test_environments_that_differ_are_refused(tmp_path):
    stored = frame(tmp_path, [timed("bf16", [2.0] * 4), timed("fp8", [1.0] * 4, "bf16")])
    changed = json.loads(stored["env"].iloc[0]) | {"driver": "999.1", "git_commit": "another"}
    arm = stored["arm"] == "fp8"
    stored.loc[arm, "env_id"] = "other"
    stored.loc[arm, "env"] = json.dumps(changed)
    got = only(paired_ratios(stored))
    assert got["verdict"] == "unclear"
    assert got["reason"] == "different environment: driver: 570.124.06 != 999.1"
    assert math.isnan(got["speedup"])


def test_two_timing_methods_make_no_ratio(tmp_path):
    wall = {**TIMING, "method": "perf_counter"}
    rows = [timed("bf16", [2.0] * 4), timed("fp8", [1.0] * 4, "bf16", timing=wall)]
    got = only(paired_ratios(frame(tmp_path, rows)))
    assert got["verdict"] == "unclear"
    assert got["reason"] == "timed by different methods: cuda_events, cold and perf_counter, cold"
    assert math.isnan(got["speedup"])


def test_regimes_are_compared_apart(tmp_path):
    """Sustained, the arm is slower; an arm that never ran is missing from both, one that failed in one only there."""
    rows = [timed("bf16", [2.0] * 4), timed("fp8", [1.0] * 4, "bf16"), timed("broke", [1.0] * 4, "bf16")]
    rows += [
        timed("bf16", [2.0] * 4, regime="sustained"),
        timed("fp8", [4.0] * 4, "bf16", regime="sustained"),
    ]
    rows.append(absent(CASE, "skipped", "skipped", "no", "bf16"))
    failed = absent(CASE, "broke", "failed", "recompiled", "bf16")
    rows.append(Measurement(**{**{f: getattr(failed, f) for f in failed.__slots__}, "regime": "sustained"}))
    ratios = paired_ratios(frame(tmp_path, rows))
    got = {(r["arm"], r["regime"]): r["verdict"] for r in ratios.to_dict("records")}
    assert got == {
        ("fp8", "isolated"): "faster",
        ("fp8", "sustained"): "slower",
        ("skipped", "isolated"): "missing",
        ("skipped", "sustained"): "missing",
        ("broke", "isolated"): "faster",
        ("broke", "sustained"): "missing",
    }


def test_swapping_the_arms_inverts_the_ratio(tmp_path):
    """Property: speedup and interval become reciprocal, low and high change places, the verdict turns round."""
    a, b = around(1.0, 0.02), around(0.9, 0.02, seed=1)
    one = only(paired_ratios(frame(tmp_path / "a", [timed("x", a), timed("fp8", b, "x")])))
    two = only(paired_ratios(frame(tmp_path / "b", [timed("x", b), timed("fp8", a, "x")])))
    assert [two["speedup"], two["low"], two["high"]] == pytest.approx(
        [1 / one["speedup"], 1 / one["high"], 1 / one["low"]]
    )
    assert (one["verdict"], two["verdict"]) == ("faster", "slower")


def test_equal_arms_are_seldom_called_different(tmp_path):
    """False alarms over 400 cases of equal arms, 2 % noise a round: far below the interval's own 5 %.

    Of 400 alarms at a true rate of 5 % at least 33 would exceed the 99.9 % point of a binomial; fewer are allowed.
    """
    rng = random.Random(11)
    rows = []
    for i in range(400):
        case = Case.of("gemm", {"M": i + 1})
        for arm, baseline in (("bf16", ""), ("bf16:again", "bf16"), ("fp8", "bf16")):
            rows.append(timed(arm, [math.exp(rng.gauss(0, 0.02)) for _ in range(8)], baseline, case=case))
    verdicts = paired_ratios(frame(tmp_path, rows))["verdict"]
    assert len(verdicts) == 400
    assert verdicts.isin(["faster", "slower"]).sum() < scipy.stats.binom.ppf(0.999, 400, 0.05)
    assert verdicts.isin(["same"]).sum() > 200


def test_fp8_is_told_by_the_flops_that_really_ran(tmp_path):
    rows = [
        timed("bf16", [2.0] * 4, flops={"bf16": 1.0}),
        timed("fp8", [1.0] * 4, "bf16", flops={"e4m3": 1.0}),
    ]
    rows.append(timed("fell_back", [1.0] * 4, "bf16", flops={"bf16": 1.0}))
    rows.append(timed("fused", [1.0] * 4, "fp8", flops={"e4m3": 1.0}))
    ratios = paired_ratios(frame(tmp_path, rows))
    assert dict(zip(ratios["arm"], ratios["fp8"], strict=True)) == {
        "fp8": True,
        "fell_back": False,
        "fused": False,
    }


def test_rates_by_hand(tmp_path):
    """2 ms for 4e12 FLOPs in two dtypes is 2000 TFLOP/s; for 3e9 bytes 1500 GB/s (1e9). No work, no rate."""
    rows = [
        timed("both", [2.0] * 3, flops={"bf16": 1e12, "e4m3": 3e12}, bytes_moved=3e9),
        timed("none", [2.0] * 3),
    ]
    rows.append(absent(CASE, "failed", "failed", "wrong"))
    rated = with_rates(frame(tmp_path, rows)).set_index("arm")
    assert rated.loc["both", "tflops"] == pytest.approx(2000)
    assert rated.loc["both", "gb_per_s"] == pytest.approx(1500)
    assert rated.loc[["none", "failed"], ["tflops", "gb_per_s"]].isna().all(axis=None)


def test_summary_takes_the_geometric_mean(tmp_path):
    """Oracle: scipy.stats.gmean of the speedups."""
    rows = []
    for m, time in ((1, 1.0), (2, 2.0), (3, 0.4)):
        case = Case.of("gemm", {"M": m})
        rows += [timed("bf16", [1.0] * 4, case=case), timed("fp8", [time] * 4, "bf16", case=case)]
    rows += [timed("bf16", [1.0] * 4), absent(CASE, "fp8", "skipped", "no", "bf16")]
    got = summary(paired_ratios(frame(tmp_path, rows))).set_index("regime").loc["isolated"]
    assert got["geometric_mean"] == pytest.approx(scipy.stats.gmean([1.0, 0.5, 2.5]))
    assert got[["pairs", "faster", "slower", "unclear", "missing"]].tolist() == [3, 1, 1, 1, 1]


def test_square_is_always_whole(tmp_path):
    """Every precision and mode has a cell: a time, or the reason why there is none."""
    cases = linear_cases(Invented(), 700.0, {"rowwise_compile": "no compiler"})[:1]
    rows = [m for m in cases[0] if m.arm != "tensorwise_eager"]
    found = square(frame(tmp_path, rows))
    assert list(found["precision"]) == list(PRECISIONS)
    cells = found.set_index("precision")
    assert list(cells.loc["rowwise", ["compile_status", "compile_note"]]) == ["skipped", "no compiler"]
    assert list(cells.loc["tensorwise", ["eager_status", "eager_note"]]) == ["", "not measured in this run"]
    assert cells.loc["bf16", "compile_status"] == "ok"
    for mode in ("eager", "compile"):
        assert (cells[f"{mode}_ms"].isna() == (cells[f"{mode}_note"] != "")).all()


def test_square_never_crosses_eager_and_compile(tmp_path):
    """bf16_compile has bf16_eager as its baseline; that gain is the compiler's and stays out of the square."""
    case = Case.of("linear", {"M": 16})
    rows = [
        timed("bf16_eager", [4.0] * 4, case=case),
        timed("bf16_compile", [2.0] * 4, "bf16_eager", case=case),
    ]
    rows += [timed("tensorwise_eager", [8.0] * 4, "bf16_eager", case=case)]
    rows += [timed("tensorwise_compile", [1.0] * 4, "bf16_compile", case=case)]
    cells = square(frame(tmp_path, rows)).set_index("precision")
    assert math.isnan(cells.loc["bf16", "compile_speedup"])
    assert cells.loc["tensorwise", "eager_speedup"] == pytest.approx(0.5)
    assert cells.loc["tensorwise", "compile_speedup"] == pytest.approx(2.0)


def test_nothing_to_compare(tmp_path):
    empty = frame(tmp_path, [timed("bf16", [1.0])])
    assert len(paired_ratios(empty)) == 0
    assert len(summary(paired_ratios(empty))) == 0
    assert len(square(empty)) == 0
