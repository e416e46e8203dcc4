"""Oracle: the command line itself: whatever the CI files and the documentation say must be accepted by the program."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

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


@pytest.mark.parametrize(
    "path", [ROOT / ".ci" / "gate", ACTION, WORKFLOW, ROOT / "docs" / "gate.md"], ids=lambda p: p.name
)
def test_every_option_that_is_named_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gate._parse(["--help"])
    known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    lines = [
        x for x in path.read_text().splitlines() if "harness gate " in x or "options" in x or "measure=(" in x
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


def test_nothing_of_the_outside_is_pasted_into_a_script() -> None:
    """`${{ }}` inside `run:` is a shell injection: whoever names a branch would write the script."""
    for path in (ACTION, WORKFLOW):
        document = yaml.safe_load(path.read_text())
        jobs = document.get("jobs", {"action": document.get("runs", {})})
        for job in jobs.values():
            assert not any("${{" in step.get("run", "") for step in job["steps"])


def test_the_committed_baseline_can_be_judged() -> None:
    """It is small, of the current schema, holds the gate's sweep, and is its own equal."""
    assert sum(p.stat().st_size for p in BASELINE.rglob("*")) < 200_000
    policy = load_policy(ROOT / ".ci" / "gate-policy.yaml")
    sides = [load_side(BASELINE, role, "") for role in ("baseline", "candidate")]
    found = judge(*sides, policy, machine_free=True)
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
