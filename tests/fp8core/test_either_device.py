"""What a GPU must show as a CPU does, by the same bodies: a CPU proves that each can pass, and that it can fail.

What only a device can show is in test_gpu.py, kernels against their twins in kernels/.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fp8core import E4M3FN, E5M2, RECIPES, Format, convert_to_float8_training, update_scales, verify
from fp8core.scaling import compute_scale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_an_eager_scale_is_the_true_quotient(device: str, fmt: Format) -> None:
    """Oracle: NumPy's float32 division, for every mantissa. A number over a tensor is a reciprocal and a product instead."""
    amax = torch.arange(0x3F80_0000, 0x4000_0000, dtype=torch.int32).view(torch.float32)
    want = np.float32(fmt.max) / amax.numpy()
    scale, scale_inv = (found.cpu().numpy() for found in compute_scale(amax.to(device), fmt))
    assert (scale == want).all()
    assert (scale_inv == np.float32(1) / want).all()
    assert ((fmt.max * amax.to(device).reciprocal()).cpu().numpy() != want).any(), (
        "or the two could not be told apart"
    )


def step_of(device: str, config: str) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16().to(device)
    convert_to_float8_training(model, config=config)
    return model, torch.randn(128, 256, dtype=torch.bfloat16, device=device, requires_grad=True)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
@pytest.mark.parametrize("device", DEVICES)
def test_verify_proves_a_step_and_names_every_product(device: str, name: str) -> None:
    """Oracle: the recipe, by which two layers have so many products in FP8."""
    model, x = step_of(device, name)

    def step() -> None:
        model(x).float().square().mean().backward()
        update_scales(model)  # delayed scales alone

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.problems
    due = 2 * sum(gemm.is_fp8 for gemm in RECIPES[name].gemms.values())
    assert proof.counted == proof.predicted == due


@pytest.mark.parametrize("device", DEVICES)
def test_verify_refutes_a_layer_that_ran_in_high_precision(device: str) -> None:
    model, x = step_of(device, "tensorwise")

    def step() -> None:  # the second layer's FP8 forward is passed by
        hidden = model[1](model[0](x))
        nn.functional.linear(hidden, model[2].weight, model[2].bias).float().square().mean().backward()

    proof = verify(step, model, announce=False)
    assert not proof.ok
    assert proof.problems
