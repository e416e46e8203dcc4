"""Training runs from the command line. Oracle: curves known beforehand; processes killed in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest
from toy_trials import ToyTrials
from trial_runs import WHOLE, curves, execute

from harness import store
from harness.__main__ import main
from harness.cli import run

SWEEP = """\
# Does the toy train?
suite: toy_trials
axes: {seed: [0, 1]}
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyTrials:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toyt.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    suite = ToyTrials()
    monkeypatch.setitem(run.SUITES, "toy_trials", suite)
    return suite


def runs(capsys: pytest.CaptureFixture[str]) -> pd.DataFrame:
    out = capsys.readouterr().out.splitlines()
    assert out[-2].startswith("results")
    assert out[-1].startswith("report")
    return store.read(out[-2].split()[-1])


def test_the_command_line_makes_runs_and_reports_them(
    command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=toyt", "device=cpu", "workers=1", "model=nano"]) == 0
    frame = runs(capsys)
    assert curves(frame) == WHOLE
    assert frame["axes"].str.contains('"model":"nano"').all()


@pytest.mark.parametrize("spread", [[], ["shard=0/1"]])
def test_what_one_shard_stored_of_a_case_is_not_made_again_by_another(
    spread: list[str], command: ToyTrials, monkeypatch: pytest.MonkeyPatch
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
    words: list[str], arms: set[str], command: ToyTrials, capsys: pytest.CaptureFixture[str]
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
        (["train.mixd_precision=fp8"], "unknown key 'train.mixd_precision' (nearest: train.mixed_precision)"),
        (["data=stdlib"], "data=stdlib means nothing to sweep 'toyt': no suite of it has an axis 'data'"),
        (["train.profile=true"], "train.profile=True means nothing to sweep 'toyt'"),
        (["modle=nano"], "unknown key 'modle' (nearest: model)"),
        (["workers=0"], "workers=0: expected an integer of at least 1"),
        (["axes.seed=[-1]"], "axes.seed=-1: expected an integer of at least 0"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_line_and_nothing_is_written(
    words: list[str], message: str, command: ToyTrials, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["sweep=toyt", "device=cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_schedule_may_hold_what_hydra_reads_otherwise(
    command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "warmup_bf16:0.1@layers.*:grad_weight,cooldown_bf16:5"
    assert main(["sweep=toyt", "device=cpu", "workers=1", f"schedule={text}"]) == 0
    assert json.loads(runs(capsys)["axes"].iloc[0])["schedule"] == text


def test_a_model_of_the_users_own_becomes_an_axis(
    command: ToyTrials, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["model._target_=my.build", "model.batch=my.batch", "model.width=8"]
    assert main(["sweep=toyt", "device=cpu", "workers=1", *words]) == 0
    axes = json.loads(runs(capsys)["axes"].iloc[0])
    assert axes["model"] == '{"_target_":"my.build","batch":"my.batch","width":8}'


CHILD = """
import sys
from harness.cli import run
from harness.__main__ import main
from toy_trials import ToyTrials
run.SUITES["toy_trials"] = ToyTrials(ACTS)
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


def sweep_in_a_process(folder: Path, acts: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a sweep of two runs at once, each in a process of its own."""
    (folder / "child.py").write_text(CHILD.replace("ACTS", repr(acts)))
    base = [sys.executable, str(folder / "child.py"), "sweep=toyt", "device=cpu", "workers=2"]
    return base, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def started(
    base: list[str], environment: dict[str, str], folder: Path, arm: str, steps: int
) -> tuple[subprocess.Popen[bytes], Path]:
    """The sweep under way, once a run of `arm` has made so many steps, and the file in which that run says so."""
    process = subprocess.Popen(base, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while True:
        for place in folder.glob(f"results/toyt/*/_checkpoints/*-{arm}/place"):
            if (text := place.read_text()) and int(text) >= steps:
                return process, place
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_no_process_outlives_a_killed_sweep(command: ToyTrials, tmp_path: Path) -> None:
    """Not even one whose run reports nothing: what it would still write is the next sweep's."""
    process, _ = started(*sweep_in_a_process(tmp_path, {"tensorwise": "hang"}), tmp_path, "tensorwise", 3)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def test_what_a_killed_sweep_had_no_time_to_remove_is_removed(tmp_path: Path) -> None:
    left = tmp_path / "_checkpoints" / "0123456789abcdef-base"
    left.mkdir(parents=True)
    (left / "place").write_text("5")
    execute(tmp_path, ToyTrials())
    assert not left.parent.exists()


@pytest.mark.slow
def test_a_sweep_killed_from_outside_goes_on_where_it_was(command: ToyTrials, tmp_path: Path) -> None:
    """SIGKILL with two processes at work: resume= makes what is missing, from where it was."""
    base, environment = sweep_in_a_process(tmp_path, {"rowwise": "wait"})
    process, place = started(base, environment, tmp_path, "rowwise", 1)
    process.kill()
    process.wait()
    folder = place.parents[2]
    again = subprocess.run(
        [*base, f"resume={folder.name}"], env=environment, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert curves(store.read(folder)) == WHOLE
    assert not (folder / "_checkpoints").exists()
