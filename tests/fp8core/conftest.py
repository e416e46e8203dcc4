"""Shared by the tests of fp8core: the error measures and the file of measured choices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8core.kernels import tuning

Measure = Callable[[torch.Tensor, torch.Tensor], float]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of measured choices, empty and the test's own."""
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path / "cache"))
    tuning.forget()
    return tmp_path / "cache" / tuning.FILE_NAME


@pytest.fixture
def sqnr_db() -> Measure:
    """20 log10(|ref| / |ref - x|) over the whole tensor, in float64."""

    def measure(ref: torch.Tensor, x: torch.Tensor) -> float:
        ref, x = ref.double(), x.double()
        return float(20 * torch.log10(ref.norm() / (ref - x).norm()))

    return measure


@pytest.fixture
def sqnr_rows_db() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The same for each row of a matrix."""

    def measure(ref: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ref, x = ref.double(), x.double()
        return 20 * torch.log10(ref.norm(dim=1) / (ref - x).norm(dim=1))

    return measure
