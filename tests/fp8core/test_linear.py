"""linear: errors of all three GEMMs, any input shape, autocast, padding, and refusals before anything runs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from recipes import FP8, ON_CPU, multiplies, on_cpu
from torch import nn

from fp8core import (
    RECIPES,
    Float8Linear,
    Recipe,
    audit,
    convert_to_float8_training,
)
from fp8core.gemm import BACKENDS
from fp8core.recipe import GEMMS

Measure = Callable[[torch.Tensor, torch.Tensor], float]

# SQNR in dB of a GEMM contracting 256 and 4096 elements: the cells of test_gemm's table that each recipe runs
E4M3 = {"tensorwise": (28.53, 28.53), "pow2": (28.48, 28.45)}
E5M2_E4M3 = (24.61, 24.56)
EXPECTED_DB: dict[str, dict[str, tuple[float, float] | None]] = {
    "tensorwise": {"output": E4M3["tensorwise"], "grad_input": E5M2_E4M3, "grad_weight": E5M2_E4M3},
    "rowwise": dict.fromkeys(GEMMS, E4M3["pow2"]),
    "rowwise_with_gw_hp": {"output": E4M3["pow2"], "grad_input": E4M3["pow2"], "grad_weight": None},
    **dict.fromkeys(("blockwise", "mxfp8"), dict.fromkeys(GEMMS, E4M3["pow2"])),
}
EXPECTED_DB |= dict.fromkeys(("delayed", "static"), EXPECTED_DB["tensorwise"])  # dynamic until updated


def emulated(name: str) -> Recipe:
    return dataclasses.replace(RECIPES[name], backend="reference")


def run(layer: nn.Module, x: torch.Tensor, grad_output: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and gradients of one forward and backward pass."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    output = layer(x)
    output.backward(grad_output)
    assert x.grad is not None
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {
        "output": output.detach(),
        "grad_input": x.grad,
        **{f"grad_{n}": g.clone() for n, g in grads.items()},
    }


def problem(
    M: int, K: int, N: int, seed: int = 0, bias: bool = False
) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A float32 Linear, input and gradient, all of bfloat16 values."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(K, N, bias=bias)
    with torch.no_grad():
        layer.weight.copy_((0.02 * torch.randn(N, K, generator=generator)).bfloat16())
    x = torch.randn(M, K, generator=generator).bfloat16().float()
    return layer, x, (0.1 * torch.randn(M, N, generator=generator)).bfloat16().float()


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in FP8 for backend in BACKENDS if multiplies(backend, name)],
)
@pytest.mark.parametrize(
    "shape", [(256, 256, 256), (256, 4096, 256), (256, 256, 4096), (4096, 256, 256)], ids=str
)
def test_sqnr_of_all_three_gemms(
    name: str, shape: tuple[int, int, int], backend: str, sqnr_db: Measure
) -> None:
    """Oracle: the float64 GEMMs of the same values, and the table of docs/numerics-gemm.md, section 4."""
    M, K, N = shape
    contracted = dict(zip(GEMMS, (K, N, M), strict=True))
    # Of three draws where they are small: a sum of 4096 products varies less
    for seed in (0, 1, 2) if backend == on_cpu(name).backend and max(shape) == 256 else (0,):
        layer, x, g = problem(M, K, N, seed)
        got = run(Float8Linear.from_float(layer, dataclasses.replace(RECIPES[name], backend=backend)), x, g)
        W, X, G = layer.weight.detach().double(), x.double(), g.double()
        for gemm, want in zip(GEMMS, (X @ W.t(), G @ W, G.t() @ X), strict=True):
            expected = EXPECTED_DB[name][gemm]
            measured = sqnr_db(want, got[gemm])
            if expected is None:
                assert measured > 100  # a float32 GEMM
            else:
                assert measured == pytest.approx(expected[contracted[gemm] > 256], abs=0.2), gemm


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (1,), (16,), (2, 8), (2, 2, 4), (0,), (3, 0)], ids=str)
def test_any_leading_dimensions(lead: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Oracle: the same tokens as a matrix; no token gives an empty output and zero gradients."""
    layer = Float8Linear(32, 48, dtype=dtype, config=dataclasses.replace(on_cpu(name), pad_inner_dim=True))
    x, g = torch.randn(*lead, 32, dtype=dtype), torch.randn(*lead, 48, dtype=dtype)
    got, want = run(layer, x, g), run(layer, x.reshape(-1, 32), g.reshape(-1, 48))
    assert (got["output"].shape, got["grad_input"].shape) == ((*lead, 48), x.shape)
    for key, value in got.items():
        assert value.dtype == dtype
        assert torch.equal(value.reshape(want[key].shape), want[key])
        assert value.isfinite().all()
    assert bool(got["grad_weight"].any()) == (0 not in lead)


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize(("M", "K", "N"), [(17, 63, 5), (1, 1, 1), (252, 50, 123)])
def test_padding_makes_every_shape_run(M: int, K: int, N: int, name: str) -> None:
    """Oracle: emulation of the same recipe, which needs no padding; equal but for half an ulp of bfloat16
    (rowwise) and float32 sums of another order."""
    layer, x, g = problem(M, K, N)
    padded = run(Float8Linear.from_float(layer, dataclasses.replace(RECIPES[name], pad_inner_dim=True)), x, g)
    plain = run(Float8Linear.from_float(layer, emulated(name)), x, g)
    for key, want in plain.items():
        torch.testing.assert_close(padded[key], want, rtol=2**-8, atol=1e-6 * float(want.abs().max()))


def test_input_is_kept_in_fp8_for_an_fp8_grad_weight() -> None:
    """Oracle: bytes kept for the backward pass, seen through the saved-tensor hooks."""
    kept: dict[str, int] = {}
    for name in FP8:
        layer, x = Float8Linear(64, 32, config=on_cpu(name)), torch.randn(16, 64, requires_grad=True)
        sizes: list[tuple[int, ...]] = []

        def pack(t: torch.Tensor, sizes: list[tuple[int, ...]] = sizes) -> torch.Tensor:
            sizes.append((t.numel(), getattr(t, "qdata", t).element_size()))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x)
        kept[name] = dict(sizes)[16 * 64]
    assert kept == {name: 4 if name == "rowwise_with_gw_hp" else 1 for name in FP8}


@pytest.mark.parametrize("name", FP8)
def test_autocast_decides_the_dtype(name: str) -> None:
    """Oracle: the layer on a bfloat16 input by hand, and nn.Linear for the dtypes."""
    layer = Float8Linear(32, 48, config=on_cpu(name))
    x, g = torch.randn(16, 32), torch.randn(16, 48, dtype=torch.bfloat16)
    want = run(layer, x.bfloat16(), g)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(layer, x, g)
    assert got["output"].dtype == torch.bfloat16
    assert (got["grad_input"].dtype, got["grad_weight"].dtype) == (torch.float32, torch.float32)
    for key, value in want.items():
        assert torch.equal(got[key], value.to(got[key].dtype)), key


def test_second_derivatives_are_refused() -> None:
    layer, x = Float8Linear(32, 48), torch.randn(16, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("name", RECIPES)
def test_from_float_shares_and_saves_plain_parameters(name: str) -> None:
    """Oracle: the original module: same Parameter objects, same state_dict, same mode."""
    layer = nn.Linear(32, 48).eval()
    low = Float8Linear.from_float(layer, on_cpu(name))
    assert low.weight is layer.weight
    assert low.bias is layer.bias
    assert not low.training
    assert [key for key in low.state_dict() if "amaxes" not in key] == list(layer.state_dict())
    assert type(low.state_dict()["weight"]) is torch.Tensor


@pytest.mark.parametrize(
    ("name", "backend"), [("blockwise", "torch"), ("mxfp8", "torch"), ("mxfp8", "triton")]
)
def test_recipes_without_a_kernel_say_so_and_name_the_nearest(name: str, backend: str) -> None:
    """On conversion and in the forward pass; emulated, the same recipe runs and shows that it is emulated."""
    x, recipe = torch.randn(16, 32), RECIPES[name].with_backend(backend)
    for attempt in (
        lambda: Float8Linear(32, 48, config=recipe)(x),
        lambda: convert_to_float8_training(nn.Linear(32, 48), config=recipe),
    ):
        with pytest.raises(ValueError, match="nearest that works: recipe 'rowwise'"):
            attempt()
    emulation = convert_to_float8_training(nn.Linear(32, 48), config=RECIPES[name].emulated())
    assert f"recipe={name}, backend=reference" in repr(emulation)
    assert audit(emulation).fp8_gemms == 0
    assert emulation(x).shape == (16, 48)


REFUSED = [
    ((16, 100, 48), "GEMM output.*K=100"),
    ((16, 32, 10), "GEMM output.*N=10"),
    ((17, 32, 48), "GEMM grad_weight.*17 tokens: K=17"),
]


@pytest.mark.parametrize(("shape", "message"), REFUSED)
def test_shapes_are_refused_in_the_forward_pass(shape: tuple[int, int, int], message: str) -> None:
    """Even a backward GEMM's: an error an hour into a step is late. Emulation has no such rules."""
    layer, x, g = problem(*shape)
    with pytest.raises(ValueError, match=message):
        Float8Linear.from_float(layer)(x)
    assert run(Float8Linear.from_float(layer, emulated("tensorwise")), x, g)["output"].shape == g.shape


def test_odd_token_counts_run_where_no_fp8_gemm_contracts_them() -> None:
    x = torch.randn(17, 32)
    with torch.no_grad():
        assert Float8Linear(32, 48)(x).shape == (17, 48)
    Float8Linear(32, 48, config="rowwise_with_gw_hp")(x).sum().backward()


@pytest.mark.parametrize(("K", "N"), [(0, 32), (32, 0)])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
def test_no_features(name: str, K: int, N: int) -> None:
    """Oracle: nn.Linear; a sum of no products is 0, and no scale makes it anything else."""
    base = nn.Linear(K, N)
    x, g = torch.randn(2, 16, K), torch.randn(2, 16, N)
    got, want = (
        run(layer, x, g) for layer in (Float8Linear.from_float(copy.deepcopy(base), on_cpu(name)), base)
    )
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=0, atol=1e-5)
