"""Measured rates of links in advise. Oracle: the rates that the rows were made with, and whose they are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from link_fixtures import hosts, operation, write
from report_fixtures import CPU, H100

from harness import store
from harness.__main__ import main
from harness.advise.link_rates import link_rates
from harness.advise.rates import MEASURED, rates_of
from harness.machine.hardware import named
from harness.machine.links import ALL_GATHER, Members, groups

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

H200 = named("h200")
NVLINK_GB_S, NETWORK_GB_S = 370.0, 44.0


def gathered(
    folder: Path, per_host: int, gb_s: float, run_id: str, backend: str = "nccl", **more: Any
) -> None:
    """All-gathers of two hosts, or of one, at a known bus bandwidth; half as fast at the smaller size."""
    ends = hosts(1 if per_host > 1 else 2, per_host)
    rows = []
    for kib, share in ((1024, 0.5), (65536, 1.0)):
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
    assert network["value"] == pytest.approx(NETWORK_GB_S * 1e9)
    assert "64 MiB by 4 ranks (1 group), NVLink, run node of 20" in link["source"]
    assert found["links"].startswith("to the node 370 GB/s, measured (all-gather of 64 MiB by 4 ranks")
    assert "to other nodes 44 GB/s, measured" in found["links"]


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
    assert len(found.ignored) == 1
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
