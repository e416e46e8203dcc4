"""Oracle: the command line itself: whatever the CI files and the documentation say must be accepted by the program."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from gate_fixtures import time_row, write

from harness import gate, store
from harness.gate.judge import judge
from harness.gate.policy import load_policy
from harness.gate.render import terminal
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
    with pytest.raises(SystemExit):
        gate._parse(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    lines = [
        x
        for x in path.read_text().splitlines()
        if "harness gate " in x or "options" in x or "measure=(" in x or "tell" in x
    ]
    named = {o for line in lines for o in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert named <= known
    assert named or path == WORKFLOW


def test_the_workflow_gives_the_action_only_inputs_that_it_has() -> None:
    inputs = set(yaml.safe_load(ACTION.read_text())["inputs"])
    workflow = yaml.safe_load(WORKFLOW.read_text())
    used = [
        s
        for job in workflow["jobs"].values()
        for s in job["steps"]
        if s.get("uses") == "./.github/actions/gate"
    ]
    assert len(used) == 2
    for step in used:
        assert set(step["with"]) <= inputs
        assert "against" in step["with"]
    assert {str(j["runs-on"]) for j in workflow["jobs"].values()} == {
        "ubuntu-latest",
        "['self-hosted', 'gpu']",
    }


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


def test_every_job_says_which_python() -> None:
    for path in WORKFLOWS:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            (python,) = [s for s in job["steps"] if "setup-python@" in s.get("uses", "")]
            assert python["with"]["python-version"] == "3.11"


def test_the_environment_of_the_gpu_job_outlives_the_job() -> None:
    """It lies outside the checkout, under a name that changes with what is asked for."""
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["gpu"]
    (setup,) = [s for s in job["steps"] if "make setup" in s.get("run", "")]
    place = setup["env"]["ENVIRONMENT"]
    assert place.startswith("${{ runner.tool_cache }}/")
    assert "hashFiles('pyproject.toml', 'constraints.txt')" in place
    assert "ln -sfn" in setup["run"]
    assert ".venv\n" in (ROOT / ".gitignore").read_text()  # a link is no folder: `.venv/` would not ignore it


def test_the_tests_and_the_canary_run_by_themselves() -> None:
    tests, canary = (yaml.safe_load((WORKFLOW.parent / f"{n}.yml").read_text()) for n in ("tests", "canary"))
    assert {"push", "pull_request"} <= tests[True].keys()  # YAML reads `on` as a truth value
    assert ".ci/run" in [s.get("run") for s in tests["jobs"]["all"]["steps"]]
    assert canary[True]["schedule"][0]["cron"]
    said = " ".join(s.get("run", "") for s in canary["jobs"]["newest"]["steps"])
    assert re.search(r"pip install --upgrade --pre torch triton torchao .*make canary", said)
    assert re.search(
        r"^canary: .*\n\t.*tests/studies/canary.py", (ROOT / "Makefile").read_text(), re.MULTILINE
    )


def test_the_slow_tests_run_every_week() -> None:
    slow = yaml.safe_load((WORKFLOW.parent / "slow.yml").read_text())
    assert slow[True]["schedule"][0]["cron"]
    runs = [s.get("run") for s in slow["jobs"]["all"]["steps"]]
    assert "make test-all ARGS=--hypothesis-profile=default" in runs, (
        "with CI set Hypothesis draws no new examples"
    )


def test_a_run_on_the_main_branch_is_not_cancelled() -> None:
    tests = yaml.safe_load((WORKFLOW.parent / "tests.yml").read_text())
    assert tests["concurrency"]["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"


@pytest.mark.parametrize("path", [ACTION, ROOT / ".ci" / "gate"], ids=lambda p: p.name)
def test_the_verdict_of_an_earlier_gate_is_removed_first(path: Path) -> None:
    """Where the gate crashes, an old gate.json would read as a verdict of this one."""
    before, removed, after = path.read_text().partition("/gate.json")
    assert "rm -f" in before.splitlines()[-1]
    assert removed
    assert "harness gate" in after


def test_environments_that_no_job_used_for_thirty_days_are_removed(tmp_path: Path) -> None:
    """Oracle: the workflow's own line, with GNU find, on folders of known ages."""
    job = yaml.safe_load(WORKFLOW.read_text())["jobs"]["gpu"]
    (setup,) = [s for s in job["steps"] if "make setup" in s.get("run", "")]
    script = setup["run"].partition("ln -sfn")[0]
    for name, days in (("py3.11-now", 90), ("py3.11-new", 20), ("py3.11-old", 40), ("other", 40)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
        os.utime(tmp_path / name, (time.time() - 86400 * days,) * 2)
    bash = shutil.which("bash")
    assert bash is not None
    environment = os.environ | {"ENVIRONMENT": str(tmp_path / "py3.11-now")}
    subprocess.run([bash, "-e", "-c", script], env=environment, check=True)
    assert {path.name for path in tmp_path.iterdir()} == {"py3.11-now", "py3.11-new", "other"}


def test_the_tutorials_sweep_finds_a_graph_break() -> None:
    """Graph breaks are counted of compiled arms alone, so the CPU's list needs one; the baseline of the CI holds it too."""
    lines = [
        x for x in (ROOT / "sweeps" / "gate.yaml").read_text().splitlines() if "on_device:[bf16_eager" in x
    ]
    (cpu,) = [re.findall(r"\[(.*?)\]", line)[0] for line in lines]
    assert [arm for arm in cpu.split(",") if arm.endswith("_compile")] == ["tensorwise_compile"]
    rows = store.read(BASELINE)
    compiled = rows[(rows["suite"] == "linear") & (rows["arm"] == "tensorwise_compile")]
    assert set(compiled["status"]) == {"ok"}
    assert any('"compile_graph_breaks":0' in text for text in compiled["resolved"])


def test_the_baseline_was_measured_on_a_clean_tree() -> None:
    (env,) = set(store.read(BASELINE)["env"])
    assert json.loads(env)["git_dirty"] is False


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


def test_no_baseline_is_made_where_git_fails(tmp_path: Path) -> None:
    """Oracle: the interpreter that would measure, which leaves a mark."""
    bash = shutil.which("bash")
    assert bash is not None
    for name in (".ci", "results/baseline/cpu"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "gate", tmp_path / ".ci" / "gate")
    (tmp_path / "results/baseline/cpu/old").write_text("")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ntouch measured\n")
    python.chmod(0o755)
    env = {**os.environ, "GIT_DIR": "/nonexistent", "PY": str(python), "GATE_OUT": str(tmp_path / "out")}
    command = [bash, str(tmp_path / ".ci" / "gate"), "update"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert done.returncode == 2
    assert "git cannot say whether the tree is clean" in done.stderr
    assert (tmp_path / "results/baseline/cpu/old").exists()
    assert not (tmp_path / "measured").exists()


def test_the_committed_baseline_can_be_judged() -> None:
    """It is small, of the current schema, holds the gate's sweep, and is its own equal."""
    assert sum(p.stat().st_size for p in BASELINE.rglob("*")) < 200_000
    policy = load_policy(ROOT / ".ci" / "gate-policy.yaml")
    before, after = (load_side(BASELINE, role, "") for role in ("baseline", "candidate"))
    after = replace(after, runs=("measured again",))  # one run on both sides is refused
    found = judge(before, after, policy, machine_free=True)
    assert found.code == 0
    assert not any(f.unit.trouble for f in found.findings)
    assert {f.unit.suite for f in found.findings} == {"linear", "gemm", "cast", "recipes", "train"}
    assert {f.unit.regime for f in found.findings} >= {"ratio"}
    judged = {f.unit.metric for f in found.findings}
    assert judged >= {
        "sqnr_db", "mismatches", "bytes_moved", "operator_calls", "compile_graph_breaks", "compile_graphs", "fp8_gemms",
        "fp8_layers", "saved_bytes_per_elem", "predicted_memory_bytes",
    }  # fmt: skip
    assert set(store.read(BASELINE)["status"]) == {"ok", "skipped"}  # a CPU keeps no peak of memory


def test_no_ratio_can_fail_the_projects_ci(tmp_path: Path) -> None:
    """What depends on the machine is told; the rest is exact."""
    policy = load_policy(ROOT / ".ci" / "gate-policy.yaml")
    assert policy.on_slower == "warn"
    rows = (
        [time_row(1, [0.7] * 10), time_row(1, [1.0] * 10, "bf16")],
        [
            time_row(1, [7.0] * 10),
            time_row(1, [1.0] * 10, "bf16"),
        ],
    )
    sides = [
        load_side(write(tmp_path / name, side), name, "")
        for name, side in zip(("baseline", "candidate"), rows, strict=True)
    ]
    found = judge(*sides, policy, machine_free=True)
    assert (found.counted["REGRESSED"], int(found.code)) == (1, 0)
    assert "REGRESSED, only reported" in terminal(found)
    assert terminal(found).splitlines()[-1].startswith("OK, no time judged, 1 slower (exit 0): 1 REGRESSED")


def test_the_page_of_earlier_sessions_shows_what_was_stored_then() -> None:
    table = (ROOT / "results" / "published" / "gate" / "selftest" / "selftest.md").read_text().strip()
    page = (ROOT / "docs" / "gate-error-rates.md").read_text()
    blocks = re.findall(r"<!-- selftest -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    assert len(blocks) == 2
    assert all(block in table for block in blocks)


def test_the_documentation_shows_the_table_that_the_command_stored() -> None:
    """The page's table of error rates is the command's own output."""
    whole = (ROOT / "results" / "published" / "gate" / "error_rates" / "selftest.md").read_text()
    page = (ROOT / "docs" / "gate-statistics.md").read_text()
    table = page.partition("<!-- all -->\n")[2].partition("\n<!-- end -->")[0]
    assert table.count("\n") == 4
    assert table in whole
    few = page.partition("<!-- few -->\n")[2].partition("\n<!-- end -->")[0]
    assert few.count("\n") == 13
    assert few in whole
    assert "| NO |" not in whole


def test_the_shell_form_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, str(ROOT / ".ci" / "gate"), "--what"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "takes nothing, --against REV, or update" in done.stderr


def test_ci_runs_the_gate() -> None:
    assert re.search(r"^(\.ci/offline )?make gate$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.search(r"^gate:.*\n\tPY=\$\(PY\) \.ci/gate", (ROOT / "Makefile").read_text(), re.MULTILINE)
