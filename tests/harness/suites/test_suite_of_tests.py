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
    assert found.cause == Cause.RUN


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


HERE = """import pytest
@pytest.mark.gpu
def test_it(): pass
"""
CASES = [
    # nothing of the marker, as on a card where the files have moved
    ("def test_of_no_gpu(): pass", Cause.ERROR, "exit code 5 after 0 tests: none was found"),
    (HERE + "def pytest_nothing(): pass", None, ""),
    (
        """import pytest
@pytest.mark.gpu
def test_stops(): pytest.exit("enough", 3)
""",
        Cause.ERROR,
        "exit code 3",
    ),
    (
        HERE + "@pytest.mark.gpu\ndef test_stopped(): raise KeyboardInterrupt",
        Cause.INTERRUPTED,
        "exit code 2",
    ),
    (HERE + "import no_such_package", Cause.BUILD, "1 of 1 tests failed"),
]


@pytest.mark.parametrize(("text", "cause", "failure"), CASES)
def test_a_pytest_that_ended_otherwise_is_no_pass(
    text: str, cause: Cause | None, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: pytest's own list of exit codes; all of these leave counts that can be read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a device\n")
    (tmp_path / "test_it.py").write_text(text)
    found = suite.trial(
        case_of(tmp_path / "test_it.py"), "pytest", "cpu", tmp_path / "work", lambda d, t: None
    )
    assert found.refusal == ""
    if cause is None:
        assert (found.failure, [s.samples for s in found.series]) == ("", [(0.0,)])
        return
    assert failure in found.failure
    assert found.cause == cause
    assert bool(found.series) == (cause == Cause.BUILD), "counts of what ran, else none"


def test_tests_that_were_all_skipped_are_a_skipped_row_with_their_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a device\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\npytestmark = [pytest.mark.gpu, pytest.mark.skipif(True, reason='no GPU is visible')]\n"
        "def test_a(): pass\ndef test_b(): pass\n"
    )
    found = suite.trial(
        case_of(tmp_path / "test_it.py"), "pytest", "cpu", tmp_path / "work", lambda d, t: None
    )
    assert (list(found.series), found.failure) == ([], "")
    assert found.refusal == "all 2 tests were skipped: no GPU is visible (2)"


def test_exit_code_1_without_a_failed_test_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plugin may fail the run, such as one that asks for coverage."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: a device\n")
    (tmp_path / "conftest.py").write_text("def pytest_sessionfinish(session): session.exitstatus = 1\n")
    (tmp_path / "test_it.py").write_text(HERE)
    found = suite.trial(
        case_of(tmp_path / "test_it.py"), "pytest", "cpu", tmp_path / "work", lambda d, t: None
    )
    assert not found.series
    assert found.cause == Cause.ERROR
    assert found.failure == "pytest ended with exit code 1 and counted no failed test; see what it printed"
