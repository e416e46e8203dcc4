"""The reference job with a fault in a layer of rank 1, named by PLANTED: it multiplies in bf16, or memory runs out.

Run under torchrun by test_reference_job.py.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import Tensor, nn

from fp8core import Float8Linear
from harness.cli import reference_job
from harness.training import sharded

_shard_blocks = sharded.shard_blocks


def _in_bf16(layer: nn.Linear) -> Any:
    return lambda x: nn.functional.linear(x, layer.weight)


def _full(x: Tensor) -> Tensor:
    raise MemoryError("planted")


def planted(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    layer: Any = model.get_submodule("layers.0.attention.o")
    if os.environ["RANK"] == "1" and isinstance(layer, Float8Linear):
        layer.forward = _full if os.environ.get("PLANTED") == "memory" else _in_bf16(layer)
    _shard_blocks(model, *args, **kwargs)


if __name__ == "__main__":
    sharded.shard_blocks = planted
    sys.exit(reference_job.main(sys.argv[1:]))
