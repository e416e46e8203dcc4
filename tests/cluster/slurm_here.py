"""A real Slurm of two nodes on this machine: a controller and two slurmd, each with ports of its own.

Needs root and Debian's slurm-wlm and munge. `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NODES = ("n1", "n2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged")
KEY = Path("/etc/munge/munge.key")
CONFIGURATION = """\
ClusterName=fp8test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
SlurmdTimeout=10
KillWait=10
OverTimeLimit=0
JobRequeue=1
MpiDefault=none
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=1440 State=UP OverSubscribe=NO
"""


def why_not() -> str:
    """What this machine lacks, "" where a Slurm can be started on it."""
    if os.geteuid():
        return "starting Slurm takes root"
    missing = [
        name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]
    return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)" if missing else ""


def wait_for(what: str, true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Waits for a condition; AssertionError with `what` where it does not come."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, f"not within {seconds:g} s: {what}"
        time.sleep(0.1)


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


@dataclass
class Slurm:
    """A running cluster; `start` and `stop` are for the fixture.

    Attributes:
        folder: of its configuration, state and logs.
    """

    folder: Path
    _made_key: bool = False
    _munged: subprocess.Popen[bytes] | None = None
    _ports: list[int] = field(default_factory=list)

    def start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self._authenticate()
        self._ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
            "RealMemory=4000 State=UNKNOWN"
            for node, port in zip(NODES, self._ports[1:], strict=True)
        )
        configuration = self.folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                folder=self.folder,
                nodes=nodes,
                names=",".join(NODES),
                controller_port=self._ports[0],
            )
        )
        os.environ["SLURM_CONF"] = str(configuration)
        self.start_controller()
        for node in NODES:
            self.start_node(node)
        self.all_idle()

    def _authenticate(self) -> None:
        """A munged that answers: the one that runs, or one of our own, with a key of our own where there is none."""
        if not subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
            return
        if not KEY.exists() or not KEY.stat().st_size:
            KEY.write_bytes(os.urandom(1024))
            shutil.chown(KEY, "munge", "munge")
            KEY.chmod(0o400)
            self._made_key = True
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        self._munged = subprocess.Popen(
            ["runuser", "-u", "munge", "--", "munged", "--foreground"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(
            "munge answers",
            lambda: not subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode,
        )

    def start_controller(self) -> None:
        run("slurmctld")
        wait_for("the controller answers", lambda: "UP" in subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, check=False).stdout)  # fmt: skip

    def start_node(self, node: str) -> None:
        run("slurmd", "-N", node)

    def lose_node(self, node: str) -> None:
        """Kills slurmd of a node, and all that it runs, at once."""
        doomed = [self._pid(f"slurmd-{node}")]
        for process in psutil.process_iter(["name"]):
            if process.info["name"] == "slurmstepd" and self._node_of(process) == node:
                doomed += [process, *process.children(recursive=True)]
        for one in filter(None, doomed):
            with suppress(psutil.NoSuchProcess):
                one.kill()

    def _node_of(self, stepd: psutil.Process) -> str | None:
        """The node of a job's slurmstepd, from the environment of what it runs."""
        for child in stepd.children(recursive=True):
            with suppress(psutil.Error):
                if name := child.environ().get("SLURMD_NODENAME"):
                    return name
        return None

    def states(self) -> dict[str, str]:
        """State of each node."""
        return dict(line.split() for line in run("sinfo", "-h", "-N", "-o", "%N %T").splitlines())

    def all_idle(self) -> None:
        wait_for(f"both nodes idle, now {self.states()}", lambda: set(self.states().values()) == {"idle"})

    def jobs(self) -> dict[str, str]:
        """State of each job in the queue, by id ("12_3" of an array)."""
        return dict(line.split() for line in run("squeue", "-h", "-r", "-o", "%i %T").splitlines())

    def node_of(self, job: str) -> str:
        return run("squeue", "-h", "-j", job, "-o", "%N").strip()

    def stop(self) -> None:
        subprocess.run(["scancel", "-u", "root"], capture_output=True, check=False)
        for _ in range(100):
            if not self.jobs():
                break
            time.sleep(0.1)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld"):
            _end(self._pid(name), signal.SIGTERM)
        if self._munged is not None:
            subprocess.run(["pkill", "-x", "munged"], check=False)
            self._munged.wait(timeout=10)
        if self._made_key:
            KEY.unlink()
        os.environ.pop("SLURM_CONF", None)

    def _pid(self, name: str) -> psutil.Process | None:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            return psutil.Process(int((self.folder / f"{name}.pid").read_text()))
        return None


def _end(process: psutil.Process | None, number: int) -> None:
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            process.wait(timeout=30)


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]
    finally:
        for one in held:
            one.close()


def cluster(folder: Path) -> Iterator[Slurm]:
    """For a fixture: a cluster that is gone afterwards."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
