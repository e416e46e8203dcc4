"""Faults planted on purpose, one row each: what is wrong is refused, and its right twin is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from suite_checks import CAST, GEMM, LINEAR, case, checked
from torch import Tensor

import fp8core
from fp8core.gemm import scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.inputs.operands import cast_both
from fp8core.recipe import RECIPES
from fp8core.tensor import Float8Tensor, quantize
from harness.store.case import Case
from harness.suites import SUITES, checksum, gemm

BIT = torch.uint8

# Products


def with_scales(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor] = lambda s: s) -> Any:
    """A product that uses other scales than it was given."""
    return lambda x, y, *args, **kwargs: scaled_mm(
        Operand(x.qdata, a(x.scale_inv)), Operand(y.qdata, b(y.scale_inv)), *args, **kwargs
    )


def swap_first_rows(scale_inv: Tensor) -> Tensor:
    return torch.cat([scale_inv[:2].flip(0), scale_inv[2:]])


def without_transpose(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    b = y.qdata.t().contiguous().t().contiguous()  # [K, N] row-major; read as if it were [N, K]
    scale_inv = y.scale_inv.reshape(1, -1) if y.scale_inv.dim() else y.scale_inv
    return scaled_mm(x, Operand(b.t(), scale_inv), *args, **kwargs)


def last_block_missing(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    a = x.qdata.clone()
    a.view(BIT)[:, -16:] = 0
    return scaled_mm(Operand(a, x.scale_inv), y, *args, **kwargs)


ANY_SCALING = {
    "scale missing": with_scales(torch.ones_like),
    "scale twice": with_scales(lambda s: s * s),
    "scale doubled": with_scales(lambda s: s * 2),
    "scale instead of its inverse": with_scales(lambda s: 1 / s),
    "no transpose": without_transpose,
    "last block of K missing": last_block_missing,
    "2 % too large": lambda x, y, *args, **kwargs: scaled_mm(x, y, *args, **kwargs) * 1.02,
    "one NaN": with_scales(lambda s: s * float("nan")),
}
ROWWISE = {
    "row scales rolled": with_scales(lambda s: s.roll(1, 0)),
    "column scales rolled": with_scales(lambda s: s, lambda s: s.roll(1, 1)),
    "two row scales swapped": with_scales(swap_first_rows),
    "one scale for all rows": with_scales(lambda s: s.mean().expand_as(s).contiguous()),
}
IN_LAYERS = ("scale doubled", "scale missing", "last block of K missing", "2 % too large")


def unscaled(x: Tensor, fmt: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """The product of its codes is right, so only the known SQNR of Gaussian data can tell."""
    return (x.float() / 64).to(fmt.dtype), torch.tensor(64.0)


# Casts


def replaced(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A cast whose codes and scale_inv are changed after the fact."""

    def wrong(x: Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
        right = quantize(x, *args, **kwargs)
        return Float8Tensor(*change(x, right.qdata, right.scale_inv), x.dtype)

    return wrong


def truncated(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    above = codes.float().abs() > (x.float() * (1 / scale_inv)).abs()
    return torch.where(above, codes.view(BIT) - 1, codes.view(BIT)).view(codes.dtype), scale_inv


def nan_to_zero(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(codes.float().isnan(), 0, codes.view(BIT)).view(codes.dtype), scale_inv


def ties_away(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    raw, scaled = codes.view(BIT), (x.float() * (1 / scale_inv)).abs().double()
    both = codes.double().abs() + (raw + 1).view(codes.dtype).double().abs()
    return torch.where(scaled * 2 == both, raw + 1, raw).view(codes.dtype), scale_inv


def one_ulp_of_scale(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    return codes, scale_inv.nextafter(torch.tensor(float("inf")))


def second_layout_rolled(*args: Any, **kwargs: Any) -> Any:
    first, second = cast_both(*args, **kwargs)
    assert isinstance(second, Float8Tensor)
    codes = second.qdata.view(BIT).roll(1, 1).view(second.qdata.dtype)
    return first, Float8Tensor(codes, second.scale_inv, second.dtype, second.granularity)


# Layers, moves, devices


def forgotten_history(model: Any) -> int:
    """An amax 16 times too small, which can't show where scales are still dynamic."""
    count = fp8core.update_scales(model)
    for name, buffer in model.named_buffers():
        if "history" in name or "amax" in name:
            buffer.div_(16)
    return count


def emulated(layer: Any, config: Any) -> Any:
    """FP8's numbers and none of its speed; only the profiler can tell."""
    return fp8core.convert_to_float8_training(layer, config=fp8core.Float8LinearConfig(emulate=True))


_copy, _amax, _product = Tensor.copy_, torch.amax, checksum._product


def flaky(when: int) -> Any:
    """One flipped bit in one repeat."""
    calls: list[int] = []

    def product(*args: Any) -> Callable[[], Tensor]:
        multiply = _product(*args)

        def run() -> Tensor:
            result = multiply().clone()
            if len(calls) == when:
                result.view(torch.int16)[3, 5] ^= 1 << 6
            calls.append(1)
            return result

        return run

    return product


def always_one_more(a: Tensor, b: Tensor, arm: str) -> Callable[[], Tensor]:
    return lambda: (a.float() @ b.float().t() * 0.0625).add(1).bfloat16()


Fault = tuple[
    Case, str, str, Any, str
]  # case, arm, what is replaced in the suite (or anywhere), by what, the reason


def faults() -> Iterator[Fault]:
    square = {"M": 48, "K": 48, "N": 48}
    for role in ("output", "grad_input"):
        which = case("gemm", GEMM, **square, role=role)
        for wrong in ANY_SCALING.values():
            yield which, "tensorwise_eager", "scaled_mm", wrong, "dB expected"
        for wrong in (ANY_SCALING | ROWWISE).values():
            yield which, "rowwise_eager", "scaled_mm", wrong, "dB expected"
    for role in ("output", "grad_input", "grad_weight"):
        which = case("gemm", GEMM, M=64, K=256, N=128, role=role)
        yield which, "blockwise_triton_eager", "scaled_mm", with_scales(lambda s: s.roll(1, 1)), "dB expected"
    which = case("gemm", GEMM)  # closer to the truth than FP8 can be, which is how it is found
    in_bf16 = lambda *_, which=which, **__: torch.mm(*gemm._operands(which, "cpu"))  # noqa: E731
    yield which, "tensorwise_eager", "scaled_mm", in_bf16, "dB expected"
    which = case("gemm", GEMM, M=256, K=256, N=64)
    yield which, "tensorwise_eager", "scale_and_cast", unscaled, r"docs/numerics-gemm.md, section 4\)"
    for granularity in ("tensorwise", "rowwise"):
        for dtype in ("e4m3fn", "e5m2"):
            which = case("cast", CAST, M=40, K=300, dtype=dtype, granularity=granularity)
            for change in (truncated, nan_to_zero, ties_away, one_ulp_of_scale):
                yield which, "eager", "quantize", replaced(change), "differ from the reference cast"
        for source in ("bf16", "fp32"):
            which = case("cast", CAST, granularity=granularity, src=source)
            yield which, "fused_both", "cast_both", second_layout_rolled, "differ from the reference cast"
    for name, recipe in RECIPES.items():
        named = ".*".join(gemm for gemm, casts in recipe.gemms.items() if casts.is_fp8)
        which = case("recipes", LINEAR, M=64, K=64, N=96) if recipe.is_four_bit else case("recipes", LINEAR)
        for fault in IN_LAYERS:  # a scale that is a code has no arithmetic to double it by
            if not (recipe.output.granularity in ("1x32", "1x16") and fault == "scale doubled"):
                where = "fp8core.plain_linear.scaled_mm"
                # of stochastic operands the numbers are not known: 2 % is within their noise
                seen = "output" if recipe.is_stochastic and fault == "2 % too large" else named
                yield which, f"{name}_eager", where, ANY_SCALING[fault], seen
        for suite in ("recipes", "linear") if recipe.scaling != "dynamic" else ():
            where = "harness.suites.linear.update_scales"
            yield case(suite, LINEAR), f"{name}_eager", where, forgotten_history, "expected"
    for convert in (lambda layer, config: layer, emulated):
        which, due = case("linear", LINEAR), "0 FP8 GEMMs ran where 3 were due: FP8 did not run as asked"
        yield which, "tensorwise_eager", "convert_to_float8_training", convert, due
    truncating = lambda self, source: _copy(self[:-1], source[:-1])  # noqa: E731
    for what in ("copy", "transpose"):
        yield Case.of("ceilings", {"what": what, "mib": 1}), "torch", "torch.Tensor.copy_", truncating, what
    short = lambda x, dim, out: _amax(x[:-1], dim, out=out)  # noqa: E731
    constant = lambda x, dim, out: out.fill_(2.0**14)  # noqa: E731
    for wrong in (short, constant):
        yield Case.of("ceilings", {"what": "read", "mib": 1}), "torch", "torch.amax", wrong, "read"
        yield case("cast", CAST), "read", "torch.amax", wrong, "read"
    for data in ("integers", "codes"):
        which = Case.of("checksum", {"cube": 48, "data": data})
        for when in (0, 1, checksum.REPEATS - 1):
            yield which, "tensorwise_eager", "_product", flaky(when), "computes wrongly"
    which = Case.of("checksum", {"cube": 48, "data": "integers"})
    yield which, "tensorwise_eager", "_product", always_one_more, "computes wrongly"


@pytest.mark.parametrize(("which", "arm", "where", "wrong", "words"), list(faults()))
def test_what_is_wrong_is_refused(
    which: Case, arm: str, where: str, wrong: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SUITES[which.suite]
    assert checked(suite, which, arm, twins=True)[1].ok
    monkeypatch.setattr(where if "." in where else f"harness.suites.{which.suite}.{where}", wrong)
    numerics = suite.build(which, arm, "cpu").check()
    assert not numerics.ok
    assert re.search(words, numerics.reason), numerics.reason
    assert which.suite != "cast" or arm == "read" or numerics.values["mismatches"] > 0
    assert which.suite != "recipes" or numerics.values["saved_bytes_per_elem"] > 0, "its figures are kept"


def test_wrong_in_the_same_way_each_time_only_another_card_can_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_product", always_one_more)
    which = Case.of("checksum", {"cube": 48, "data": "codes"})
    assert checksum.build(which, "tensorwise_eager", "cpu").check().ok
