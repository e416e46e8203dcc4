"""What a GPU must show as a CPU does, by the same bodies: a CPU proves that each can pass, and that it can fail.

What only a device can show is in test_gpu.py, kernels against their twins in kernels/.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8core import E4M3FN, E5M2, Format
from fp8core.scaling import compute_scale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_an_eager_scale_is_the_true_quotient(device: str, fmt: Format) -> None:
    """Oracle: NumPy's float32 division, for every mantissa. A number over a tensor is a reciprocal and a product instead."""
    amax = torch.arange(0x3F80_0000, 0x4000_0000, dtype=torch.int32).view(torch.float32)
    want = np.float32(fmt.largest) / amax.numpy()
    scale, scale_inv = (found.cpu().numpy() for found in compute_scale(amax.to(device), fmt))
    assert (scale == want).all()
    assert (scale_inv == np.float32(1) / want).all()
    assert ((fmt.largest * amax.to(device).reciprocal()).cpu().numpy() != want).any(), (
        "or the two could not be told apart"
    )
