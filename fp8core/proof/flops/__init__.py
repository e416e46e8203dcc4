"""FLOPs of the matrix products of a training step: counted while it runs, by owner, dtype and pass.

>>> import torch
>>> from fp8core import convert_to_float8_training
>>> from fp8core.proof.flops import count_matmuls
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 16))
>>> model = convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn == "0")
>>> x = torch.randn(32, 64, requires_grad=True)
>>> print(count_matmuls(lambda: model(x).sum().backward(), model).text)
80.0 % of the counted matmul FLOPs in FP8; not in FP8: 2 20.0 %
"""

from fp8core.proof.flops.count import (
    FP8_DTYPES,
    Matmul,
    MatmulCount,
    Uncounted,
    percent,
)
from fp8core.proof.flops.counter import MatmulCounter, count_matmuls
from fp8core.proof.formulas import (
    Causal,
    register_with_torch,
)

__all__ = [
    "FP8_DTYPES",
    "Causal",
    "Matmul",
    "MatmulCount",
    "MatmulCounter",
    "Uncounted",
    "count_matmuls",
    "percent",
    "register_with_torch",
]
