"""Oracle: the contract of exit codes and last lines; bad input ends in one line and exit 2 and writes nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from toy import ToySuite, as_module
from unruly import Unruly

from harness import store
from harness.__main__ import main
from harness.cli import run
from harness.machine import environment
from harness.timing.workload import Numerics, Unsupported, Workload

SWEEP = """\
# Does the toy pay?
suite: toy
axes: {n: [1, 2]}
timing: {min_rounds: 3, max_rounds: 3, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toy.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    suite = ToySuite()
    monkeypatch.setitem(run.SUITES, "toy", suite)
    return suite


def lines(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], list[str]]:
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ["sweep=toy", "resume=no-such-run", "dry_run=true"],
        ["sweep=toy", "budget_s=-1"],
        ["sweep=toy", "shard=0/2,1/2"],
        ["sweep=toy", "run_id=../away"],
        ["sweep=toy", "run_id=r1", "resume=r2"],
        ["sweep=toy", "log_level=LOUD"],
        ["sweep=toy", "device=cpu", "devices=all"],
        ["sweep=toy", "device=cpu", "devices=0,1"],
        ["sweep=toy", "case_timeout_s=0"],
        ["sweep=toy", "case_wall_s=0"],
        ["sweep=toy", "case_memory_gib=-1"],
        ["sweep=toy", "case_timeout_s=5", "isolate=false"],
        ["sweep=toy", "workers=2", "isolate=false"],
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(words) == 2
    out, err = lines(capsys)
    assert out == []
    assert len(err) == 1
    assert err[0].startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_only_arms_that_this_device_lacks_is_exit_2(
    toy: ToySuite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.refuses = {"other": Unsupported("device", "needs sm_89")}
    assert main(["sweep=toy", "arms=[other]", "device=cpu"]) == 2
    assert "needs sm_89" in lines(capsys)[1][0]
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("key", ["results_dir", "reports_dir"])
def test_a_folder_that_cannot_be_written_is_exit_2(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["sweep=toy", "device=cpu", f"{key}=file/below"]) == 2
    _out, err = lines(capsys)
    assert len(err) == 1
    assert f"{key}=DIR" in err[0]
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_page_that_is_open_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full as the report is written anew leaves the one that is there."""
    assert main(["sweep=toy", "device=cpu", "isolate=false", "run_id=r1"]) == 0
    page = Path("reports/r1.md").read_text()

    def refuse(self: Path, target: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    assert main(["report", "results/toy/r1", "-o", "reports/r1.html"]) == 2
    assert Path("reports/r1.md").read_text() == page
    assert len(list(Path("reports").iterdir())) == 2


def test_a_suite_that_cannot_be_sent_to_a_worker_is_told_how_to_run(
    toy: ToySuite, capsys: pytest.CaptureFixture[str]
) -> None:
    toy.behaviour = {"other": lambda case: Workload(run=int, check=lambda: Numerics({}))}
    assert main(["sweep=toy", "device=cpu"]) == 1
    told = [line for line in lines(capsys)[0] if " failed: " in line]
    assert "cannot be handed to a worker process" in told[0]
    assert "isolate=false" in told[0]


def test_resume_by_other_code_says_what_changed_and_can_be_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One case before a change of code and of torch, one after it; the report shows both."""
    monkeypatch.setitem(run.SUITES, "toy", as_module(Unruly(acts={2: "die"})))
    assert main(["sweep=toy", "device=cpu"]) == 1
    folder = Path(lines(capsys)[0][-2].split()[-1])
    monkeypatch.setitem(run.SUITES, "toy", as_module(Unruly()))
    real = environment.fingerprint
    changed = {"code": "0123456789ab", "git_commit": "f" * 40, "torch": "9.9"}
    monkeypatch.setattr(environment, "fingerprint", lambda *given: {**real(*given), **changed})
    again = ["sweep=toy", "device=cpu", f"resume={folder.name}"]
    assert main(again) == 2
    (error,) = lines(capsys)[1]
    before = real("cpu")
    assert f"-> commit {'f' * 12}" in error
    assert f"torch {before['torch']} -> 9.9" in error
    assert "resume_anyway=true" in error
    assert main([*again, "resume_anyway=true"]) == 0
    out, err = lines(capsys)
    assert any(line.startswith("resumed although changed: code of commit") for line in err)
    frame = store.read(folder)
    assert (frame["status"] == "ok").all()
    assert {json.loads(env)["torch"] for env in frame["env"]} == {before["torch"], "9.9"}
    page = Path(out[-1].split()[-1]).with_suffix(".md").read_text()
    assert "torch 9.9" in page
    assert f"torch {before['torch']}" in page


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_dry_run_imports_nothing_that_only_a_measurement_needs(tmp_path: Path) -> None:
    """Oracle: `sys.modules`: a plan is made without Parquet, pandas, a pool of workers or a report."""
    done = python(
        "import sys; from harness.__main__ import main\n"
        "assert main(['sweep=cast', 'dry_run=true', 'device=cpu']) == 0\n"
        "heavy = {'pandas', 'pyarrow', 'harness.engine.executor', 'harness.report', 'harness.judge', 'harness.training.models'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_keeps_finished_cases_and_reports_them(
    toy: ToySuite, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(case: object) -> Workload:
        if case["n"] == 2:
            raise KeyboardInterrupt
        return Workload(run=int, check=lambda: Numerics({}))

    toy.behaviour = {"other": build}
    assert main(["sweep=toy", "device=cpu", "isolate=false"]) == 2
    out, err = lines(capsys)
    assert re.fullmatch(r"error: interrupted; .*: resume=\S+ continues it", err[-1])
    assert store.read(out[-2].split()[-1])["case_id"].nunique() == 1
    assert Path(out[-1].split()[-1]).exists()
