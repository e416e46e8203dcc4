"""Bar: kernel cases pinned to cores run at least 1.7 times as fast in two processes as in one.

    pytest -m benchmark_bar tests/benchmarks/test_shards.py -s

The sweep does a fixed amount of work, about a minute of it. One process on one core and two shards on a core each take
turns, so that whatever else the machine does meets both; the figure is the median of the paired ratios, its noise their
spread. Timed is from the first case begun to the last one done. That includes the start of each process's worker.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import harness

BAR = 1.7
PAIRS = 3
ROOT = Path(harness.__path__[0]).parent
SWEEP = """\
# How fast do shards run?
suite: gemm
arms: [tensorwise_eager, rowwise_eager]
axes: {role: [output], M: [64, 96, 128, 160, 192, 256], K: [128, 256], N: [64, 128]}
timing: {min_rounds: 640, max_rounds: 640, min_samples: 1, min_seconds: 0.0, max_seconds: 60.0, block_ms: 2.0,
         warmup_min_iterations: 3, warmup_min_seconds: 0.0, warmup_max_seconds: 0.2}
"""
PINNED = (
    "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])]); "
    "from harness.__main__ import main; sys.exit(main(sys.argv[2:]))"
)


def took(cores: list[int], run_id: str) -> float:
    """Seconds of the slowest shard, from its own start."""
    words = ["sweep=bench", "device=cpu", f"run_id={run_id}", "quiet=true"]
    processes = []
    for index, core in enumerate(cores):
        shard = [f"shard={index}/{len(cores)}"] if len(cores) > 1 else []
        command = [sys.executable, "-c", PINNED, str(core), *words, *shard]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    assert [process.wait(600) for process in processes] == [0] * len(cores)
    notes = [json.loads(path.read_text()) for path in Path("results/bench", run_id).rglob("_progress.json")]
    assert len(notes) == len(cores)
    return max(float(note["written"] - note["started"]) for note in notes)


@pytest.mark.benchmark_bar
def test_two_shards_are_nearly_twice_as_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "bench.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    ratios, alone = [], []
    for pair in range(PAIRS):
        order = [cores[:1], cores[:2]] if pair % 2 == 0 else [cores[:2], cores[:1]]
        by_shards = {len(on): took(on, f"r{pair}-{len(on)}") for on in order}
        ratios.append(by_shards[1] / by_shards[2])
        alone.append(by_shards[1])
    noise = (max(alone) - min(alone)) / statistics.median(alone)
    said = (
        f"two shards run {statistics.median(ratios):.2f} times as fast as one process "
        f"({', '.join(f'{r:.2f}' for r in ratios)}); one process alone takes {statistics.median(alone):.0f} s and varies by {noise:.0%}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    print(said)
    assert statistics.median(ratios) >= BAR, said
