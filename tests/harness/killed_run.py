"""A training run for `test_training_checkpoints`, slow enough to be killed: python killed_run.py WORKSPACE OUT.json"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from loop_jobs import curves, job

from harness.training.loop import train

if __name__ == "__main__":
    workspace, out = map(Path, sys.argv[1:])
    made = train(job("delayed", "warmup_bf16:5"), "cpu", workspace, lambda done, total: time.sleep(0.1))
    points = [[*key, value] for key, value in curves(made).items()]
    out.write_text(json.dumps({"curves": points, "resumed": made.facts["resumed_from_steps"]}))
