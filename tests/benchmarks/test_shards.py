"""Bar of issue 8: kernel cases pinned to cores run at least 1.7 times as fast in two processes as in one.

    pytest -m benchmark_bar tests/benchmarks/test_shards.py -s

The sweep does a fixed amount of work, long beside the start of a worker, which each process pays. One process on one core and two shards on a core each take turns, so that whatever
else the machine does meets both; the figure is the median of the paired ratios, its noise their spread. Only measuring
is timed: starting Python and torch takes seconds that a sweep of hours doesn't notice. Where other programs keep the
cores busy the bar can't be judged, and the test says so.
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
arms: [fp8_tensorwise, fp8_rowwise]
axes: {role: [output], M: [64, 96, 128, 160, 192, 256], K: [128, 256], N: [64, 128]}
timing: {min_rounds: 160, max_rounds: 160, min_samples: 1, min_seconds: 0.0, max_seconds: 60.0, block_ms: 2.0,
         warmup_min_iterations: 3, warmup_min_seconds: 0.0, warmup_max_seconds: 0.2}
"""
PINNED = (
    "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])]); "
    "from harness.__main__ import main; sys.exit(main(sys.argv[2:]))"
)


def seconds(cores: list[int], run_id: str) -> float:
    """From the first case begun to the last one done, of as many shards as cores."""
    words = ["sweep=bench", "device=cpu", f"run_id={run_id}", "quiet=true"]
    processes = []
    for index, core in enumerate(cores):
        shard = [f"shard={index}/{len(cores)}"] if len(cores) > 1 else []
        command = [sys.executable, "-c", PINNED, str(core), *words, *shard]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL))
    assert [process.wait(600) for process in processes] == [0] * len(cores)
    notes = [json.loads(p.read_text()) for p in Path("results/bench", run_id).rglob("progress.json")]
    assert len(notes) == len(cores)
    # The slower shard decides; the start of the other is not waited for.
    return max(note["written"] - note["started"] for note in notes)


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
        took = {len(on): seconds(on, f"r{pair}-{len(on)}") for on in order}
        ratios.append(took[1] / took[2])
        alone.append(took[1])
    noise = (max(alone) - min(alone)) / statistics.median(alone)
    said = (
        f"two shards run {statistics.median(ratios):.2f} times as fast as one process "
        f"({', '.join(f'{r:.2f}' for r in ratios)}); one process alone varies by {noise:.0%}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    print(said)
    assert statistics.median(ratios) >= BAR, said
