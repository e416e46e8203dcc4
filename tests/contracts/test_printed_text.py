"""Text from outside never moves the cursor nor is a command of GitHub's. Oracle: Unicode's categories of what is printed."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import QUICKLY, USERS_MODEL, Ended, path

from harness.__main__ import main

BAD = "\x1b[2Jzz\x1b]0;owned\x07 \u202egnp\r\x9b2J\v\u2028\n::error::zz"
STYLES = re.compile(
    r"\x1b\[(?:[\d;]*m|\?25[hl]|1A|2K)|\r(?=\x1b\[(?:2K|1A))"
)  # rich's, where a terminal is asked for
MEANT = {
    "status",
    "better",
    "metric",
    "unit",
    "cause",
    "suite",
    "arm",
    "arm_fields",
    "baseline",
    "regime",
    "case_id",
    "flops",
}  # else no row
JSON = {"axes": "data", "resolved": "recipe", "timing": "method", "env": "cpu"}


def said(folder: Path, *words: str) -> str:
    """All that a command prints."""
    out = io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        path(folder),
    ):
        main(words)
    return out.getvalue()


def planted(source: Path, target: Path) -> Path:
    """A copy of a run that somebody sent."""
    target.mkdir(parents=True)
    about = json.loads((source / "_run.json").read_text())
    about |= dict.fromkeys(("command", "question", "made_by", "started_at", "answer"), BAD) | {
        "parts_done": [BAD],
        "parts_total": 2,
    }
    about |= {"state": "running", "config": {**about["config"], "name": BAD, "model": BAD}}
    (target / "_run.json").write_text(json.dumps(about))
    note = json.loads((source / "_progress.json").read_text())
    (target / "_progress.json").write_text(
        json.dumps(note | {"text": BAD, "message": BAD, "state": "failed"})
    )
    for file in source.glob("*.parquet"):
        table = pq.ParquetFile(file).read().replace_schema_metadata(None)
        own = {"run_id": target.name + BAD}
        rows = [{name: bad(name, value) for name, value in row.items()} | own for row in table.to_pylist()]
        pq.write_table(
            pa.Table.from_pylist(rows, schema=table.schema), target / f"{file.stem}{target.name}.parquet"
        )
    if target.name == "b":
        (target / f"part-{BAD.replace('/', '')}.parquet").write_bytes(b"none")
    return target


def bad(name: str, value: Any) -> Any:
    if name in JSON:
        return json.dumps(json.loads(value or "{}") | {JSON[name]: BAD, BAD: BAD})
    return BAD if isinstance(value, str) and name not in MEANT else value


@pytest.fixture
def stranger(tmp_path: Path, partly_failed: Ended, measured: Ended) -> Path:
    for name, run in (("a", partly_failed), ("b", partly_failed), ("c", measured), ("d", measured)):
        planted(run.path("results"), tmp_path / "results" / "x" / name)
    return tmp_path


def live(folder: Path) -> str:
    model = USERS_MODEL.replace('"three is too many"', repr(BAD))
    (folder / "bad_model.py").write_text(model)
    words = ("sweep=train", "model._target_=bad_model.build", "model.batch=bad_model.batch", "axes.batch=[3]")
    return said(folder, *words, "arms=[bf16_eager]", "device=cpu", "isolate=false", *QUICKLY)


GATE = ("gate", "--baseline", "results/x/a", "--candidate", "results/x/b", "--annotations=true")
COMMANDS: dict[str, Callable[[Path], str]] = {
    "report": lambda folder: said(folder, "report", "results/x", "-o", "page.html"),
    "diff": lambda folder: said(folder, "diff", "results/x/a", "results/x/b"),
    "diff json": lambda folder: said(folder, "diff", "results/x/c", "results/x/d", "json=true"),
    "fleet": lambda folder: said(folder, "fleet", "results/x", "expect=" + BAD),
    "gate": lambda folder: said(folder, *GATE),
    "gate of times": lambda folder: said(
        folder, *(word.replace("x/a", "x/c").replace("x/b", "x/d") for word in GATE)
    ),
    "advise": lambda folder: said(folder, "advise", "model=nano", "gpu=h200", "runs=results/x"),
    "resume": lambda folder: said(folder, "resume=a") + said(folder, "resume=a", "trust=true"),
    "export": lambda folder: said(folder, "export", "results/x/c", "-o", "x.csv"),
    "words": lambda folder: (
        said(folder, "report", BAD) + said(folder, BAD) + said(folder, "gate", f"--{BAD}")
    ),
    "a sweep": live,
}


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_control_character_of_others_is_printed(
    command: str, terminal: bool, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    text = COMMANDS[command](stranger)
    assert "zz" in text or command in ("report", "export"), text
    assert {c for c in STYLES.sub("", text) if not c.isprintable()} <= {"\n", "\t"}
    assert "\n::error::zz" not in f"\n{text}" or "gate" not in command
