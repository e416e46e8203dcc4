"""The reference job with a fault: a layer of rank 1 multiplies in bf16. Run by test_reference_job.py under torchrun."""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import nn

from fp8core import Float8Linear
from harness.cli import reference_job
from harness.training import sharded

_shard_blocks = sharded.shard_blocks


def planted(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    layer: Any = model.get_submodule("layers.0.attention.o")
    if os.environ["RANK"] == "1" and isinstance(layer, Float8Linear):
        layer.forward = lambda x: nn.functional.linear(x, layer.weight)
    _shard_blocks(model, *args, **kwargs)


if __name__ == "__main__":
    sharded.shard_blocks = planted
    sys.exit(reference_job.main(sys.argv[1:]))
