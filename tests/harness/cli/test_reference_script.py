"""The job script of the reference job, with programs of Slurm that only write down how they are called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from harness.cli import reference_job

SCRIPT = Path(__file__).parents[3] / "docs" / "examples" / "reference_7b.sbatch"


def test_the_job_script_is_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert f"-m {reference_job.__name__}" in SCRIPT.read_text()


def test_the_ranks_of_a_node_get_all_that_the_job_asked_for(tmp_path: Path) -> None:
    """One task a node has one core unless it asks for more, and since Slurm 22.05 srun does not take that from sbatch."""
    options = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH ")]
    asked = dict(option.removeprefix("--").split("=", 1) for option in options if "=" in option)
    assert int(asked["cpus-per-task"]) >= int(asked["gpus-per-node"])
    assert asked["mem"] == "0"
    for name, body in {"srun": f'printf "%s\\n" "$@" > {tmp_path}/called', "scontrol": "echo n1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SUBMIT_DIR": str(tmp_path),
        "JOB_ID": "7",
        "JOB_NODELIST": "n1",
        "NNODES": "2",
        "CPUS_PER_TASK": "5",
    }
    env = {f"SLURM_{name}": value for name, value in slurm.items()}
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(["bash", str(SCRIPT), "steps=3"], env={**env, "PATH": path}, check=True)
    words = (tmp_path / "called").read_text().split()
    assert "--cpus-per-task=5" in words[: words.index("torchrun")]
    assert words[-2:] == ["run_id=slurm-7", "steps=3"]
