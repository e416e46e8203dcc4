"""Ranks on two hosts by torchrun, over gloo, and what goes wrong between them: `make test-cluster`.

Oracles: the suites' own (losses of one process; of weights gathered in high precision), which host of the test a rank is on,
and what the namespaces list of processes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import hosts_here
import pytest
from slurm_here import wait_for

from harness import store
from harness.machine.torchrun import SILENT_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hosts_here import Command, Hosts

pytestmark = pytest.mark.cluster

ENDLESS = ["sweep=parallel", "axes.cell=fsdp2", "axes.steps=100", "device=cpu", "run_id=r1", "quiet=true"]
ARMS = ["no_fp8", "tensorwise", "delayed"]
RUN = Path("results/parallel/r1")
PORT = 29555


@pytest.fixture(scope="module")
def both() -> Iterator[Hosts]:
    if why := hosts_here.why_not():
        pytest.skip(why)
    yield from hosts_here.several()


@pytest.fixture
def hosts(both: Hosts, shared: Path) -> Iterator[Hosts]:
    """Two hosts that see one another, on which nothing runs: before a test, and by the test after it."""
    yield both
    try:  # servers of multiprocessing end a moment after those whom they served
        wait_for("nothing is left on any host", lambda: not any(host.pids() for host in both.hosts), 10.0)
    finally:
        both.clear()


def torchrun(hosts: Hosts, each: int, *words: str) -> list[Command]:
    """A command on all hosts, with so many ranks on each."""
    started = []
    for number, host in enumerate(hosts.hosts):
        where = ["--nnodes=2", f"--nproc-per-node={each}", f"--node-rank={number}",
                 f"--master-addr={hosts.hosts[0].address}", f"--master-port={PORT}"]  # fmt: skip
        started.append(
            host.start(sys.executable, "-m", "torch.distributed.run", *where, "-m", "harness", *words)
        )
    return started


def on_hosts(folder: Path) -> set[int]:
    """On how many hosts the ranks of the stored cases were."""
    return {json.loads(resolved)["hosts"] for resolved in store.read(folder)["resolved"]}


def of_arm(arm: str) -> set[str]:
    """The statuses of the rows of an arm."""
    with_rows = RUN.exists() and any(RUN.rglob("*.parquet"))
    frame = store.read(RUN) if with_rows else None
    return set() if frame is None else set(frame.loc[frame["arm"] == arm, "status"])


def once(folder: Path) -> None:
    """All rows are measured, each once."""
    frame = store.read(folder)
    assert set(frame["status"]) == {"ok"}
    assert not frame.duplicated(["case_id", "arm", "metric", "regime", "part"]).any()


def test_all_gather_over_two_hosts(hosts: Hosts) -> None:
    words = ["axes.compute=fp32", "axes.fp8_all_gather=true", "device=cpu", "run_id=r1", "quiet=true"]
    first, second = torchrun(hosts, 1, "sweep=allgather", "ranks=2", *words)
    code, out, err = first.said(120)
    assert code == 0, (out, err)
    assert second.said(30)[:2] == (0, "")
    folder = Path("results/allgather/r1")
    assert on_hosts(folder) == {2}
    frame = store.read(folder)
    assert set(frame.loc[frame["metric"].isin(["time_ms", "loss_deviation"]), "status"]) == {"ok"}
    assert not [name for name in os.environ if name.startswith("GLOO")]  # found without being told


@pytest.mark.parametrize(("cells", "each"), [(["fsdp2", "tp"], 1), (["hsdp"], 2)])
def test_training_in_parallel_over_two_hosts(hosts: Hosts, cells: list[str], each: int) -> None:
    words = ["sweep=parallel", f"axes.cell=[{','.join(cells)}]", "arms=[no_fp8,tensorwise]", "device=cpu"]
    first, second = torchrun(hosts, each, *words, "run_id=r1", "quiet=true")
    code, out, err = first.said(200)
    assert code == 0, (out, err)
    assert second.said(30)[:2] == (0, "")
    folder = Path("results/parallel/r1")
    assert on_hosts(folder) == {2}
    once(folder)
    assert store.read(folder).groupby("case_id")["arm"].nunique().tolist() == [2] * len(cells)


def begin_and_wait_for_an_arm(hosts: Hosts) -> list[Command]:
    """The sweep with three arms, of which the first is stored and the second under way."""
    commands = torchrun(hosts, 1, *ENDLESS, f"arms=[{','.join(ARMS)}]")
    wait_for("the first arm", lambda: of_arm(ARMS[0]) == {"ok"}, 120)
    time.sleep(1.0)
    return commands


def ends_with_the_lost_rank_named(hosts: Hosts, command: Command, why: str) -> None:
    code, out, err = command.said(120)  # it writes a report, on a machine that may be busy
    assert code == 1, (out, err)
    named = f"rank 1 of 2 (host 2 of 2): {why}; start all ranks again"
    assert [named in line for line in out.splitlines() if line.startswith("  2 failed:")] == [True], out
    assert of_arm(ARMS[0]) == {"ok"}
    assert of_arm(ARMS[1]) == of_arm(ARMS[2]) == {"failed"}
    frame = store.read(RUN)
    assert set(frame.loc[frame["status"] == "failed", "cause"]) == {"died"}


def goes_on(hosts: Hosts) -> None:
    words = [word for word in ENDLESS if not word.startswith("run_id=")]
    for command in torchrun(hosts, 1, *words, f"arms=[{','.join(ARMS)}]", "resume=r1"):
        code, out, err = command.said(120)
        assert code == 0, (out, err)
    once(RUN)
    assert on_hosts(RUN) == {2}


def test_a_host_that_is_cut_off_in_the_middle(hosts: Hosts) -> None:
    first, second = begin_and_wait_for_an_arm(hosts)
    hosts.cut(hosts.hosts[1])
    cut = time.monotonic()
    wait_for("the lost rank's row", lambda: of_arm(ARMS[1]) == {"failed"}, 2 * SILENT_S + 15)
    assert time.monotonic() - cut > SILENT_S / 2
    ends_with_the_lost_rank_named(hosts, first, f"no sign of life from its host for {SILENT_S} s")
    assert second.said(3 * SILENT_S)[0] == 1
    hosts.mend(hosts.hosts[1])
    goes_on(hosts)


def test_a_host_that_dies_in_the_middle(hosts: Hosts) -> None:
    first, second = begin_and_wait_for_an_arm(hosts)
    hosts.hosts[1].lose()
    second.said(10)
    wait_for("the lost rank's row", lambda: of_arm(ARMS[1]) == {"failed"}, 2 * SILENT_S + 15)
    ends_with_the_lost_rank_named(hosts, first, f"no sign of life from its host for {SILENT_S} s")


def test_ctrl_c_on_the_first_host_ends_all(hosts: Hosts) -> None:
    first, second = begin_and_wait_for_an_arm(hosts)
    os.killpg(first.process.pid, signal.SIGINT)
    assert first.said(60)[0] != 0
    second.said(60)
    assert of_arm(ARMS[0]) == {"ok"}
    assert store.read_about(RUN)["state"] == "interrupted"
