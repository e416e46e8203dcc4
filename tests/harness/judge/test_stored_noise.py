"""Seeds that a verdict needs. Oracles: the sd of the gaps that were planted, and draws of the tests themselves."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from curves_for_tests import AXES, control, rows_of_runs, run_of

from harness import store
from harness.__main__ import main
from harness.judge.verdict import Run, rows
from harness.judge.verdict.power import ALPHA, seeds_for, tost_power
from harness.judge.verdict.result import MARGIN
from harness.judge.verdict.stored_noise import SeedsNeeded, best_noise, seconds
from harness.store.case import NEGATIVE, OTHER, Arm, parse


@pytest.mark.parametrize(
    ("sd", "gap", "seeds"), [(0.3, 0.5, 4), (0.7, -0.25, 9), (1.2, 0.0, 30), (0.5, 1.0, 5)]
)
def test_the_power_is_the_share_of_draws_that_pass(sd: float, gap: float, seeds: int) -> None:
    """100,000 draws: a standard error of at most 0.0016; 5 of them are allowed."""
    draws = np.random.default_rng(seeds).normal(gap, sd, (100_000, seeds))
    half = scipy.stats.t.ppf(1 - ALPHA, seeds - 1) * draws.std(axis=1, ddof=1) / math.sqrt(seeds)
    share = float((np.abs(draws.mean(axis=1)) + half < 1.0).mean())
    assert tost_power(sd, 1.0, seeds, gap) == pytest.approx(share, abs=0.008)


GAPS = (-1.0, 0.0, 1.0, 0.5, -0.5)  # of the seeds, in units of `size`


def with_gaps(base: dict[int, Run], size: float) -> dict[int, Run]:
    """A candidate whose late and held-out gaps are GAPS x size x the control's mean loss, exactly."""
    late = np.mean([run.loss.values[-60:].mean() for run in base.values()])
    return {s: run_of(run.loss.values + GAPS[s] * size * late) for s, run in base.items()}


def frame(tmp_path: Path, size: float, seeds: int = 5, name: str = "r1", **axes: Any) -> Any:
    base = control(range(seeds))
    made = rows_of_runs("base", base, {**AXES, **axes})
    made += rows_of_runs("tensorwise", with_gaps(base, size), {**AXES, **axes})
    writer = store.RunWriter(
        tmp_path / "divergence" / name, run_id=name, sweep="divergence", env_id="e", env={},
        about={"config": {"suite": "divergence", "parts": {}, "axes": {**AXES, **axes}}},
    )  # fmt: skip
    writer.append(made)
    writer.close("finished")
    return store.read(tmp_path)


def test_the_noise_is_the_sd_of_the_stored_gaps(tmp_path: Path) -> None:
    noise = best_noise(rows.setups(frame(tmp_path, 0.001)), AXES, parse("tensorwise"))
    assert noise is not None
    assert (noise.run_id, noise.seeds, noise.differs) == ("r1", 5, ())
    assert noise.late == pytest.approx(0.001 * np.std(GAPS, ddof=1), rel=0.02)  # the window is 59.8 steps
    assert noise.heldout == pytest.approx(noise.late, rel=0.02)
    counts = [seeds_for(noise.sd, MARGIN, gap) for gap in (0.0, MARGIN / 2)]
    arms = ["base", "base_other", "negative_control", "tensorwise"]
    ((arm, *shown),) = cells(needed(rows.setups(store.read(tmp_path)), *arms))
    assert (arm, shown[:2]) == ("tensorwise", [str(n) for n in counts])


@pytest.mark.parametrize(
    ("arm", "is_tested"),
    [
        ("base", False), ("base_other", False), ("base_eps", True), ("negative_control", False), ("tensorwise_golden", True),
        ("somebodys_recipe", True), ("bf16_other", False), ("base_of_mine", True),
    ],
)  # fmt: skip
def test_seeds_are_asked_for_arms_with_a_margin(arm: str, is_tested: bool) -> None:
    """By the record of an arm, so that one from outside counts whatever its name begins with."""
    assert [name for _, name, _ in needed([], arm).arms] == [arm] * is_tested


@pytest.mark.parametrize("variant", [NEGATIVE, OTHER])
def test_a_control_of_a_recipe_from_outside_asks_for_no_seeds(variant: str) -> None:
    """Its record says that it is a control, whatever it is called; nothing here knows it by its name."""
    assert SeedsNeeded.of([(AXES, {Arm("somebodys", variant=variant): 5})], []).arms == []


def test_a_row_names_the_axes_in_which_the_set_ups_differ(tmp_path: Path) -> None:
    """All others are those of the request; of one set-up none is named."""
    stored = rows.setups(frame(tmp_path, 0.001))
    arm = parse("tensorwise")
    both = SeedsNeeded.of([(AXES | {"schedule": s}, {arm: 5}) for s in ("", "cooldown_bf16:0.2")], stored)
    assert [row[0] for row in cells(both)] == ["tensorwise", "tensorwise schedule=cooldown_bf16:0.2"]
    assert [row[0] for row in cells(SeedsNeeded.of([(AXES, {arm: 5})], stored))] == ["tensorwise"]


def needed(stored: list[Any], *arms: str) -> SeedsNeeded:
    return SeedsNeeded.of([(AXES, dict.fromkeys(map(parse, arms), 5))], stored)


def cells(found: SeedsNeeded) -> list[list[str]]:
    (made,) = found.tables()
    return [[cell.text for cell in row] for row in made.rows]


@pytest.mark.parametrize(("size", "seeds"), [(0.0, 5), (0.001, 2), (0.001, 1)])
def test_an_sd_of_zero_or_of_two_seeds_is_no_evidence(size: float, seeds: int, tmp_path: Path) -> None:
    stored = rows.setups(frame(tmp_path, size, seeds))
    assert best_noise(stored, AXES, parse("tensorwise")) is None
    found = needed(stored, "tensorwise")
    assert (cells(found), [arm["noise"] for arm in found.data()["arms"]]) == ([], [None])
    assert found.lines()[1].endswith("run 3 first: tensorwise")


def test_the_same_set_up_comes_first_then_one_of_other_steps_which_is_said(tmp_path: Path) -> None:
    frame(tmp_path, 0.002, name="longer", steps=600)
    stored = rows.setups(frame(tmp_path, 0.001, name="other_model", model="gpt2"))
    noise = best_noise(stored, AXES, parse("tensorwise"))
    assert noise is not None
    assert (noise.run_id, noise.differs) == ("longer", ("steps=600",))
    ((*_, of),) = cells(needed(stored, "tensorwise"))
    assert of.endswith("which had steps=600")
    exact = best_noise(rows.setups(frame(tmp_path, 0.001, seeds=3, name="exact")), AXES, parse("tensorwise"))
    assert exact is not None
    assert (exact.run_id, exact.seeds) == ("exact", 3)
    assert best_noise(stored, AXES, parse("rowwise")) is None


def test_dry_run_prints_them_from_results_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["sweep=divergence", "device=cpu", "dry_run=true", "arms=[base,tensorwise,rowwise]"]
    frame(tmp_path / "elsewhere", 0.001)
    (tmp_path / "elsewhere/divergence/damaged").mkdir()
    (tmp_path / "elsewhere/divergence/damaged/_run.json").write_text("{")
    for folder, told in (
        ("elsewhere", "tensorwise .* 5 seeds of r1"),
        ("nowhere", ".*run 3 first: tensorwise"),
    ):
        assert main([*words, f"results_dir={folder}"]) == 0
        out = capsys.readouterr().out.splitlines()
        assert [bool(re.match(told, x)) for x in out].count(True) == 1
        assert any(re.match("15 training runs: ", x) for x in out)
    for more in ([*words, "train.judge=false"], ["sweep=cast", "device=cpu", "dry_run=true"]):
        assert main(more) == 0
        assert "training runs: " not in capsys.readouterr().out


def test_how_long_is_the_median_of_the_newest_run_with_the_same_axes(tmp_path: Path) -> None:
    stored = rows.setups(frame(tmp_path, 0.001))
    took = [run.elapsed.values[-1] for run in stored[0].arms["tensorwise"].values()]
    assert seconds(stored, {**AXES, "seed": 9}, parse("tensorwise")) == pytest.approx(np.median(took))
    assert seconds(stored, {**AXES, "steps": 7}, parse("tensorwise")) is None
    assert seconds(stored, AXES, parse("rowwise")) is None


def test_runs_that_were_not_proved_to_be_fp8_are_no_evidence(tmp_path: Path) -> None:
    base = control()
    made = rows_of_runs("base", base)
    made += rows_of_runs("tensorwise", with_gaps(base, 0.001), verify="x", verify_outcome="disproved")
    writer = store.RunWriter(tmp_path / "r", run_id="r", sweep="divergence", env_id="e", env={}, about={})
    writer.append(made)
    assert best_noise(rows.setups(store.read(tmp_path)), AXES, parse("tensorwise")) is None
