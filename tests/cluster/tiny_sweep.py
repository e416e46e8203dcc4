"""What the tests of clusters ask of the sweep `tiny` (`conftest.py`): its cases, what is stored of them, and whether all is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from slurm_here import wait_for

from harness import store

CASES = 16


def harness(*words: str, code: int = 0) -> str:
    """What a command of the harness prints, which ends with `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def stored(folder: Path) -> int:
    """Cases that a shard has stored."""
    with_rows = folder.exists() and any(folder.rglob("*.parquet"))
    return int(store.read(folder)["case_id"].nunique()) if with_rows else 0


def whole(folder: Path) -> None:
    """Every case of the sweep has its rows, each once, and none is missing in the report."""
    frame = store.read(folder)
    assert frame["case_id"].nunique() == CASES
    assert not frame.duplicated(["case_id", "arm", "metric", "regime", "part"]).any()
    assert set(frame["status"]) == {"ok"}
    harness("report", str(folder), "-o", "how.html")
    text = Path("how.md").read_text()
    assert not any(words in text for words in ("has not ended", "was interrupted", "ended early"))


def began(folder: Path, shard: int) -> None:
    wait_for(f"a case of shard {shard}", lambda: stored(folder / f"shard-{shard}-of-4") > 0, 120)


def states(folder: Path) -> list[str]:
    return [store.read_about(folder / f"shard-{shard}-of-4").get("state", "") for shard in range(4)]
