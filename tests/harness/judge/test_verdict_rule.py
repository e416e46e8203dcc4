"""The rule of loss on anyone's curves. Oracles: figures published for modded-nanogpt's record of 2026-07-17, scipy, what is planted."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t as student
from scipy.stats import ttest_ind

import harness
from harness.judge.verdict.course import Course
from harness.judge.verdict.sooner import ratio_to_target
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from harness.judge.verdict.rule import CurveVerdict

Frames = list[pd.DataFrame]


def runs(
    seed: int, n: int = 5, gap: float = 0.0, sd: float = 0.001, count: int = 11, **columns: Any
) -> Frames:
    """Runs that fall from 4 to 2 nats, with noise of every value about `sd`."""
    generator, t = np.random.default_rng(seed), np.linspace(0, 1, count)
    noise = generator.normal(0, sd, (n, count))
    losses = (2 + 2 * np.exp(-8 * t) + noise) * (1 + gap * (t > 0))
    return [pd.DataFrame({"step": np.arange(count) * 100, "val_loss": own, **columns}) for own in losses]


def pairs(
    gap: float = 0.0, own: float = 1e-3, seeds: Any = range(5), like: Any = None
) -> tuple[Frames, Frames]:
    """Base and candidate of some seeds: the candidate has the base's noise (that of the seeds `like`) and a little of its own."""
    sides: tuple[Frames, Frames] = ([], [])
    for seed, shared in zip(seeds, like or seeds, strict=True):
        base = runs(100 + seed, 1, sd=0.02, count=101)[0]
        mine = base if shared == seed else runs(100 + shared, 1, sd=0.02, count=101)[0]
        noise = np.random.default_rng(seed).normal(0, own, 101)
        changed = mine["val_loss"] * (1 + gap * (mine["step"] > 0)) + noise
        sides[0].append(base.assign(seed=seed))
        sides[1].append(mine.assign(seed=seed, val_loss=changed))
    return sides


def each(frames: Frames, change: Any, only: Any = slice(None)) -> Frames:
    """The frames with `change(loss, step, run)` for the loss of some runs."""
    some = range(len(frames))[only]
    return [
        f.assign(val_loss=change(f["val_loss"].to_numpy(), f["step"].to_numpy(), i)) if i in some else f
        for i, f in enumerate(frames)
    ]


def put(at: Any, value: Any) -> Any:
    """A change that writes a value at some places."""

    def change(v: np.ndarray, s: np.ndarray, i: int) -> np.ndarray:
        return np.where(np.isin(np.arange(v.size), np.arange(v.size)[at]), value, v)

    return change


def judged(base: Frames, candidate: Frames, **options: Any) -> CurveVerdict:
    """The verdict on sides of one frame each, which are read faster."""
    sides = (pd.concat([f.assign(run=str(i)) for i, f in enumerate(side)]) for side in (base, candidate))
    return harness.verdict(*([side] for side in sides), **options)


def test_a_wiggle_as_large_as_the_own_that_runs_of_a_side_share_is_seen() -> None:
    generator = np.random.default_rng(0)
    base, candidate = generator.normal(1, 0.01, (2, 4, 4000))
    assert Course(base, candidate, 0.01).shared_noise == 0
    assert Course(base, candidate + generator.normal(0, 0.0117, 4000), 0.01).shared_noise > 0


def test_one_run_a_side_needs_so_many_by_the_noise_of_others() -> None:
    """Oracle: Welch's two tests, at the level of the rule, on drawn runs of that spread."""
    noise = runs(2, 8, sd=0.005)
    found = judged(runs(0, 1), runs(1, 1), noise=noise)
    n, ends = found.needed[0], np.array([frame["val_loss"].iloc[-1] for frame in noise])
    assert n is not None
    power = []
    for count in (n - 1, n):
        a, b = np.random.default_rng(0).normal(0, ends.std(ddof=1) / ends.mean(), (2, 20_000, count))
        low, high = ttest_ind(a, b, axis=1, equal_var=False).confidence_interval(0.92)
        power.append(((low > -0.0025) & (high < 0.0025)).mean())
    assert power[0] < 0.81
    assert power[1] > 0.79


# What speaks against a word


A, B, LONG_A, LONG_B = runs(0), runs(1), runs(0, count=41), runs(1, count=41)
PAIRS = {"paired": "seed"}


def named(frames: Frames, **columns: Any) -> Frames:
    return [
        f.assign(**{k: v[i] if isinstance(v, list) else v for k, v in columns.items()})
        for i, f in enumerate(frames)
    ]


def losses(seed: int) -> list[np.ndarray]:
    return [f["val_loss"].to_numpy() for f in runs(seed)]


NORMS = [*(1 + 0.01 * np.random.default_rng(0).random((5, 11)))]


def copied(change: Any) -> tuple[Frames, Frames]:
    """The candidate's last run is a change of its first."""
    first = LONG_B[0]["val_loss"].to_numpy()
    return LONG_A, each(LONG_B, lambda v, s, i: change(first, v), only=slice(4, 5))


WIGGLE = np.random.default_rng(9).normal(0, 0.02, 41)
OF_CANDIDATE = {
    "repeats": lambda v, s, i: np.repeat(v[::2], 2)[:41],
    "course": lambda v, s, i: v * (1 + 0.03 * (abs(s - 2000) < 500)),
    "swing": lambda v, s, i: v * (1 + 0.02 * np.cos(np.pi * s / 100)),
    "trend": lambda v, s, i: v * (1 + 0.003 * np.clip(np.log(np.maximum(s, 1) / 1500), 0, None)),
    "smooth": lambda v, s, i: pd.Series(v).ewm(span=6).mean().to_numpy(),
    "spikes": lambda v, s, i: v * (1 + 0.2 * (abs(s - 1500 - 200 * i) < 150)),
    "broke": put([4], 1e30),
    "not_positive": put([4], 0.0),
    "other_start": put([0], 4.1),
    "other_units": lambda v, s, i: v / math.log(2),
}
OF_BOTH = {
    "few_values": lambda v, s, i: np.where(s < 300, v, math.nan),
    "idle": lambda v, s, i: 6 - v,
    "rises": lambda v, s, i: 6 - v,
    "still": lambda v, s, i: v - 2 * np.exp(-s / 500) + 2 * np.exp(-s / 80),
    "worse_than_its_best": lambda v, s, i: v * (1 + 0.04 * (s > 3000)),
    "one_run": lambda v, s, i: v + WIGGLE - 0.95 * (v - v.round(2)),
    "coarse_log": lambda v, s, i: v.round(2),
}
SETTINGS: dict[str, tuple[Any, ...]] = {
    "differs": ({"dataset": "c4"}, {"dataset": "fineweb"}),
    "no_treatment": ({}, {}, {"treatment": ["recipe"]}),
    "mixed_treatment": ({"recipe": "bf16"}, {"recipe": ["fp8"] * 4 + ["bf16"]}),
    "same_treatment": ({"recipe": "fp8"}, {"recipe": "fp8"}),
    "swapped": ({"precision": "fp8"}, {"precision": "bf16"}),
    "seeds_repeat": ({"seed": [0, 1, 2, 3, 3]}, {}),
    "seeds_chosen": ({"seed": [0, 1, 2, 4, 7]}, {}),
    "skipped": ({"skipped": 0}, {"skipped": [0, 0, 3, 0, 0]}),
    "grad_norm": ({"grad_norm": NORMS}, {"grad_norm": [1.1 * n for n in NORMS]}),
    "other_loss_column": ({"train_loss": losses(2)}, {"train_loss": [1.02 * v for v in losses(3)]}),
    "no_loss": ({"accuracy": losses(0)}, {"accuracy": losses(1)}, {"value": "accuracy"}),
}
TABLE: dict[str, tuple[Any, ...]] = {
    **{code: (LONG_A, each(LONG_B, change)) for code, change in OF_CANDIDATE.items()},
    **{code: tuple(each(side, change) for side in (LONG_A, LONG_B)) for code, change in OF_BOTH.items()},
    **{code: (named(A, **a), named(B, **b), *more) for code, (a, b, *more) in SETTINGS.items()},
    "few_runs": (A[:2], B[:2]),
    "seed_missing": (pairs()[0], pairs()[1][:4], PAIRS),
    "seed_missing, in every run": (pairs()[0][:3], pairs()[1][3:], PAIRS),
    "base_broke": (each(A, put([-1], math.nan)), B),
    "not_finite": (A, each(B, put([-1], math.inf), only=slice(1))),
    "unfinished": (A, named(each(B, put([9, 10], math.nan)), lr=1.0)),
    "hole": (LONG_A, [LONG_B[0].drop(range(15, 26)), *LONG_B[1:]]),
    "stopped_early": (A, [f[:10] for f in B]),
    "copies, a stretch": copied(lambda first, v: np.where(np.arange(41) < 12, first, v)),
    "copies, rounded": copied(lambda first, v: first.round(4)),
    "copies, noise": copied(lambda first, v: first + np.random.default_rng(3).normal(0, 1e-5, 41)),
    "copies, one step off": copied(lambda first, v: np.append(first[1:], v[-1])),
    "copies, of the base": (A, [*B[:4], A[0]]),
    "equals_base": (pairs()[0], pairs()[0], PAIRS),
    "barely_differs": (*pairs(own=1e-6), PAIRS),
    "pairs_mixed": (*pairs(like=(1, 2, 3, 4, 0)), PAIRS),
    "swing, of pairs": (pairs()[0], each(pairs()[1], lambda v, s, i: v * (1 + 0.05 * np.sin(s / 700 + i) * (s > 0))), PAIRS),
    "other_loss": (A, [f.rename(columns={"val_loss": "eval_loss"}) for f in B]),
    "other_axis": (A, [f.rename(columns={"step": "iter"}) for f in B]),
    "stray": (A, each(B, lambda v, s, i: v * (1 + 0.03 * (s > 0)), only=slice(1))),
    "uneven": (runs(0, 8, sd=2e-4), each(runs(1, 8, sd=2e-4), lambda v, s, i: v * (1 + (i - 3.5) * 1e-3 * (s > 0)))),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_what_speaks_against_a_word_is_named_and_nothing_passes(case: str) -> None:
    base, candidate, options = (*TABLE[case], {})[:3]
    found = judged(base, candidate, **options)
    assert case.partition(",")[0] in found.codes
    assert found.outcome == ("FAIL" if case == "not_finite" else "INCONCLUSIVE")
    is_refused = any(not each.is_soft for each in found.findings)
    figures = found.gap, found.low, found.high, found.p, found.step
    assert not is_refused or all(math.isnan(figure) for figure in figures)


SPIKED = [
    each(runs(seed, count=101), lambda v, s, i, a=seed: v * (1 + 0.2 * np.isin(s, (1300 + 700 * a + 500 * i, 9000 - 300 * i))))
    for seed in (0, 1)
]  # fmt: skip
STOPPED = [
    [f[: int((f["val_loss"] < 2.05).argmax()) + 1] for f in runs(seed, sd=0.002, count=201)]
    for seed in (0, 1)
]
RATES = [
    *(np.linspace(1, end, 11) for end in (0.1, 0.2))
]  # a run's rate is no schedule where another run of its side has another
HONEST: dict[str, tuple[Any, ...]] = {
    "spikes at other steps": tuple(SPIKED),
    "stopped at a target": tuple(STOPPED),
    "a waived difference": (*TABLE["differs"], {"differs": ["dataset"]}),
    "a waived finding": (*TABLE["seeds_chosen"], {"differs": ["seeds_chosen"]}),
    "the treatment": (named(A, recipe="bf16"), named(B, recipe="fp8")),
    "a treatment of another name": (named(A, way="old"), named(B, way="new"), {"treatment": ["way"]}),
    "of each run its own": (named(A, host=[*"abcde"], lr_id=[*"vwxyz"]), named(B, host=[*"fghij"], lr_id=[*"klmno"])),
    "one side logged more often": (A, [f.assign(step=f["step"] / 2) for f in runs(1, count=21)]),
    "a rate of each run": tuple(named(side, lr=[RATES[k ^ (i == 1)] for i in range(5)]) for k, side in enumerate((A, B))),
    "a window": (LONG_A, LONG_B, {"window": 7}),
    "pairs": (*pairs(), PAIRS),
    "pairs that spike": (
        *(each(side, lambda v, s, i, k=k: v * (1 + 0.5 * (abs(s - 2000 - 900 * i - 400 * k) < 150))) for k, side in enumerate(pairs())),
        PAIRS,
    ),
    "a loss beside that is as good": (named(A, train_loss=losses(2)), named(B, train_loss=losses(3))),
    "the same machines": tuple(named(side, machine=[*"ababa"]) for side in (A, B)),
}  # fmt: skip


@pytest.mark.parametrize("case", HONEST)
def test_honest_twins_pass(case: str) -> None:
    base, candidate, options = (*HONEST[case], {})[:3]
    found = judged(base, candidate, **options)
    assert (found.outcome, found.codes) == ("PASS", ["equivalent"])
    assert "up to step" in found.lines()[0]


# Clusters


@pytest.mark.parametrize(
    "sizes",
    [
        ((3, 3), (3, 3)),
        ((5, 5, 5), (10, 2)),
        ((1, 4, 2), (2, 2, 2)),
        ((10,), (4, 4, 4)),
        ((2, 3, 4, 5), (6, 1)),
    ],
)
def test_the_wider_of_runs_and_clusters_is_that_of_scipy(sizes: tuple[tuple[int, ...], ...]) -> None:
    """Shapes of MLPerf's arms. Oracles: scipy's Welch test of the ends, and its pooled t test of the clusters' means."""
    sides, ends, means = [], [], []
    for side, counts in enumerate(sizes):
        of = np.repeat(range(len(counts)), counts)
        off = np.random.default_rng(side).normal(0, 0.004, len(counts))[of]
        frames = each(runs(side, of.size, sd=0.002), lambda v, s, i, off=off: v * (1 + off[i] * (s > 0)))
        sides.append(named(frames, machine=[f"{side}/{k}" for k in of]))
        ends.append(pd.Series([f["val_loss"].iloc[-1] for f in frames]))
        means.append(ends[-1].groupby(of).mean())
    found = judged(*sides, differs=["stray", "uneven"])
    welch = ttest_ind(ends[1], ends[0], equal_var=False).confidence_interval()
    pooled = ttest_ind(means[1], means[0]).confidence_interval()
    low, high = min(welch.low, pooled.low), max(welch.high, pooled.high)
    level = np.median(ends[0])
    assert found.gap == pytest.approx((ends[1].mean() - ends[0].mean()) / level)
    assert [found.low, found.high] == pytest.approx([low / level, high / level])


def test_one_machine_a_side_is_said_and_a_known_spread_between_machines_counts() -> None:
    """Oracle: Welch's standard error with 2 tau^2 added to its square."""
    sides = [named(side, machine=name) for side, name in ((A, "one"), (B, "two"))]
    plain, told = judged(*sides), judged(*sides, between=0.0005)
    degrees = ttest_ind(*([f["val_loss"].iloc[-1] for f in side] for side in (A, B)), equal_var=False).df
    half = [(found.high - found.low) / 2 / student.ppf(0.975, degrees) for found in (plain, told)]
    assert half[1] ** 2 - half[0] ** 2 == pytest.approx(2 * 0.0005**2)
    assert "these two machines" in plain.lines()[0]


# Sooner


def test_time_to_a_loss() -> None:
    seconds = np.arange(11) * 100.0
    base, mine = named(A, time_s=[seconds] * 5), named(B, time_s=[0.9 * seconds] * 5)
    found = judged(base, mine, target=2.5)
    assert found.time is not None
    assert found.time.ratio == pytest.approx(0.9, rel=0.01)
    assert judged(base, mine, target=1.0).time is None  # nobody reaches it
    assert judged(A, mine, target=2.5).time is None


def test_the_ratio_of_samples_is_welchs_on_logarithms_with_a_cell_in_its_variance() -> None:
    """Oracle: by hand, with scipy's quantile; degrees of freedom where a cell counts by Welch and Satterthwaite, at most 10."""
    base, mine = [100.0, 110.0, 120.0, 110.0], [120.0, 130.0, 110.0]
    a, b = np.log(base), np.log(mine)
    test = ttest_ind(b, a, equal_var=False)
    plain, cells = ratio_to_target(base, mine), ratio_to_target(base, mine, cell=10.0)
    assert plain.ratio == pytest.approx(math.exp(b.mean() - a.mean()))
    assert [plain.low, plain.high] == pytest.approx(np.exp(test.confidence_interval()).tolist())
    share = 10 / math.exp(np.log([*base, *mine]).mean())
    error = math.sqrt(a.var(ddof=1) / 4 + b.var(ddof=1) / 3 + share**2 / 24)
    runs = a.var(ddof=1) / 4 + b.var(ddof=1) / 3
    degrees = min(max(10, test.df), test.df * (error**2 / runs) ** 2)
    assert cells.log_high - cells.log == pytest.approx(student.ppf(0.975, degrees) * error)
    wide = ratio_to_target(base, mine, clusters=([*"aabb"], [*"ccd"]))
    assert wide.high - wide.low > plain.high - plain.low
    assert ratio_to_target([5.0] * 6, [5.0] * 6).ratio == 1.0


# Requests that are none


@pytest.mark.parametrize(
    "options",
    [{"margin": 0.0}, {"margin": 0.25}, {"window": -1}, {"paired": "yes"}, {"target": math.nan}, {"between": 1.0},
     {"cluster": "rack"}, {"paired": "seed"}],
)  # fmt: skip
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        judged(A, B, **options)


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [pd.DataFrame({"step": [], "val_loss": []})],
        [pd.concat([A[0]] * 2, axis=1)],
        [pd.DataFrame({"run": range(201), "step": 1, "val_loss": 2.0})],
    ],
    ids=["none", "empty", "two columns of one name", "a run a row"],
)
def test_frames_that_are_none(frames: Frames) -> None:
    with pytest.raises(UsageError):
        harness.verdict(A, frames)


def test_a_million_rows_take_seconds_and_a_notebook_shows_no_markup() -> None:
    many = [f.assign(run=f"<b>{k}") for k, f in enumerate(runs(0, 10, count=100_000))]
    start = time.process_time()
    found = harness.verdict(many[:5], many[5:], window=1000)
    assert time.process_time() - start < 10
    assert found.outcome == "PASS"
    found.reasons = ["<script>"]
    assert "<script>" not in found._repr_html_()
