"""Fixtures that several test files of the harness share."""

from __future__ import annotations

import pytest
from fakes import FakeCuda, FakeNvml, FakeTime


@pytest.fixture
def fake_time() -> FakeTime:
    """A clock that moves only when told to."""
    return FakeTime()


@pytest.fixture
def fake_cuda(fake_time: FakeTime) -> FakeCuda:
    """An H200 with one stream, on `fake_time`."""
    return FakeCuda(fake_time)


@pytest.fixture
def fake_nvml() -> FakeNvml:
    """NVML of that H200."""
    return FakeNvml()
