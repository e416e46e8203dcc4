"""Reports of a GPU, of a CPU and of both with training runs, made once."""

from __future__ import annotations

import pytest
from curves_for_tests import whole_suite
from report_cases import cpu_run, gpu_run, train_cases
from report_fixtures import H200, Invented, write_run
from report_pages import machine

from harness.report import write_report


@pytest.fixture(scope="session")
def gpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    run = gpu_run(folder / "results")
    return run, write_report([run], folder / "reports" / "gpu.html")


@pytest.fixture(scope="session")
def gpu_machine(gpu):
    return machine(gpu[0])


@pytest.fixture(scope="session")
def cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    run = cpu_run(folder / "results")
    return run, write_report([run], folder / "reports" / "cpu.html")


@pytest.fixture(scope="session")
def cpu_machine(cpu):
    return machine(cpu[0])


@pytest.fixture(scope="session")
def whole(gpu, cpu, tmp_path_factory):
    """A page of everything: a GPU and a CPU, steps, losses, two commits, long tables, maps and figures."""
    folder = tmp_path_factory.mktemp("whole")
    about = {"sweep": "train", "run_id": "20260104T030405Z-fedcba9-cccc"}
    env = H200 | {"git_commit": "f" * 40}
    train = write_run(folder / "t", [*train_cases(Invented()), whole_suite()], env=env, **about)
    return write_report([cpu[0], train, gpu[0]], folder / "whole.html", focus="mfu")
