"""The reference job (docs/examples/reference_7b.sbatch) small, on two nodes of a real Slurm: `make test-cluster`.

Oracle: the same job that nothing happened to, whose losses must be those of the one that was queued again, bit for bit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from slurm_here import run, wait_for

from harness import store

if TYPE_CHECKING:
    from slurm_here import Slurm

pytestmark = pytest.mark.cluster

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "reference_7b.sbatch"
SMALL = ("device=cpu", "parts.loss.axes.seed=[0]", "train.judge=false", "log_level=debug")
CURVES = ("loss", "grad_norm", "fp8_grad_norm", "heldout_loss")


@pytest.fixture
def nodes(slurm: Slurm, shared: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """The cluster, with `torchrun` of this Python and an address for its first node, whose name is none here."""
    torchrun = shared / "bin" / "torchrun"
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{torchrun.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FIRST_NODE", "127.0.0.1")
    return slurm


def submit(*words: str, nodes: int = 2) -> str:
    options = (f"--nodes={nodes}", "--gpus-per-node=0", "--cpus-per-task=2", "--output=out-%j.txt")
    return run("sbatch", "--parsable", *options, str(SCRIPT), *SMALL, *words).strip()


def said(job: str) -> str:
    path = Path(f"out-{job}.txt")
    return path.read_text() if path.exists() else ""


def ended(slurm: Slurm, job: str) -> None:
    wait_for(f"job {job} to end", lambda: job not in slurm.jobs(), 300)


def folder_of(job: str) -> Path:
    return Path("results/reference_7b") / f"slurm-{job}"


def curves(job: str) -> dict[tuple[str, str], list[float]]:
    """The samples of each arm and metric of the training runs."""
    rows = store.read(folder_of(job))
    rows = rows[(rows["suite"] == "divergence") & rows["metric"].isin(CURVES)]
    return {(r.arm, r.metric): list(r.samples) for r in rows.itertuples()}


def reason_of(job: str) -> str:
    """Why a job waits, in Slurm's word."""
    return run("squeue", "-h", "-j", job, "-o", "%r").strip()


def under_way(job: str, arm: str) -> None:
    """Waits for the log's line of a step: a line of the job's own output comes every 30 s, and it may end before."""
    log = folder_of(job) / "_run.log"
    wait_for(f"a step of {arm}", lambda: log.exists() and f"/100 of {arm}" in log.read_text(), 300)


def test_queued_again_in_the_middle_it_trains_the_same(nodes: Slurm) -> None:
    plain = submit()
    ended(nodes, plain)
    assert "report   reports" in said(plain), said(plain)

    again = submit()
    under_way(again, "tensorwise")
    run("scontrol", "requeue", again)
    wait_for("it waits to be started", lambda: nodes.jobs().get(again) == "PENDING", 60)
    run("scontrol", "update", f"JobId={again}", "StartTime=now")  # else Slurm waits for two minutes
    ended(nodes, again)

    expected, found = curves(plain), curves(again)
    assert len(expected["tensorwise", "loss"]) == 100
    assert found == expected
    rows = store.read(folder_of(again))
    assert {"train", "divergence"} == set(rows["suite"])
    assert not rows.duplicated(["case_id", "arm", "metric", "part"]).any()
    assert store.read_about(folder_of(again))["state"] == "finished"


def test_before_its_time_limit_it_ends_and_queues_itself_again(nodes: Slurm) -> None:
    """SIGUSR1 to the script, as `#SBATCH --signal` sends it."""
    job = submit()
    under_way(job, "base")
    run("scancel", "--batch", "--signal=USR1", job)
    wait_for("it is queued again", lambda: nodes.jobs().get(job) == "PENDING", 60)
    assert store.read_about(folder_of(job))["state"] == "interrupted"
    run("scancel", job)
    ended(nodes, job)


def test_more_nodes_than_there_are(nodes: Slurm) -> None:
    """Slurm takes the job and says why it does not start; where it is set to refuse (EnforcePartLimits), sbatch says so."""
    job = submit(nodes=3)
    wait_for("a reason", lambda: reason_of(job) not in ("None", "Priority", ""), 30)
    reason = reason_of(job)
    run("scancel", job)
    assert reason in ("PartitionNodeLimit", "PartitionConfig")
