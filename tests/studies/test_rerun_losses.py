"""Oracle: the stored run itself, equal bit for bit; then one stored value moved by one unit in the last place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import rerun_losses

from harness import store
from harness.__main__ import main

WORDS = ["sweep=divergence", "device=cpu", "isolate=false", "report=false", "quiet=true", "train.judge=false"]
SMALL = ["axes.steps=6", "axes.lr_warmup=0", "axes.eval_every=3", "axes.seed=[0,1]", "arms=[base,tensorwise]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert main([*WORDS, *SMALL, f"results_dir={folder}"]) == 0
    (stored,) = (folder / "divergence").iterdir()
    return stored


def test_the_same_runs_are_equal_bit_for_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rerun_losses.main([str(run), "--seeds", "0", "1"]) == 0
    *runs, last = capsys.readouterr().out.splitlines()[1:]
    assert last == "4 of 4 runs equal"
    # 6 losses, 6 gradient norms and a held-out loss before the first, after the third and the last step
    assert [line.split(": ")[1] for line in runs] == ["15 values equal bit for bit"] * 4


def test_one_value_moved_by_one_unit_in_the_last_place_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = store.read([run])
    row = frame.index[(frame["metric"] == "loss") & (frame["arm"] == "tensorwise")][0]
    samples = list(frame.at[row, "samples"])
    samples[4] = math.nextafter(samples[4], math.inf)
    frame.at[row, "samples"] = samples
    monkeypatch.setattr(rerun_losses.store, "read", lambda paths: frame)
    assert rerun_losses.main([str(run), "--arms", "tensorwise"]) == 1
    out = capsys.readouterr().out
    assert "loss differs from its value 4 on" in out
    assert out.splitlines()[-1] == "1 of 2 runs equal"


def test_seeds_that_were_not_stored_compare_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rerun_losses.main([str(run), "--seeds", "7"]) == 2
    assert "seeds [7]" in capsys.readouterr().err


def test_a_curve_that_was_not_stored_is_a_difference() -> None:
    assert rerun_losses.first_difference({"loss": [1.0]}, {"loss": [1.0], "grad_norm": [2.0]})
    assert rerun_losses.first_difference({"loss": [1.0, 2.0]}, {"loss": [1.0]})
    assert not rerun_losses.first_difference({"loss": [1.0]}, {"loss": [1.0]})
