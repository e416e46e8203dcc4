"""Sides that cannot take turns: each runs its whole sweep by its own command line. Oracle: trees whose command is a script."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_repo import git
from gate_fixtures import ENV, case, failed_row, time_row, value_row

from harness import store
from harness.__main__ import main
from harness.engine.turns import VERSION
from harness.gate import sweeping
from harness.gate import trees as work_trees
from harness.gate.options import Exit, GateError, Loud
from harness.gate.policy import load_policy
from harness.gate.render import GateAnswer, markdown
from harness.gate.runner import Session
from harness.gate.sweeping import Sweeping
from harness.machine.environment import env_id

if TYPE_CHECKING:
    from harness.store.measurement import Measurement

# Takes turns as it is told, or stores the rows that lie beside it and ends as it is told.
PROGRAM = """
import json, os, shutil, sys
from multiprocessing.connection import Connection
from pathlib import Path
words = dict(word.partition("=")[::2] for word in sys.argv[1:])
here = Path(__file__).parent
script = json.loads((here / "script.json").read_text())
def log(event):
    with open(script["log"], "a") as file:
        file.write(json.dumps([script["side"], event, words]) + "\\n")
log("turns" if "turns" in words else "begins")
if "turns" in words:
    if script["turns"] > 100:
        pipe = Connection(int(words["turns"]))
        plan = {"version": script["turns"] - 100, "root": str(here.parent.resolve()), "cases": []}
        pipe.send_bytes(json.dumps(plan).encode())
        pipe.recv_bytes()
    sys.exit(script["turns"])
if (here / "rows").exists():
    shutil.copytree(here / "rows", Path(words["results_dir"]) / "x" / words["run_id"])
log("ends")
os.kill(os.getpid(), -script["code"]) if script["code"] < 0 else sys.exit(script["code"])
"""
ROOT = Path(sweeping.__file__).resolve().parents[2]
SPEAKS = 100 + VERSION
ROWS = (time_row(1, [1.0, 1.00001] * 3), value_row(1, "sqnr_db", 28.0))
OLD = {"turns": 2}  # as every command line that does not know the word


@dataclasses.dataclass
class Trees:
    """Two trees below a folder, and what their commands were asked for."""

    folder: Path

    def tree(
        self, side: str, rows: Sequence[Measurement] = ROWS, *, turns: int = SPEAKS, code: int = 0, schema: int = 0,
        commit: object = ENV["git_commit"],
    ) -> Path:  # fmt: skip
        tree = self.folder / side
        (tree / "harness").mkdir(parents=True)
        (tree / "harness" / "__init__.py").write_text("")
        (tree / "harness" / "__main__.py").write_text(PROGRAM)
        script = {"side": side, "turns": turns, "code": code, "log": str(self.folder / "log")}
        (tree / "harness" / "script.json").write_text(json.dumps(script))
        if rows:
            folder = tree / "harness" / "rows"
            env = {**ENV, "git_commit": commit}
            writer = store.RunWriter(folder, run_id="run", sweep="x", env_id=env_id(env), env=env, about={})
            writer.append(rows)
            writer.close("finished")
            for part in folder.glob("*.parquet") if schema else ():
                table = pq.read_table(part)
                place = table.schema.get_field_index("schema_version")
                versions = pa.array([schema] * len(table), pa.int32())
                pq.write_table(table.set_column(place, "schema_version", versions), part)
        return tree

    def session(self, baseline: dict[str, Any], candidate: dict[str, Any] | None = None) -> Session:
        trees = {
            side: self.tree(side, **of)
            for side, of in {"baseline": baseline, "candidate": candidate or {}}.items()
        }
        policy = dataclasses.replace(load_policy(), pairs=5, confirm_pairs=8, blocks=3)
        commits = dict.fromkeys(trees, str(ENV["git_commit"]))
        return Session(Sweeping(trees, ["sweep=x"], policy.blocks, commits), policy, self.folder / "r")

    @property
    def log(self) -> list[list[Any]]:
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    return Trees(tmp_path)


def clock_of_its_own(session: Session) -> list[str]:
    """Lends the candidate the base commit's clock; returns a list that grows as it gets its own back."""
    returned: list[str] = []
    assert isinstance(session.instrument, Sweeping)
    session.instrument.own_clock = lambda: returned.append("own")
    return returned


@pytest.mark.parametrize("turns", [2, SPEAKS + 1], ids=["none", "another version"])
def test_where_the_baseline_takes_no_turns_each_side_runs_its_whole_sweep(trees: Trees, turns: int) -> None:
    """Both the same way, one after the other, in an order that is drawn each round; a round is a process a side."""
    found = trees.session({"turns": turns}).run()
    assert (found.code, found.mode, found.findings[0].rounds) == (Exit.OK, "paired", 5)
    whole = [line for line in trees.log if line[1] != "turns"]
    sides, events, words = zip(*whole, strict=True)
    assert events == ("begins", "ends") * 10
    rounds = [sides[place : place + 4 : 2] for place in range(0, 20, 4)]
    assert set(rounds) == {("baseline", "candidate"), ("candidate", "baseline")}
    asked = [{k: v for k, v in each.items() if k != "results_dir"} for each in words]
    assert asked == asked[:1] * 20
    assert (asked[0]["rounds"], asked[0]["control"]) == ("3", "false")
    assert len(trees.log) - len(whole) <= 2  # asked for turns once, and never again


def test_the_verdict_says_that_it_was_measured_so(trees: Trees) -> None:
    """A field of its own, which a judgement of the stored session has too; no control case is one that was not judged."""
    found = trees.session(OLD).run()
    data = GateAnswer.of(found).data()
    assert (data["alone"], data["control"]["rounds"], data["control"]["moved"]) == ("sweeps", 0, False)
    assert any("turns" in note for note in found.notes)
    assert "rounds measured together" not in markdown(GateAnswer.of(found))
    (session,) = (trees.folder / "r" / "gate").iterdir()
    file = trees.folder / "again.json"
    names = [str(session / side) for side in ("baseline", "candidate")]
    main(["gate", "--baseline", names[0], "--candidate", names[1], "--json", str(file)])
    assert json.loads(file.read_text())["alone"] == "sweeps"


def test_what_is_slower_is_measured_again_alone(trees: Trees) -> None:
    slower = (time_row(1, [1.2, 1.20001] * 3), time_row(2, [1.0, 1.00001] * 3))
    found = trees.session({**OLD, "rows": (ROWS[0], time_row(2, [1.0, 1.00001] * 3))}, {"rows": slower}).run()
    assert (found.code, found.counted["REGRESSED"], found.counted["OK"]) == (Exit.REGRESSED, 1, 1)
    assert trees.log[-1][2]["cases"] == f"['{case(1).case_id}']"


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_times_of_two_clocks_are_not_judged_whatever_they_are(trees: Trees, factor: float) -> None:
    after = (time_row(1, [factor, factor * 1.00001] * 3), ROWS[1])
    session = trees.session(OLD, {"rows": after})
    returned = clock_of_its_own(session)
    found = session.run()
    verdicts = {f.key.metric: str(f.verdict) for f in found.findings}
    assert verdicts == {"time_ms": "INCONCLUSIVE", "sqnr_db": "OK"}
    assert (found.code, returned) == (Exit.INCONCLUSIVE, ["own"])
    assert any(isinstance(note, Loud) for note in found.notes)


def test_what_no_clock_decides_is_judged_between_two_clocks(trees: Trees) -> None:
    session = trees.session(OLD, {"rows": (ROWS[0], value_row(1, "sqnr_db", 20.0))})
    clock_of_its_own(session)
    assert session.run().code is Exit.NUMERICS


def test_a_candidate_that_does_not_import_with_the_clock_it_was_lent_is_not_broken(trees: Trees) -> None:
    """Code 7 is what the harness ends with where a name is missing from the base commit's clock."""
    session = trees.session({}, {"turns": 7})
    returned = clock_of_its_own(session)
    found = session.run()
    assert (found.mode, found.code, returned) == ("paired", Exit.INCONCLUSIVE, ["own"])


def test_a_candidate_that_does_not_import_with_its_own_clock_is_broken(trees: Trees) -> None:
    found = trees.session({}, {"turns": 7}).run()
    assert (found.mode, found.code) == ("broken", Exit.REGRESSED)
    session = Trees(trees.folder / "lent").session({}, {"turns": 7, "code": 7, "rows": ()})
    clock_of_its_own(session)
    found = session.run()
    assert (found.mode, found.code) == ("broken", Exit.REGRESSED)


def test_a_candidate_that_refuses_the_request_is_asked_no_other_way(trees: Trees) -> None:
    """A suite whose arms are runs and no closures takes no turns either: the gate does not train."""
    with pytest.raises(GateError) as caught:
        trees.session(OLD, {"turns": 2}).run()
    assert caught.value.code is Exit.USAGE
    assert {event for _, event, _ in trees.log} == {"turns"}


@pytest.mark.parametrize(
    ("baseline", "code"),
    [
        ({"code": 2, "rows": ()}, Exit.NO_BASELINE),
        ({"code": 0, "rows": ()}, Exit.NO_BASELINE),
        ({"code": 1, "rows": ()}, Exit.NO_BASELINE),
        ({"code": -9}, Exit.INCONCLUSIVE),  # whatever rows it has left
        ({"code": 7}, Exit.NO_BASELINE),
        ({"schema": 3}, Exit.INCONCLUSIVE),  # rows that this harness cannot read
        ({"commit": "f" * 40}, Exit.INCONCLUSIVE),  # an installed harness, where the tree has none
        ({"commit": None}, Exit.INCONCLUSIVE),
    ],
)
def test_where_its_own_command_line_fails_too_there_is_nothing_to_compare(
    trees: Trees, baseline: dict[str, Any], code: Exit
) -> None:
    with pytest.raises(GateError) as caught:
        trees.session({**OLD, **baseline}).run()
    assert caught.value.code is code


def test_arms_that_failed_end_no_side(trees: Trees) -> None:
    """A sweep ends with 1 where an arm failed, and with its rows."""
    rows = (*ROWS, failed_row(2, "boom"))
    found = trees.session({**OLD, "code": 1, "rows": rows}, {"code": 1, "rows": rows}).run()
    assert (found.mode, found.counted["OK"]) == ("paired", 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "former", "alone"),
    [
        (f"\nVERSION = {VERSION}\n", "\nVERSION = 0\n", "sweeps"),
        ("RanksTimer", "FormerTimer", "clocks"),  # of harness/timing, which the engine imports
    ],
)
def test_a_base_commit_that_speaks_otherwise_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, former: str, alone: str
) -> None:
    """Through the command, on this harness: the base commit has another version, or a clock that lacks what this one calls."""
    root = tmp_path / "repo"
    for folder in ("harness", "fp8core", "sweeps"):
        shutil.copytree(ROOT / folder, root / folder)
    texts = {file: file.read_text() for file in (root / "harness").rglob("*.py")}
    texts = {file: text for file, text in texts.items() if name in text}
    for file, text in texts.items():
        file.write_text(text.replace(name, former))
    git(tmp_path, "init", "-q", "repo")
    git(root, "add", "-A")
    git(root, "commit", "-qm", "one")
    for file, text in texts.items():
        file.write_text(text)
    monkeypatch.setattr(work_trees, "project_root", lambda: root)
    verdict = tmp_path / "verdict.json"
    words = ["sweep=cast", "axes.M=16", "axes.K=16", "axes.dtype=e4m3fn", "axes.granularity=tensorwise",
             "axes.src=bf16", "arms=[eager]", "device=cpu", "timing.block_ms=1", "--pairs", "1"]  # fmt: skip
    code = main(["gate", "--against", "HEAD", "--json", str(verdict), "--results-dir", str(tmp_path / "r"), *words])  # fmt: skip
    data = json.loads(verdict.read_text())
    assert (code, data["alone"], data["mode"]) == (Exit.INCONCLUSIVE, alone, "paired")  # one round is too few
    assert {f["verdict"] for f in data["findings"] if f["rule"] != "timed"} == {"OK"}
