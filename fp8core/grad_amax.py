"""The amax of a gradient, handed from the backward pass that wrote it to the Float8Linear that casts it.

    note_amax(grad, amax) a producer's backward pass, which has each element on chip anyway
    amax_of(grad)         Float8Linear's, one read less; None where nothing was left or the gradient has changed since

Autograd carries tensors and nothing beside them, and may reshape a gradient or add another one to it on its way. So an
amax belongs to a storage and to its version: a view has both, a sum is new storage or a new version, and what a hook
returns or changes is too. A storage that is gone can't be taken for another: the weak reference keeps its identity.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Noted(NamedTuple):
    storage: StorageWeakRef
    version: int
    dtype: torch.dtype
    amax: torch.Tensor


_noted: dict[int, _Noted] = {}  # by identity of the storage


def note_amax(grad: torch.Tensor, amax: torch.Tensor) -> None:
    """Notes the amax of a gradient that is about to be returned to autograd.

    Args:
        grad: any shape and dtype, the whole of its storage; else nothing is noted.
        amax: float32, 0-dimensional, on its device.
    """
    for key in [key for key, noted in _noted.items() if noted.storage.expired()]:
        _noted.pop(key, None)
    if _is_whole(grad):
        storage = grad.untyped_storage()
        _noted[storage._cdata] = _Noted(StorageWeakRef(storage), grad._version, grad.dtype, amax)


def amax_of(grad: torch.Tensor) -> torch.Tensor | None:
    """What `note_amax` noted of this gradient or of one that it is a view of; None where that says nothing about it.

    Args:
        grad: as autograd gives it.

    Returns:
        float32, 0-dimensional.
    """
    if not _noted or torch.compiler.is_compiling() or type(grad) is not torch.Tensor:
        return None
    noted = _noted.get(grad.untyped_storage()._cdata)
    if noted is None or noted.storage.expired() or not _is_whole(grad):
        return None
    return noted.amax if (noted.version, noted.dtype) == (grad._version, grad.dtype) else None


def _is_whole(x: torch.Tensor) -> bool:
    """x has each element of its storage once."""
    if x.numel() * x.itemsize != x.untyped_storage().nbytes():
        return False
    return x.is_contiguous() or 0 not in x.stride()
