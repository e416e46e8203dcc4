"""Seeds that a verdict needs. Oracles: the sd of the gaps that were planted, and draws of the tests themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from curves_for_tests import AXES, control, rows_of_runs, run_of

from harness import store
from harness.judge.verdict import Run, rows
from harness.judge.verdict.stored_noise import best_noise, lines, seconds

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


@pytest.mark.parametrize(("size", "seeds"), [(0.0, 5), (0.001, 2), (0.001, 1)])
def test_an_sd_of_zero_or_of_two_seeds_is_no_evidence(size: float, seeds: int, tmp_path: Path) -> None:
    stored = rows.setups(frame(tmp_path, size, seeds))
    assert best_noise(stored, AXES, "tensorwise") is None
    (_, line) = lines([(AXES, ["tensorwise"])], stored)
    assert line.endswith("no stored run of this arm: unknown; run 3 seeds first")


def test_the_same_set_up_comes_first_then_one_of_other_steps_which_is_said(tmp_path: Path) -> None:
    frame(tmp_path, 0.002, name="longer", steps=600)
    stored = rows.setups(frame(tmp_path, 0.001, name="other_model", model="gpt2"))
    noise = best_noise(stored, AXES, "tensorwise")
    assert noise is not None
    assert (noise.run_id, noise.differs) == ("longer", ("steps=600",))
    (_, line) = lines([(AXES, ["tensorwise"])], stored)
    assert "which had steps=600" in line
    exact = best_noise(rows.setups(frame(tmp_path, 0.001, seeds=3, name="exact")), AXES, "tensorwise")
    assert exact is not None
    assert (exact.run_id, exact.seeds) == ("exact", 3)
    assert best_noise(stored, AXES, "rowwise") is None


def test_how_long_is_the_median_of_the_newest_run_with_the_same_axes(tmp_path: Path) -> None:
    stored = rows.setups(frame(tmp_path, 0.001))
    took = [run.elapsed.values[-1] for run in stored[0].arms["tensorwise"].values()]
    assert seconds(stored, {**AXES, "seed": 9}, "tensorwise") == pytest.approx(np.median(took))
    assert seconds(stored, {**AXES, "steps": 7}, "tensorwise") is None
    assert seconds(stored, AXES, "rowwise") is None
