"""Faults planted on purpose: what is wrong is refused, and what cannot run says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import fp8core.scaled_linear
from fp8core.gemm import scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.recipe import RECIPES
from fp8core.tensor import Float8Tensor, quantize
from harness.store.case import Case
from harness.suites import cast, ceilings, gemm, linear, recipes, smoke_kernels

if TYPE_CHECKING:
    from collections.abc import Callable
from suite_checks import CAST, GEMM, LINEAR, case, checked

from fp8core.gemm.accumulate import ACCUMULATIONS, accumulate
from harness.suites import accumulation

# What is wrong is refused


def with_scales(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor] = lambda s: s) -> Any:
    """A product that uses other scales than it was given."""

    def wrong(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
        return scaled_mm(Operand(x.qdata, a(x.scale_inv)), Operand(y.qdata, b(y.scale_inv)), *args, **kwargs)

    return wrong


def swap_first_rows(scale_inv: Tensor) -> Tensor:
    swapped = scale_inv.clone()
    swapped[0], swapped[1] = scale_inv[1], scale_inv[0]
    return swapped


def without_transpose(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    b = y.qdata.t().contiguous().t().contiguous()  # [K, N] row-major; read as if it were [N, K]
    return scaled_mm(
        x, Operand(b.t(), y.scale_inv.reshape(1, -1) if y.scale_inv.dim() else y.scale_inv), *args, **kwargs
    )


def last_block_missing(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    a = x.qdata.clone()
    a.view(torch.uint8)[:, -16:] = 0
    return scaled_mm(Operand(a, x.scale_inv), y, *args, **kwargs)


def biased(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    return scaled_mm(x, y, *args, **kwargs) * 1.02


ANY_SCALING = {
    "scale missing": with_scales(torch.ones_like),
    "scale twice": with_scales(lambda s: s * s),
    "scale doubled": with_scales(lambda s: s * 2),
    "scale instead of its inverse": with_scales(lambda s: 1 / s),
    "no transpose": without_transpose,
    "last block of K missing": last_block_missing,
    "2 % too large": biased,
    "one NaN": with_scales(lambda s: s * float("nan")),
}


ROWWISE = {
    "row scales rolled": with_scales(lambda s: s.roll(1, 0)),
    "column scales rolled": with_scales(lambda s: s, lambda s: s.roll(1, 1)),
    "two row scales swapped": with_scales(swap_first_rows),
    "one scale for all rows": with_scales(lambda s: s.mean().expand_as(s).contiguous()),
}


@pytest.mark.parametrize("role", ["output", "grad_input"])
@pytest.mark.parametrize(
    ("arm", "fault"),
    [("tensorwise_eager", f) for f in ANY_SCALING] + [("rowwise_eager", f) for f in (ANY_SCALING | ROWWISE)],
)
def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch, arm: str, fault: str, role: str) -> None:
    which = case("gemm", GEMM, M=48, K=48, N=48, role=role)
    assert checked(gemm, which, arm)[1].ok
    monkeypatch.setattr(gemm, "scaled_mm", (ANY_SCALING | ROWWISE)[fault])
    _, numerics = checked(gemm, which, arm)
    assert not numerics.ok
    assert "dB expected" in numerics.reason


def test_a_product_that_ran_in_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closer to the truth than FP8 can be, which is how it is found."""
    which = case("gemm", GEMM)

    def honest_but_not_fp8(*args: Any, **kwargs: Any) -> Tensor:
        return torch.mm(*gemm._operands(which, "cpu"))

    monkeypatch.setattr(gemm, "scaled_mm", honest_but_not_fp8)
    assert not checked(gemm, which, "tensorwise_eager")[1].ok


def test_an_operand_cast_without_scaling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of its codes is right, so only the known SQNR of Gaussian data can tell (docs/numerics-gemm.md, section 4)."""

    def unscaled(x: Tensor, fmt: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return (x.float() / 64).to(fmt.dtype), torch.tensor(64.0)

    which = case("gemm", GEMM, M=256, K=256, N=64)
    assert checked(gemm, which, "tensorwise_eager")[1].ok
    monkeypatch.setattr(gemm, "scale_and_cast", unscaled)
    _, numerics = checked(gemm, which, "tensorwise_eager")
    assert not numerics.ok
    assert "docs/numerics-gemm.md, section 4)" in numerics.reason


def replaced(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A cast whose codes and scale_inv are changed after the fact."""

    def wrong(x: Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
        right = quantize(x, *args, **kwargs)
        codes, scale_inv = change(x, right.qdata, right.scale_inv)
        return Float8Tensor(codes, scale_inv, x.dtype)

    return wrong


def truncated(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    scaled = (x.float() * (1 / scale_inv)).abs()
    raw = codes.view(torch.uint8)
    return torch.where(codes.float().abs() > scaled, raw - 1, raw).view(codes.dtype), scale_inv


def nan_to_zero(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    raw = codes.view(torch.uint8)
    return torch.where(codes.float().isnan(), torch.zeros_like(raw), raw).view(codes.dtype), scale_inv


def ties_away(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    raw = codes.view(torch.uint8)
    scaled = (x.float() * (1 / scale_inv)).abs().double()
    value, above = codes.double().abs(), (raw + 1).view(codes.dtype).double().abs()
    return torch.where(scaled * 2 == value + above, raw + 1, raw).view(codes.dtype), scale_inv


def one_ulp_of_scale(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    return codes, scale_inv.nextafter(torch.tensor(float("inf")))


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("change", [truncated, nan_to_zero, ties_away, one_ulp_of_scale])
def test_a_wrong_cast_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, dtype: str, granularity: str
) -> None:
    which = case("cast", CAST, M=40, K=300, dtype=dtype, granularity=granularity)
    assert checked(cast, which, "eager")[1].ok
    monkeypatch.setattr(cast, "quantize", replaced(change))
    _, numerics = checked(cast, which, "eager")
    assert not numerics.ok
    assert numerics.values["mismatches"] > 0


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        (recipe, fault)
        for recipe in RECIPES
        for fault in ("scale doubled", "scale missing", "last block of K missing", "2 % too large")
        # an E8M0 scale has no arithmetic to double it by
        if not (RECIPES[recipe].output.granularity == "1x32" and fault == "scale doubled")
    ],
)
def test_a_wrong_product_in_the_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: str, fault: str
) -> None:
    """Through the suite `recipes`, which emulates what a CPU has no kernel for and checks like `linear`."""
    monkeypatch.setattr(fp8core.scaled_linear, "scaled_mm", ANY_SCALING[fault])
    _, numerics = checked(recipes, case("recipes", LINEAR), f"{recipe}_eager")
    assert not numerics.ok
    assert numerics.values["saved_bytes_per_elem"] > 0, "its figures are kept"
    for name in [n for n, g in RECIPES[recipe].gemms.items() if g.is_fp8]:
        assert name in numerics.reason


def test_a_layer_that_stayed_in_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "convert_to_float8_training", lambda layer, config: layer)
    workload, numerics = checked(linear, case("linear", LINEAR), "tensorwise_eager")
    assert not numerics.ok
    assert "0 FP8 GEMMs ran where 3 were due" in numerics.reason
    assert workload.resolved["module"] == "Linear"


def test_an_emulated_layer_is_refused_though_its_numbers_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantising before each product yields FP8's numbers and none of its speed; only the profiler can tell."""
    emulate = fp8core.Float8LinearConfig(emulate=True)
    convert = fp8core.convert_to_float8_training
    monkeypatch.setattr(
        linear, "convert_to_float8_training", lambda layer, config: convert(layer, config=emulate)
    )
    _, numerics = checked(linear, case("linear", LINEAR), "tensorwise_eager")
    assert not numerics.ok
    assert numerics.reason == "0 FP8 GEMMs ran where 3 were due: FP8 did not run as asked"


def test_a_wrong_ceiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, source: copy(self[:-1], source[:-1]))
    for what in ("copy", "transpose"):
        assert not checked(ceilings, Case.of("ceilings", {"what": what, "mib": 1}), "torch")[1].ok
    monkeypatch.undo()
    amax = torch.amax
    monkeypatch.setattr(torch, "amax", lambda x, dim, out: amax(x[:-1], dim, out=out))
    assert not checked(ceilings, Case.of("ceilings", {"what": "read", "mib": 1}), "torch")[1].ok


# What can't run says why


SUM = {"K": 2048, "data": "positive"}


@pytest.mark.parametrize("data", ["positive", "randn"])
@pytest.mark.parametrize("mode", ACCUMULATIONS)
def test_it_names_the_sum_that_was_formed(mode: Any, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def summed(a: Any, b: Any, *_: object, **__: object) -> torch.Tensor:
        codes = accumulate(a.qdata.double(), b.qdata.double(), mode)
        return (codes * a.scale_inv.double() * b.scale_inv.double()).float()

    monkeypatch.setattr(accumulation, "scaled_mm", summed)
    work = accumulation.build(case("accumulation", SUM, data=data), "slow", "cpu")
    numerics = work.check()
    assert numerics.ok, numerics.reason
    assert work.resolved["agrees_best_with"] == mode
    assert numerics.values[accumulation.FIGURES[mode]] > 120


def test_a_sum_that_no_register_explains_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second half of K forgotten."""

    def half(a: Any, b: Any, *_: object, **__: object) -> torch.Tensor:
        kept = a.qdata.shape[1] // 2
        return (a.qdata.double()[:, :kept] @ b.qdata.double()[:kept] * a.scale_inv * b.scale_inv).float()

    monkeypatch.setattr(accumulation, "scaled_mm", half)
    numerics = accumulation.build(case("accumulation", SUM), "slow", "cpu").check()
    assert not numerics.ok
    assert "short accumulator" in numerics.reason


def test_kernels_may_round_otherwise_and_no_more() -> None:
    """By hand: a norm's last bit and its amax may differ, a wrong one of 40 rows may not; a cast may differ in no code."""
    y = torch.randn(40, 64)
    nearly = y * (1 + 2.0**-20)
    assert smoke_kernels.compare("rms_norm_amax", (y, y.amax()), (nearly, nearly.amax())) == (0, "")
    wrong = y.clone()
    wrong[7] = -wrong[7]
    differ, why = smoke_kernels.compare("rms_norm_amax", (wrong, y.amax()), (y, y.amax()))
    assert differ == 64
    assert why
    codes = y.to(torch.float8_e4m3fn)
    other = codes.view(torch.uint8).clone()
    other[0, 0] ^= 1
    assert smoke_kernels.compare("cast", (codes,), (codes,)) == (0, "")
    assert smoke_kernels.compare("cast", (other.view(codes.dtype),), (codes,))[0] == 1
    assert smoke_kernels.compare("cast", (codes, codes), (codes,))[1]
