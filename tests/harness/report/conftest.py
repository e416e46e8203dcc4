"""A report of a GPU and one of a CPU, made once."""

from __future__ import annotations

import pytest
from report_cases import cpu_run, gpu_run

from harness.report import write_report


@pytest.fixture(scope="session")
def gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    run = gpu_run(folder / "results")
    return run, write_report([run], folder / "reports" / "gpu.html")


@pytest.fixture(scope="session")
def cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    run = cpu_run(folder / "results")
    return run, write_report([run], folder / "reports" / "cpu.html")
