"""Measured rates of links in advise. Oracle: the rates that the rows were made with, and whose they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from link_fixtures import hosts, operation, write
from report_fixtures import CPU, H100

from harness import store
from harness.__main__ import main
from harness.advise.link_rates import link_rates
from harness.advise.rates import MEASURED, rates_of
from harness.machine.hardware import named
from harness.machine.links import ALL_GATHER, End, Members, groups

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.store.measurement import Measurement

H200 = named("h200")
NVLINK_GB_S, NETWORK_GB_S = 370.0, 44.0


def gathered(
    folder: Path, per_host: int, gb_s: float, run_id: str, backend: str = "nccl", **more: Any
) -> None:
    """All-gathers of two hosts, or of one, at a known bus bandwidth; half as fast at the smaller size."""
    ends = hosts(1 if per_host > 1 else 2, per_host)
    rows = []
    for kib, share in ((1024, 0.5), (65536, 1.0)):  # the smaller says latency
        for members in groups(ALL_GATHER, len(ends)):
            n = len(members.ranks)
            seconds = (n - 1) / n * 1024 * kib / (gb_s * share * 1e9)
            rows.append(operation(ALL_GATHER, kib, Members(members.ranks), ends, [seconds] * 3, backend))
    write(folder, rows, run_id=run_id, **more)


def asked(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Mapping[str, Any]:
    capsys.readouterr()
    runs = ",".join(str(run) for run in sorted(folder.iterdir()))
    common = ["advise", "model=llama3_8b", "gpus=16", "json=true", f"runs={runs}"]
    assert main([*common, *words]) == 0
    found: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_rates_of_the_gpu_come_from_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NVLink by the whole node at the largest size, the network by one GPU a host; each with where and when."""
    gathered(tmp_path, 4, NVLINK_GB_S, "node")
    gathered(tmp_path, 1, NETWORK_GB_S, "network")
    found = asked(capsys, tmp_path)
    link, network = found["rates"]["link"], found["rates"]["network"]
    assert (link["kind"], network["kind"]) == (MEASURED, MEASURED)
    assert link["value"] == pytest.approx(NVLINK_GB_S * 1e9)
    # One GPU a host was measured, of eight: as if they shared its card; three standard errors up it is each GPU's own
    assert network["value"] == pytest.approx(NETWORK_GB_S * 1e9 / 8)
    assert network["value"] * (1 + network["spread"]) ** 3 == pytest.approx(NETWORK_GB_S * 1e9)
    assert "1 of 8 GPUs a node, taken for all of them" in network["source"]
    assert "64 MiB by 4 ranks (1 group), NVLink, run node of 20" in link["source"]
    assert found["links"].startswith("to the node 370 GB/s, measured (all-gather of 64 MiB by 4 ranks")
    assert "to other nodes 5.5 GB/s, measured" in found["links"]
    assert "node: all-gathers below 64 MiB, such as of 1 MiB, are not applied" in found["links"]
    alone = asked(capsys, tmp_path, "node=1")["rates"]["network"]
    assert alone["value"] == pytest.approx(NETWORK_GB_S * 1e9)


def test_what_was_not_measured_is_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gathered(tmp_path, 4, NVLINK_GB_S, "node")
    found = asked(capsys, tmp_path)
    assert found["rates"]["network"]["kind"] == "typical"
    assert "to other nodes 40 GB/s, not measured (400 Gbit/s a GPU" in found["links"]
    assert found["rates"]["link"]["value"] > rates_of(H200)["link"]
    assert (
        asked(capsys, tmp_path, "network_gb_s=30")["rates"]["network"]["value"] == 30e9
    )  # the word of the user


@pytest.mark.parametrize(
    ("env", "backend", "said"),
    [
        (CPU, "gloo", "run other: links between CPUs over gloo are not applied to the H200"),
        ({}, "gloo", "run other: links between NVIDIA H200 over gloo are not applied to the H200"),
        (
            H100,
            "nccl",
            "run other: links between NVIDIA H100 80GB HBM3 over nccl are not applied to the H200",
        ),
    ],
)
def test_other_transports_and_other_gpus_are_never_applied(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env: Mapping[str, Any], backend: str, said: str
) -> None:
    """Beside a run of the GPU that is asked about, which has no rows of links."""
    gathered(tmp_path, 4, 1.0, "other", backend, **({"env": env} if env else {}))
    found = link_rates(store.read(tmp_path), H200)
    assert dict(found.figures) == {}
    assert len(found.ignored) == 1  # the transport is the first reason; the size is not asked
    assert found.ignored[0].startswith(said.partition(" to the")[0])
    assert found.ignored[0].endswith(H200.key)
    write(tmp_path, [operation(ALL_GATHER, 1024, Members((0, 1)), hosts(2), [1e-4])], run_id="own")
    answered = asked(capsys, tmp_path, "gpu=h200")
    assert answered["rates"]["link"]["kind"] == "typical"
    assert found.ignored[0] in answered["links"]


def test_a_cpus_run_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gathered(tmp_path, 4, 1.0, "other", "gloo", env=CPU)
    assert main(["advise", "model=llama3_8b", "gpu=h200", f"runs={tmp_path / 'other'}"]) == 2
    assert "no row is of the" in capsys.readouterr().err


Groups = Callable[[Members], float]


def all_gathers(ends: list[End], gb_s: Groups, kib: int = 131072) -> list[list[Measurement]]:
    """All-gathers of pairs and of all ranks at a bus bandwidth of each group."""
    found = []
    for members in groups(ALL_GATHER, len(ends)):
        n = len(members.ranks)
        seconds = (n - 1) / n * 1024 * kib / (gb_s(members) * 1e9)
        found.append(operation(ALL_GATHER, kib, members, ends, [seconds] * 3))
    return found


def test_all_gpus_at_once_say_what_a_node_has(tmp_path: Path) -> None:
    """Two nodes of 8: a pair has 45 GB/s, all 16 at once 6 GB/s a node, so a GPU has 0.75."""
    rows = all_gathers(hosts(2, 8), lambda m: 6.0 if len(m.ranks) == 16 else 45.0)
    write(tmp_path, rows)
    network = link_rates(store.read(tmp_path), H200).figures["network"]
    assert network.value == pytest.approx(0.75e9)
    assert "16 ranks" in network.source
    assert "6 GB/s for 8 GPUs a node at once" in network.source


def test_small_messages_give_no_rate(tmp_path: Path) -> None:
    write(tmp_path, all_gathers(hosts(1, 8), lambda m: 0.3, kib=4))
    found = link_rates(store.read(tmp_path), H200)
    assert dict(found.figures) == {}
    assert found.ignored == (
        "run links-1: all-gathers below 64 MiB, such as of 4 KiB, are not applied: their time is latency; "
        "measure with axes.kib=65536",
    )


def test_kinds_are_not_mixed_and_most_ranks_come_before_size(tmp_path: Path) -> None:
    """A node with NVLink at 370, later a pair at a larger size, later the same node over PCIe at 12: never 191."""
    write(tmp_path, all_gathers(hosts(1, 8), lambda m: 370.0), run_id="a")
    write(tmp_path, all_gathers(hosts(1, 2), lambda m: 150.0, kib=262144), run_id="b")
    found = link_rates(store.read(tmp_path), H200).figures["link"]
    assert found.value == pytest.approx(370e9)
    assert ", NVLink, run a of " in found.source
    pcie = [replace(end, nvlinked=()) for end in hosts(1, 8)]
    write(tmp_path, all_gathers(pcie, lambda m: 12.0), run_id="c")
    found = link_rates(store.read(tmp_path), H200).figures["link"]
    assert found.value == pytest.approx(12e9)
    assert ", PCIe, run c of " in found.source


def test_gpus_of_two_models_and_unreadable_rows_are_named(tmp_path: Path) -> None:
    mixed = [replace(end, model=f"GPU {end.rank}") for end in hosts(1, 2)]
    write(tmp_path, all_gathers(mixed, lambda m: 100.0), run_id="a")
    old = [[replace(row, resolved={}) for row in own] for own in all_gathers(hosts(1, 2), lambda m: 100.0)]
    write(tmp_path, old, run_id="b")
    found = link_rates(store.read(tmp_path), H200)
    assert dict(found.figures) == {}
    assert "run a: links between GPU 0 and GPU 1 are those of neither and not applied" in found.ignored
    assert any(why.startswith("run b: resolved.ends") for why in found.ignored)


def test_all_gathers_that_failed_are_named(tmp_path: Path) -> None:
    """Beside smaller groups of the same run that give a rate: which of them failed is said, and with what."""
    rows = all_gathers(hosts(1, 8), lambda m: 370.0)
    failed = replace(rows[-1][0], status="failed", reason="rank 3 died", samples=(), rounds=(), part="")
    write(tmp_path, [[failed]], run_id="a")
    write(tmp_path, rows, run_id="b")
    found = link_rates(store.read(tmp_path), H200)
    assert found.figures["link"].value == pytest.approx(370e9)
    assert found.ignored == ("run a: all-gather failed: rank 3 died",)
