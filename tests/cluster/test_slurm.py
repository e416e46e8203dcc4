"""A real Slurm with two nodes, and what goes wrong on one: `make test-cluster`.

Oracle: the plan of the sweep. Whatever happened, each case ends in exactly one final row an arm and metric, and what
`report` says meanwhile agrees with the rows.
"""

from __future__ import annotations

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


def test_a_task_that_is_queued_again_goes_on(slurm: Slurm, shared: Path) -> None:
    job = submit("--export=ALL,SWEEP=tiny")
    folder = rows_of(job)
    began(folder, 1)
    kept = stored(folder / "shard-1-of-4")
    run("scontrol", "requeue", f"{job}_1")
    gone(slurm, job)
    whole(folder)
    every = store.read(folder / "shard-1-of-4", all_attempts=True)
    assert kept >= 1
    assert every["attempt"].nunique() >= 2
    assert states(folder) == ["finished"] * 4


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
