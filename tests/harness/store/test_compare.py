"""compare: paired ratios, noise floor, verdicts, rates. Oracles: scipy, and figures worked out by hand."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from report_fixtures import TIMING, absent, frame
from stored import row

from harness.store.case import Case
from harness.store.compare import paired_ratios, with_rates

CASE = Case.of("gemm", {"M": 16, "K": 32, "N": 48})


def timed(arm, samples, baseline="", rounds=None, regime="isolated", case=CASE, fine=1e-8, **more):
    """A time row; one sample a round unless `rounds` says otherwise. Equal samples differ by one tick of a fine clock."""
    return row(
        case,
        arm,
        [x * (1 + fine * i) for i, x in enumerate(samples)],
        baseline=baseline,
        regime=regime,
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


WALL = {**TIMING, "method": "perf_counter"}
TOKENS = {"tokens_per_step": 1000}
LEVEL = [1.0, 1.4, 2.0, 3.0]
LOUD = timed("bf16:again", around(1.0, 0.3, seed=1), "bf16")


def again(samples):
    """The baseline as well timed a second time: a floor of 1."""
    return {"control": timed("bf16:again", samples, "bf16")}


@pytest.mark.parametrize(
    ("base", "arm", "more", "speedup", "rounds", "verdict"),
    [
        ([4.0] * 8, timed("fp8", [2.0] * 8, "bf16"), again([4.0] * 8), 2.0, 8, "faster"),
        # without an A/A control nobody knows how far equal things seem apart
        ([4.0] * 8, timed("fp8", [2.0] * 8, "bf16"), {}, 2.0, 8, "unclear"),
        ([4.0] * 8, timed("fp8", [8.0] * 8, "bf16"), {}, 0.5, 8, "slower"),
        # three times the tokens in twice the time
        ([4.0] * 8, timed("fp8", [8.0] * 8, "bf16", resolved={"tokens_per_step": 3000}), again([4.0] * 8), 1.5, 8, "faster"),
        # a drift that both share cancels in each round
        ([1.1 * x for x in LEVEL], timed("fp8", LEVEL, "bf16"), again([1.1 * x for x in LEVEL]), 1.1, 4, "faster"),
        # only rounds that both have are paired
        ([2.0, 2.0, 2.0, 9.0], timed("fp8", [7.0, 1.0, 1.0, 1.0], "bf16", [9, 0, 1, 2]), again([2.0, 2.0, 2.0, 9.0]), 2.0, 3, "faster"),
        ([4.0] * 3, timed("fp8", [2.0] * 3, "bf16", [3, 4, 5]), {}, math.nan, 0, "unclear"),
        # too few rounds for an interval
        ([4.0] * 2, timed("fp8", [2.0] * 2, "bf16"), {}, 2.0, 2, "unclear"),
        # the interval holds 1, and no control says by which floor it could be a tie
        (around(1.0, 0.1), timed("fp8", around(0.98, 0.1, seed=1), "bf16"), {}, None, 10, "unclear"),
        # two copies of the baseline 30 % apart: too noisy to call anything the same
        (around(1.0, 0.3), timed("fp8", around(1.0, 0.3, seed=2), "bf16"), {"control": LOUD}, None, 10, "unclear"),
        ([2.0] * 4, timed("fp8", [1.0] * 4, "bf16", timing=WALL), {}, math.nan, 0, "unclear"),
        ([2.0] * 4, timed("fp8", [1.0] * 4, "bf16"), {"env_id": "other"}, math.nan, 0, "unclear"),
    ],
)  # fmt: skip
def test_a_ratio_by_hand(tmp_path, base, arm, more, speedup, rounds, verdict):
    rows = [timed("bf16", base, resolved=TOKENS), arm, *([more["control"]] if "control" in more else [])]
    stored = frame(tmp_path, rows)
    if "env_id" in more:
        stored.loc[stored["arm"] == "fp8", "env_id"] = more["env_id"]
        stored.loc[stored["arm"] == "fp8", "env"] = json.dumps({"driver": "999.1"})
    got = only(paired_ratios(stored))
    assert (got["rounds"], got["verdict"]) == (rounds, verdict)
    if speedup is not None:
        assert got["speedup"] == pytest.approx(speedup, nan_ok=True)
    assert math.isnan(got["low"]) == math.isnan(got["high"]) == (rounds < 3)
    if "env_id" in more:
        assert "driver: 570.124.06 != 999.1" in got["reason"]


@pytest.mark.parametrize("partial", [False, True])
def test_what_was_cut_off_is_paired_where_it_is_asked_for_and_decides_nothing(tmp_path, partial):
    rows = [
        replace(timed(*of), status="partial", reason="cut")
        for of in (("bf16", [2.0] * 4), ("fp8", [1.0] * 4, "bf16"))
    ]
    got = only(paired_ratios(frame(tmp_path, rows), partial=partial))
    assert got["cut_off"] is partial
    assert got["verdict"] == ("unclear" if partial else "missing")
    assert got["speedup"] == pytest.approx(2.0 if partial else math.nan, nan_ok=True)
