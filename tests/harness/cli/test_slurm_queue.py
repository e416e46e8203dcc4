"""States of jobs from the queue. Oracle: what Slurm 22.05.8 printed for `squeue` here."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from harness.cli import slurm_queue

if TYPE_CHECKING:
    from pathlib import Path

SQUEUE = """\
JOBID|STATE|NODELIST|REASON
7_0|RUNNING|n1|None
7_1|PENDING||Resources
6|COMPLETED|n2|None
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that answer as a Slurm without accounting does."""
    for name, body in {
        "sbatch": "exit 1",
        "sacct": "echo Slurm accounting storage is disabled >&2; exit 1",
        "squeue": f"cat <<'E'\n{SQUEUE}E",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the queue's watcher sees, which a test sets."""
    seconds = [100.0]
    monkeypatch.setattr(slurm_queue.time, "monotonic", lambda: seconds[0])
    return seconds


def test_whether_accounts_are_kept_is_what_sacct_answers(cluster: Path) -> None:
    assert not slurm_queue.keeps_accounts()
    (cluster / "sacct").write_text("#!/bin/sh\nexit 0\n")
    assert slurm_queue.keeps_accounts()


def test_a_job_is_over_where_it_left_the_queue_and_stays_away(
    cluster: Path, capfd: pytest.CaptureFixture[str], now: list[float]
) -> None:
    """6 has ended, 5_2 is no longer listed; 7_0 seems so for a moment, while Slurm queues it again."""
    slurm = pytest.importorskip("submitit.slurm.slurm", reason="submitit is not installed")
    before, jobs = slurm.SlurmJob.watcher, ("7_0", "7_1", "6", "5_2")

    def over() -> dict[str, str]:
        watcher._last_status_check = float("-inf")
        states = {job: watcher.get_state(job, mode="force") for job in jobs}
        watcher.update()
        return {
            job: watcher.get_state(job, mode="cache") for job in states if watcher.is_done(job, mode="cache")
        }

    with slurm_queue.watched():
        watcher = slurm.SlurmJob.watcher
        for seconds, running in ((0, "CANCELLED"), (10, "RUNNING"), (10, "CANCELLED")):
            (cluster / "squeue").write_text(f"#!/bin/sh\ncat <<'E'\n{SQUEUE.replace('RUNNING', running)}E\n")
            now[0] += seconds
            seen = over()
        assert seen == {"6": "COMPLETED", "5_2": slurm_queue.GONE}
        now[0] += slurm_queue.SETTLED_S
        assert over().keys() == {"6", "5_2", "7_0"}
    assert slurm.SlurmJob.watcher is before
    assert "accounting" not in "".join(capfd.readouterr())


STUCK = """\
JOBID|STATE|NODELIST|REASON
8_0|PENDING||Resources
8_1|PENDING||PartitionConfig
8_2|PENDING||PartitionConfig
8_3|PENDING||AssocGrpCPUMinutesLimit
8_4|PENDING||AssocGrpCPUMinutesLimit
8_5|PENDING||AssocGrpCPUMinutesLimit
8_6|PENDING||AssocGrpCPUMinutesLimit
9|PENDING||BadConstraints
"""


def test_a_job_that_slurm_may_never_start_is_named_once(
    cluster: Path, capfd: pytest.CaptureFixture[str], now: list[float]
) -> None:
    """After 20 s of the same reason, since one may pass; 9 is another command's."""
    slurm = pytest.importorskip("submitit.slurm.slurm", reason="submitit is not installed")

    def said(seconds: float, text: str) -> list[str]:
        now[0] += seconds
        (cluster / "squeue").write_text(f"#!/bin/sh\ncat <<'E'\n{text}E\n")
        watcher._last_status_check = float("-inf")
        for number in range(7):
            assert watcher.get_state(f"8_{number}", mode="force") == "RUNNING"
        return capfd.readouterr().err.splitlines()

    with slurm_queue.watched():
        watcher = slurm.SlurmJob.watcher
        for number in range(7):
            watcher.register_job(f"8_{number}")
        assert "%r" in " ".join(watcher._make_command())
        assert said(0, STUCK) == []
        assert (
            said(slurm_queue.SETTLED_S - 1, STUCK.replace("8_2|PENDING||P", "8_2|PENDING||Resources, P"))
            == []
        )
        first, second = said(1, STUCK)
        assert first.startswith("Slurm does not start job 8_1 (PartitionConfig), and may never: ")
        assert second.startswith(
            "Slurm does not start jobs 8_3, 8_4, 8_5 and 1 more (AssocGrpCPUMinutesLimit), and"
        )
        assert said(slurm_queue.SETTLED_S - 1, STUCK) == []
        (third,) = said(1, STUCK)
        assert third.startswith("Slurm does not start job 8_2 (PartitionConfig)")
        assert said(1000, STUCK) == []


def test_with_accounts_nothing_changes(cluster: Path) -> None:
    slurm = pytest.importorskip("submitit.slurm.slurm", reason="submitit is not installed")
    (cluster / "sacct").write_text("#!/bin/sh\nexit 0\n")
    before = slurm.SlurmJob.watcher
    with slurm_queue.watched():
        assert slurm.SlurmJob.watcher is before
