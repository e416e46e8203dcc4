"""What the project's own wrappers cost beside the work they wrap: the pytest-benchmark suite of this project.

No bars: these cases are for the gate. Run by `make bench`, or alone, brought into the store and compared:

    python -m pytest -m benchmark_bar tests/benchmarks/test_wrapper_costs.py --benchmark-json=b.json --benchmark-save-data
    python -m harness import b.json
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fp8core import convert_to_float8_training, quantize
from harness import store
from harness.store.case import Case
from harness.store.measurement import Measurement

pytestmark = pytest.mark.benchmark_bar

Benchmark = Callable[..., Any]


def measurement(n: int) -> Measurement:
    case = Case.of("gemm", {"M": n, "K": 64, "N": 64, "role": "output"})
    return Measurement(
        suite="gemm", case_id=case.case_id, arm="bf16", axes=case.axes_json, metric="time_ms", status="ok",
        regime="isolated", samples=tuple(1.0 + i / 1e3 for i in range(30)), rounds=tuple(i // 3 for i in range(30)),
    )  # fmt: skip


@pytest.fixture
def writer(tmp_path: Path) -> store.RunWriter:
    return store.RunWriter(tmp_path / "r", run_id="r", sweep="s", env_id="e", env={"device": "cpu"}, about={})


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_dispatch_of_a_cast(benchmark: Benchmark, granularity: str) -> None:
    """A cast of so few elements that all of its time is dispatch."""
    x = torch.randn(16, 16)
    benchmark(lambda: quantize(x, torch.float8_e4m3fn, granularity))


def test_dispatch_of_a_layer(benchmark: Benchmark) -> None:
    layer = nn.Sequential(nn.Linear(16, 16, bias=False))
    convert_to_float8_training(layer)
    x = torch.randn(16, 16, requires_grad=True)
    benchmark(lambda: layer(x).sum().backward())


def test_conversion_of_a_model(benchmark: Benchmark) -> None:
    """A hundred layers; made anew for each conversion, outside of what is timed."""

    def model() -> tuple[tuple[nn.Module], dict[str, Any]]:
        return (nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(100))),), {}

    benchmark.pedantic(convert_to_float8_training, setup=model, rounds=30)


def test_appending_a_case(benchmark: Benchmark, writer: store.RunWriter) -> None:
    rows = [measurement(n) for n in range(10)]
    benchmark(writer.append, rows)


def test_reading_a_run(benchmark: Benchmark, writer: store.RunWriter) -> None:
    writer.append([measurement(n) for n in range(500)])
    benchmark(store.read, writer.folder)


@pytest.mark.parametrize("module", ["fp8core", "harness.store", "harness.gate.judge"])
def test_import_time(benchmark: Benchmark, module: str) -> None:
    """A whole interpreter, since a module is imported once in its life."""

    def start() -> None:
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    benchmark.pedantic(start, rounds=10)
