"""The suite that runs tests. Oracle: a test file whose outcomes are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.store.case import Case, expand
from harness.store.cause import Cause
from harness.suites import tests as suite

TWO = """import pytest
@pytest.mark.gpu
def test_right(): pass
@pytest.mark.gpu
def test_wrong(): assert False
@pytest.mark.gpu
@pytest.mark.skip(reason="not here")
def test_elsewhere(): pass
def test_of_no_gpu(): assert False
"""


def case_of(files: Path) -> Case:
    axes = {"files": [str(files)], "processes": [1]}
    (case,) = expand("tests", axes, suite.points([], axes, None), 0)
    return case


def test_its_counts_are_rows_and_a_failure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a device\n")
    (tmp_path / "test_it.py").write_text(TWO)
    case = case_of(tmp_path / "test_it.py")
    assert suite.unsupported(case, "pytest", "cpu") is None
    found = suite.trial(case, "pytest", "cpu", tmp_path / "work", lambda done, total: None)
    assert {key: found.resolved[key] for key in ("tests", "passed", "failures", "errors", "skipped")} == {
        "tests": 3, "passed": 1, "failures": 1, "errors": 0, "skipped": 1,
    }  # fmt: skip
    assert [series.samples for series in found.series] == [(1.0,)]
    assert "test_wrong" in found.failure
    assert found.cause == Cause.NUMERICS


def test_one_that_never_counted_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies has written no counts, and counts of nothing are no pass."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a device\n")
    (tmp_path / "test_it.py").write_text("import os\nos._exit(9)\n")
    found = suite.trial(
        case_of(tmp_path / "test_it.py"), "pytest", "cpu", tmp_path / "work", lambda d, t: None
    )
    assert not found.series
    assert found.cause == Cause.DIED
    absent = suite.unsupported(case_of(tmp_path / "absent.py"), "pytest", "cpu")
    assert absent is not None
    assert absent.cause == Cause.MISSING
