"""Deliberately wrong implementations, each with the check that must catch it.

A fault is planted by patching fp8core while a block runs:

    with FAULTS["no scaling"].planted():
        ...

so that any later gate can be shown to catch it as well. `caught_by` names a check of `fault_checks`; `gate` says who
sees it in a real training run of the fault's `recipe`. It was written down before the first such run; reports/published/studies/loss-verdict-faults.md
lists what was predicted and what was found, and here stands what was found:

    numerics     nobody but that check: the optimizer absorbs it, or the run holds no value that it would touch
    refused      fp8core itself, which raises at the first step
    gradient     L6 of the verdict, the gradient norms
    early loss   L3, the course
    not finite   L1, a loss that is no number
    late loss    L4, the late window or the held-out loss
    state        no run of this kind: it takes a write to a weight, or more microbatches, in the middle of a step
    verify       no verdict on curves, but `fp8core.verify`: the arithmetic is right, and not the one that was asked for
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import fp8core
import fp8core.cast
import fp8core.gemm
import fp8core.inputs.microbatch
import fp8core.inputs.operands
import fp8core.plain_linear
import fp8core.scaling
from fp8core import E4M3FN, E5M2
from fp8core.config import as_recipe
from fp8core.gemm import BACKENDS, reference
from fp8core.gemm.layout import Operand
from fp8core.history import AmaxMemory
from fp8core.kernels import ops
from fp8core.proof import adders

if TYPE_CHECKING:
    from fp8core.recipe import Kernels

Patches = list[tuple[str, Any]]  # (dotted name, what takes its place)

amax, compute_scale = fp8core.scaling.amax, fp8core.scaling.compute_scale
cast_saturating, cast_with_amax = fp8core.cast.cast_saturating, fp8core.cast.cast_with_amax
mx_scale_code, cast_operand, cast_operand_pair = (
    fp8core.scaling.mx_scale_code,
    fp8core.inputs.operands.cast_operand,
    fp8core.inputs.operands.cast_operand_pair,
)
scaled_mm = fp8core.gemm.scaled_mm


@dataclasses.dataclass(frozen=True)
class Fault:
    """One wrong implementation."""

    name: str
    caught_by: str
    gate: str
    patches: Patches
    recipe: str = "tensorwise"
    kernels: Kernels = "auto"

    @contextmanager
    def planted(self) -> Iterator[None]:
        """fp8core is wrong while the block runs."""
        with ExitStack() as stack:
            for target, replacement in self.patches:
                stack.enter_context(mock.patch(target, replacement))
            yield


def scale_of(change: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Patches:
    return [("fp8core.cast.compute_scale", change)]


def no_scaling(a: torch.Tensor, fmt: Any, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones_like(a), torch.ones_like(a)


def inverted(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scale, scale_inv = compute_scale(*args)
    return scale_inv, scale


def by_reciprocal(a: torch.Tensor, fmt: Any, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    if power_of_two:
        return compute_scale(a, fmt, True)
    scale = a.float().clamp(min=1e-12).reciprocal() * fmt.max
    return scale, scale.reciprocal()


def rounded_up(a: torch.Tensor, fmt: Any, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    scale, scale_inv = compute_scale(a, fmt, power_of_two)
    return (2 * scale, scale_inv / 2) if power_of_two else (scale, scale_inv)


def without_floor(a: torch.Tensor, fmt: Any, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    scale, scale_inv = compute_scale(a, fmt, power_of_two)
    return torch.where(a == 0, torch.inf, scale), torch.where(a == 0, 0.0, scale_inv)


def four_times(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scale, scale_inv = compute_scale(*args)
    return 4 * scale, scale_inv / 4


def amax_of(change: Callable[..., torch.Tensor]) -> Patches:
    return [("fp8core.cast.amax", change), *both_ways(SCALE_AND_CAST)]


def neighbours_row(x: torch.Tensor, granularity: Any = "tensorwise", dim: int = -1) -> torch.Tensor:
    found = amax(x, granularity, dim)
    return found.roll(1, 1 - dim % 2) if granularity == "rowwise" else found


def other_axis(x: torch.Tensor, granularity: Any = "tensorwise", dim: int = -1) -> torch.Tensor:
    return amax(x, granularity, 1 - dim % 2 if granularity == "rowwise" else dim)


def half_blocks(x: torch.Tensor, granularity: Any = "tensorwise", dim: int = -1) -> torch.Tensor:
    if granularity != "1x128":
        return amax(x, granularity, dim)
    keep = torch.arange(x.shape[dim]) % 128 < 64
    return amax(x * (keep if dim in (1, -1) else keep[:, None]), granularity, dim)


def square_transposed(x: torch.Tensor, granularity: Any = "tensorwise", dim: int = -1) -> torch.Tensor:
    found = amax(x, granularity, dim)
    return found.t() if granularity == "128x128" and found.shape[0] == found.shape[1] else found


def signed(x: torch.Tensor, granularity: Any = "tensorwise", dim: int = -1) -> torch.Tensor:
    return amax(x.clamp(min=0), granularity, dim)


def codes_of(change: Callable[..., torch.Tensor]) -> Patches:
    where = ("fp8core.cast.cast_saturating", "fault_checks.cast_saturating")
    return [(target, lambda x, fmt, **_: change(x, fmt)) for target in where]


def without_clamp(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    return x.detach().float().to(fp8core.formats.as_element_format(fmt).dtype)


def neighbours(x: torch.Tensor, fmt: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(|x| clamped, the largest value not above it, the next one)."""
    every = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
    table = every[(every >= 0) & every.isfinite()].unique()
    size = x.detach().float().abs().clamp(max=fmt.max)
    index = (torch.searchsorted(table, size.nan_to_num().contiguous(), right=True) - 1).clamp(min=0)
    return size, table[index], table[(index + 1).clamp(max=len(table) - 1)]


def truncated(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    fmt = fp8core.formats.as_element_format(fmt)
    size, low, _ = neighbours(x, fmt)
    return torch.where(size.isnan(), x.float(), low.copysign(x.float())).to(fmt.dtype)


def half_up(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    fmt = fp8core.formats.as_element_format(fmt)
    size, low, high = neighbours(x, fmt)
    rounded = torch.where(size - low >= high - size, high, low)
    return torch.where(size.isnan(), x.float(), rounded.copysign(x.float())).to(fmt.dtype)


def nan_to_zero(x: torch.Tensor, fmt: Any) -> torch.Tensor:
    return cast_saturating(x.float().nan_to_num(nan=0.0), fmt)


def product_in_bfloat16(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    codes, scale_inv = SCALE_AND_CAST(x, *args, **kwargs)
    if scale_inv.dtype == torch.float32 and scale_inv.dim() == 2 and 1 in scale_inv.shape:
        product = (x.bfloat16() * (1 / scale_inv).bfloat16()).float()
        return cast_saturating(product, codes.dtype), scale_inv
    return codes, scale_inv


def both_ways(change: Callable[..., Any]) -> Patches:
    """A fault of a cast along one axis, in the function that casts along both axes too."""

    def rowwise(x: torch.Tensor, fmt: Any, dims: tuple[int, ...], *, power_of_two: bool = False) -> Any:
        found = [change(x, fmt, "rowwise", dim=dim, power_of_two=power_of_two) for dim in dims]
        return [part if dim else tuple(t.t() for t in part) for dim, part in zip(dims, found, strict=True)]

    return [("fp8core.cast.scale_and_cast", change), ("fp8core.cast.cast_rowwise", rowwise)]


SCALE_AND_CAST = fp8core.cast.scale_and_cast


def hides_infinity(x: torch.Tensor, fmt: Any, expected: torch.Tensor, **kwargs: Any) -> Any:
    codes, _, seen = cast_with_amax(x, fmt, expected, **kwargs)
    return codes, compute_scale(expected, fmt)[1], seen


def operand_of(change: Callable[..., Any]) -> Patches:
    """In the plain layer and in what attaches to it."""

    def one(x: torch.Tensor, cast: Any, dim: int, role: str) -> Any:
        return change(x, cast, dim, None, role)

    def both(x: torch.Tensor, first: Any, second: Any, role: str) -> Any:
        return one(x, first, 1, role), one(x, second, 0, role)

    plain = [("cast", staticmethod(one)), ("cast_twice", staticmethod(both))]
    attached = [(f"fp8core.inputs.{where}.cast_operand", change) for where in ("operands", "attached")]
    return [*attached, *((f"fp8core.plain_linear.Plan.{name}", way) for name, way in plain)]


def both_operands_of(change: Callable[..., Any]) -> Patches:
    def both(x: torch.Tensor, first: Any, second: Any, role: str) -> Any:
        return change(x, first, second, None, role)

    plain = ("fp8core.plain_linear.Plan.cast_twice", staticmethod(both))
    return [("fp8core.inputs.attached.cast_operand_pair", change), plain]


def e5m2_weights(
    x: torch.Tensor, cast: Any, dim: int, memory: Any = None, role: str = "input", **kwargs: Any
) -> Any:
    if role == "weight" and cast is not None:
        cast = dataclasses.replace(cast, format=E5M2)
    return cast_operand(x, cast, dim, memory, role, **kwargs)


def unscaled_gradients(
    x: torch.Tensor, cast: Any, dim: int, memory: Any = None, role: str = "input", **kwargs: Any
) -> Any:
    if role != "grad_output" or cast is None:
        return cast_operand(x, cast, dim, memory, role, **kwargs)
    one = cast_operand(x, cast, dim, memory, role, **kwargs)
    codes = cast_saturating(x if dim == 1 else x.t(), E4M3FN)
    return Operand(codes, torch.ones_like(one.scale_inv))


def shifted_tile(x: torch.Tensor, first: Any, second: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The transposed copy of the input lies one row of the input lower."""
    a, b = cast_operand_pair(x, first, second, *args, **kwargs)
    if isinstance(b, Operand) and args[1] == "input":
        b = Operand(b.qdata.view(torch.uint8).roll(1, 1).view(b.qdata.dtype), b.scale_inv)
    return a, b


def one_direction(x: torch.Tensor, first: Any, second: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Both GEMMs get codes that are scaled for the first, wrongly taken for the second's."""
    a, b = cast_operand_pair(x, first, second, *args, **kwargs)
    if isinstance(a, Operand) and isinstance(b, Operand) and b.scale_inv.dim():
        b = Operand(a.qdata.t(), b.scale_inv)
    return a, b


def transposed_tile(x: torch.Tensor, amax: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """The fused cast's second copy: the first tile of 128 columns and the rest have changed places."""
    codes, codes_t, scale_inv = OPS.cast_both(x, amax, *args)
    rolled = codes_t.view(torch.uint8).roll(codes_t.shape[0] // 2, 0).view(codes_t.dtype)
    return codes, rolled, scale_inv


def rows_for_columns(x: torch.Tensor, *args: Any) -> tuple[torch.Tensor, ...]:
    """The fused rowwise cast's second copy with the scales of the first."""
    codes, scale_inv, _, scale_inv_t = OPS.cast_rowwise_both(x, *args)
    return codes, scale_inv, codes.t().contiguous(), scale_inv_t


def half_amax(x: torch.Tensor) -> torch.Tensor:
    """The fused amax of a launch whose second half never ran."""
    return OPS.amax(x[: (x.shape[0] + 1) // 2])


def kernels_of(**changes: Callable[..., Any]) -> Patches:
    return [(f"fp8core.inputs.operands.ops.{name}", change) for name, change in changes.items()]


def gemm_of(change: Callable[..., torch.Tensor]) -> Patches:
    return [("fp8core.plain_linear.scaled_mm", change), ("fault_checks.scaled_mm", change)]


def two_percent(*args: Any, **kwargs: Any) -> torch.Tensor:
    return scaled_mm(*args, **kwargs) * 1.02


def last_k_missing(a: Any, b: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The last 16 elements of K are never added."""
    codes = a.qdata.clone()
    codes.view(torch.uint8)[:, -16:] = 0
    return scaled_mm(fp8core.gemm.layout.Operand(codes, a.scale_inv), b, *args, **kwargs)


def bf16_product(a: torch.Tensor, b: torch.Tensor, sa: Any, sb: Any, dtype: Any, fast: bool) -> torch.Tensor:
    """Another GEMM in the FP8 one's place."""
    return reference.matmul(a, b, sa, sb, dtype, fast)


def always_floor(a: torch.Tensor, fmt: Any, mode: Any = "rceil") -> torch.Tensor:
    return mx_scale_code(a, fmt, "floor")


ACCUMULATE = adders.accumulate


def never_promoted(a: torch.Tensor, b: torch.Tensor, register: adders.Register) -> torch.Tensor:
    return ACCUMULATE(a, b, adders.Register(register.fraction_bits))


def last_amax_only(self: AmaxMemory, role: str, seen: torch.Tensor) -> None:
    self.pending[("input", "weight", "grad_output").index(role)] = seen


def stays(self: AmaxMemory) -> None:
    """Stale amax: the first one is kept for good."""
    if not self.ready:
        ADVANCE(self)
    self.pending.zero_()


ADVANCE = AmaxMemory.advance


def conversion_by(change: Callable[..., torch.nn.Module]) -> Patches:
    where = ("fp8core.convert_to_float8_training", "harness.training.setup.convert_to_float8_training")
    return [(target, change) for target in where]


def converts_nothing(module: torch.nn.Module, **_: Any) -> torch.nn.Module:
    return module


def converts_emulated(module: torch.nn.Module, config: Any = None, **kwargs: Any) -> torch.nn.Module:
    return CONVERT(module, config=as_recipe(config).emulated(), **kwargs)


def drops_the_recipe(module: torch.nn.Module, config: Any = None, **kwargs: Any) -> torch.nn.Module:
    return CONVERT(module, **kwargs)


CONVERT = fp8core.convert_to_float8_training
OPS = types.SimpleNamespace(amax=ops.amax, cast_both=ops.cast_both, cast_rowwise_both=ops.cast_rowwise_both)
_FAKE_FP8 = copy.copy(BACKENDS["torch"])
vars(_FAKE_FP8)["matmul"] = bf16_product
_CACHE = "fp8core.inputs.microbatch"

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("no scaling", "gemm_band", "early loss", scale_of(no_scaling)),
        Fault("scale inverted", "exact_scales", "early loss", scale_of(inverted)),
        Fault("scale four times too large", "gemm_band", "not finite", scale_of(four_times)),
        Fault("scale by a float32 reciprocal", "exact_scales", "numerics", scale_of(by_reciprocal)),
        Fault("power of two rounded up", "exact_scales", "early loss", scale_of(rounded_up), "rowwise"),
        Fault("no floor of amax", "non_finite", "numerics", scale_of(without_floor), "rowwise"),
        Fault("scale of the neighbouring row", "heterogeneous_blocks", "gradient", amax_of(neighbours_row), "rowwise"),
        Fault("scale on the wrong axis", "layer_rows", "refused", amax_of(other_axis), "rowwise"),
        Fault("amax of half a block", "heterogeneous_blocks", "gradient", amax_of(half_blocks), "blockwise"),
        Fault("square scales transposed", "heterogeneous_blocks", "numerics", amax_of(square_transposed), "blockwise"),
        Fault("amax without magnitude", "exact_scales", "not finite", amax_of(signed)),
        Fault("missing clamp", "every_code", "numerics", codes_of(without_clamp)),
        Fault("truncation for rounding", "every_code", "gradient", codes_of(truncated)),
        Fault("half up for half to even", "every_code", "numerics", codes_of(half_up)),
        Fault("NaN becomes zero", "every_code", "numerics", codes_of(nan_to_zero)),
        Fault("product in bfloat16", "exact_scales", "numerics", both_ways(product_in_bfloat16), "rowwise"),
        Fault("saturation hides Inf", "non_finite", "numerics", [("fp8core.cast.cast_with_amax", hides_infinity)], "delayed"),
        Fault("e5m2 weights", "layer_band", "refused", operand_of(e5m2_weights)),
        Fault("gradients unscaled", "layer_band", "late loss", operand_of(unscaled_gradients)),
        Fault("transposed tile off by one", "layer_band", "late loss", both_operands_of(shifted_tile)),
        Fault("one direction's codes for both", "layer_rows", "gradient", both_operands_of(one_direction), "rowwise"),
        Fault("fused cast: tiles changed places", "kernel_route", "early loss", kernels_of(cast_both=transposed_tile), "tensorwise", "always"),
        Fault("fused cast: rows for columns", "kernel_route", "gradient", kernels_of(cast_rowwise_both=rows_for_columns), "rowwise", "always"),
        Fault("fused amax of half the tensor", "kernel_route", "numerics", kernels_of(amax=half_amax), "tensorwise", "always"),
        Fault("result 2 % too large", "products", "late loss", gemm_of(two_percent)),
        Fault("last elements of K missing", "products", "early loss", gemm_of(last_k_missing)),
        Fault("MX floor for rceil", "gemm_band", "gradient", [("fp8core.cast.mx_scale_code", always_floor)], "mxfp8"),
        Fault("missing promotion", "accumulation", "numerics",
              [("fault_checks.accumulate", never_promoted), ("fp8core.proof.adders.accumulate", never_promoted)]),
        Fault("stale amax", "delayed_scales", "late loss", [("fp8core.history.AmaxMemory.advance", stays)], "delayed"),
        Fault("amax of the last microbatch", "delayed_scales", "state", [("fp8core.history.AmaxMemory.record", last_amax_only)], "delayed"),
        Fault("cached weight never invalidated", "weight_changes", "state",
              [(f"{_CACHE}.WeightCache._holds", lambda *_: True),
               (f"{_CACHE}._Digest.differs", lambda *_: torch.tensor(False))]),
        Fault("content of cached weight unchecked", "weight_changes", "state",
              [(f"{_CACHE}._Digest.differs", lambda *_: torch.tensor(False))]),
        Fault("fused step unnoticed", "weight_changes", "state",
              [(f"{_CACHE}._Digest.differs", lambda *_: torch.tensor(False)),
               (f"{_CACHE}._Scope.drop", lambda *_: None)]),
        Fault("nothing converted", "proof", "verify", conversion_by(converts_nothing), "rowwise"),
        Fault("silently emulated", "proof", "verify", conversion_by(converts_emulated), "rowwise"),
        Fault("recipe dropped", "proof", "verify", conversion_by(drops_the_recipe), "rowwise"),
        Fault("another GEMM in the FP8 one's place", "proof", "verify",
              [(f"fp8core.{where}.KNOWN", {**BACKENDS, "torch": _FAKE_FP8}) for where in ("gemm", "plain_linear")], "rowwise"),
    )
}  # fmt: skip
