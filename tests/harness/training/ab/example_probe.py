"""Runs a script as it stands and keeps what its trial found on this rank: `example_probe.py SCRIPT FOLDER`."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    script, folder = Path(sys.argv[1]), Path(sys.argv[2])
    start = time.monotonic()
    names = runpy.run_path(str(script), run_name="__main__")
    found = {"seconds": time.monotonic() - start}
    if (trial := names.get("trial")) is not None:
        result = trial.result()
        effect = result.effect
        found |= asdict(result) | {
            "done": trial.done,
            "decision": [result.decision, result.doubt],
            "speedup": effect.speedup,
            "interval": [effect.log_low, effect.log_high] if effect.has_interval else [],
            "faults": [why for r in result.rounds for why in r.faults.values()],
            "extent": str(trial._steps.expected),
        }
    (folder / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))
