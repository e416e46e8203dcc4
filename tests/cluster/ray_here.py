"""A real Ray of two nodes on this machine: a head and a worker, each in a host of its own (`hosts_here`)."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hosts_here
import psutil
from hosts_here import Host, Hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 6379
START = ("-m", "ray.scripts.scripts", "start", "--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats")  # fmt: skip


def why_not() -> str:
    """What this machine lacks, "" where Ray can be started on it."""
    for module in ("ray", "hydra_plugins.hydra_ray_launcher"):
        with suppress(ModuleNotFoundError):
            if importlib.util.find_spec(module) is not None:
                continue
        return f"not installed: {module} (the extra `ray`)"
    return hosts_here.why_not()


@dataclass
class Ray:
    """A running cluster; `start` and `stop` are for the fixture.

    Attributes:
        env: variables that its workers have.
    """

    env: dict[str, str]
    hosts: Hosts = field(default_factory=Hosts)
    # Short: the path of a socket has 107 characters
    _folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="ray-")))

    @property
    def head(self) -> Host:
        return self.hosts.hosts[0]

    @property
    def worker(self) -> Host:
        return self.hosts.hosts[1]

    @property
    def address(self) -> str:
        return f"{self.head.address}:{PORT}"

    def start(self) -> None:
        self.hosts.start()
        self._started(self.head, "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}")  # fmt: skip
        self.start_worker()

    def start_worker(self) -> None:
        self._started(self.worker, f"--address={self.address}")

    def _started(self, host: Host, *options: str) -> None:
        own = f"--node-ip-address={host.address}"
        code, out, err = host.start(sys.executable, *START, own, *options, **self.env).said(120)
        assert code == 0, (out, err)

    def stop(self) -> None:
        self.hosts.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def kill_worker(pid: int) -> None:
    """Kills a process of Ray that runs a shard, as the kernel's memory killer would."""
    psutil.Process(pid).send_signal(signal.SIGKILL)


def cluster(**env: str) -> Iterator[Ray]:
    """For a fixture: a cluster that is gone afterwards."""
    ray = Ray(env)
    try:
        ray.start()
        yield ray
    finally:
        ray.stop()
