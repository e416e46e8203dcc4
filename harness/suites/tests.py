"""Suite `tests`: do the tests that need this device pass on it? One run of pytest; its counts are rows like any other's.

The counts are those of pytest's own JUnit file. Untested versions of libraries may warn, and a test file may lack a
package: neither costs the other tests. A run in which no test ran is no pass: it has failed, or is skipped where each of its
tests was.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from harness.store.arm import Arm
from harness.store.cause import Cause
from harness.suites.common import crossed_points
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported, arm_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from harness.store.case import Case

METRIC = "tests_failed"
LENIENT = ("-W", "default", "--continue-on-collection-errors", "-rf")
# Exit codes of a pytest that has counted: all passed, some failed. Others of its own: interrupted, internal error, bad usage,
# no test found.
COUNTED, INTERRUPTED, ITS_OWN = (0, 1), 2, range(6)
SIGN_S = 1.0  # between two signs of life: one test may compile for minutes

AXES: Mapping[str, Axis] = {
    "files": Axis("test files and folders, with spaces between them", kind="str", default="tests"),
    "marker": Axis("of the tests that are run", kind="str", default="gpu"),
    "processes": Axis("at once, where pytest-xdist is installed; tests marked `alone` are then left out"),
}
ARMS: Mapping[str, ArmInfo] = arm_table({Arm(variant="pytest"): ArmInfo("one run of pytest")})


points = crossed_points("tests", "no shapes", AXES)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """A file that is not there: an installed wheel has no tests."""
    absent = [name for name in case.text("files").split() if not Path(name).exists()]
    return Unsupported("device", f"no {', '.join(absent)} here", Cause.MISSING) if absent else None


def work(case: Case) -> float:
    """All runs count alike."""
    return 1.0


def trial(case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]) -> Trial:
    """Runs pytest, which ends with this process."""
    workspace.mkdir(parents=True, exist_ok=True)
    counts, log = workspace / "junit.xml", workspace / "output.txt"
    several = case.integer("processes") > 1 and importlib.util.find_spec("xdist") is not None
    chosen = f"{case.text('marker')} and not alone" if several else case.text("marker")
    spread = ["-n", str(case.integer("processes")), "--dist", "worksteal"] if several else []
    words = ["-m", chosen, *spread, *LENIENT, f"--junitxml={counts}", *case.text("files").split()]
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "pytest", *words], stdout=output, stderr=output)
        while True:
            try:
                code = process.wait(SIGN_S)
                break
            except subprocess.TimeoutExpired:
                on_step(0, 1)
    facts = {"command": words, "exit": code, "printed": log.read_text(errors="replace")[-8000:]}
    try:
        suites = list(ElementTree.parse(counts).iter("testsuite"))
    except (OSError, ElementTree.ParseError):
        return Trial((), facts, f"pytest ended with exit code {code} and no counts", cause=_ended(code))
    of = {key: sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped")}
    bad = of["failures"] + of["errors"]
    passed = of["tests"] - bad - of["skipped"]
    resolved = {**facts, **of, "passed": passed}
    if code not in COUNTED or not of["tests"]:
        why = f"pytest ended with exit code {code} after {of['tests']} tests"
        return Trial((), resolved, f"{why}: none was found" if code == 5 else why, cause=_ended(code))
    if code == 1 and not bad:
        why = "pytest ended with exit code 1 and counted no failed test; see what it printed"
        return Trial((), resolved, why, cause=Cause.ERROR)
    if not passed + bad:
        reasons = Counter(str(e.get("message")) for s in suites for e in s.iter("skipped"))
        why = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
        return Trial((), resolved, refusal=f"all {of['tests']} tests were skipped: {why}")
    named = [
        f"{c.get('classname')}::{c.get('name')}"
        for s in suites
        for c in s
        if len(c) and c[0].tag != "skipped"
    ]
    failure = f"{bad} of {of['tests']} tests failed, first {named[0] if named else 'unknown'}" if bad else ""
    cause = (
        Cause.RUN if of["failures"] else Cause.BUILD
    )  # of a test itself, or before one: its import, its fixtures
    return Trial((Series(METRIC, (float(bad),), (0,)),), resolved, failure, cause=cause)


def _ended(code: int) -> Cause:
    if code == INTERRUPTED:
        return Cause.INTERRUPTED
    return Cause.ERROR if code in ITS_OWN else Cause.DIED
