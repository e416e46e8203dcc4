"""accelerate's FP8 path (`AORecipeKwargs`) on fp8core, in two gloo processes: DDP, and FSDP2 with FP8 all-gather."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="pip install 'fp8-harness[clients]'")
pytest.importorskip("transformers", reason="pip install 'fp8-harness[clients]'")
pytest.importorskip("torchao", reason="accelerate asks for torchao's distribution: pip install torchao")

from tiny_models import BOUND, largest_difference, report

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
WORKER = Path(__file__).with_name("accelerate_worker.py")


def two_processes(*arguments: str) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if arguments[1] == "fsdp2":
        shared["ACCELERATE_USE_FSDP"] = "true"
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


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_processes_beside_bf16(sharding: str) -> None:
    """Oracle: accelerate's bfloat16. Its filter leaves out the first and the last Linear: 13 of 15."""
    fp8, bf16 = two_processes("fp8", sharding), two_processes("no", sharding)
    for result in fp8:
        assert result["fp8"] == 13
        assert result["world"] == 2
        assert result["kind"].startswith("FSDP" if sharding == "fsdp2" else "DistributedDataParallel")
        assert sharding == "ddp" or result["gathers"] == ["fp8"]
        assert result["losses"][-1] < 0.8 * result["losses"][0]
    assert [result["fp8"] for result in bf16] == [0, 0]
    report(f"accelerate, {sharding}", bf16[0]["losses"], fp8[0]["losses"])
    assert largest_difference(fp8[0]["losses"], bf16[0]["losses"]) < BOUND
