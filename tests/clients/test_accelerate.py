"""accelerate's FP8 path (`AORecipeKwargs`) on fp8core, in two gloo processes under DDP.

accelerate has no FSDP on CPUs: with its plugin, processes of gloo come out as DDP all the same.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="pip install -e '.[clients]'")
pytest.importorskip("transformers", reason="pip install -e '.[clients]'")
pytest.importorskip("torchao", reason="accelerate asks for torchao's distribution: pip install torchao")

from tiny_models import BOUND, largest_difference, report

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
WORKER = Path(__file__).with_name("accelerate_worker.py")


def two_processes(*arguments: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=600) for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(err[-3000:] for _, err in ended)
    return [json.loads(out.partition("RESULT")[2]) for out, _ in ended]


def test_two_processes_beside_bf16() -> None:
    """Oracle: accelerate's bfloat16. Its filter leaves out the first and the last Linear: 13 of 15."""
    fp8, bf16 = two_processes("fp8"), two_processes("no")
    for result in fp8:
        assert result["fp8"] == 13
        assert result["world"] == 2
        assert result["kind"] == "DistributedDataParallel"
        assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert [result["fp8"] for result in bf16] == [0, 0]
    report("accelerate, two processes", bf16[0]["losses"], fp8[0]["losses"])
    assert largest_difference(fp8[0]["losses"], bf16[0]["losses"]) < BOUND


def test_an_optimizer_made_before_prepare_under_the_default_is_named() -> None:
    """`AORecipeKwargs()` asks for FP8 all-gather, which makes new weights: one warning a process, and audit counts 13."""
    for result in two_processes("default"):
        assert (result["warned"], result["not_trained"]) == (1, 13)
    for result in two_processes("fp8"):
        assert (result["warned"], result["not_trained"]) == (0, 0)
