"""Several hosts on this machine: network namespaces joined by a bridge, each with an address and a host name of its own.

Needs root and iproute2. `why_not` says what is missing. What runs in a host is known by its namespace, whoever started it, so
that a host can be lost whole and nothing is left behind.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from slurm_here import run, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

INTERFACE = "v0"


def why_not() -> str:
    """What this machine lacks, "" where hosts can be made on it."""
    if os.geteuid():
        return "making network namespaces takes root"
    if shutil.which("ip") is None:
        return "not installed: ip (Debian: iproute2)"
    name = f"fp8-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    run("ip", "netns", "del", name)
    return ""


class Command:
    """A command under way; what it says goes to files, so that it never waits for a reader."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen(words, stdout=out, stderr=err, env=env, start_new_session=True)

    def said(self, timeout: float) -> tuple[int, str, str]:
        """How it ended: exit code, standard output and error."""
        code = self.process.wait(timeout)
        out, err = (file.read_text() for file in self._files)
        self._folder.cleanup()
        return code, out, err


@dataclass
class Host:
    """One host: a network namespace `name` with an `address`."""

    name: str
    address: str

    def start(self, *words: str, **env: str) -> Command:
        """A command in this host, in a session of its own."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name.rpartition("-")[2]]
        return Command(["ip", "netns", "exec", self.name, *named, *words], {**os.environ, **env})

    def harness(self, *words: str, **env: str) -> Command:
        return self.start(sys.executable, "-m", "harness", *words, **env)

    def pids(self) -> list[int]:
        """Every process of this host."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.name).split()]

    def lose(self) -> None:
        """Kills all that runs here, until nothing does."""

        def gone() -> bool:
            found = self.pids()
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_for(f"nothing runs in {self.name}", gone)


@dataclass
class Hosts:
    """Two hosts that see one another; `start` and `stop` are for the fixture."""

    hosts: list[Host] = field(default_factory=list)

    @property
    def _bridge(self) -> str:
        return f"fp8-{os.getpid()}-net"

    def start(self) -> None:
        # The bridge has a namespace of its own: this machine's network sees nothing of it all
        run("ip", "netns", "add", self._bridge)
        run("ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", self._bridge, "link", "set", "br0", "up")
        for number in (1, 2):
            host = Host(f"fp8-{os.getpid()}-h{number}", f"10.77.0.{number}")
            run("ip", "netns", "add", host.name)
            self.hosts.append(host)
            run("ip", "link", "add", INTERFACE, "netns", host.name, "type", "veth",
                "peer", "name", f"p{number}", "netns", self._bridge)  # fmt: skip
            run("ip", "-n", self._bridge, "link", "set", f"p{number}", "master", "br0", "up")
            run("ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            for link in (INTERFACE, "lo"):
                run("ip", "-n", host.name, "link", "set", link, "up")

    def cut(self, host: Host) -> None:
        """Unplugs a host: at the switch, so that its own end sees nothing but silence."""
        run("ip", "-n", self._bridge, "link", "set", f"p{1 + self.hosts.index(host)}", "nomaster")

    def mend(self, host: Host) -> None:
        run("ip", "-n", self._bridge, "link", "set", f"p{1 + self.hosts.index(host)}", "master", "br0", "up")

    def clear(self) -> None:
        """Whole links, and nothing that runs."""
        for host in self.hosts:
            host.lose()
            self.mend(host)

    def stop(self) -> None:
        for host in self.hosts:
            host.lose()
            run("ip", "netns", "del", host.name)
        self.hosts.clear()
        run("ip", "netns", "del", self._bridge)


def several() -> Iterator[Hosts]:
    """For a fixture: hosts that are gone afterwards."""
    hosts = Hosts()
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
