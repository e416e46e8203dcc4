"""Links. Oracle: the formulas of nccl-tests' doc/PERFORMANCE.md with figures by hand, and devices that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeCuda, FakeNvml

from harness.machine import link_check, link_times
from harness.machine.gpu_monitor import GpuMonitor
from harness.machine.link_times import Survey
from harness.machine.links import (
    ALL_GATHER,
    ALL_REDUCE,
    HOSTS,
    MEMORY,
    NETWORKS,
    NVLINK,
    PCIE,
    REDUCE_SCATTER,
    SEND,
    UNKNOWN,
    End,
    Members,
    bandwidths,
    groups,
    kind,
    undivided,
)

A = End(0, 0, "host", "net", "cuda:0", "a", ("b",))
B = replace(A, rank=1, device="cuda:1", gpu="b", nvlinked=("a",))


@pytest.mark.parametrize(
    ("operation", "ranks", "algorithm", "bus"),
    [  # 8 GB in a second; 2*7/8, 7/8, 7/8 and 1 of it
        ("all_reduce", 8, 8.0, 14.0),
        ("all_gather", 8, 8.0, 7.0),
        ("reduce_scatter", 8, 8.0, 7.0),
        ("send", 2, 8.0, 8.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, ranks: int, algorithm: float, bus: float) -> None:
    assert bandwidths(operation, 8_000_000_000, ranks, 1.0) == (algorithm, bus)


def test_kinds_of_links() -> None:
    far = replace(B, host="another", network="another")
    cpu = replace(A, device="cpu", gpu="", nvlinked=None)
    assert kind(A, B) == NVLINK
    assert kind(A, replace(B, gpu="c")) == PCIE
    assert kind(replace(A, nvlinked=None), B) == kind(B, replace(A, nvlinked=None)) == UNKNOWN
    assert (
        kind(replace(A, nvlinked=()), B) == kind(B, replace(A, nvlinked=())) == PCIE
    )  # one end alone says so
    one, other = (
        replace(end, nvlinked=(), paths=((gpu, "one switch"),)) for end, gpu in ((A, "b"), (B, "a"))
    )
    assert kind(one, other) == f"{PCIE}, one switch"
    assert kind(one, replace(other, paths=(("a", "across sockets"),))) == PCIE  # they contradict each other
    assert End.of(json.loads(json.dumps(one.as_dict()))) == one
    assert kind(A, far) == HOSTS
    assert kind(cpu, replace(cpu, rank=1)) == MEMORY
    assert kind(cpu, replace(cpu, rank=1, network="other")) == NETWORKS
    assert End.of(A.as_dict() | {"nvlinked": ["b"]}) == A  # as JSON gives it back


def test_groups_are_all_pairs_and_all_at_once() -> None:
    assert len(groups(SEND, 4)) == 12
    assert [str(one) for one in groups("all_reduce", 3)] == ["0-1", "0-2", "1-2", "0-1-2"]
    assert [str(one) for one in groups("all_reduce", 2)] == ["0-1"]
    for members in (*groups(SEND, 3), *groups("all_gather", 12)):
        assert Members.of(str(members)) == members


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 12])
def test_the_nearest_size_that_divides_does(ranks: int) -> None:
    for kib in (1, 64, 1000):
        why = undivided("all_gather", 1024 * kib, ranks)
        assert bool(why) == (1024 * kib % (4 * ranks) != 0)
        if why:
            near = int(why.rpartition("=")[2])
            assert undivided("all_gather", 1024 * near, ranks) == ""


def test_nvlink_is_asked_of_nvml() -> None:
    """Three GPUs, of which the second is joined by NVLink and the third is not; and a library that cannot say."""

    class Nvml(FakeNvml):
        NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
        NVML_TOPOLOGY_SINGLE, NVML_TOPOLOGY_SYSTEM = 10, 50  # of nvml.h

        def nvmlDeviceGetCount(self) -> int:  # noqa: N802
            return 3

        def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
            return ("board", "second", "third")[index]

        def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
            return {"board": f"GPU-{self.UUID}", "second": "GPU-2", "third": "GPU-3"}[handle]

        def nvmlDeviceGetP2PStatus(self, one: str, other: str, index: int) -> int:  # noqa: N802
            assert (one, index) == ("board", 2)
            return {"second": 0, "third": 5}[other]

        def nvmlDeviceGetTopologyCommonAncestor(self, one: str, other: str) -> int:  # noqa: N802
            assert one == "board"
            return {"second": 10, "third": 50}[other]

    def paths(nvml: Any) -> Any:
        with GpuMonitor(uuid=Nvml.UUID, nvml=nvml) as monitor:
            return monitor.pcie_paths()

    assert paths(Nvml()) == {"2": "one switch", "3": "across sockets"}
    assert paths(Nvml(refused=("nvmlDeviceGetTopologyCommonAncestor",))) is None

    def linked(nvml: Any) -> Any:
        with GpuMonitor(uuid=Nvml.UUID, nvml=nvml) as monitor:
            return monitor.nvlinked()

    assert linked(Nvml()) == ["2"]
    assert linked(Nvml(refused=("nvmlDeviceGetP2PStatus",))) is None
    assert linked(Nvml(absent=("nvmlDeviceGetCount",))) is None


def test_on_a_gpu_calls_are_queued_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake device, on which one call takes 2 ms; never run on a real one."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    sent: list[int] = []

    def send(tensor: torch.Tensor, to: int) -> None:
        sent.append(to)
        cuda.enqueue(2e-3)

    answered = SimpleNamespace(send=send, recv=lambda tensor, source: cuda.enqueue(0.0))
    monkeypatch.setattr(link_times, "dist", answered)
    call = link_times._Call(Survey(SEND, 1024, 1, device="cuda"), Members((0, 1), True), 0, None, "cpu")
    assert call.seconds() == pytest.approx(2e-3, rel=0.01)
    assert sent == [1] * 20


def test_a_rank_on_a_gpu_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", FakeCuda())
    monkeypatch.setattr(link_times, "monitor_for", lambda device: GpuMonitor(uuid="x", nvml=FakeNvml()))
    monkeypatch.setenv("GROUP_RANK", "3")
    end = link_times.end_here(5, "cuda:0")
    assert (end.rank, end.node, end.device, len(end.gpu), end.nvlinked) == (5, 3, "cuda:0", 12, None)
    assert (end.model, end.paths) == ("NVIDIA H200", None)


def test_machines_of_one_name_are_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two boots of the same name, and of the same number of a network namespace."""
    ends = []
    for boot in ("first", "second"):
        monkeypatch.setattr(Path, "read_text", lambda self, boot=boot: f"{boot}\n")
        ends.append(link_times.end_here(0, "cpu"))
    assert kind(*ends) == HOSTS
    assert ends[0].network != ends[1].network


def test_rounds_end_with_the_budget_but_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_times, "dist", SimpleNamespace(broadcast=lambda tensor, src: None))

    def on(turn: int, elapsed_s: float) -> bool:
        return link_times._go_on(Survey(SEND, 1024, 7, 50, 2.0, 300.0), turn, elapsed_s)

    assert on(1, 299.0)  # too few rounds
    assert not on(1, 301.0)  # the budget is spent
    assert on(8, 1.0)  # too little time
    assert not on(8, 2.0)
    assert not on(50, 1.0)


@pytest.mark.parametrize("operation", [ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND])
def test_bytes_of_the_right_rank_in_the_wrong_place_are_found(
    monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    """Two ranks made up: what arrives at rank 1 is right, and then moved on by one place. Sums by hand."""
    size, moved = 64, [0]
    members = Members((0, 1), operation == SEND)
    first, second = (torch.empty(size // (8 if operation == ALL_GATHER else 4)) for _ in range(2))
    for rank, data in enumerate((first, second)):
        link_check.fill(data, operation, members, rank)

    def arrive(out: torch.Tensor, values: torch.Tensor) -> None:
        out.copy_(values.roll(moved[0]))

    monkeypatch.setattr(
        link_times, "_gather", lambda out, data, group: arrive(out, torch.cat([first, second]))
    )
    monkeypatch.setattr(
        link_times, "_scatter", lambda out, data, group: arrive(out, (first + second)[size // 8 :])
    )
    one_of_two = SimpleNamespace(
        all_reduce=lambda data, group: arrive(data, first + second),
        recv=lambda data, source: arrive(data, first), send=lambda data, to: None,
    )  # fmt: skip
    monkeypatch.setattr(link_times, "dist", one_of_two)
    for moved[0], wrong in ((0, False), (1, True)):
        call = link_times._Call(Survey(operation, size, 1), members, 1, None, "cpu")
        assert bool(call.check()) == wrong
