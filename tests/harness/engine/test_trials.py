"""Runs of trial suites through executor and command line. Oracle: what the toy suite counts, and the store's contract."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from toy import as_module
from toy_trials import ToyTrials
from trial_runs import WHOLE, curves, execute

from harness import store
from harness.__main__ import main
from harness.cli import run
from harness.machine.gpu_monitor import Monitor
from harness.store.errors import Cause


@pytest.mark.parametrize("lanes", [0, 2])
def test_a_run_that_raises_fails_alone(lanes: int, tmp_path: Path) -> None:
    outcome, frame = execute(tmp_path, ToyTrials({"tensorwise": "raise"}), lanes=lanes)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[1] != "tensorwise"}
    failed = frame[frame["status"] == "failed"]
    assert failed["arm"].tolist() == ["tensorwise"] * 2
    assert set(failed["metric"]) == {"loss"}
    assert set(failed["reason"]) == {"RuntimeError: boom"}
    assert failed["resolved"].str.contains("toy_trials.py").all()  # the traceback
    assert outcome.statuses["failed"] == 2
    assert not (tmp_path / "_checkpoints").exists()


@pytest.mark.parametrize(
    ("device", "lanes", "told"), [("cuda", 2, {2}), ("cuda", 1, {None}), ("cpu", 2, {None})]
)
def test_runs_that_share_a_gpu_say_so(tmp_path: Path, device: str, lanes: int, told: set[int | None]) -> None:
    """Their seconds are no speed; each run of a CPU has a core of its own."""
    _, frame = execute(tmp_path, ToyTrials(), seeds=1, device=device, lanes=lanes, monitor=Monitor())
    good = frame[frame["status"] == "ok"]
    assert {json.loads(resolved).get("runs_on_this_gpu") for resolved in good["resolved"]} == told


def test_a_curve_that_ends_early_is_a_result_and_one_that_never_began_a_failure(tmp_path: Path) -> None:
    _, frame = execute(tmp_path, ToyTrials({"rowwise": "nan", "broken": "nothing"}), seeds=1)
    assert curves(frame)[0, "rowwise"] == [0.0] * 3
    (reason,) = frame[frame["arm"] == "broken"]["reason"]
    assert reason == "nothing was trained: loss is nan at step 0"


def test_a_run_whose_process_dies_twice_has_failed_and_resume_goes_on_from_its_file(tmp_path: Path) -> None:
    suite = ToyTrials({"tensorwise": "die 2"})
    outcome, frame = execute(tmp_path, suite, lanes=2)
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[1] != "tensorwise"}
    assert set(frame[frame["status"] == "failed"]["cause"]) == {Cause.DIED}
    assert outcome.statuses["failed"] == 2
    outcome, frame = execute(tmp_path, suite, resume=True, lanes=2)
    assert curves(frame) == WHOLE
    assert (frame["status"] == "ok").all()
    begun = {json.loads(r)["begun"] for r in frame[frame["arm"] == "tensorwise"]["resolved"]}
    assert begun == {3}
    assert not (tmp_path / "_checkpoints").exists()


SWEEP = """\
# Does the toy train?
suite: toy_trials
axes: {seed: [0, 1]}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toyt.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    suite = as_module(ToyTrials())
    monkeypatch.setitem(run.SUITES, "toy_trials", suite)
    return suite


def runs(capsys: pytest.CaptureFixture[str]) -> pd.DataFrame:
    out = capsys.readouterr().out.splitlines()
    assert out[-2].startswith("results")
    assert out[-1].startswith("report")
    return store.read(out[-2].split()[-1])


@pytest.mark.parametrize("spread", [[], ["shard=0/1"]])
def test_what_one_shard_stored_of_a_case_is_not_made_again_by_another(
    spread: list[str], command: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third of four arms; the rest is made without shards, or by those of another number."""
    words = ["sweep=toyt", "device=cpu", "isolate=false", "quiet=true", "axes.seed=0"]
    monkeypatch.setitem(run.SUITES, "toy_trials", ToyTrials({"rowwise": "stop"}))
    assert main([*words, "run_id=r1", "shard=0/1"]) == 2
    whole = Path("results/toyt/r1")
    (whole / "shard-0-of-1").rename(whole / "shard-0-of-2")
    monkeypatch.setitem(run.SUITES, "toy_trials", command)
    assert main([*words, "resume=r1", *spread]) == 0
    frame = store.read(whole, all_attempts=True)
    assert not frame.duplicated(["case_id", "arm", "metric", "part"]).any()
    assert curves(frame) == {key: values for key, values in WHOLE.items() if key[0] == 0}


@pytest.mark.parametrize(
    ("words", "arms"),
    [
        (["train.mixed_precision=bf16"], {"base"}),
        (["train.mixed_precision=fp8"], {"base", "tensorwise", "broken"}),
        (["train.mixed_precision=FP8", "train.recipe=rowwise"], {"base", "rowwise", "broken"}),
        (["train.mixed_precision=float8", "arms=[base,rowwise,tensorwise]"], {"base", "tensorwise"}),
    ],
)
def test_mixed_precision_and_recipe_choose_the_arms(
    words: list[str], arms: set[str], command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=toyt", "device=cpu", "workers=1", *words]) == 0
    assert set(runs(capsys)["arm"]) == arms


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.mixed_precision=fp9"], "unknown train.mixed_precision 'fp9' (nearest: fp8)"),
        (["train.mixed_precision=bf16", "arms=[rowwise]"], "leaves none of the arms rowwise"),
        (["train.recipe=rowwise"], "train.recipe=rowwise needs train.mixed_precision=fp8"),
        (["train.mixed_precision=fp8", "train.recipe=rowise"], "unknown train.recipe 'rowise' (nearest: rowwise)"),
        (["data=stdlib"], "data=stdlib means nothing to sweep 'toyt': no suite of it has an axis 'data'"),
        (["train.profile=true"], "train.profile=True means nothing to sweep 'toyt'"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_and_nothing_is_written(
    words: list[str], message: str, command: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["sweep=toyt", "device=cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "axis", "value"),
    [
        (
            ["schedule=warmup_bf16:0.1@layers.*:grad_weight,cooldown_bf16:5"],
            "schedule",
            "warmup_bf16:0.1@layers.*:grad_weight,cooldown_bf16:5",
        ),
        (
            ["model._target_=my.build", "model.batch=my.batch", "model.width=8"],
            "model",
            '{"_target_":"my.build","batch":"my.batch","width":8}',
        ),
        (["model=nano"], "model", "nano"),
    ],
)
def test_the_command_line_makes_runs_of_a_key_that_is_an_axis(
    words: list[str], axis: str, value: str, command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=toyt", "device=cpu", "workers=1", *words]) == 0
    frame = runs(capsys)
    assert curves(frame) == WHOLE
    assert json.loads(frame["axes"].iloc[0])[axis] == value


def test_what_a_killed_sweep_had_no_time_to_remove_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "_checkpoints" / "0123456789abcdef-base"
    left.mkdir(parents=True)
    (left / "place").write_text("5")
    execute(tmp_path, ToyTrials())
    assert not left.parent.exists()
