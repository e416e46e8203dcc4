"""Several hosts on this machine whose links have rates: network namespaces at one bridge, shaped by `tc` at each sender.

Root and iproute2. All names begin with `fp8links`; `hosts` takes away what is left of an earlier run, and its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from slurm_here import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NAME, BRIDGE = "fp8links", "fp8linksb"
PORT = 29541
INTERFACE = "eth0"


def why_not() -> str:
    """Why this machine cannot do it; "" where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} of iproute2 is not installed"
    tried = subprocess.run(["ip", "netns", "add", f"{NAME}-try"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    run("ip", "netns", "del", f"{NAME}-try")
    return ""


def run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def address(host: int) -> str:
    return f"10.78.0.{host + 1}"


@contextmanager
def hosts(count: int, rate_mbit: int | None = None) -> Iterator[None]:
    """So many namespaces, each of which sends to each other one at `rate_mbit`; None: as fast as it goes."""
    _remove()
    try:
        run("ip", "netns", "add", BRIDGE)
        run("ip", "-n", BRIDGE, "link", "add", "br0", "type", "bridge")
        run("ip", "-n", BRIDGE, "link", "set", "br0", "up")
        for host in range(count):
            name = f"{NAME}{host}"
            run("ip", "netns", "add", name)
            run(
                *("ip", "link", "add", INTERFACE, "netns", name, "type", "veth"),
                *("peer", "name", f"port{host}", "netns", BRIDGE),
            )
            run("ip", "-n", BRIDGE, "link", "set", f"port{host}", "master", "br0", "up")
            run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            tc(name, "qdisc", "add", "dev", INTERFACE, "root", "handle", "1:", "htb")
        if rate_mbit is not None:
            for one in range(count):
                for other in range(count):
                    if one != other:
                        shape(one, other, rate_mbit)
        yield
    finally:
        _remove()


def tc(namespace: str, *words: str) -> None:
    run("ip", "netns", "exec", namespace, "tc", *words)


def shape(one: int, other: int, rate_mbit: int) -> None:
    """What `one` sends to `other` goes at that rate."""
    name, handle = f"{NAME}{one}", f"1:{other + 1}"
    tc(
        *(name, "class", "replace", "dev", INTERFACE, "parent", "1:", "classid", handle),
        *("htb", "rate", f"{rate_mbit}mbit", "burst", "16kb", "cburst", "16kb"),
    )
    tc(
        *(
            name,
            "filter",
            "replace",
            "dev",
            INTERFACE,
            "parent",
            "1:",
            "protocol",
            "ip",
            "prio",
            str(other + 1),
        ),
        *("u32", "match", "ip", "dst", f"{address(other)}/32", "flowid", handle),
    )


def launched(
    count: int, command: Sequence[str], timeout_s: float = 300
) -> list[subprocess.CompletedProcess[str]]:
    """A command of Python's on each host, one rank each, by torchrun; they end together."""
    started = [
        subprocess.Popen(
            [
                *("ip", "netns", "exec", f"{NAME}{host}", sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={count}", f"--node-rank={host}", "--nproc-per-node=1"),
                *(f"--master-addr={address(0)}", f"--master-port={PORT}", *command),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE},
        )
        for host in range(count)
    ]
    try:
        said = [one.communicate(timeout=timeout_s)[0] for one in started]
    finally:
        for host in range(count):
            _end_all(f"{NAME}{host}")
    return [
        subprocess.CompletedProcess(one.args, one.returncode, out, "")
        for one, out in zip(started, said, strict=True)
    ]


def _end_all(namespace: str) -> None:
    """Kills all that runs in a namespace, whoever started it, until nothing does."""

    def is_empty() -> bool:
        found = [int(pid) for pid in run("ip", "netns", "pids", namespace).split()]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_for(f"nothing runs in {namespace}", is_empty)


def _remove() -> None:
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(NAME):
            _end_all(name)
            run("ip", "netns", "del", name)
