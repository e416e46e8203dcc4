"""Checks of an FP8 implementation, each small enough to run on every fault of the catalogue.

Each is a function without arguments that returns if fp8core, as it is patched at that moment, is right, and raises
AssertionError if it is not. `CHECKS` names them. Oracles are ml_dtypes, float64 and the definitions by hand; none
uses a path of fp8core to judge the same path.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from torch import nn

import fp8core
from fp8core import (
    E4M3FN,
    E5M2,
    RECIPES,
    Float8Linear,
    Recipe,
    microbatches,
    quantize,
    scaled_mm,
    update_scales,
)
from fp8core.cast import cast_saturating
from fp8core.proof.adders import Register, accumulate

BAND_DB = 0.2


def sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    return float(20 * torch.log10(want.double().norm() / (want.double() - got.double()).norm()))


def gaussian(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def every_code() -> None:
    """All bfloat16 patterns, in e4m3 and e5m2; oracle: ml_dtypes of the clipped input, NaN as a class."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for fmt, dtype in ((E4M3FN, ml_dtypes.float8_e4m3fn), (E5M2, ml_dtypes.float8_e5m2)):
        with np.errstate(invalid="ignore"):  # of NaN
            want = np.clip(x.float().numpy(), -fmt.max, fmt.max).astype(dtype).astype(np.float32)
        assert np.array_equal(cast_saturating(x, fmt).float().numpy(), want, equal_nan=True)


def exact_scales() -> None:
    """The correctly rounded quotient and its reciprocal, of 2^12 amaxes; power of two: its lower power."""
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 100 + 1e-3
    x = torch.stack([-amax, amax / 3], dim=1)
    for pow2 in (False, True):
        want = torch.tensor([float(np.float32(448.0 / float(a))) for a in amax])
        if pow2:
            _, exponent = torch.frexp(want)
            want = torch.ldexp(torch.ones_like(want), exponent - 1)
        q = quantize(x, E4M3FN, "rowwise", dim=1, power_of_two=pow2)
        assert torch.equal(q.scale_inv[:, 0], 1 / want)
        assert torch.equal(
            -q.qdata.float()[:, 0], (amax * want).clamp(max=448).to(torch.float8_e4m3fn).float()
        )


def gemm_band() -> None:
    """SQNR of a Gaussian GEMM inside 0.2 dB of its cell, for each scaling (docs/numerics-gemm.md, section 4)."""
    a, b = gaussian(256, 256), gaussian(256, 256, seed=1, scale=0.02).t()
    want = a.double() @ b.double()
    for kinds, pow2, expected in (
        (("tensorwise",) * 2, False, 28.53), (("tensorwise",) * 2, True, 28.48), (("rowwise",) * 2, True, 28.48),
        (("rowwise",) * 2, False, 28.65), (("1x128", "128x128"), True, 28.48), (("1x32",) * 2, False, 28.48),
    ):  # fmt: skip
        qa, qb = (
            quantize(x, E4M3FN, k, dim=d, power_of_two=pow2)
            for x, k, d in zip((a, b), kinds, (1, 0), strict=True)
        )
        assert (
            abs(sqnr_db(want, scaled_mm(qa, qb, torch.float64, backend="reference")) - expected) < BAND_DB
        ), kinds


def heterogeneous_blocks() -> None:
    """Rows, columns and blocks of very different size; every group by itself keeps e4m3's relative error."""
    x = gaussian(256, 256) * torch.logspace(0, -6, 256)[:, None] * torch.logspace(0, -6, 256)[None].flip(1)
    for kind, rows, columns in (
        ("rowwise", 1, 256),
        ("1x128", 1, 128),
        ("128x128", 128, 128),
        ("1x32", 1, 32),
    ):
        back = quantize(x, E4M3FN, kind, dim=1).dequantize()
        for i in range(0, 256, rows):
            for j in range(0, 256, columns):
                part, got = x[i : i + rows, j : j + columns], back[i : i + rows, j : j + columns]
                top = part.abs().max()
                assert ((got - part).abs() <= part.abs() * 2**-4 + top * 2**-17).all(), kind


def products() -> None:
    """Both backends against the float64 product of the dequantised operands, all-positive, odd sizes."""
    a, b = gaussian(17, 96).abs(), gaussian(48, 96, seed=1).abs().t()
    for kind in ("tensorwise", "rowwise"):
        qa, qb = quantize(a, E4M3FN, kind, dim=1), quantize(b, E4M3FN, kind, dim=0)
        want = qa.dequantize(torch.float64) @ qb.dequantize(torch.float64)
        for backend in ("torch", "reference"):
            assert sqnr_db(want, scaled_mm(qa, qb, backend=backend)) > 50


def accumulation() -> None:
    """All-positive operands: promotion every 128 elements keeps 62 dB at K = 4096, none loses 7 %."""
    a = cast_saturating(gaussian(16, 4096).abs() * 100, E4M3FN).double()
    b = cast_saturating(gaussian(16, 4096, seed=1).abs() * 100, E4M3FN).double().t()
    assert 60 < sqnr_db(a @ b, accumulate(a, b, Register(13, 128))) < 70
    assert 20 < sqnr_db(a @ b, accumulate(a, b, Register(13))) < 26


def step(
    layer: nn.Module, x: torch.Tensor, g: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    grad_input, grad_weight = torch.autograd.grad(y, (x, layer.weight), g)
    return y.detach(), grad_input, grad_weight


def layer_of(recipe: Recipe | str, K: int = 256, N: int = 256) -> Float8Linear:
    layer = Float8Linear(K, N, bias=False, config=recipe)
    with torch.no_grad():
        layer.weight.copy_(gaussian(N, K, seed=1, scale=0.02))
    return layer


def layer_band() -> None:
    """All three GEMMs of a layer inside the band, gradients as small as in training."""
    x, g = gaussian(256, 256), gaussian(256, 256, seed=2, scale=2.0**-14)
    for name, expected in (("tensorwise", (28.53, 24.61, 24.61)), ("rowwise", (28.48,) * 3)):
        layer = layer_of(name)
        W, X, G = layer.weight.detach().double(), x.double(), g.double()
        for got, want, db in zip(step(layer, x, g), (X @ W.t(), G @ W, G.t() @ X), expected, strict=True):
            assert abs(sqnr_db(want, got) - db) < BAND_DB


def layer_rows() -> None:
    """Tokens and channels that span decades: each row of each result by itself."""
    x = gaussian(128, 128) * torch.logspace(0, -8, 128)[:, None]
    g = gaussian(128, 128, seed=2) * torch.logspace(0, -8, 128)[None]
    layer = layer_of("rowwise", 128, 128)
    W, X, G = layer.weight.detach().double(), x.double(), g.double()
    for got, want in zip(step(layer, x, g), (X @ W.t(), G @ W, G.t() @ X), strict=True):
        for row_want, row_got in zip(want, got, strict=True):
            assert sqnr_db(row_want, row_got) > 22


def delayed_scales() -> None:
    """A jump of the amax saturates for one step and not after it; a margin leaves its binades free."""
    layer, exact = layer_of("delayed", 64, 64), layer_of("tensorwise", 64, 64)
    x, g = gaussian(64, 64), gaussian(64, 64, seed=2)
    for size, fresh in ((1.0, True), (1.0, True), (8.0, False), (8.0, True), (1.0, False)):
        got, want = step(layer, size * x, g), step(exact, size * x, g)
        assert torch.equal(got[0], want[0]) == fresh
        step(layer, size * x / 2, g)  # a second, smaller microbatch of the same step
        update_scales(layer)


def weight_changes() -> None:
    """Kept casts give the results of fresh ones after a fused step, an in-place update and a write through data."""
    for change in ("fused", "in place", "data"):
        results = []
        for cached in (False, True):
            layer = layer_of("tensorwise", 64, 64)
            x, g = gaussian(64, 64), gaussian(64, 64, seed=2)
            with microbatches(layer) if cached else torch.enable_grad():
                layer(x).backward(g)
                if change == "fused":
                    torch.optim.SGD(layer.parameters(), lr=1.0, fused=True).step()
                elif change == "in place":
                    with torch.no_grad():
                        layer.weight.neg_()
                else:
                    layer.weight.data.copy_(layer.weight.flip(0))
                results.append(layer(x).detach())
        assert torch.equal(*results), change


def non_finite() -> None:
    """Inf and NaN stay loud in every recipe, before and after delayed scales move; zeros stay zeros."""
    for name in RECIPES:
        recipe = RECIPES[name].emulated()
        layer, g = layer_of(recipe, 64, 64), gaussian(64, 64, seed=2)
        for moved in (False, True):
            if moved:
                layer = layer_of(recipe, 64, 64)
                step(layer, gaussian(64, 64), g)
                update_scales(layer)
            for bad in (torch.inf, torch.nan):
                x = gaussian(64, 64)
                x[3, 4] = bad
                assert layer(x)[3].isnan().all(), name
            assert torch.equal(layer(torch.zeros(64, 64)), torch.zeros(64, 64)), name


def kernel_route() -> None:
    """Casts by the fused operators and by plain PyTorch: the same layer, bit for bit, in every recipe of FP8: no kernel casts to four bits."""
    g = gaussian(64, 128, seed=2)
    for name in (name for name, recipe in RECIPES.items() if not recipe.is_four_bit):
        results = []
        for kernels in ("never", "always"):
            layer = layer_of(RECIPES[name].emulated().with_kernels(kernels), 256, 128)
            results.append(step(layer, gaussian(64, 256), g))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name


def bias_and_sums() -> None:
    """A bias of size 100 is added as it is; its gradient, and gradients of 8 microbatches, are their sums in float64."""
    for name in ("tensorwise", "rowwise"):
        layer, bare = Float8Linear(64, 48, config=name), Float8Linear(64, 48, bias=False, config=name)
        with torch.no_grad():
            bare.weight.copy_(gaussian(48, 64, seed=1))
            layer.weight.copy_(bare.weight)
            layer.bias.copy_(torch.linspace(-100, 100, 48))
        sums = [torch.zeros(48, 64).double(), torch.zeros(48).double()]
        for seed in range(8):
            x, g = gaussian(32, 64, seed=seed), gaussian(32, 48, seed=seed + 9, scale=2.0**-10)
            y = layer(x)
            assert torch.allclose(y, bare(x) + layer.bias, rtol=0, atol=1e-4)
            sums[0] += torch.autograd.grad(bare(x), bare.weight, g)[0].double()
            sums[1] += g.double().sum(0)
            y.backward(g)
        assert sqnr_db(sums[0], layer.weight.grad) > 120
        assert sqnr_db(sums[1], layer.bias.grad) > 120


def experts() -> None:
    """Each expert's three products by itself, in float64 of its own rows; e4m3 keeps 22 dB."""
    x, weight, g = gaussian(96, 64), gaussian(3, 48, 64, seed=1, scale=0.1), gaussian(96, 48, seed=2)
    ends = [16, 64, 96]
    for name in ("tensorwise", "rowwise"):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = fp8core.grouped_mm(*inputs, torch.tensor(ends, dtype=torch.int32), config=name)
        grad_x, grad_weight = torch.autograd.grad(y, inputs, g)
        for e, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
            X, W, G = x[first:end].double(), weight[e].double(), g[first:end].double()
            for want, got in (
                (X @ W.t(), y[first:end]),
                (G @ W, grad_x[first:end]),
                (G.t() @ X, grad_weight[e]),
            ):
                assert sqnr_db(want, got.detach()) > 22, (name, e)


def proof() -> None:
    """`verify` itself, on a small model that was asked to run rowwise in FP8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model = fp8core.convert_to_float8_training(model, config="rowwise", allow_no_conversion=True)
    x = torch.randn(64, 64, requires_grad=True)
    found = fp8core.verify(
        lambda: model(x).square().mean().backward(), model, recipe="rowwise", announce=False
    )
    assert found.ok, found.problems


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        every_code, exact_scales, gemm_band, heterogeneous_blocks, products, accumulation, layer_band, layer_rows,
        delayed_scales, weight_changes, non_finite, kernel_route, bias_and_sums, experts, proof,
    )
}  # fmt: skip
