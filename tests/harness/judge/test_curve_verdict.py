"""Verdict on anyone's curves. Oracles: figures published for modded-nanogpt's record of 2026-07-17, scipy, what is planted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

import harness
from harness.judge.curve_verdict import REFUSED, CurveVerdict
from harness.store.curve_files import read_all
from harness.store.errors import UsageError

RECORD = Path(__file__).parents[3] / "results" / "published" / "curves" / "modded_nanogpt_fp8_down.csv"
STEPS = np.arange(0, 1001, 100)


def runs(seed: int, n: int = 5, gap: float = 0.0, sd: float = 0.001, **columns: Any) -> list[pd.DataFrame]:
    """Frames of runs that fall from 4 to 2 nats, whose whole curves lie `sd` apart."""
    generator = np.random.default_rng(seed)
    fall = 2 + 2 * np.exp(-STEPS / 100)
    noise = generator.normal(0, sd, (n, STEPS.size)).cumsum(axis=1) / np.sqrt(STEPS.size)
    return [
        pd.DataFrame({"step": STEPS, "val_loss": (fall + curve) * (1 + gap * (STEPS > 0)), **columns})
        for curve in noise
    ]


def judged(mine: list[pd.DataFrame], base: list[pd.DataFrame] | None = None, **options: Any) -> CurveVerdict:
    return harness.verdict(runs(0) if base is None else base, mine, **options)


def test_the_published_runs_give_the_published_figures() -> None:
    base, mine = (read_all([f"{RECORD}:{arm}/*"], arm) for arm in ("baseline", "this_pr"))
    found = harness.verdict(base, mine)
    ends = pd.read_csv(RECORD).query("step == 1390").groupby("arm")["val_loss"]
    first, second = (ends.get_group(arm) for arm in ("baseline", "this_pr"))
    oracle = ttest_ind(second, first, equal_var=False).confidence_interval()
    level = first.mean()
    assert (found.outcome, found.codes) == ("PASS", ["equivalent"])
    assert [len(side) for side in found.sides] == [13, 13]
    assert found.gap * level == pytest.approx(0.00012, abs=5e-6)
    assert [found.low * level, found.high * level] == pytest.approx([oracle.low, oracle.high])
    assert [100 * found.low, 100 * found.high] == pytest.approx([-0.040, 0.047], abs=5e-4)
    assert found.p == pytest.approx(4e-11, rel=0.15)
    assert 100 * found.shows == pytest.approx(0.06, abs=0.005)
    assert "80.73 and 79.68 s" in found.lines[-1]
    assert found.time is not None
    assert found.time.ratio == pytest.approx(79.68 / 80.73, abs=1e-4)


def test_time_to_a_loss() -> None:
    mine, base = (runs(i, time_s=STEPS * (0.9 if i else 1.0)) for i in (1, 0))
    found = judged(mine, base, target=2.5)
    assert found.time is not None
    assert found.time.ratio == pytest.approx(0.9, rel=0.01)
    assert judged(mine, base, target=1.0).time is None  # nobody reaches it
    assert judged(mine, runs(0), target=2.5).time is None


@pytest.mark.parametrize(
    ("n", "gap", "sd", "outcome", "code"),
    [
        (5, 0.0, 0.001, "PASS", "equivalent"),
        (5, 0.01, 0.001, "FAIL", "worse"),
        (5, -0.01, 0.001, "INCONCLUSIVE", "better"),
        (5, 0.0, 0.05, "INCONCLUSIVE", "not_shown"),
        (5, 0.0025, 0.001, "INCONCLUSIVE", "not_shown"),
        (2, 0.0, 0.001, "INCONCLUSIVE", "few_runs"),
        (1, 0.1, 0.001, "INCONCLUSIVE", "few_runs"),
    ],
)
def test_what_is_planted_decides(n: int, gap: float, sd: float, outcome: str, code: str) -> None:
    found = judged(runs(1, n, gap, sd), runs(0, n, sd=sd))
    assert (found.outcome, found.codes) == (outcome, [code])
    assert bool(found.needed) == (n > 1 and code in ("not_shown", "few_runs"))


def test_one_run_a_side_needs_so_many_by_the_noise_of_others() -> None:
    """Oracle: Welch's two tests on drawn runs of that spread."""
    noise = runs(2, 8, sd=0.005)
    found = judged(runs(1, 1), runs(0, 1), noise=noise)
    n, ends = found.needed[0], np.array([frame["val_loss"].iloc[-1] for frame in noise])
    assert found.outcome == "INCONCLUSIVE"
    assert n is not None
    power = []
    for count in (n - 1, n):
        a, b = np.random.default_rng(0).normal(0, ends.std(ddof=1) / ends.mean(), (2, 20_000, count))
        low, high = ttest_ind(a, b, axis=1, equal_var=False).confidence_interval(0.9)
        power.append(((low > -0.0025) & (high < 0.0025)).mean())
    assert power[0] < 0.81
    assert power[1] > 0.79


def ends_in(value: float, seed: int = 1, n: int = 1) -> list[pd.DataFrame]:
    frames = runs(seed)
    for frame in frames[:n]:
        frame.loc[frame.index[-1], "val_loss"] = value
    return frames


def changed(frames: list[pd.DataFrame], **columns: Any) -> list[pd.DataFrame]:
    return [frame.assign(**columns) for frame in frames]


def test_runs_that_break() -> None:
    for value in (np.nan, np.inf):
        assert judged(ends_in(value)).codes == ["not_finite"]
        assert judged(ends_in(value)).outcome == "FAIL"
        assert judged(ends_in(value, n=5)).outcome == "FAIL"
        assert judged(runs(1), ends_in(value, 0)).codes == ["base_broke"]
        assert judged(ends_in(value), ends_in(value, 0, 5)).outcome == "INCONCLUSIVE"


LONGER = [frame.assign(step=frame["step"] * 1.5) for frame in runs(1)]
NO_EVIDENCE: dict[str, tuple[list[pd.DataFrame], list[pd.DataFrame]]] = {
    "few_values": ([f[f["step"] < 300] for f in runs(1)], [f[f["step"] < 300] for f in runs(0)]),
    "repeated": (runs(1)[:1] * 5, runs(0)),
    "repeated, rounded": ([*runs(1)[:4], runs(1)[0].round(5)], runs(0)),
    "repeated, cut": ([*runs(1)[:4], runs(1)[0][2:]], runs(0)),
    "repeated, of the base": (runs(0), runs(0)),
    "mixed_steps": (LONGER, runs(0)),
    "mixed_steps, in one side": (runs(1)[:4] + LONGER[4:], runs(0)),
    "mixed_steps, other names": ([f.rename(columns={"step": "iter"}) for f in runs(1)], runs(0)),
    "unfinished": (changed([f.assign(val_loss=f["val_loss"].where(f["step"] < 900)) for f in runs(1)], lr=1.0), runs(0)),
    "other_loss": ([f.rename(columns={"val_loss": "eval_loss"}) for f in runs(1)], runs(0)),
    "other_settings": (changed(runs(1), dataset="c4"), changed(runs(0), dataset="fineweb")),
    "other_start": ([f.assign(val_loss=f["val_loss"] * (1 + 0.01 * (f["step"] == 0))) for f in runs(1)], runs(0)),
    "no_share": ([f.assign(val_loss=f["val_loss"] - 3) for f in runs(1)], [f.assign(val_loss=f["val_loss"] - 3) for f in runs(0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_EVIDENCE)
def test_what_is_no_evidence_is_neither_passed_nor_failed(case: str) -> None:
    found = judged(*NO_EVIDENCE[case])
    assert found.outcome == "INCONCLUSIVE"
    assert case.partition(",")[0] in found.codes
    assert set(found.codes) <= set(REFUSED)


def test_a_base_that_learns_nothing_and_a_run_that_strays_do_not_pass() -> None:
    flat = [
        [f.assign(val_loss=2 + (f["val_loss"] - 2) / 100) for f in runs(seed, sd=0.03)] for seed in (1, 0)
    ]
    assert judged(*flat).codes == ["idle"]
    mine = runs(1, 60)
    mine[0]["val_loss"] *= 1.021
    mine[0].loc[0, "val_loss"] = 4.0
    assert judged(mine, runs(0, 60)).codes == ["stray"]


def test_ends_at_other_steps_are_compared_and_said() -> None:
    found = judged([frame.assign(step=frame["step"] * 0.9) for frame in runs(1)])
    assert found.outcome == "PASS"
    assert any("1000 and 900" in note for note in found.notes)


def dense(seed: int, gap: float, **columns: Any) -> pd.DataFrame:
    """A run of 300 steps with gradient norms; the seed is its batches."""
    generator, steps = np.random.default_rng(seed), np.arange(300)
    loss = 2 + 1.5 * np.exp(-steps / 40) + generator.normal(0, 0.01, 300)
    own = np.random.default_rng(1000 + seed).normal(0, 1e-4, 300) * bool(gap)
    return pd.DataFrame(
        {
            "step": steps,
            "val_loss": loss * (1 + (gap + own) * (steps > 0)),
            "grad_norm": 1 + generator.random(300),
            "seed": seed,
            **columns,
        }
    )


def test_runs_of_one_seed_are_judged_by_the_paired_rule() -> None:
    base = [dense(seed, 0) for seed in range(5)]
    assert harness.verdict(base, [dense(s, 1e-5) for s in range(5)], paired="seed").outcome == "PASS"
    worse = harness.verdict(base, [dense(s, 0.02) for s in range(5)], paired="seed")
    assert (worse.outcome, "L4" in worse.codes) == ("FAIL", True)
    assert harness.verdict(base, base, paired="seed").codes == ["repeated"]
    assert harness.verdict(base[:1], [dense(0, 0.02)], paired="seed").codes == ["few_runs"]
    with pytest.raises(UsageError, match="seed"):
        harness.verdict(base, runs(1), paired="seed")


@pytest.mark.parametrize(
    "options", [{"margin": 0.0}, {"margin": 0.25}, {"window": 0}, {"paired": "yes"}, {"target": np.nan}]
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        judged(runs(1), **options)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [pd.DataFrame({"step": [], "val_loss": []})],
        [pd.concat([runs(1)[0]] * 2, axis=1)],
        [pd.DataFrame({"run": range(201), "step": 1, "val_loss": 2.0})],
    ],
    ids=["none", "empty", "two columns of one name", "a run a row"],
)
def test_frames_that_are_none(frames: list[pd.DataFrame]) -> None:
    with pytest.raises(UsageError):
        judged(frames)


def test_a_million_rows_take_seconds_and_a_notebook_shows_no_markup() -> None:
    many = [
        pd.DataFrame(
            {
                "run": f"<b>{k}",
                "step": np.arange(100_000),
                "val_loss": 2 + 2 * np.exp(-np.arange(100_000) / 9e3),
            }
        )
        for k in range(10)
    ]
    for k, frame in enumerate(many):
        frame["val_loss"] += np.random.default_rng(k).normal(0, 1e-3, 100_000)
    start = time.process_time()
    found = judged(many[:5], many[5:], window=1000)
    assert time.process_time() - start < 10
    assert found.outcome == "PASS"
    found.reasons = ["<script>"]
    assert "<script>" not in found._repr_html_()
