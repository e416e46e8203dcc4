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
SMALL = ("model=llama_tiny", "batch=1", "seq=32", "accumulation=1", "checkpointing=none", "steps=40", "lr_warmup=4",
         "eval_every=20", "eval_batches=4", "checkpoint_s=1")  # fmt: skip
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


def checkpoint_of(job: str, arm: str) -> None:
    def there() -> bool:
        return any(folder_of(job).glob(f"_checkpoints/*-{arm}/step-*/run-*.pt"))

    wait_for(f"a checkpoint of {arm}", there, 200)


def curves(job: str) -> dict[tuple[str, str], list[float]]:
    """The samples of each arm and metric of the training runs."""
    rows = store.read(folder_of(job))
    rows = rows[(rows["suite"] == "divergence") & rows["metric"].isin(CURVES)]
    return {(r.arm, r.metric): list(r.samples) for r in rows.itertuples()}


def reason_of(job: str) -> str:
    """Why a job waits, in Slurm's word."""
    return run("squeue", "-h", "-j", job, "-o", "%r").strip()


def refusal(job: str) -> str:
    """The one line that says why a job was not carried out."""
    (line,) = [line for line in said(job).splitlines() if line.startswith("error:")]
    return line


def test_queued_again_in_the_middle_it_trains_the_same(nodes: Slurm) -> None:
    plain = submit("ab_steps=0")
    ended(nodes, plain)
    assert "report   reports" in said(plain), said(plain)

    again = submit("ab_steps=71")
    checkpoint_of(again, "tensorwise")
    run("scontrol", "requeue", again)
    wait_for("it waits to be started", lambda: nodes.jobs().get(again) == "PENDING", 60)
    run("scontrol", "update", f"JobId={again}", "StartTime=now")  # else Slurm waits for two minutes
    ended(nodes, again)

    expected, found = curves(plain), curves(again)
    assert len(expected["tensorwise", "loss"]) == 40
    assert found == expected
    assert said(again).count("every rank: FP8 verified") == 2  # in each start
    assert "tensorwise, seed 0: continues from step" in said(again)
    rows = store.read(folder_of(again))
    assert {"scale", "ab", "divergence"} == set(rows["suite"])
    assert not rows.duplicated(["case_id", "arm", "metric", "part"]).any()
    assert store.read_about(folder_of(again))["state"] == "finished"
    report = Path(f"reports/slurm-{again}.md").read_text()
    assert "The job, predicted and measured" in report
    assert "no prediction for this device" in report
    assert "INCONCLUSIVE" in report  # one seed has no interval
    assert "interrupted" not in report


def test_before_its_time_limit_it_saves_and_queues_itself_again(nodes: Slurm) -> None:
    """SIGUSR1 to the script, as `#SBATCH --signal` sends it."""
    job = submit("ab_steps=0", "steps=60", "checkpoint_s=1e9")
    wait_for("the first step", lambda: "step 1 of 60" in said(job), 100)
    run("scancel", "--batch", "--signal=USR1", job)
    wait_for("it is queued again", lambda: nodes.jobs().get(job) == "PENDING", 60)
    assert store.read_about(folder_of(job))["state"] == "interrupted"
    assert any(folder_of(job).glob("_checkpoints/*-base/step-*/run-*.pt"))
    run("scancel", job)
    ended(nodes, job)


def test_a_cancelled_job_does_not_come_back(nodes: Slurm) -> None:
    job = submit("ab_steps=0")
    wait_for("the first step", lambda: "step 1 of 40" in said(job), 100)
    run("scancel", job)
    ended(nodes, job)
    assert store.read_about(folder_of(job))["state"] == "interrupted"
    assert any(folder_of(job).glob("_checkpoints/*-base/step-*/run-*.pt"))


def test_too_few_nodes(nodes: Slurm) -> None:
    job = submit("ab_steps=0", nodes=1)
    ended(nodes, job)
    assert refusal(job).startswith("error: 1 rank: the recipe shards over 2 or more; give more nodes")


def test_more_nodes_than_there_are(nodes: Slurm) -> None:
    """Slurm takes the job and says why it does not start; where it is set to refuse (EnforcePartLimits), sbatch says so."""
    job = submit("ab_steps=0", nodes=3)
    wait_for("a reason", lambda: reason_of(job) not in ("None", "Priority", ""), 30)
    reason = reason_of(job)
    run("scancel", job)
    assert reason in ("PartitionNodeLimit", "PartitionConfig")


def test_a_folder_that_is_not_shared(nodes: Slurm, shared: Path) -> None:
    (shared / "results").mkdir()
    (shared / "elsewhere").mkdir()
    nodes.restart("n2", other=(shared / "results", shared / "elsewhere"))
    try:
        job = submit("ab_steps=0")
        ended(nodes, job)
    finally:
        nodes.restart("n2")
    assert "error: results_dir=results is not shared: what rank" in refusal(job)
    assert "on n2" in refusal(job)
    assert not any((shared / "results").rglob("*.parquet"))


def test_a_folder_that_one_node_cannot_write(nodes: Slurm, shared: Path) -> None:
    (shared / "results").mkdir()
    nodes.restart("n2", read_only=shared / "results")
    try:
        job = submit("ab_steps=0")
        ended(nodes, job)
    finally:
        nodes.restart("n2")
    assert "on n2 cannot write there (Read-only file system)" in refusal(job)
