"""What casts do to the tensors of one training step, taken where a layer makes them; `fp8core.watch` reads it.

A layer that is in `fp8core.observers.WATCHED` hands each tensor and the codes and scales that its GEMM is about to receive to a `CallStats`.
Nothing is cast a second time. Of each tensor at most `samples` elements are looked at, and its amax:

    amax         largest magnitude of the whole tensor
    saturated    |x| / scale_inv > overflow threshold of the format (464 in e4m3fn): only the clamp keeps it finite
    underflowed  x is not 0, and its code is
    signal       sum of x**2                         noise   sum of (x - code * scale_inv)**2, both in float64

A call counts once its backward pass runs. So evaluations, and what activation checkpointing computes twice, don't. Of a
forward pass with several backward passes (`retain_graph=True`) the first one counts. A microbatch that was run again after its
backward pass counts twice: nothing here knows that the first one failed.

Samples are copied at once, because optimizers change their tensors in place, and counted together, `_HELD` of them at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8core import four_bits
from fp8core.arguments import PLAIN_TENSORS
from fp8core.formats import E2M1FN, E8M0FNU, as_element_format
from fp8core.gemm.layout import Operand, transposed
from fp8core.history import ROLES
from fp8core.scaling import BLOCK, MX_BLOCK, broadcast_block_scales
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Hashable

    from fp8core.proof.sampled_places import SampledPlaces
    from fp8core.recipe import Cast, Recipe

READS = {  # GEMM -> its operands a and b: what they are, and whether their first dimension is contracted
    "output": (("input", False), ("weight", False)),
    "grad_input": (("grad_output", False), ("weight", True)),
    "grad_weight": (("grad_output", True), ("input", True)),
}
CAST, HIGH_PRECISION, CODES_ONLY, NOT_SEEN = "cast", "high precision", "codes only", "not seen"
MAXIMA = 3  # the first figures of a row are maxima: amax, scale_inv, -scale_inv; the others are sums
_HELD = 1 << 15  # samples that wait: in a small model an operator costs more than what it does to one cast
_LARGEST = torch.finfo(torch.float32).max  # of all dtypes that are cast


class Slot(NamedTuple):
    """One tensor as operand of the GEMMs that read the same cast of it."""

    role: str
    gemms: tuple[str, ...]


def reads_of(recipe: Recipe, role: str) -> list[tuple[str, Cast | None]]:
    """The two GEMMs that read a tensor, each with its cast of it: first the one that contracts its columns."""
    return [
        (name, cast)
        for name, gemm in recipe.gemms.items()
        for (read, _), cast in zip(READS[name], (gemm.a, gemm.b), strict=True)
        if read == role
    ]


def slots(recipe: Recipe) -> dict[Slot, Cast | None]:
    """The operands that a recipe tells apart, with their casts; None is high precision.

    Two GEMMs share a slot where the same codes serve both.
    """
    result: dict[Slot, Cast | None] = {}
    for role in ROLES:
        (one, first), (other, second) = reads_of(recipe, role)
        if first == second and (first is None or first.axis_free):
            result[Slot(role, (one, other))] = first
        else:
            result[Slot(role, (one,))] = first
            result[Slot(role, (other,))] = second
    return result


# Figures of one cast, float64 [9] on the tensor's device, none until `StepStats.count`: amax, largest scale_inv, -smallest
# scale_inv, then as estimates for all elements: saturated, underflowed, not zero, not finite, signal, noise
StatsRow = list[torch.Tensor]


class Sample(NamedTuple):
    """Elements of one cast.

    Attributes:
        values: high precision, [n].
        codes: uint8 [n].
        decoding: scale_inv of each, float32 [n]; [1] where all have the same.
        dtype: of the codes.
        weight: elements of the tensor for each one of the sample.
    """

    values: torch.Tensor
    codes: torch.Tensor
    decoding: torch.Tensor
    dtype: torch.dtype
    weight: float


class Waiting(NamedTuple):
    """What waits to be counted; without a sample where nothing was cast, or codes are all that is there.

    Attributes:
        extremes: of the tensor, then of scale_inv: the smallest and the largest; 0-dimensional.
    """

    row: StatsRow
    extremes: tuple[torch.Tensor, ...]
    sample: Sample | None


class OperandStats:
    """What one operand of one layer showed in all calls of a step.

    Attributes:
        slot, cast: which operand, and its cast; None in high precision.
        status: one of CAST, HIGH_PRECISION, CODES_ONLY.
        rows: of the calls.
        elements, sampled, calls: of the whole step.
    """

    def __init__(self, slot: Slot, cast: Cast | None, status: str) -> None:
        self.slot, self.cast, self.status = slot, cast, status
        self.rows: list[StatsRow] = []
        self.elements = self.sampled = self.calls = 0

    def merge(self) -> torch.Tensor:
        """One row of all calls, which must have been counted."""
        together = torch.stack([value for row in self.rows for value in row])
        return torch.cat((together[:, :MAXIMA].amax(0), together[:, MAXIMA:].sum(0)))

    def add(self, row: StatsRow | None, elements: int, sampled: int) -> None:
        """One more call."""
        if row is not None:
            self.rows.append(row)
        self.elements += elements
        self.sampled += sampled
        self.calls += 1


class StepStats:
    """All layers of one watched step.

    Attributes:
        places: which elements are looked at.
        seen: of each module whose backward pass ran, by (reported name, recipe, slot, status).
        calls: forward passes that were seen.
        failure: the first error of the statistics themselves, after which nothing more is looked at; "" if none.
    """

    def __init__(self, places: SampledPlaces) -> None:
        self.places = places
        self.seen: dict[str, dict[tuple[str, int, Slot, str], OperandStats]] = {}
        self.calls = 0
        self.failure = ""
        self._slots: dict[int, tuple[Recipe, dict[tuple[str, str], tuple[Slot, Cast | None]]]] = {}
        self._waiting: list[Waiting] = []
        self._held = 0

    def call(self, module: str, name: str, recipe: Recipe) -> CallStats:
        """What a forward pass of a module, and the backward pass that belongs to it, report to; as `name`."""
        self.calls += 1
        if id(recipe) not in self._slots:  # a recipe takes longer to hash than to look at
            by_gemm = {(s.role, gemm): (s, cast) for s, cast in slots(recipe).items() for gemm in s.gemms}
            self._slots[id(recipe)] = recipe, by_gemm
        return CallStats(self, module, name, self._slots[id(recipe)][1], id(recipe))

    def wait(self, row: StatsRow, extremes: tuple[torch.Tensor, ...], sample: Sample | None) -> None:
        """Takes what is to be counted as `row`."""
        self._waiting.append(Waiting(row, extremes, sample))
        self._held += 1 if sample is None else sample.values.numel()
        if self._held >= _HELD:
            self.count()

    def count(self) -> None:
        """Counts what waits; casts of as many samples and the same dtypes together."""
        waiting, self._waiting, self._held = self._waiting, [], 0
        groups: dict[Hashable, list[Waiting]] = {}
        for one in waiting:
            key: tuple[Hashable, ...] = (one.extremes[0].device,)
            if one.sample is not None:
                key += one.sample.dtype, *((x.dtype, x.numel()) for x in one.sample[:3])
            groups.setdefault(key, []).append(one)
        for group in groups.values():
            extremes = torch.stack([x for one in group for x in one.extremes]).double().view(-1, 4)
            least, most, least_scale, most_scale = extremes.unbind(1)
            maxima = torch.stack((torch.maximum(-least, most), most_scale, -least_scale), 1)
            samples = [one.sample for one in group if one.sample is not None]
            sums = _sums(samples) if samples else maxima.new_zeros(len(group), 6)
            for one, value in zip(group, torch.cat((maxima, sums), 1).unbind(), strict=True):
                one.row.append(value)


def _sums(samples: list[Sample]) -> torch.Tensor:
    """float64 [casts, 6]: what of a row is no maximum."""
    dtype = samples[0].dtype
    values = torch.stack([one.values for one in samples]).double()
    codes = _values_of(dtype, values.device).take(torch.stack([one.codes for one in samples]).long())
    decoding = torch.stack([one.decoding for one in samples]).double()
    limit = (E2M1FN if dtype == torch.uint8 else as_element_format(dtype)).overflow_threshold
    error = torch.addcmul(values, codes, decoding, value=-1)
    magnitude, not_zero = values.abs(), _count(values != 0)
    counts = (
        _count(magnitude > decoding * limit),
        not_zero - _count(codes != 0),  # the code of 0 is 0
        not_zero,
        values.shape[1] - _count(magnitude <= _LARGEST),
    )
    squares = (torch.linalg.vecdot(x, x) for x in (values, error))
    sums = torch.stack((*(x.double() for x in counts), *squares), 1)
    weights = [one.weight for one in samples]
    if max(weights) > 1:
        sums *= torch.tensor(weights, dtype=torch.float64)[:, None].to(sums.device, non_blocking=True)
    return sums


def _count(mask: torch.Tensor) -> torch.Tensor:
    """True elements of each row, int32; a sum of bool would take ten times as long on a CPU."""
    return mask.view(torch.uint8).sum(1, dtype=torch.int32)


@lru_cache
def _values_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """float64 [256], of each code: a look-up takes a tenth of the time of a conversion on a CPU. Of uint8, e2m1."""
    if dtype == torch.uint8:
        return four_bits.decode(torch.arange(256, dtype=torch.uint8) & 15).double().to(device)
    return torch.arange(256, dtype=torch.uint8).view(dtype).double().to(device)


class CallStats:
    """One forward pass of a layer with its first backward pass."""

    def __init__(
        self,
        step: StepStats,
        module: str,
        name: str,
        by_gemm: dict[tuple[str, str], tuple[Slot, Cast | None]],
        recipe: int,
    ) -> None:
        self.step, self.module, self.name, self.by_gemm, self.recipe = step, module, name, by_gemm, recipe
        self._pending: dict[tuple[Slot, str], tuple[Cast | None, StatsRow | None, int, int]] = {}
        self._extremes: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._committed = False

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
        """Take an operand, as `fp8core.observers.CallObserver` says."""
        if self._committed or self.step.failure or torch.compiler.is_compiling():
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
                signs = None if cast is None else cast.hadamard
                row = self._row(role, x, operand, status, turned, group, signs)
            self._pending[slot, status] = cast, *row
        except Exception as error:  # noqa: BLE001  # an allocation that fails must not end the training
            self.step.failure = f"{self.name} {role}: {type(error).__name__}: {error}"

    def commit(self) -> None:
        """The backward pass has run: the call counts, once."""
        if self._committed:
            return
        self._committed = True
        seen = self.step.seen.setdefault(self.module, {})
        for (slot, status), (cast, row, elements, sampled) in self._pending.items():
            key = self.name, self.recipe, slot, status
            if key not in seen:
                seen[key] = OperandStats(slot, cast, status)
            seen[key].add(row, elements, sampled)
        self._pending.clear()
        self._extremes.clear()

    def _row(
        self,
        role: str,
        x: torch.Tensor | None,
        operand: Operand | torch.Tensor,
        status: str,
        turned: bool,
        group: torch.Tensor | None,
        signs: tuple[int, ...] | None,
    ) -> tuple[StatsRow | None, int, int]:
        if isinstance(operand, Operand) and operand.qdata.dtype == torch.uint8:
            operand = _spread(operand)
        tensor = operand.qdata if isinstance(operand, Operand) else operand
        size, row = tensor.numel(), list[torch.Tensor]()
        if not size or _capturing(tensor):
            return None, size, 0
        if not isinstance(operand, Operand):
            least, most = self._extremes_of(role, operand)
            nothing = torch.zeros_like(least)
            self.step.wait(row, (least, most, nothing, nothing), None)
            return row, size, 0
        scale_inv = operand.scale_inv
        of_scale = _extremes(scale_inv if scale_inv.dtype == torch.float32 else scale_inv.float())
        if status == CODES_ONLY:
            nothing = torch.zeros_like(of_scale[0])
            self.step.wait(row, (nothing, nothing, *of_scale), None)
            return row, size, 0
        assert x is not None
        places = self.step.places
        at = places.of(x.shape, x.device)
        lies = transposed(operand) if turned else operand
        codes = lies.qdata.view(torch.uint8).take(at)
        decoding = of_scale[0][None]
        if scale_inv.numel() > 1:
            decoding = _scales_at(lies.scale_inv, lies.qdata.shape, places, group)
        sampled = at.numel()
        cast_was = x.detach() if signs is None else four_bits.hadamard(x.detach(), int(not turned), signs)
        sample = Sample(cast_was.take(at), codes, decoding, operand.qdata.dtype, size / sampled)
        self.step.wait(row, (*self._extremes_of(role, x), *of_scale), sample)
        return row, size, sampled

    def _extremes_of(self, role: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Extremes of a tensor, once for all GEMMs that read it."""
        if role not in self._extremes:
            self._extremes[role] = _extremes(x.detach())
        return self._extremes[role]


def _spread(operand: Operand) -> Operand:
    """Lines of e2m1 as a code a byte and the whole decoding scale, float32, of each."""
    codes = four_bits.unpack(operand.qdata)
    block = codes.shape[1] // operand.scale_inv.shape[1]
    scale_inv = broadcast_block_scales(operand.scale_inv, codes.shape, block)
    of_tensor = operand.tensor_scale_inv
    return Operand(codes, (scale_inv if of_tensor is None else scale_inv * of_tensor).contiguous())


def _extremes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest element; NaN if there is one. Copies: delayed scales change in place."""
    if x.dim():
        least, most = torch.aminmax(x)
        return least, most
    copy = x.clone()
    return copy, copy


def _capturing(x: torch.Tensor) -> bool:
    """A CUDA graph records: what it replays reports nothing."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _scales_at(
    scale_inv: torch.Tensor,
    codes: torch.Size,
    places: SampledPlaces,
    group: torch.Tensor | None,
) -> torch.Tensor:
    """The decoding scale of each sampled element, float32 [n]."""
    at = places.by_dimension(codes, scale_inv.device)
    if group is not None and scale_inv.dim() == 3:  # for each group of rows a scale for each column
        return scale_inv[group[at[0]], 0, at[1]]
    mx = scale_inv.dtype == E8M0FNU.dtype
    block, known = MX_BLOCK if mx else BLOCK, scale_inv.view(torch.uint8) if mx else scale_inv
    index = [
        place if count == size else place // block if count > 1 else 0
        for place, size, count in zip(
            at, codes, scale_inv.shape, strict=False
        )  # one scale an expert: [experts]
    ]
    found = known[tuple(index)]
    return found.view(scale_inv.dtype).float() if mx else found
