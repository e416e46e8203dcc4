"""What casts do to the tensors of one training step, taken where a layer makes them; `fp8core.watch` reads it.

A layer that is in `WATCHED` hands each tensor and the codes and scales that its GEMM is about to receive to a `CallStats`.
Nothing is cast a second time. Of each tensor at most `samples` elements are looked at, and its amax:

    amax         largest magnitude of the whole tensor
    saturated    |x| / scale_inv > overflow threshold of the format (464 in e4m3fn): only the clamp keeps it finite
    underflowed  x is not 0, and its code is
    signal       sum of x**2                         noise   sum of (x - code * scale_inv)**2, both in float64

A call counts once its backward pass runs. So evaluations, and what activation checkpointing computes twice, don't.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8core.arguments import PLAIN_TENSORS
from fp8core.formats import E8M0FNU, as_element_format
from fp8core.gemm.layout import Operand
from fp8core.scaling import BLOCK, MX_BLOCK
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from fp8core.recipe import Cast, Recipe

READS = {  # role -> the operands of GEMMs that it is
    "input": (("output", "a"), ("grad_weight", "b")),
    "weight": (("output", "b"), ("grad_input", "b")),
    "grad_output": (("grad_input", "a"), ("grad_weight", "a")),
}
CAST, HIGH_PRECISION, CODES_ONLY, NOT_SEEN = "cast", "high precision", "codes only", "not seen"
MAXIMA = 3  # the first figures of a row are maxima: amax, scale_inv, -scale_inv; the others are sums
_ROWS_KEPT = 32  # of a slot, until they are merged
_SHAPES_KEPT = 64
_LARGEST = torch.finfo(torch.float32).max  # of all dtypes that are cast

Where = tuple[torch.Tensor, ...]  # an index of each sampled element, by dimension


class Slot(NamedTuple):
    """One tensor as operand of the GEMMs that read the same cast of it."""

    role: str
    gemms: tuple[str, ...]


def slots(recipe: Recipe) -> dict[Slot, Cast | None]:
    """The operands that a recipe tells apart, with their casts; None is high precision.

    Two GEMMs share a slot where the same codes serve both.
    """
    result: dict[Slot, Cast | None] = {}
    for role, ((one, a), (other, b)) in READS.items():
        first, second = getattr(recipe.gemms[one], a), getattr(recipe.gemms[other], b)
        if first == second and (first is None or first.axis_free):
            result[Slot(role, (one, other))] = first
        else:
            result[Slot(role, (one,))] = first
            result[Slot(role, (other,))] = second
    return result


class Seen:
    """What one operand of one layer showed in all calls of a step.

    Attributes:
        slot, cast: which operand, and its cast; None in high precision.
        status: one of CAST, HIGH_PRECISION, CODES_ONLY.
        rows: float64 [9] on the tensor's device, see `CallStats`; all merged by `merge`.
        elements, sampled, calls: of the whole step.
    """

    def __init__(self, slot: Slot, cast: Cast | None, status: str) -> None:
        self.slot, self.cast, self.status = slot, cast, status
        self.rows: list[torch.Tensor] = []
        self.elements = self.sampled = self.calls = 0

    def merge(self) -> torch.Tensor:
        """One row of all calls."""
        if len(self.rows) > 1:
            together = torch.stack(self.rows)
            self.rows = [torch.cat((together[:, :MAXIMA].amax(0), together[:, MAXIMA:].sum(0)))]
        return self.rows[0]

    def add(self, row: torch.Tensor | None, elements: int, sampled: int) -> None:
        """One more call."""
        if row is not None:
            self.rows.append(row)
            if len(self.rows) >= _ROWS_KEPT:
                self.merge()
        self.elements += elements
        self.sampled += sampled
        self.calls += 1


class StepStats:
    """All layers of one watched step.

    Attributes:
        samples: elements of a tensor that are looked at in each call.
        seen: of each module whose backward pass ran, by (reported name, recipe, slot, status).
        failure: the first error of the statistics themselves, after which nothing more is looked at; "" if none.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.seen: dict[str, dict[tuple[str, int, Slot, str], Seen]] = {}
        self.failure = ""
        self._places: dict[tuple[torch.Size, torch.device], Where] = {}
        self._slots: dict[int, tuple[Recipe, dict[tuple[str, str], tuple[Slot, Cast | None]]]] = {}

    def call(self, module: str, name: str, recipe: Recipe) -> CallStats:
        """What a forward pass of a module, and the backward pass that belongs to it, report to; as `name`."""
        if id(recipe) not in self._slots:  # a recipe takes longer to hash than to look at
            by_gemm = {(s.role, gemm): (s, cast) for s, cast in slots(recipe).items() for gemm in s.gemms}
            self._slots[id(recipe)] = recipe, by_gemm
        return CallStats(self, module, name, self._slots[id(recipe)][1], id(recipe))

    def places(self, shape: torch.Size, device: torch.device) -> Where:
        """Indices of elements a fixed stride apart; coprime to the last dimension, so that all columns take part."""
        key = shape, device
        if key not in self._places:
            size, last = shape.numel(), shape[-1]
            stride = -(-size // self.samples)
            while stride > 1 and math.gcd(stride, last) != 1:
                stride += 1
            if len(self._places) >= _SHAPES_KEPT:
                self._places.clear()
            self._places[key] = torch.unravel_index(torch.arange(0, size, stride, device=device), shape)
        return self._places[key]


class CallStats:
    """One forward pass of a layer with its backward pass.

    A row: amax, largest scale_inv, -smallest scale_inv, then as estimates for all elements: saturated, underflowed, not
    zero, not finite, signal, noise.
    """

    def __init__(
        self,
        step: StepStats,
        module: str,
        name: str,
        by_gemm: dict[tuple[str, str], tuple[Slot, Cast | None]],
        recipe: int,
    ) -> None:
        self.step, self.module, self.name, self.by_gemm, self.recipe = step, module, name, by_gemm, recipe
        self._pending: dict[tuple[Slot, str], tuple[Cast | None, torch.Tensor | None, int, int]] = {}
        self._amax: dict[str, torch.Tensor] = {}

    def saw(
        self,
        role: str,
        gemm: str,
        x: torch.Tensor | None,
        operand: Operand | torch.Tensor,
        *,
        turned: bool = False,
        group: torch.Tensor | None = None,
    ) -> None:
        """A GEMM is about to receive an operand.

        Args:
            role: of the tensor.
            gemm: that reads it.
            x: the tensor that was cast, in high precision; None or a Float8Tensor where only codes are there.
            operand: codes and scales, a Float8Tensor, or what is multiplied in high precision.
            turned: the codes of a matrix x lie as x.t().
            group: int64 [rows], which of scale_inv's first dimension a row goes by; None: scales lie as the codes do.
        """
        if self.step.failure or torch.compiler.is_compiling():
            return
        slot, cast = self.by_gemm[role, gemm]
        if isinstance(operand, Float8Tensor):
            operand = Operand(operand.qdata, operand.scale_inv)
        if isinstance(operand, Operand):
            status = CODES_ONLY if x is None or type(x) not in PLAIN_TENSORS else CAST
        else:
            status = HIGH_PRECISION
        if (slot, status) in self._pending:
            return
        try:
            with torch.no_grad(), _disable_current_modes():
                row = self._row(role, x, operand, status, turned, group)
            self._pending[slot, status] = cast, *row
        except Exception as error:  # noqa: BLE001  # an allocation that fails must not end the training
            self.step.failure = f"{self.name} {role}: {type(error).__name__}: {error}"

    def commit(self) -> None:
        """The backward pass has run: the call counts."""
        seen = self.step.seen.setdefault(self.module, {})
        for (slot, status), (cast, row, elements, sampled) in self._pending.items():
            key = self.name, self.recipe, slot, status
            if key not in seen:
                seen[key] = Seen(slot, cast, status)
            seen[key].add(row, elements, sampled)
        self._pending.clear()
        self._amax.clear()

    def _row(
        self,
        role: str,
        x: torch.Tensor | None,
        operand: Operand | torch.Tensor,
        status: str,
        turned: bool,
        group: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, int, int]:
        tensor = operand.qdata if isinstance(operand, Operand) else operand
        size = tensor.numel()
        if not size or _capturing(tensor):
            return None, size, 0
        if not isinstance(operand, Operand):
            nothing = tensor.new_zeros(6, dtype=torch.float64)
            return torch.cat((self._amax_of(role, operand), nothing[:2], nothing)), size, 0
        scale_inv = operand.scale_inv
        ends = _ends(scale_inv if scale_inv.dtype == torch.float32 else scale_inv.float())
        if status == CODES_ONLY:
            nothing = ends.new_zeros(6)
            return torch.cat((nothing[:1], ends, nothing)), size, 0
        assert x is not None
        # Few operators: in a small model each costs more than what it does to a sample
        where = self.step.places(x.shape, x.device)
        values = x.detach()[where].double()
        there = where[::-1] if turned else where
        codes = operand.qdata.view(torch.uint8)[there].view(operand.qdata.dtype).float()
        decoding = _scales_at(scale_inv, operand.qdata.shape, there, group).double()
        limit = as_element_format(operand.qdata.dtype).overflow_threshold
        error = torch.addcmul(values, codes, decoding, value=-1)
        magnitude, not_zero = values.abs(), torch.count_nonzero(values)
        counts = (
            torch.count_nonzero(magnitude > decoding * limit),
            not_zero - torch.count_nonzero(codes),  # the code of 0 is 0
            not_zero,
            values.numel() - torch.count_nonzero(magnitude <= _LARGEST),
        )
        sums = torch.stack((*counts, torch.dot(values, values), torch.dot(error, error)))
        if size > values.numel():
            sums *= size / values.numel()
        return torch.cat((self._amax_of(role, x), ends, sums)), size, values.numel()

    def _amax_of(self, role: str, x: torch.Tensor) -> torch.Tensor:
        """Amax of a tensor, float64 [1]; once for all GEMMs that read it."""
        if role not in self._amax:
            least, most = torch.aminmax(x.detach())
            self._amax[role] = torch.maximum(-least, most).double()[None]
        return self._amax[role]


# Layers and grouped products whose casts are looked at, each with what makes the CallStats of a call with a weight;
# empty but for the watched steps, so that other steps ask an empty dict
WATCHED: dict[nn.Module, Callable[[torch.Tensor, Recipe], CallStats]] = {}


def _ends(scale_inv: torch.Tensor) -> torch.Tensor:
    """float64 [2]: the largest, and the smallest with a minus sign."""
    least, most = (scale_inv, scale_inv) if scale_inv.dim() == 0 else torch.aminmax(scale_inv)
    return torch.stack((most, -least)).double()


def _capturing(x: torch.Tensor) -> bool:
    """A CUDA graph records: what it replays reports nothing."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _scales_at(
    scale_inv: torch.Tensor, shape: torch.Size, where: Where, group: torch.Tensor | None
) -> torch.Tensor:
    """The decoding scale of each sampled element."""
    if scale_inv.dim() == 0:
        return scale_inv
    block = MX_BLOCK if scale_inv.dtype == E8M0FNU.dtype else BLOCK
    scale_inv = scale_inv.float()
    if scale_inv.dim() == 1:  # one for each expert
        return scale_inv[where[0]]
    if group is not None and scale_inv.dim() == 3:  # for each group of rows a scale for each column
        return scale_inv[group[where[0]], 0, where[1]]
    index = tuple(
        0 if count == 1 else at if count == size else at // block
        for size, count, at in zip(shape, scale_inv.shape, where, strict=True)
    )
    return scale_inv[index]
