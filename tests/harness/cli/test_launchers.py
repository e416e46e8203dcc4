"""Oracles: the plan of the whole sweep, each case of which must end in exactly one final row an arm and metric."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize
from hydra.core.global_hydra import GlobalHydra

from harness import store
from harness.__main__ import main
from harness.cli import launch
from harness.cli.config import sweeps
from harness.report.runs import load

SWEEP = """\
# Do shards survive?
suite: gemm
arms: [tensorwise_eager, rowwise_eager]
axes: {role: [output], M: [16, 32, 48], K: [32, 64], N: [32]}
timing: {min_rounds: 3, max_rounds: 100, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""
SLOWLY = ["timing.min_seconds=0.3", "timing.max_seconds=0.3", "timing.rel_half_width=0.0001"]
CASES = 6
ROOT = Path(launch.__file__).parents[2]
OVERRIDES = {
    "ray": ["+hydra.launcher.ray.init.num_cpus=2", "+hydra.launcher.ray.init.include_dashboard=false"]
}


def needs(name: str) -> pytest.MarkDecorator:
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(launch.LAUNCHERS[name].module) is not None:
            return pytest.mark.skipif(False, reason="")
    return pytest.mark.skip(reason=f"hydra/launcher={name} is not installed")


@pytest.fixture(autouse=True)
def in_a_folder_with_a_sweep(
    enter_folder_with_sweep: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter_folder_with_sweep("tiny", SWEEP)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def spread(name: str, *more: str) -> list[str]:
    words = ["-m", "sweep=tiny", "device=cpu", "shard=0/2,1/2", f"hydra/launcher={name}", "run_id=r1", *more]
    return [*words, *OVERRIDES.get(name, [])]


def whole(folder: Path = Path("results/tiny/r1")) -> None:
    """Every case of the sweep has its rows, each once."""
    frame = store.read(folder)
    assert frame["case_id"].nunique() == CASES
    assert set(frame["run_id"]) == {"r1"}
    assert not frame.duplicated(["case_id", "arm", "metric", "regime", "part"]).any()
    assert set(frame["status"]) == {"ok"}
    assert set(frame.groupby("case_id")["arm"].nunique()) == {2}


def kill_a_shard_at_work(parent: subprocess.Popen[str]) -> int:
    """Kills the process of the first shard that has stored a case and still runs; the cases that it had stored."""
    for _ in range(2400):
        for note in Path("results/tiny/r1").glob("shard-*/_progress.json"):
            seen = json.loads(note.read_text())
            if seen["state"] == "running" and seen["statuses"].get("ok", 0):
                os.kill(seen["pid"], signal.SIGKILL)
                return int(store.read(note.parent)["case_id"].nunique())
        assert parent.poll() is None, parent.communicate()
        time.sleep(0.1)
    raise AssertionError("no shard stored a case within four minutes")


LOCAL = [pytest.param(name, marks=needs(name)) for name in ("joblib", "submitit_local")]


@pytest.mark.slow
@pytest.mark.parametrize("name", LOCAL)
def test_a_sweep_is_spread_over_processes_and_reported_as_one(name: str, tmp_path: Path) -> None:
    process = start(*spread(name))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "2 of 2 shards finished" in out
    assert out.splitlines()[-2:] == [
        f"results  {tmp_path}/results/tiny/r1",
        "report   reports/r1.html",
    ]
    whole()
    (run,) = load([Path("results/tiny/r1")], Path("reports")).runs
    assert run.state == "finished"
    assert run.command.startswith("python -m harness -m sweep=tiny")
    pids = {
        json.loads(note.read_text())["pid"] for note in Path("results/tiny/r1").glob("shard-*/_progress.json")
    }
    assert len(pids) == 2
    if len(os.sched_getaffinity(0)) >= 2:
        threads = {json.loads(env)["threads"] for env in store.read("results/tiny/r1")["env"]}
        assert threads == {1}


@pytest.mark.slow
@needs("joblib")
def test_a_killed_joblib_worker_loses_nothing_that_was_stored_and_resume_ends_the_sweep() -> None:
    process = start(*spread("joblib", *SLOWLY))
    kill_a_shard_at_work(process)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "did not finish" in err
    assert "resume=r1" in err
    kept = store.read("results/tiny/r1")
    assert 1 <= kept["case_id"].nunique() < CASES
    assert main(["sweep=tiny", "device=cpu", *SLOWLY, "resume=r1"]) == 0
    whole()
    after = store.read("results/tiny/r1", all_attempts=True)
    stored = after[after["attempt"].isin(set(kept["attempt"]))]
    assert set(stored["case_id"]) == set(kept["case_id"])


@pytest.mark.slow
@needs("ray")
def test_a_killed_ray_worker_is_replaced_and_its_shard_goes_on() -> None:
    process = start(*spread("ray", *SLOWLY))
    kept = kill_a_shard_at_work(process)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    whole()
    assert kept >= 1
    frame = store.read("results/tiny/r1")
    assert frame["attempt"].nunique() == 3  # two shards, and the one that went on: what was stored stayed


@pytest.mark.slow
def test_two_shards_of_the_same_number_at_once_leave_each_case_once() -> None:
    twice = [start("sweep=tiny", "device=cpu", "shard=0/2", "run_id=r1") for _ in range(2)]
    codes = [process.communicate(timeout=300) and process.returncode for process in twice]
    assert sorted(codes) in ([0, 0], [0, 2])  # refused, where the first one still writes
    assert main(["sweep=tiny", "device=cpu", "shard=1/2", "run_id=r1"]) == 0
    whole()


# A cluster that is not there: programs of its names that run the jobs here

SBATCH = """\
#!/bin/bash
# Starts every job of the array as Slurm would, and answers as it does.
script="${@: -1}"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script"); last=${last:-0}
for i in $(seq 0 "$last"); do
  SLURM_JOB_ID=77$i SLURM_ARRAY_JOB_ID=77 SLURM_ARRAY_TASK_ID=$i SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 \\
    SLURM_JOB_NODELIST=here SLURM_PROCID=0 SLURM_LOCALID=0 setsid bash "$script" > /dev/null 2>&1 < /dev/null &
  echo $! >> "$SLURM_FAKE/pids"
done
cp "$script" "$SLURM_FAKE/script"
echo "Submitted batch job 77"
"""
SRUN = """\
#!/bin/bash
# Drops its own options and runs the command.
while [[ "$1" == --* ]]; do
  if [[ "$1" == --output || "$1" == --error ]]; then shift; fi
  shift
done
exec "$@"
"""
SACCT = """\
#!/bin/bash
echo "JobID|State|NodeList"
for i in $(seq 1 $(wc -l < "$SLURM_FAKE/pids")); do
  pid=$(sed -n "${i}p" "$SLURM_FAKE/pids")
  if kill -0 "$pid" 2> /dev/null; then state=RUNNING; else state=COMPLETED; fi
  echo "77_$((i - 1))|$state|here"
done
"""


@pytest.mark.slow
@needs("submitit_slurm")
@pytest.mark.skipif(shutil.which("setsid") is None, reason="the imitation of Slurm needs setsid")
def test_slurm_jobs_are_submitted_as_an_array_and_their_rows_gathered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: programs named sbatch, srun and sacct that keep Slurm's manners and run the jobs on this machine."""
    fake = tmp_path / "fake"
    fake.mkdir()
    for name, text in {"sbatch": SBATCH, "srun": SRUN, "sacct": SACCT}.items():
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_FAKE", str(fake))
    more = ["hydra.launcher.partition=gpu", "hydra.launcher.timeout_min=30"]
    process = start(*spread("submitit_slurm", *more))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "2 of 2 shards finished" in out
    whole()
    script = (fake / "script").read_text()
    assert "#SBATCH --partition=gpu" in script
    assert "#SBATCH --array=0-1" in script


# Refusals


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["shard=5/4"], "count from 0"),
        (["shard=x"], "i/n"),
        (["shard=0/2,0/2"], "twice"),
        ([], "shard=0/4,1/4"),
        (["shard=0/2,1/2", "hydra/launcher=jobli"], "nearest: joblib"),
        (["shard=0/2,1/2", "hydra/launcher=submitit_slurm"], "no sbatch"),
        (
            ["shard=0/2,1/2", "hydra/launcher=submitit_slurm", "hydra.launcher.nodes=3"],
            "one process on one node",
        ),
        (["shard=0/2,1/2", "axes.nn=1"], "unknown axis"),
        (["shard=0/2,1/2", "run_id=a/b"], "names a folder"),
        (["shard=0/2,1/2", "resume=nothing"], "no run 'nothing'"),
    ],
)
@needs("submitit_slurm")
def test_bad_input_is_one_line_exit_2_and_starts_nothing(
    words: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    assert main(["-m", "sweep=tiny", "device=cpu", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert why in line
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("missing", ["module", "needs"])
@pytest.mark.parametrize(
    ("name", "extra"),
    [("joblib", "joblib"), ("submitit_local", "slurm"), ("submitit_slurm", "slurm"), ("ray", "ray")],
)
def test_a_launcher_that_is_not_installed_names_its_extra(
    name: str,
    extra: str,
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = getattr(launch.LAUNCHERS[name], missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None if module == gone else object())
    assert main(["-m", "sweep=tiny", "shard=0/2,1/2", f"hydra/launcher={name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"pip install 'fp8-harness[{extra}]'" in line
    assert not (tmp_path / "results").exists()


def test_the_extras_that_errors_name_exist() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {launcher.extra for launcher in launch.LAUNCHERS.values()} - {""} <= set(extras)


def test_a_dry_run_lists_the_cases_of_each_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["-m", "sweep=tiny", "device=cpu", "shard=0/2,1/2", "dry_run=true"]) == 0
    out = capsys.readouterr().out
    ids = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert len(ids) == len(set(ids)) == CASES
    assert out.count("in other shards") == 2
    assert sorted(tmp_path.rglob("*")) == before


# The examples


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(n)) for n in ("submitit_slurm", "ray")])
def test_the_ready_examples_name_settings_that_their_launchers_have(name: str) -> None:
    """Oracle: Hydra, which composes a launcher's settings against the launcher's own schema."""
    page = (ROOT / "docs" / "howto-scale-out.md").read_text()
    command = next(
        block for block in page.split("```") if f"hydra/launcher={name}" in block and "-m harness -m" in block
    )
    words = command.replace("\\\n", " ").split("-m harness -m", 1)[1].split("\n\n")[0].split()
    assert next(word.partition("=")[2] for word in words if word.startswith("sweep=")) in sweeps()
    own = [word for word in words if word.lstrip("+").startswith(("hydra/", "hydra."))]
    GlobalHydra.instance().clear()
    with initialize(version_base="1.3", config_path=None):
        composed = compose(overrides=own, return_hydra_config=True)
    assert len(own) > 2
    assert composed.hydra.launcher._target_.startswith("hydra_plugins.")


def test_the_sbatch_script_is_a_script_whose_shards_cover_the_sweep(tmp_path: Path) -> None:
    script = ROOT / "docs" / "examples" / "sweep.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    lines = script.read_text().splitlines()
    (array,) = [line for line in lines if line.startswith("#SBATCH --array=")]
    last = int(array.rpartition("-")[2])
    echoed = tmp_path / "python"
    echoed.write_text('#!/bin/bash\necho "$@"\n')
    echoed.chmod(0o755)
    for index in (0, last):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(index), "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_COUNT": str(last + 1), "SLURM_SUBMIT_DIR": str(tmp_path)}  # fmt: skip
        said = subprocess.run(
            ["bash", str(script)], env=env, capture_output=True, text=True, check=True
        ).stdout
        assert f"shard={index}/{last + 1}" in said
        assert "run_id=slurm-9" in said


def test_the_ray_cluster_file_is_one(tmp_path: Path) -> None:
    cluster = yaml.safe_load((ROOT / "docs" / "examples" / "ray-cluster.yaml").read_text())
    assert {
        "cluster_name",
        "provider",
        "auth",
        "head_start_ray_commands",
        "worker_start_ray_commands",
    } <= set(cluster)
    assert any("fp8-harness[ray]" in command for command in cluster["setup_commands"])
