"""Fixtures that several test files of the harness share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


@pytest.fixture
def enter_folder_with_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Takes the name and text of a sweep; the current folder then holds that sweep alone."""

    def enter(name: str, text: str) -> None:
        (tmp_path / "sweeps").mkdir()
        (tmp_path / "sweeps" / f"{name}.yaml").write_text(text)
        monkeypatch.chdir(tmp_path)

    return enter


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """transformers can be imported; where it is not installed, it is the stand-in."""
    if importlib.util.find_spec("transformers") is not None:
        yield
        return
    monkeypatch.syspath_prepend(Path(__file__).parent / "stand_ins")
    yield
    sys.modules.pop("transformers", None)
