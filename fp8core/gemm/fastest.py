"""Backend "fastest": each product by the faster of cuBLAS ("torch") and fp8core's kernel ("triton"), measured here once.

Both multiply the same codes by the same scales with the accumulation that was asked for, so the choice changes nothing
but the order and width of sums that each backend documents. Granularity is the recipe's affair: it is never changed.

    one of them takes the product by its rules   that one
    it was measured, here or by an earlier run   the faster one
    it can be measured                           both run in turn, by `fp8core.kernels.tuning`: a tie goes to "torch"
    else                                         the default: on a CPU, with FP8CORE_TUNE=0, while a CUDA graph records,
                                                 under deterministic algorithms (times are not), in traced code

What is traced by `torch.compile` is chosen while tracing, so that the graph holds the library's own operator: by what
was measured before, in this process or on disk. A step in eager mode, such as `fp8core.verify` makes, measures. Sizes
that the trace leaves open take the default.

A result is stored with the tiles of the kernels and is valid as long (`tuning.key`). N, always a dimension of a weight,
counts exactly. M or K counts tokens, which may vary from step to step: both are rounded up to `LEADING_BITS` bits, at most 16 sizes a binade, which leaves the sizes of nearly all models as they are; up to 4096
a step is at most 128, the rows of one tile, within which either library does the same work.

Ranks measure for themselves and may differ, which is no more than their sums do. The file can be copied to others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8core.gemm import layout
from fp8core.gemm.backend import Backend
from fp8core.kernels import ops, tuning
from fp8core.scaling import GRANULARITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fp8core.formats import Format
    from fp8core.gemm.backend import Operands
    from fp8core.gemm.layout import Operand

LEADING_BITS = 5
MEASURING = (
    "fp8core::measuring"  # a profiler's range around what runs to be timed, which is no part of a step
)


class Product(NamedTuple):
    """What decides how fast A [M, K] @ B [K, N] is."""

    M: int
    K: int
    N: int
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    granularity: str
    out_dtype: torch.dtype
    use_fast_accum: bool
    device: torch.device


class Fastest(Backend):
    """A choice among backends, cached for this process; it refuses what every candidate refuses.

    Args:
        candidates: the default first; two or more.
        time_ms: measures a closure in milliseconds, on any device; None: CUDA events, on a GPU.
    """

    name = "fastest"

    def __init__(
        self,
        candidates: Iterable[Backend],
        time_ms: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        self.candidates = {backend.name: backend for backend in candidates}
        self.default = next(iter(self.candidates.values()))
        self.choices: dict[Product, str] = {}
        self._time_ms = time_ms
        self.is_fp8 = all(backend.is_fp8 for backend in self.candidates.values())
        # A result must not depend on who was faster: where one of them rounds, both do. "cuda" asks for kernels at all
        self.bf16_only = frozenset(
            granularity
            for granularity in GRANULARITIES
            for backend in self.candidates.values()
            if granularity in backend.bf16_only and backend.granularity_reason("cuda", granularity) is None
        )
        self.grouped_granularities = self.default.grouped_granularities

        def traced(*fields: Any) -> str:  # apart, since Dynamo takes no tuple with names for a constant
            product = Product(*fields)
            return self._cached(product) or self._choose(product, None)

        # As torch.compiler.assume_constant_result does, which would load the compiler into every process that imports us
        vars(traced)["_dynamo_marked_constant"] = True
        self._while_tracing = traced

    def matmul(self, *operands: *Operands) -> torch.Tensor:
        """A [M, K] row-major @ B [K, N] column-major with their scales: see `fp8core.gemm.scaled_mm`.

        Raises:
            ValueError: no candidate takes it; the reason of each.
        """
        return self.candidates[self.choice(*operands)].matmul(*operands)

    def choice(self, *operands: *Operands) -> str:
        """The candidate for these operands, the arguments of `matmul`; measures where that is due and can be done."""
        a, b, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum = operands
        granularity = layout.granularity_of(a, b, scale_inv_a, scale_inv_b)
        (M, K), N = a.shape, b.shape[1]
        product = Product(M, K, N, a.dtype, b.dtype, granularity, out_dtype, use_fast_accum, a.device)
        if torch.compiler.is_compiling():
            from torch.fx.experimental.symbolic_shapes import has_static_value  # sympy: a second to import

            if has_static_value(M) and has_static_value(K) and has_static_value(N):
                return self._while_tracing(*product)
            return self._of_open_sizes(product)
        return self._cached(product) or self._choose(product, operands)

    def _cached(self, product: Product) -> str | None:
        """The choice of this process, if it holds now: a measured one does not while nothing is to be measured."""
        cached = self.choices.get(product)
        if cached is None or cached == self.default.name or not self._unmeasurable(product):
            return cached
        return None

    def _choose(self, product: Product, operands: Operands | None) -> str:
        """The fastest of those that support the product, the first where that is unknown; cached where it can't change."""
        supported = self._supported(product)
        is_fixed = len(supported) == 1 or (self._time_ms is None and product.device.type != "cuda")
        best = supported[0] if is_fixed else self._fastest(product, supported, operands)
        if best is not None and operands is not None:
            self.choices[product] = best
        return best or supported[0]

    def _fastest(self, product: Product, supported: list[str], operands: Operands | None) -> str | None:
        """The stored choice, else a measured one if there are operands; None where nothing can be measured now."""
        if self._unmeasurable(product):
            return None
        key = _key(product)
        if operands is None or any(type(t) is not torch.Tensor for t in operands[:4]):
            return tuning.recall(key, supported)  # a fake tensor has a shape and no data
        from triton.runtime.errors import TritonError  # not on every platform

        # Modes such as that of selective checkpointing count and keep what they see: measuring is not part of their program
        with (
            _disable_current_modes(),
            ops.on_device_of(operands[0]),
            torch.profiler.record_function(MEASURING),
        ):
            return tuning.fastest(
                key,
                supported,
                lambda name: partial(self.candidates[name].matmul, *operands),
                time_ms=self._time_ms,
                tolerates=(RuntimeError, TritonError),  # cuBLAS lacks a kernel; one of ours does not compile
            )

    def _supported(self, product: Product) -> list[str]:
        """Who takes the product by its rules.

        Raises:
            ValueError: nobody.
        """
        M, K, N, a, b, granularity, out_dtype, _, device = product
        reasons = {
            name: backend.unsupported(M, K, N, a, b, granularity, out_dtype, device)
            for name, backend in self.candidates.items()
        }
        if refused := _union(reasons):
            raise ValueError(refused)
        return [name for name, reason in reasons.items() if reason is None]

    def _of_open_sizes(self, product: Product) -> str:
        """In traced code, where only rules that are arithmetic can be asked: the first who takes it."""
        M, K, N, a, b, granularity, out_dtype, _, device = product
        for name, backend in self.candidates.items():
            if (
                backend.granularity_reason(device, granularity) is None
                and backend.shape_reason(M, K, N, a, b, granularity, out_dtype) is None
            ):
                return name
        return self.default.name  # which says why not

    def _unmeasurable(self, product: Product) -> bool:
        """Whether the product is empty, or no choice is made at all."""
        if 0 in product[:3]:
            return True
        if self._time_ms is not None:
            return False
        return product.device.type != "cuda" or torch.are_deterministic_algorithms_enabled() or tuning.off()

    def shape_reason(
        self,
        M: int,
        K: int,
        N: int,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
        granularity: str = "tensorwise",
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> str | None:
        """What all candidates that have kernels for these scales and formats refuse; the others are no way out."""
        able = [
            backend
            for backend in self.candidates.values()
            if backend.granularity_reason("cuda", granularity) is None
            and backend.device_reason("cpu", a_fmt, b_fmt) is None
        ]
        arguments = (M, K, N, a_fmt, b_fmt, granularity, out_dtype)
        return _union({b.name: b.shape_reason(*arguments) for b in able or self.candidates.values()})

    def device_reason(
        self, device: torch.device | str, a_fmt: Format | torch.dtype | str, b_fmt: Format | torch.dtype | str
    ) -> str | None:
        """What all candidates say."""
        return _union({name: b.device_reason(device, a_fmt, b_fmt) for name, b in self.candidates.items()})

    def granularity_reason(
        self, device: torch.device | str, granularity: str, nearest: str = ""
    ) -> str | None:
        """What all candidates say."""
        reasons = {
            name: b.granularity_reason(device, granularity, nearest) for name, b in self.candidates.items()
        }
        return _union(reasons)

    def grouped_reason(
        self, device: torch.device, granularity: str, a_dtype: torch.dtype, b_dtype: torch.dtype
    ) -> str | None:
        """The default's: its grouped kernel is taken unmeasured."""
        return self.default.grouped_reason(device, granularity, a_dtype, b_dtype)

    def grouped_matmul(
        self, a: Operand, b: Operand, offsets: torch.Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> torch.Tensor:
        """That of the default."""
        return self.default.grouped_matmul(a, b, offsets, out_dtype, use_fast_accum)

    def for_groups(self, granularity: str) -> Backend:
        """The default, where it has a grouped kernel for these scales."""
        return self.default if granularity in self.grouped_granularities else self


def _key(product: Product) -> str:
    """The key of a product's result in the store."""
    M, K, N, a, b, granularity, out_dtype, fast, device = product
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    sizes = (tuning.rounded(M, LEADING_BITS), tuning.rounded(K, LEADING_BITS), N)
    sums = "fast" if fast else "exact"
    return tuning.key(f"scaled_mm {granularity} {sums}", sizes, (a, b, out_dtype), name)


def _union(reasons: Mapping[str, str | None]) -> str | None:
    """None if anyone takes it; else the reason that all give, or each with its own."""
    refusals = [reason for reason in reasons.values() if reason is not None]
    if len(refusals) < len(reasons):
        return None
    if len(set(refusals)) == 1:
        return refusals[0]
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())
