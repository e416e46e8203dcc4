"""Meters many launches with one Triton or another, in a process a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.advise.meter.facts import Facts
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.advise.meter.launches import Launch

ROOT = Path(__file__).parents[3]
Answer = Facts | str


def meter_all(
    launches: Sequence[Launch], triton: Path | None, cache: Path, capability: int = 90, workers: int = 0
) -> list[Answer]:
    """Facts of each launch, or why there are none, in their order.

    Args:
        launches: of kernels in modules that can be imported.
        triton: folder of another Triton than the installed one (`pip install --target`); None: the installed one.
        cache: folder in which facts are kept.
        capability: 10 * major + minor of the compute capability.
        workers: processes; 0: as many as there are cores.

    Raises:
        UsageError: that folder holds no Triton, or a process ended without answers.
    """
    if triton is not None and not (triton / "triton" / "__init__.py").is_file():
        raise UsageError(f"{triton} contains no Triton; fill it with: make {triton}")
    count = max(1, min(workers or len(os.sched_getaffinity(0)), len(launches)))
    # The same kernel's launches stay together, so that what Triton parses of it is parsed once.
    shares = [list(range(i, len(launches), count)) for i in range(count)]
    with ThreadPoolExecutor(count) as pool:
        answers = pool.map(
            lambda share: _ask([launches[i] for i in share], triton, cache, capability), shares
        )
        found: dict[int, Answer] = {}
        for share, replies in zip(shares, answers, strict=True):
            found |= dict(zip(share, replies, strict=True))
    return [found[i] for i in range(len(launches))]


def _ask(launches: Sequence[Launch], triton: Path | None, cache: Path, capability: int) -> list[Answer]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ahead = [str(triton.resolve())] if triton is not None else []
    env["PYTHONPATH"] = os.pathsep.join([*ahead, str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "harness.advise.meter.worker", str(cache), str(capability)]
    request = json.dumps([launch.to_json() for launch in launches])
    done = subprocess.run(command, input=request, capture_output=True, text=True, env=env, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != len(launches):
        tail = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UsageError(f"{len(lines)} of {len(launches)} kernels were metered, then: {tail}")
    return [_answer(json.loads(line)) for line in lines]


def _answer(data: dict[str, Any]) -> Answer:
    return str(data["error"]) if "error" in data else Facts.from_json(data)
