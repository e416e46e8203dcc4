"""Oracle: each way of seeming fast, brought by an installed package, gets no speed and the cause that was seen; an honest twin does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ways import WAYS

from harness import store

NAMES = ("honest_product", *WAYS)


def rows(folder: Path) -> dict[str, tuple[str, str]]:
    """Way -> status and cause of its time."""
    package = folder / "site" / "cheats-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cheats\nVersion: 1.0\n")
    points = "\n".join(f"{name} = ways:{name}" for name in NAMES)
    (package / "entry_points.txt").write_text(f"[fp8_harness.peers]\n{points}\n")
    arms = ",".join(["bf16_eager", "tensorwise_eager", *(f"{name}_tensorwise_eager" for name in NAMES)])
    words = ["sweep=gemm", "shapes=[]", "axes.tokens=null", "axes.M=64", "axes.K=128", "axes.N=64"]
    words = [w for w in words if "null" not in w] + ["~axes.tokens", "device=cpu", f"arms=[{arms}]"]
    words += [f"results_dir={folder}/results", f"report_dir={folder}", "timing.max_seconds=0.02"]
    path = os.pathsep.join([str(package.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", "harness", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    (run,) = (folder / "results" / "gemm").iterdir()
    frame = store.read(run)
    times = frame[(frame["metric"] == "time_ms") & frame["arm"].str.endswith("_tensorwise_eager")]
    return {
        arm.removesuffix("_tensorwise_eager"): (status, cause)
        for arm, status, cause in zip(times["arm"], times["status"], times["cause"], strict=True)
    }


def test_no_way_gets_a_speed(tmp_path: Path) -> None:
    found = rows(tmp_path)
    wanted = {name: ("failed", cause) for name, (_, cause) in WAYS.items()}
    assert found == {"honest_product": ("ok", ""), **wanted}
