"""Which elements of a tensor `fp8core.watch` looks at: one at a hashed place in each of equal parts of the tensor.

A fixed stride would repeat itself from row to row: in a square matrix it can see a diagonal and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_Places = TypeVar("_Places", torch.Tensor, tuple[torch.Tensor, ...])


class SampledPlaces:
    """Indices into tensors, each made once and kept.

    Attributes:
        samples: elements of a tensor at most; a smaller tensor is looked at as a whole.
    """

    KEPT = 128  # of shapes, 8 bytes a sample and dimension

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._kept: dict[Hashable, Any] = {}

    def of(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """int64 [n], flat and ascending: one place in each n-th of the tensor; the same ones each time."""
        return self._once((shape, device), lambda: _spread(shape.numel(), self.samples).to(device))

    def by_dimension(self, shape: torch.Size, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The same places, int64 [n], along each dimension."""
        return self._once((shape, device, 2), lambda: torch.unravel_index(self.of(shape, device), shape))

    def _once(self, key: Hashable, make: Callable[[], _Places]) -> _Places:
        found = self._kept.get(key)
        if found is None:
            found = make()
            if len(self._kept) >= self.KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found


def _spread(size: int, samples: int) -> torch.Tensor:
    """int64 [min(size, samples)]: part i begins at i * size // n, and its place is by a hash of i."""
    if size <= samples:
        return torch.arange(size)
    part = torch.arange(samples)
    edges = torch.arange(samples + 1) * size // samples
    hashed = part + 1
    for multiplier in (0x45D9F3B, 0x119DE1F3):  # any mixing of all bits would do
        hashed = ((hashed ^ (hashed >> 16)) * multiplier) & 0xFFFFFFFF
    hashed ^= hashed >> 16
    # In float64, for a hash modulo a power of two would be its low bits alone
    offset = (hashed.double() / 2**32 * edges.diff()).long()
    return edges[:-1] + offset
