"""States of Slurm jobs where Slurm keeps no accounts: from its queue.

submitit asks `sacct`, which then fails at each call: it warns line by line and never hears that a job was lost, so the command
would wait forever. The queue names each job until some minutes after its end.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.machine import raw_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOOK_S = 30  # at most, between two looks at the queue
SETTLED_S = 20  # for which a job must have been over: one that is queued again passes through such states
GONE = "NOT_IN_QUEUE"
# Reasons for which a job waits until somebody changes it, its account or the cluster, and how others of them begin
STUCK = {"AccountNotAllowed", "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "JobHeldAdmin",
         "JobHeldUser", "PartitionConfig", "PartitionDown", "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit",
         "QOSNotAllowed", "QOSTimeLimit", "ReservationDeleted"}  # fmt: skip
STUCK_GROUPS = ("AssocGrp", "AssocMax", "QOSGrp", "QOSMax", "QOSMin")
NAMED = 3  # jobs of one line, at most
UNDER_WAY = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "PREEMPTED", "STOPPED", "SIGNALING",
             "STAGE_OUT", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}  # fmt: skip


def keeps_accounts() -> bool:
    """Whether `sacct` answers."""
    if shutil.which("sacct") is None:
        return False
    return not subprocess.run(
        ["sacct", "--noheader", "--jobs=1"], capture_output=True, check=False
    ).returncode


class _Stuck:
    """Says once which jobs Slurm does not start for what does not pass by itself."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}
        self._told: set[tuple[str, str]] = set()

    def look(self, codes: Mapping[str, str]) -> None:
        """One look at the queue: the code of what each job waits for."""
        now, stuck = time.monotonic(), set[tuple[str, str]]()
        for job, waits_for in codes.items():
            if waits_for in STUCK or waits_for.startswith(STUCK_GROUPS):
                stuck.add((job, waits_for))
        self._since = {pair: self._since.get(pair, now) for pair in stuck}
        fresh = {pair for pair, since in self._since.items() if now - since >= SETTLED_S} - self._told
        self._told |= fresh
        for waits_for in dict.fromkeys(codes.values()):
            jobs = [job for job in codes if (job, waits_for) in fresh]
            if jobs:
                more = f" and {len(jobs) - NAMED} more" if len(jobs) > NAMED else ""
                raw_output.say(
                    f"Slurm does not start job{'s' * (len(jobs) > 1)} {', '.join(jobs[:NAMED])}{more} ({waits_for}), and may never: see "
                    f"scontrol show job {jobs[0]}; mend that, or end this command with Ctrl-C, scancel the jobs and ask for less\n"
                )


@contextmanager
def watched() -> Iterator[None]:
    """Within, submitit reads the states of jobs from the queue where this Slurm keeps no accounts; else nothing changes."""
    if shutil.which("sbatch") is None or keeps_accounts():
        yield
        return
    try:
        from submitit.slurm import slurm
    except ImportError:
        yield
        return

    class Queue(slurm.SlurmInfoWatcher):
        """submitit's watcher of jobs, with another command."""

        def __init__(self, delay_s: int) -> None:
            super().__init__(delay_s)
            self._over_since: dict[str, float] = {}
            self._stuck = _Stuck()

        def _make_command(self) -> list[str] | None:
            waits = self._registered - self._finished
            return ["squeue", "--me", "--array", "--states=all", "--format=%i|%T|%N|%r"] if waits else None

        def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
            text = string.decode() if isinstance(string, bytes) else string
            rows = text.partition("\n")[2]
            found: dict[str, dict[str, str]] = super().read_info(f"JobID|State|NodeList|Reason\n{rows}")
            waiting = {job: found[job] for job in sorted(self._registered) if job in found}
            self._stuck.look(
                {job: row.get("Reason", "") for job, row in waiting.items() if row["State"] == "PENDING"}
            )
            for job in self._registered:
                state = found.get(job, {}).get("State", GONE)
                since = self._over_since.setdefault(job, time.monotonic())
                if state in UNDER_WAY:
                    del self._over_since[job]
                settled = state not in UNDER_WAY and time.monotonic() - since >= SETTLED_S
                # submitit waits for what runs; of Slurm's words it knows fewer
                found[job] = {"JobID": job, "State": state if settled else "RUNNING", "NodeList": ""}
            return found

    before: Any = slurm.SlurmJob.watcher
    slurm.SlurmJob.watcher = Queue(delay_s=LOOK_S)
    try:
        yield
    finally:
        slurm.SlurmJob.watcher = before
