"""Why a row has no number is a column. Oracle: the rows written, and the sentences that version 3 of the harness stored."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import harness
from harness import store
from harness.store.cause import DEFAULT, RETRYABLE, Cause
from harness.store.measurement import SCHEMA_VERSION, Measurement
from harness.store.schema import JSON_COLUMNS

WHERE: dict[str, Any] = {"run_id": "r", "sweep": "toy", "env_id": "e", "env": {}, "about": {}}


def row(arm: str = "a", status: str = "ok", reason: str = "", **more: Any) -> Measurement:
    samples = () if reason and status != "partial" else (1.0,)
    return Measurement("s", "c", arm, "{}", "time_ms", status, samples=samples, reason=reason, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "words",
    [
        "time budget exceeded by kernel",
        "the device was lost somewhere in the kernel's own words",
        "its process died, says the kernel",
        "partial: tile of the kernel",
    ],
)
@pytest.mark.parametrize("stored_as", ["this version", "version 3"])
def test_a_failure_whose_words_sound_like_a_cut_is_a_failure(
    words: str, stored_as: str, tmp_path: Path
) -> None:
    """It replaces the older row that has a number, and is not measured again."""
    store.RunWriter(tmp_path, **WHERE).append([row()])
    store.RunWriter(tmp_path, **WHERE).append([row(status="failed", reason=words, cause=Cause.RUN)])
    if stored_as == "version 3":
        for part in tmp_path.glob("part-*"):
            older(part)
    frame = store.read(tmp_path)
    assert frame["status"].tolist() == ["failed"]
    assert frame["reason"].tolist() == [words]
    assert not frame["retryable"].any()


def older(part: Path) -> None:
    """Makes a part one of schema_version 3, which has no causes."""
    table = pq.read_table(part).drop_columns(["cause", "retryable"])
    version = pa.array([3] * len(table), pa.int32())
    place = table.schema.get_field_index("schema_version")
    pq.write_table(table.set_column(place, "schema_version", version), part)


@pytest.mark.parametrize("cause", sorted(RETRYABLE))
def test_what_may_have_passed_replaces_no_number_whatever_its_words_are(cause: Cause, tmp_path: Path) -> None:
    store.RunWriter(tmp_path, **WHERE).append([row()])
    store.RunWriter(tmp_path, **WHERE).append([row(status="failed", reason="any words", cause=cause)])
    assert store.read(tmp_path)["status"].tolist() == ["ok"]


def test_a_row_says_its_cause_and_whether_it_may_have_passed() -> None:
    assert SCHEMA_VERSION == 4
    for status, cause in DEFAULT.items():
        made = row(status=status, reason="" if status == "ok" else "why")
        assert made.as_row()["cause"] == str(cause)
        assert made.as_row()["retryable"] is (status == "partial")
    lost = row(status="failed", reason="why", cause=Cause.DEVICE_LOST)
    assert lost.retryable
    with pytest.raises(ValueError, match="'ok' with the cause oom"):
        row(cause=Cause.OOM)
    with pytest.raises(ValueError, match="'heat' is not a valid Cause"):
        row(status="failed", reason="why", cause="heat")


CUT = "partial: 3 of at least 8 rounds, then it was cut off; resume=RUN_ID measures the case again"
# (status, metric, reason as version 3 wrote it) -> (cause, retryable)
OLDER = {
    ("ok", "time_ms", ""): ("", False),
    (
        "skipped",
        "time_ms",
        "time budget of 60 s was spent before this case; resume=RUN_ID runs it",
    ): ("budget", True),
    (
        "failed",
        "loss",
        "the device was lost in case 1f: CUDA error; resume=RUN_ID runs the rest",
    ): ("device_lost", True),
    (
        "failed",
        "time_ms",
        "its process died twice (signal 9, SIGKILL) in arm b after it was begun; resume=RUN_ID runs it again",
    ): ("died", True),
    (
        "failed",
        "time_ms",
        "its process died 3 times (signal 11, SIGSEGV) after x: last words; resume=RUN_ID runs it again",
    ): ("died", True),
    (
        "failed",
        "time_ms",
        "no sign of life for 60 s in arm b since x; case_timeout_s=SECONDS allows more",
    ): ("timeout", False),
    (
        "failed",
        "time_ms",
        "not done within 60 s in arm b after x; case_wall_s=SECONDS allows more",
    ): ("timeout", False),
    ("failed", "time_ms", "out of memory: tried to allocate 80 GiB"): ("oom", False),
    ("failed", "time_ms", "numerics: output sqnr is 3.00 dB, at least 20 dB expected (x)"): (
        "numerics",
        False,
    ),
    ("failed", "sqnr_db", "3; output sqnr is 3.00 dB, at least 20 dB expected (x)"): ("numerics", False),
    ("failed", "time_ms", "numerics: 1 FP8 GEMMs ran where 3 were due: FP8 did not run as asked"): (
        "not_fp8",
        False,
    ),
    ("failed", "loss", "nothing was trained: loss is nan at step 0"): ("diverged", False),
    ("failed", "time_ms", "2 graph break(s): part of the arm ran eager"): ("compile", False),
    (
        "failed",
        "time_ms",
        "1 graph(s) compiled and 0 graph break(s) while it was timed",
    ): ("compile", False),
    ("failed", "time_ms", "RuntimeError: time budget exceeded by kernel"): ("error", False),
    ("failed", "time_ms", "arm a lost the device: CUDA error"): ("baseline", False),
    ("skipped", "loss", "refuses: no experts were converted to FP8"): ("refused", False),
    ("skipped", "time_ms", "torchao is not installed: pip install 'torchao>=0.18'"): ("missing", False),
    ("skipped", "time_ms", "M=100: FP8 GEMMs take multiples of 16"): ("unsupported", False),
    (
        "skipped",
        "time_ms",
        "out of memory, predicted: 90 GiB of 80",
    ): ("oom", False),
    ("partial", "time_ms", CUT): ("interrupted", True),
    (
        "partial",
        "time_ms",
        f"{CUT}; no sign of life for 5 s since x; case_timeout_s=SECONDS allows more",
    ): ("timeout", True),
    (
        "partial",
        "time_ms",
        f"{CUT}; its process died twice (exit code 3) after x; resume=RUN_ID runs it again",
    ): ("died", True),
}


def test_the_cause_of_an_older_row_is_derived_when_it_is_read(tmp_path: Path) -> None:
    columns = {
        "schema_version": pa.array([3] * len(OLDER), pa.int32()),
        "case_id": [f"c{i}" for i in range(len(OLDER))],
        "status": [status for status, _, _ in OLDER],
        "metric": [metric for _, metric, _ in OLDER],
        "reason": [reason for _, _, reason in OLDER],
    }
    pq.write_table(pa.table(columns), tmp_path / "part-old.parquet")
    frame = store.read(tmp_path, all_attempts=True)
    assert list(zip(frame["cause"], frame["retryable"], strict=True)) == list(OLDER.values())


# No product code asks the prose


ALLOWED = {
    "store/schema.py",  # derives the cause of rows that were stored without one
    "store/run_state.py",  # derives what made a run whose `_run.json` does not say
}
PROSE = {"reason", "note", "command"}  # what is written for people: of a row, of a judgement, of `_run.json`
ASKING = {
    "startswith",
    "endswith",
    "contains",
    "match",
    "fullmatch",
    "search",
    "isin",
    "partition",
    "rpartition",
}


def asks_prose(code: ast.AST) -> list[int]:
    """Lines that compare prose with text: by a method, a regular expression, `in`, == or !=."""
    found = []
    for node in ast.walk(code):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKING:
            parts: list[ast.expr] = [node.func.value, *node.args]
        elif isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            others = [p for p in parts if not is_prose(p)]
            if all(isinstance(p, ast.Constant) and p.value in ("", None) for p in others):
                continue  # whether there is one at all
        else:
            continue
        if any(is_prose(part) for part in parts):
            found.append(node.lineno)
    return found


def is_prose(node: ast.AST) -> bool:
    """Whether an expression is prose: `x.reason`, `x["reason"]`, `x.get("command")`, `str(...)` or `....str` of it."""
    if isinstance(node, ast.Attribute):
        return node.attr in PROSE or (node.attr == "str" and is_prose(node.value))
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value in PROSE
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "get" and node.args and isinstance(node.args[0], ast.Constant):
            return node.args[0].value in PROSE
        return node.func.attr == "lower" and is_prose(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(map(is_prose, node.args))
    return isinstance(node, ast.Name) and node.id in PROSE


def members_named(code: ast.Module) -> ast.Module:
    """The code with each variable that runs over `....notes` or `....reasons` renamed to `note` or `reason`."""
    for node in ast.walk(code):
        loops = getattr(node, "generators", [node] if isinstance(node, ast.For) else [])
        for loop in loops:
            if isinstance(loop.iter, ast.Attribute) and loop.iter.attr.removesuffix("s") in PROSE:
                member, prose = getattr(loop.target, "id", ""), loop.iter.attr.removesuffix("s")
                for name in ast.walk(node):
                    if isinstance(name, ast.Name) and name.id == member:
                        name.id = prose
    return code


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("row.reason.startswith('time budget')", True),
        ("frame['reason'].str.contains(NOT_FP8)", True),
        ("'pip install' in reason", True),
        ("PATTERN.search(str(row['reason']))", True),
        ("r.reason.lower().startswith('out of memory')", True),
        ("row['reason'] == 'x'", True),
        ("sorted(j.notes, key=lambda note: note.startswith(LOUD))", True),
        ("[n for n in judgement.notes if n.startswith(LOUD)]", True),
        ("str(about.get('command', '')).startswith(IMPORT)", True),
        ("status, _, why = note.partition(': ')", True),
        ("row.reason != ''", False),
        ("row['cause'] == Cause.OOM", False),
        ("reason.removeprefix('numerics: ')", False),
        ("[n for n in judgement.notes if isinstance(n, Loud)]", False),
        ("about.get('made_by') == 'import'", False),
    ],
)
def test_the_check_of_the_code_sees_prose_that_is_asked(code: str, asks: bool) -> None:
    assert bool(asks_prose(members_named(ast.parse(code)))) is asks


def test_no_code_of_the_harness_decides_by_a_reasons_words() -> None:
    root = Path(harness.__file__).parent
    asking = [
        f"{path.relative_to(root)}:{line}"
        for path in sorted(root.rglob("*.py"))
        if str(path.relative_to(root)) not in ALLOWED
        for line in asks_prose(members_named(ast.parse(path.read_text())))
    ]
    assert asking == []


def test_one_parser_reads_the_json_columns() -> None:
    """`json.loads` of a row's `axes`, `resolved`, `flops`, `timing` or `env` stands in no other module."""
    root, found = Path(harness.__file__).parent, []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "json.loads"
                and any(f"'{c}'" in ast.unparse(node) or f".{c} " in ast.unparse(node) for c in JSON_COLUMNS)
            ):
                found.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found == []
