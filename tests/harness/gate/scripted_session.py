"""A gate session whose workers answer by a script, or misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.gate import process
from harness.gate.session import PairedMeasurement

ROOT = Path(process.__file__).resolve().parent.parent.parent

# Answers by script: `plan`, then whatever the test says for each command.
SCRIPTED = """\
import json, sys, time
script = json.loads(open(sys.argv[1] + "/script.json").read())
counts = {}
for line in sys.stdin:
    what = json.loads(line)["do"]
    if what == "quit":
        break
    counts[what] = counts.get(what, 0) + 1
    says = script.get(what + str(counts[what]), script.get(what))
    if says == "die":
        sys.exit("no memory left")
    if says == "hang":
        time.sleep(3600)
    print(json.dumps(says), flush=True)
"""
CASE = {"suite": "gemm", "case_id": "c1", "arm": "fp8", "baseline": "", "axes": "{}", "seed": 0}
PLANNED = {"case_id": "c1", "suite": "gemm", "axes": "{}", "seed": 0, "arms": {"fp8": ""}}
PLAN = {"env": {"device": "cuda"}, "env_id": "e", "cases": [PLANNED]}
PREPARE = {
    "rows": [
        CASE | {"metric": "time_ms", "status": "ok", "resolved": {"timed": "it"}, "flops": {"e4m3": 2.0}, "bytes_moved": 4.0},
        CASE | {"metric": "sqnr_db", "status": "ok", "samples": [28.0]},
        CASE | {"metric": "compile_s", "status": "ok", "samples": [1.5]},
        CASE | {"metric": "of_another_commit", "status": "ok", "samples": [1.0]},
    ],
    "arms": ["fp8"],
}  # fmt: skip
TIMED = {"method": "m", "l2": "cold"}
BLOCK = {
    "samples": {"fp8": [1.0, 2.0], "control": [0.5]}, "clocks": {"fp8": [1980.0, 1980.0], "control": []},
    "late": {"fp8": 1, "control": 0}, "timing": {"fp8": TIMED, "control": TIMED}, "faults": {},
}  # fmt: skip
SCRIPT: dict[str, Any] = {"plan": PLAN, "prepare": PREPARE, "block": BLOCK}


def scripted(tmp: Path, monkeypatch: pytest.MonkeyPatch, **sides: dict[str, Any]) -> PairedMeasurement:
    (tmp / "worker.py").write_text(SCRIPTED)
    monkeypatch.setattr(process, "WORKER", tmp / "worker.py")
    trees = {}
    for side, script in sides.items():
        trees[side] = tmp / side
        trees[side].mkdir()
        (trees[side] / "script.json").write_text(json.dumps(script))
    return PairedMeasurement(trees, ["sweep=x"], tmp / "S", blocks=2)
