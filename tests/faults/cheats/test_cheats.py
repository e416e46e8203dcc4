"""Oracle: each way of seeming fast, brought by an installed package, gets no speed and the cause that was seen; an honest twin does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ways import WAYS

from harness import store
from harness.engine.arm_process import _Held
from harness.store.case import Case
from harness.store.errors import Cause
from harness.suites import gemm
from harness.timing.timers import CpuTimer

SIZES = ["axes.M=64", "axes.K=128", "device=cpu"]
SWEEPS = {  # by the part of a peer that they time
    "gemm": ["sweep=gemm", "shapes=[]", "axes.N=64", *SIZES],
    "linear": ["sweep=linear", "shapes=[]", "axes.N=64", *SIZES],
    "cast": ["sweep=cast", "axes.dtype=[e4m3fn]", "axes.granularity=[tensorwise]", "axes.src=[bf16]", *SIZES],
}
BRIEF = ["timing.min_seconds=0.02", "timing.max_seconds=0.05", "report=false"]


def rows(folder: Path, part: str) -> dict[str, tuple[str, str]]:
    """Way -> status and cause of its time."""
    names = [f"honest_{part}", *(name for name, way in WAYS.items() if way.part == part)]
    package = folder / "site" / "cheats-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cheats\nVersion: 1.0\n")
    points = "\n".join(f"{name} = ways:{name}" for name in names)
    (package / "entry_points.txt").write_text(f"[fp8_harness.peers]\n{points}\n")
    tail, base = ("_eager", "eager") if part == "cast" else ("_tensorwise_eager", "bf16_eager")
    arms = f"arms=[{','.join([base, *(name + tail for name in names)])}]"
    path = os.pathsep.join(
        [str(package.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "harness", *SWEEPS[part], arms, *BRIEF, f"results_dir={folder}/results"]
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    (run,) = (folder / "results" / part).iterdir()
    frame = store.read(run)
    times = frame[(frame["metric"] == "time_ms") & frame["arm"].str.removesuffix(tail).isin(names)]
    return {
        arm.removesuffix(tail): (status, cause)
        for arm, status, cause in zip(times["arm"], times["status"], times["cause"], strict=True)
    }


@pytest.mark.parametrize("part", SWEEPS)
def test_no_way_gets_a_speed(part: str, tmp_path: Path) -> None:
    found = rows(tmp_path, part)
    assert found.pop(f"honest_{part}") == ("ok", "")
    wanted = {name: way.causes for name, way in WAYS.items() if way.part == part}
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(wanted, "failed")
    assert not {name: cause for name, (_, cause) in found.items() if cause not in wanted[name]}


def test_an_output_is_kept_of_any_number_of_calls_and_none_is_no_proof() -> None:
    """Oracle: none; more samples than operand sets were made for lost the output that was to be compared."""
    sizes = {
        "shape_set": "custom",
        "layer": "custom",
        "role": "output",
        "data": "randn",
        "M": 16,
        "K": 16,
        "N": 16,
    }
    held = _Held(gemm.build(Case.of("gemm", sizes, 0), "bf16_eager", "cpu"), CpuTimer(), "cpu")
    for calls in range(1, 8):
        for n in (1, 65, 100):
            assert len(held.take("run", held.timer.block, n, calls)) == n
            assert held.outputs["run"] is not None
    assert held.unproven() == ("", Cause.NONE)
    held.outputs["run"] = None
    assert held.unproven()[1] is Cause.UNPROVEN
