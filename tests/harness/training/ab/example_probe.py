"""Runs a script as it stands and keeps what its trial found on this rank: `example_probe.py SCRIPT FOLDER`."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any


def said_by(trial: Any) -> dict[str, Any]:
    result = trial.result()
    return {
        "done": trial.done,
        "proved": result.proved,
        "proof": result.proof,
        "problem": result.problem,
        "doubt": result.doubt,
        "decision": result.decision,
        "ranks": result.ranks,
        "rounds": len(result.rounds),
        "faults": [why for r in result.rounds for why in r.faults.values()],
        "speedup": result.effect.speedup,
        "has_interval": result.effect.has_interval,
        "interval": [result.effect.log_low, result.effect.log_high],
        "losses": all(r.losses.get("fp8") for r in result.rounds),
        "steps": sum(result.steps_run),
        "tokens": result.tokens,
        "notes": list(result.notes),
        "extent": str(trial._extent),
        "layers": result.layers,
    }


if __name__ == "__main__":
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    start = time.monotonic()
    names = runpy.run_path(str(script), run_name="__main__")
    found = said_by(names["trial"]) if "trial" in names else {}
    found["seconds"] = time.monotonic() - start
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
