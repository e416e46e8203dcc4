"""A cluster for each file of tests, and a folder with a sweep that all of its nodes see."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import slurm_here

if TYPE_CHECKING:
    from collections.abc import Iterator

SWEEP = """\
# Does a cluster lose anything?
suite: gemm
arms: [tensorwise_eager, rowwise_eager]
axes: {role: [output], M: [16, 32, 48, 64], K: [32, 64], N: [32, 48]}
timing: {min_rounds: 3, max_rounds: 100, min_samples: 1, min_seconds: 0.6, max_seconds: 0.6, rel_half_width: 0.0001,
         warmup_min_iterations: 1, warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_here.Slurm]:
    if why := slurm_here.why_not():
        pytest.skip(why)
    yield from slurm_here.cluster(tmp_path_factory.mktemp("slurm"))


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> Path:
    """The folder that all nodes see, with a sweep `tiny`; the current one."""
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "tiny.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(pytestconfig.rootpath))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return tmp_path
