"""Where a tensor's elements come from: a parameter, FP8 codes, a softmax, a product of activations.

Followed through every operator by storage, since views, casts and copies make new tensors. An origin passes on if all
of an operator's largest floating-point inputs have it: `weight * scale` is still the weight, `x * gain` is no parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp8core.proof.recorder import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOOKUPS = ("embedding",)  # their result is an activation
_PUTS = ("index_copy", "index_copy_", "index_add", "index_add_")
_SOFTMAX = ("_softmax", "_safe_softmax", "_masked_softmax")


class Origin(NamedTuple):
    """What is known of one storage.

    Attributes:
        parameter: the parameter that its elements are made of.
        of_codes: they were FP8 codes, converted to high precision.
        of_softmax: they are probabilities.
        product: the record of the product of activations that made them.
        rows: of a matrix whose other rows are zeros that fill up groups, how many there are in truth.
    """

    parameter: nn.Parameter | None = None
    of_codes: bool = False
    of_softmax: bool = False
    product: Any = None
    rows: int | None = None


NOTHING = Origin()


class _Place(NamedTuple):
    """A parameter's elements within its storage."""

    first: int
    end: int
    parameter: nn.Parameter


class Provenance:
    """Origins by storage, as a recorder numbers them; keeps no tensor's memory alive."""

    def __init__(self, number_of: Callable[[Tensor], int]) -> None:
        self._number_of = number_of
        self._origins: dict[int, Origin] = {}
        self._places: dict[int, list[_Place]] = {}

    def add_parameter(self, parameter: nn.Parameter) -> None:
        """Makes a parameter, or the parts of one that is a tensor subclass, known at its present storage."""
        for part in plain_parts(parameter):
            if part.layout is not torch.strided or not part.numel():
                continue
            places = self._places.setdefault(self._number_of(part), [])
            first = int(part.storage_offset())
            place = _Place(first, first + part.numel(), parameter)
            if not any(known[:2] == place[:2] for known in places):
                places.append(place)

    def of(self, x: Tensor) -> Origin:
        """The origin of a plain tensor."""
        if x.layout is not torch.strided:
            return NOTHING
        number = self._number_of(x)
        for place in self._places.get(number, ()):
            if place.first <= x.storage_offset() < place.end:
                return Origin(parameter=place.parameter)
        return self._origins.get(number, NOTHING)

    def set(self, x: Tensor, origin: Origin) -> None:
        """Notes an origin, unless the storage is a parameter's."""
        number = self._number_of(x)
        if number not in self._places:
            self._origins[number] = origin

    def follow(self, func: Any, args: Any, out: Any) -> None:
        """Passes origins on through an operator that multiplies no matrices."""
        name = func.overloadpacket.__name__
        inputs = [part for part in tensors_in(args) if part.is_floating_point()]
        if not inputs or name in _LOOKUPS:
            origin = NOTHING
        elif func.is_view:
            return  # the same storage
        else:
            source = [args[1]] if name == "copy_" and isinstance(args[1], Tensor) else inputs
            size = max(part.numel() for part in source)
            origins = [self.of(part) for part in source if part.numel() == size]
            first = origins[0]
            same = all(origin.parameter is first.parameter for origin in origins)
            from_codes = all(
                origin.of_codes or (part.dtype.itemsize == 1 and part.dtype.is_floating_point)
                for origin, part in zip(origins, (p for p in source if p.numel() == size), strict=True)
            )
            origin = Origin(
                first.parameter if same else None,
                from_codes,
                any(origin.of_softmax for origin in origins) or name in _SOFTMAX,
                next((origin.product for origin in origins if origin.product is not None), None),
                _rows_put(name, args) or next((origin.rows for origin in origins if origin.rows), None),
            )
        for part in tensors_in(out):
            self.set(part, origin)


def _rows_put(name: str, args: Any) -> int | None:
    """Rows that an operator puts into a matrix of more rows, as `fp8core.pad_groups` and its derivative do."""
    if name not in _PUTS or args[1] != 0:
        return None
    into, _, index, rows = args[:4]
    return len(rows) if into.dim() == rows.dim() == 2 and len(index) == len(rows) < len(into) else None


def plain_parts(x: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that a wrapper subclass (Float8Tensor, DTensor) holds."""
    if not is_traceable_wrapper_subclass(x):
        yield x
        return
    names, _ = x.__tensor_flatten__()
    for name in names:
        inner = getattr(x, name)
        if isinstance(inner, Tensor):
            yield from plain_parts(inner)
