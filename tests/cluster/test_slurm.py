"""A real Slurm with two nodes, and what goes wrong on one: `make test-cluster`.

Oracle: the plan of the sweep. Whatever happened, each case ends in exactly one final row an arm and metric, and what
`watch` and `report` say meanwhile agrees with the rows.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from slurm_here import run, wait_for
from tiny_sweep import CASES, began, harness, states, stored, whole

from harness import store

if TYPE_CHECKING:
    from slurm_here import Slurm

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "sweep.sbatch"


def submit(*options: str) -> str:
    """The array script as it stands in the docs, with one GPU less a job and no more tasks than the test needs; its job id."""
    words = ["sbatch", "--parsable", "--gpus=0", "--cpus-per-task=1", "--array=0-3", *options, str(SCRIPT)]
    return run(*words).strip()


def rows_of(job: str) -> Path:
    return Path("results/tiny") / f"slurm-{job}"


def gone(slurm: Slurm, job: str) -> None:
    wait_for(f"job {job} to end", lambda: not any(name.startswith(job) for name in slurm.jobs()), 300)


def test_submitit_spreads_four_shards_over_two_nodes(slurm: Slurm, shared: Path) -> None:
    out = harness(
        "-m", "sweep=tiny", "device=cpu", "shard=0/4,1/4,2/4,3/4", "run_id=r1", "hydra/launcher=submitit_slurm",
        "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=5",
    )  # fmt: skip
    assert "4 of 4 shards finished" in out
    assert "sacct" not in out  # this Slurm keeps no accounts, which submitit would say at every look
    assert "accounting" not in out
    whole(Path("results/tiny/r1"))
    nodes = set(run("sh", "-c", "scontrol show jobs -o | grep -o ' NodeList=[^ ]*'").split())
    assert {"NodeList=n1", "NodeList=n2"} <= nodes


def test_a_task_that_is_queued_again_goes_on(slurm: Slurm, shared: Path) -> None:
    job = submit("--export=ALL,SWEEP=tiny")
    folder = rows_of(job)
    began(folder, 1)
    kept = stored(folder / "shard-1-of-4")
    run("scontrol", "requeue", f"{job}_1")
    watched = harness("watch", str(folder))  # ends with the run
    gone(slurm, job)
    whole(folder)
    every = store.read(folder / "shard-1-of-4", all_attempts=True)
    assert kept >= 1
    assert every["attempt"].nunique() >= 2
    assert states(folder) == ["finished"] * 4
    assert "finished" in watched


def test_a_cancelled_task_is_missing_until_it_is_resumed(slurm: Slurm, shared: Path) -> None:
    job = submit("--export=ALL,SWEEP=tiny")
    folder = rows_of(job)
    began(folder, 2)
    run("scancel", "--batch", "--signal=TERM", f"{job}_2")
    gone(slurm, job)
    assert states(folder)[2] == "interrupted"
    assert 1 <= stored(folder / "shard-2-of-4") < CASES // 4 + 1
    harness("report", str(folder), "-o", "part.html")
    missing = CASES - stored(folder)
    assert missing > 0
    assert "interrupted" in Path("part.md").read_text()
    harness(f"resume={folder.name}")
    whole(folder)


def test_a_lost_node_costs_no_row(slurm: Slurm, shared: Path) -> None:
    """slurmd of one node and all that it runs are killed; Slurm queues its jobs again."""
    job = submit("--export=ALL,SWEEP=tiny")
    folder = rows_of(job)
    for shard in range(4):
        began(folder, shard)
    lost = slurm.node_of(f"{job}_0")
    before = stored(folder)
    slurm.lose_node(lost)
    wait_for(f"{lost} is down", lambda: slurm.states()[lost].startswith("down"), 120)
    gone(slurm, job)
    slurm.start_node(lost)
    slurm.all_idle()
    assert before >= 4
    whole(folder)


def test_a_job_that_reaches_its_time_is_submitted_again(slurm: Slurm, shared: Path) -> None:
    """A sweep in jobs that have too little time for it; submitit asks Slurm for a signal before the end and requeues."""
    out = harness(
        "-m", "sweep=tiny", "device=cpu", "shard=0/1", "run_id=r1", "hydra/launcher=submitit_slurm",
        "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=20",
        "hydra.launcher.max_num_timeout=4", "timing.min_seconds=1.5", "timing.max_seconds=1.5",
    )  # fmt: skip
    assert "1 of 1 shards finished" in out
    whole(Path("results/tiny/r1"))
    assert store.read("results/tiny/r1", all_attempts=True)["attempt"].nunique() >= 2


def test_a_job_that_is_killed_outright_is_missed_by_the_command(slurm: Slurm, shared: Path) -> None:
    """Nothing of it is left to say so: the command hears it from Slurm's queue."""
    words = ["-m", "sweep=tiny", "device=cpu", "shard=0/2,1/2", "run_id=r1", "hydra/launcher=submitit_slurm",
             "hydra.launcher.cpus_per_task=1", "hydra.launcher.timeout_min=5"]  # fmt: skip
    command = subprocess.Popen(
        [sys.executable, "-m", "harness", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    folder = Path("results/tiny/r1")
    wait_for("a case of shard 1", lambda: stored(folder / "shard-1-of-2") > 0, 120)
    (job,) = (name for name in slurm.jobs() if name.endswith("_1"))
    run("scancel", "--signal=KILL", job)
    run("scancel", job)
    _, err = command.communicate(timeout=240)
    assert command.returncode == 2
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert line.startswith("error: shards 1/2 (")
    assert 1 <= stored(folder / "shard-1-of-2") < CASES
    harness("sweep=tiny", "device=cpu", "resume=r1")
    whole(folder)
