"""Oracle: the command line itself: whatever the CI files and the documentation say must be accepted by the program."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from gate_fixtures import run, time_row

from harness import gate, store
from harness.gate.judge import judge
from harness.gate.policy import load_policy
from harness.gate.render import GateAnswer, terminal
from harness.gate.sides import load_side

ROOT = Path(gate.__file__).resolve().parents[2]
BASELINE = ROOT / "results" / "baseline" / "cpu"
ACTION = ROOT / ".github" / "actions" / "gate" / "action.yml"
WORKFLOW = ROOT / ".github" / "workflows" / "gate.yml"
WORKFLOWS = sorted(WORKFLOW.parent.glob("*.yml"))


@pytest.mark.parametrize(
    "path", [ROOT / ".ci" / "gate", ACTION, WORKFLOW, ROOT / "docs" / "gate.md"], ids=lambda p: p.name
)
def test_every_option_that_is_named_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate.main(["--help"]) == 0
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    lines = [
        x
        for x in path.read_text().splitlines()
        if "harness gate " in x or "options" in x or "measure=(" in x or "tell" in x
    ]
    named = {o for line in lines for o in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert named <= known
    assert named or path == WORKFLOW


def steps_of(path: Path) -> list[dict[str, Any]]:
    document = yaml.safe_load(path.read_text())
    jobs = document.get("jobs", {"action": document.get("runs", {})})
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("path", [ACTION, *WORKFLOWS], ids=lambda p: p.name)
def test_a_workflow_trusts_nobody(path: Path) -> None:
    """`${{ }}` inside `run:` is a shell injection: whoever names a branch would write the script. A tag of an action
    can be moved, a commit's hash cannot. A token that a checkout leaves behind is read by the code that is measured."""
    for step in steps_of(path):
        assert "${{" not in step.get("run", "")
        if "actions/checkout@" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
    foreign = [u for u in re.findall(r"uses: (.*)", path.read_text()) if not u.startswith("./")]
    assert foreign
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", u) for u in foreign), foreign
    if path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_no_baseline_is_made_of_a_tree_with_changes(tmp_path: Path) -> None:
    """Oracle: git. Refused before anything is measured or removed."""
    bash = shutil.which("bash")
    assert bash is not None
    for name in (".ci", "results/baseline/cpu"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "gate", tmp_path / ".ci" / "gate")
    (tmp_path / "results/baseline/cpu/old").write_text("")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    command = [bash, str(tmp_path / ".ci" / "gate"), "update"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "measured on a clean tree" in done.stderr
    assert (tmp_path / "results/baseline/cpu/old").exists()


def test_the_committed_baseline_can_be_judged() -> None:
    """It is small, of the current schema, holds the gate's sweep, and is its own equal."""
    assert sum(p.stat().st_size for p in BASELINE.rglob("*")) < 200_000
    policy = load_policy(ROOT / ".ci" / "gate-policy.yaml")
    before, after = (load_side(BASELINE, role, "") for role in ("baseline", "candidate"))
    after = replace(after, runs=("measured again",))  # one run on both sides is refused
    found = judge(before, after, policy, machine_free=True)
    assert found.code == 0
    assert not any(f.trouble for f in found.findings)
    assert {f.key.suite for f in found.findings} == {"linear", "gemm", "cast", "recipes", "train"}
    assert {f.key.regime for f in found.findings} >= {"ratio"}
    judged = {f.key.metric for f in found.findings}
    assert judged >= {
        "sqnr_db", "mismatches", "bytes_moved", "operator_calls", "compile_graph_breaks", "compile_graphs", "fp8_gemms",
        "fp8_layers", "saved_bytes_per_elem", "predicted_memory_bytes",
    }  # fmt: skip
    stored = store.read(BASELINE)
    assert json.loads(stored["env"].unique().item())["git_dirty"] is False
    assert set(stored["status"]) == {"ok", "skipped"}  # a CPU keeps no peak of memory


def test_no_ratio_can_fail_the_projects_ci(tmp_path: Path) -> None:
    """What depends on the machine is told; the rest is exact."""
    policy = load_policy(ROOT / ".ci" / "gate-policy.yaml")
    before, after = ([time_row(1, [ms] * 10), time_row(1, [1.0] * 10, "bf16")] for ms in (0.7, 7.0))
    found = run(tmp_path, before, after, policy=policy, machine_free=True)
    assert (found.counted["REGRESSED"], int(found.code)) == (1, 0)
    assert "OK, no time judged, 1 slower (exit 0)" in terminal(GateAnswer.of(found))
