"""What `import fp8core` loads. Oracle: `sys.modules` of a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fp8core

PROGRAM = """
import sys
import fp8core
from fp8core.arguments import is_dtensor
assert "torch.distributed.tensor" not in sys.modules
import torch
model = fp8core.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)), config="tensorwise")
model(torch.randn(16, 32)).sum().backward()
assert not [name for name in sys.modules if name.startswith("fp8core.proof")]
fp8core.audit(model)
fp8core.convert_to_high_precision(model)
assert not is_dtensor(torch.ones(2))
assert "torch.distributed.tensor" not in sys.modules
print("without")
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
assert isinstance(x, DTensor) and is_dtensor(x)
dist.destroy_process_group()
print("seen")
"""


def test_dtensor_is_not_imported_before_someone_needs_it_and_is_seen_then() -> None:
    """It takes longer to import than all of fp8core. In a process that has none, nothing is a DTensor; one that arrives after
    the first step is. Oracle: `isinstance`."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True)
    assert ran.stdout == "without\nseen\n", ran.stderr


def test_names_that_need_it_are_there_all_the_same() -> None:
    """Oracle: `__all__`, the modules that define the names, and `import *`."""
    from fp8core.distributed import tensor_parallel

    assert fp8core.Float8ColwiseParallel is tensor_parallel.Float8ColwiseParallel
    names: dict[str, object] = {}
    exec("from fp8core import *", names)
    assert set(fp8core.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="module 'fp8core' has no attribute 'Float9Linear'"):
        getattr(fp8core, "Float9Linear")  # noqa: B009 - a type checker would refuse the attribute
