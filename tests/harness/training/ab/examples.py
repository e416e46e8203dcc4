"""The scripts in docs/examples/ab, each before and after: their lines, and what a trial finds in them."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "docs" / "examples" / "ab"
PROBE = Path(__file__).with_name("example_probe.py")
NAMES = sorted(path.stem for path in (FOLDER / "before").glob("*.py"))


def text(name: str, side: str) -> str:
    return (FOLDER / side / f"{name}.py").read_text()


def changed(name: str) -> tuple[int, int]:
    """(lines added or rewritten, lines that were moved to the right and nothing else). None may be taken away."""
    before, after = ([*map(str.strip, text(name, side).splitlines())] for side in ("before", "after"))
    written = 0
    for kind, first, last, start, end in difflib.SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            assert end - start >= last - first, (name, before[first:last])
            written += end - start
    lines = difflib.ndiff(*(text(name, side).splitlines() for side in ("before", "after")))
    return written, sum(line.startswith("+ ") for line in lines) - written


def run(name: str, folder: Path, ranks: int = 1, side: str = "after") -> tuple[list[dict[str, Any]], str]:
    """Runs a script as it stands in a folder, by torchrun if `ranks` is above 1; what each rank found, and what was printed."""
    words = [str(PROBE), str(FOLDER / side / f"{name}.py"), str(folder)]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if ranks == 1:
        ended = forked.run(words, folder, os.environ | offline)
    else:
        several = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        ended = subprocess.run(
            [*several, *words],
            cwd=folder,
            env=os.environ | offline,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)], ended.stdout


def check(found: dict[str, Any], ranks: int) -> None:
    """A trial that came to its end, proved, with an interval; and no word on speed on a CPU."""
    assert found["done"]
    assert not found["problem"]
    assert found["proved"], found["proof"]
    assert "FP8 verified: " in found["proof"]
    assert found["ranks"] == ranks
    assert len(found["rounds"]) >= 3
    assert found["interval"], found
    assert found["interval"][0] < found["interval"][1]
    assert all(r["losses"].get("fp8") for r in found["rounds"])
    assert found["notes"] == []
    assert found["decision"][0] == "cannot tell"
    assert "cpu" in found["decision"][1]
