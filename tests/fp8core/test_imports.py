"""What `import fp8core` loads. Oracle: `sys.modules` of a fresh process."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fp8core

TRAINS = """
import torch
model = fp8core.convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32)), config="tensorwise")
model(torch.randn(16, 32)).sum().backward()
fp8core.audit(model)
fp8core.convert_to_high_precision(model)
"""


@pytest.mark.parametrize("program", ["", TRAINS], ids=["import", "train"])
def test_dtensor_is_not_imported_before_someone_needs_it(program: str) -> None:
    """It takes longer to import than all of fp8core. In a process that has none, nothing is a DTensor."""
    ends = "import sys\nassert 'torch.distributed.tensor' not in sys.modules\nprint('without')"
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import fp8core\n{program}\n{ends}"],
        capture_output=True,
        text=True,
    )
    assert ran.stdout == "without\n", ran.stderr


def test_names_that_need_it_are_there_all_the_same() -> None:
    """Oracle: `__all__`, the modules that define the names, and `import *`."""
    from fp8core.distributed import tensor_parallel

    assert set(fp8core.__all__) <= set(dir(fp8core))
    assert fp8core.Float8ColwiseParallel is tensor_parallel.Float8ColwiseParallel
    names: dict[str, object] = {}
    exec("from fp8core import *", names)
    assert set(fp8core.__all__) <= names.keys()
    with pytest.raises(AttributeError, match="module 'fp8core' has no attribute 'Float9Linear'"):
        _ = fp8core.Float9Linear  # type: ignore[attr-defined]
