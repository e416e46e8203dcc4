"""Backend "fastest": each product by the faster of cuBLAS ("torch") and fp8core's kernel ("triton"), measured here once.

Both multiply the same codes by the same scales with the accumulation that was asked for, so the choice changes nothing
but the order and width of sums that each backend documents. Granularity is the recipe's affair: it is never changed.

    one of them takes the product by its rules   that one
    it was measured, here or by an earlier run   the faster one
    it can be measured                           both run in turn for `ROUNDS` rounds; the median over rounds of
                                                 time / default's time decides, and one must be `MARGIN` below 1 to
                                                 replace the default: a tie goes to "torch"
    else                                         the default: on a CPU, with FP8CORE_TUNE=0, while a CUDA graph records,
                                                 under deterministic algorithms (a clock is none), in traced code

What is traced by `torch.compile` is settled while tracing, so that the graph holds the library's own operator: by what
was measured before, in this process or on disk. A step in eager mode, such as `fp8core.verify` makes, measures. Sizes
that the trace leaves open take the default.

A result belongs to a product, a device, versions of torch, CUDA and Triton, and the sources of fp8core's kernels. N,
always a dimension of a weight, counts exactly. M or K counts tokens, which may vary from step to step: both are rounded
up to `LEADING_BITS` bits, at most 16 sizes a binade, which leaves the sizes of nearly all models as they are; up to 4096
a step is at most 128, the rows of one tile, within which either library does the same work.

Ranks measure for themselves and may differ, which is no more than their sums do. The file can be copied to others.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8core.gemm import layout
from fp8core.gemm.backend import Backend
from fp8core.kernels import ops
from fp8core.recipe import GRANULARITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fp8core.formats import Format

ROUNDS = 5
MARGIN = 0.02  # of the default's time; what a choice between equals could win is noise
LEADING_BITS = 5
MEASURING = (
    "fp8core::measuring"  # range of a profiler around what runs to be timed, which is no part of a step
)
_WARMUP_MS, _MEASURED_MS = 2, 10  # of one library in one round


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


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype, bool]


class Fastest:
    """A choice among backends, and what of it is settled in this process.

    Args:
        candidates: backends by name, the default first; two or more.
        time_ms: measures a closure in milliseconds, on any device; None: CUDA events, on a GPU.
    """

    def __init__(
        self,
        candidates: Mapping[str, Backend],
        time_ms: Callable[[Callable[[], object]], float] | None = None,
    ) -> None:
        self.candidates = dict(candidates)
        self.settled: dict[Product, str] = {}
        self._time_ms = time_ms

        def known(
            M: int,
            K: int,
            N: int,
            a: torch.dtype,
            b: torch.dtype,
            kind: str,
            out: torch.dtype,
            fast: bool,
            where: torch.device,
        ) -> str:  # apart, since Dynamo takes no tuple with names for a constant
            return self._known(Product(M, K, N, a, b, kind, out, fast, where))

        # As torch.compiler.assume_constant_result does, which would load the compiler into every process that imports us
        vars(known)["_dynamo_marked_constant"] = True
        self._while_tracing = known

    def backend(self) -> Backend:
        """The entry of `fp8core.gemm.BACKENDS`: it refuses what every candidate refuses."""
        rounded = {
            granularity
            for granularity in GRANULARITIES
            for backend in self.candidates.values()
            if granularity in backend.bf16_only and backend.granularity_reason("cpu", granularity) is None
        }
        return Backend(
            self.matmul,
            is_fp8=all(backend.is_fp8 for backend in self.candidates.values()),
            shape_reason=self._shape_reason,
            device_reason=self._device_reason,
            granularity_reason=self._granularity_reason,
            # A result must not depend on who was faster: where one of them rounds, both do
            bf16_only=frozenset(rounded),
        )

    def matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> torch.Tensor:
        """A [M, K] row-major @ B [K, N] column-major with their scales: see `fp8core.gemm.scaled_mm`.

        Raises:
            ValueError: no candidate takes it; what each says.
        """
        operands = (a, b, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)
        return self.candidates[self.choice(*operands)].matmul(*operands)

    def choice(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> str:
        """Who multiplies these operands, the arguments of `matmul`; measures where that is due and can be done."""
        granularity = layout.granularity_of(a, b, scale_inv_a, scale_inv_b)
        (M, K), N = a.shape, b.shape[1]
        product = Product(M, K, N, a.dtype, b.dtype, granularity, out_dtype, use_fast_accum, a.device)
        if torch.compiler.is_compiling():
            from torch.fx.experimental.symbolic_shapes import has_static_value  # sympy: a second to import

            if has_static_value(M) and has_static_value(K) and has_static_value(N):
                return self._while_tracing(*product)
            return self._of_open_sizes(product)
        return self._standing(product) or self._settle(
            product, (a, b, scale_inv_a, scale_inv_b, out_dtype, use_fast_accum)
        )

    def _standing(self, product: Product) -> str | None:
        """What is settled and holds now: who was found to be faster does not count while nothing is to be measured."""
        known = self.settled.get(product)
        if known is None or known == next(iter(self.candidates)) or not self._unmeasurable(product):
            return known
        return None

    def _able(self, product: Product) -> list[str]:
        """Who takes the product by its rules.

        Raises:
            ValueError: nobody.
        """
        M, K, N, a, b, granularity, out_dtype, _, device = product
        reasons = {
            name: backend.shape_reason(M, K, N, a, b, granularity, out_dtype)
            or backend.granularity_reason(device, granularity)
            or backend.device_reason(device, a, b)
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
        return next(iter(self.candidates))  # which says why not

    def _known(self, product: Product) -> str:
        """What is settled or remembered, else the default; runs while `torch.compile` traces."""
        if standing := self._standing(product):
            return standing
        able = self._able(product)
        return (self._recalled(product, able) if len(able) > 1 else None) or able[0]

    def _recalled(self, product: Product, able: Sequence[str]) -> str | None:
        """What was measured before; None where it was not, or where nothing is to be measured."""
        if self._unmeasurable(product):
            return None
        from fp8core.kernels import tuning  # needs triton, which not every platform has

        found = tuning.recall(_key(product), [{name: 1} for name in able])
        return None if found is None else next(iter(found))

    def _settle(self, product: Product, operands: Operands) -> str:
        able = self._able(product)
        if len(able) == 1 or (self._time_ms is None and product.device.type != "cuda"):
            self.settled[product] = able[0]
            return able[0]
        found = self._recalled(product, able) or self._measured(product, able, operands)
        if found is None:
            return able[0]
        self.settled[product] = found
        return found

    def _measured(self, product: Product, able: Sequence[str], operands: Operands) -> str | None:
        """The faster one, and keeps it; None where nothing can be measured now.

        Raises:
            RuntimeError: the device refused all of them.
        """
        if self._unmeasurable(product) or any(type(t) is not torch.Tensor for t in operands[:4]):
            return None  # a fake tensor has a shape and no data
        from fp8core.kernels import tuning

        if self._time_ms is None and tuning.capturing():
            return None
        time_ms = self._time_ms or partial(tuning.cuda_ms, warmup_ms=_WARMUP_MS, measured_ms=_MEASURED_MS)
        runs = {name: partial(self.candidates[name].matmul, *operands) for name in able}
        # Modes such as that of selective checkpointing count and keep what passes: this is none of theirs
        with (
            _disable_current_modes(),
            ops.on_device_of(operands[0]),
            torch.profiler.record_function(MEASURING),
        ):
            try:
                able_here = _that_run(runs)
                best = race(able_here, time_ms)
            except torch.OutOfMemoryError:  # a result of its own does not fit now; a later call may find room
                return None
        if len(able_here) == len(able):  # a refusal may pass: it is not written down
            tuning.remember(_key(product), {best: 1})
        return best

    def _unmeasurable(self, product: Product) -> bool:
        """Empty, or where no choice is made at all."""
        if 0 in product[:3]:
            return True
        if self._time_ms is not None:
            return False
        if product.device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
            return True
        from fp8core.kernels import tuning

        return tuning.off()

    def _shape_reason(
        self,
        M: int,
        K: int,
        N: int,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
        granularity: str = "tensorwise",
        out_dtype: torch.dtype = torch.bfloat16,
    ) -> str | None:
        able = {  # one that lacks kernels for these scales or formats, which its other rules say, is no way out
            name: backend
            for name, backend in self.candidates.items()
            if backend.granularity_reason("cpu", granularity) is None
            and backend.device_reason("cpu", a_fmt, b_fmt) is None
        }
        arguments = (M, K, N, a_fmt, b_fmt, granularity, out_dtype)
        return _union({name: b.shape_reason(*arguments) for name, b in (able or self.candidates).items()})

    def _device_reason(
        self,
        device: torch.device | str,
        a_fmt: Format | torch.dtype | str,
        b_fmt: Format | torch.dtype | str,
    ) -> str | None:
        return _union({name: b.device_reason(device, a_fmt, b_fmt) for name, b in self.candidates.items()})

    def _granularity_reason(
        self, device: torch.device | str, granularity: str, nearest: str = ""
    ) -> str | None:
        reasons = {
            name: b.granularity_reason(device, granularity, nearest) for name, b in self.candidates.items()
        }
        return _union(reasons)


def race(runs: Mapping[str, Callable[[], object]], time_ms: Callable[[Callable[[], object]], float]) -> str:
    """The name of the fastest, by medians of ratios within a round; the first where none is `MARGIN` faster.

    A round times all of them, every second one in reverse, so that a drift of the clock or of the load hits each alike.
    """
    default, *others = runs
    rounds = []
    for number in range(ROUNDS if others else 0):
        order = [default, *others][:: -1 if number % 2 else 1]
        times = {name: time_ms(runs[name]) for name in order}
        rounds.append({name: times[name] / times[default] for name in others})
    ratios = {name: statistics.median(ratio[name] for ratio in rounds) for name in others}
    best = min(ratios, key=ratios.__getitem__, default=default)
    return best if ratios.get(best, 1.0) < 1 - MARGIN else default


def rounded(size: int) -> int:
    """The size rounded up to `LEADING_BITS` binary digits.

    >>> [rounded(n) for n in (31, 33, 4096, 4100, 14336, 16384)]
    [31, 34, 4096, 4352, 14336, 16384]
    """
    step = 1 << max(size.bit_length() - LEADING_BITS, 0)
    return -(-size // step) * step


def _that_run(runs: Mapping[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """Those that the device does not refuse; their first call compiles, and tunes its tiles."""
    from triton.runtime.errors import TritonError

    able, refusals = {}, []
    for name, run in runs.items():
        try:
            run()
            able[name] = run
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TritonError) as error:  # cuBLAS lacks a kernel, a tile does not fit
            refusals.append(f"{name}: {error}")
    if not able:
        raise RuntimeError("no GEMM backend runs this product here; " + "; ".join(refusals))
    return able


def _key(product: Product) -> str:
    """What a result is remembered under."""
    import triton

    M, K, N, a, b, granularity, out_dtype, fast, device = product
    types = " ".join(str(dtype).removeprefix("torch.") for dtype in (a, b, out_dtype))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    from fp8core.kernels import tuning

    versions = f"torch {torch.__version__}|cuda {torch.version.cuda}|triton {triton.__version__}|kernels {tuning.sources()}"
    sums = "fast" if fast else "exact"
    return f"scaled_mm {granularity} {sums}|{rounded(M)}x{rounded(K)}x{N}|{types}|{name}|{versions}"


def _union(reasons: Mapping[str, str | None]) -> str | None:
    """None if anyone takes it; else what all say, or each."""
    said = [reason for reason in reasons.values() if reason is not None]
    if len(said) < len(reasons):
        return None
    return said[0] if len(set(said)) == 1 else "; ".join(f"{name}: {why}" for name, why in reasons.items())
