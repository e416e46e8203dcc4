"""What a gather of FP8 codes did, and who is shown it; apart from `.sequence_parallel`, which needs DTensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed.tensor import DTensor

    from fp8core.history import Amaxes
    from fp8core.recipe import Cast
    from fp8core.tensor import Float8Tensor


class Gathered(NamedTuple):
    """What one gather did, for `fp8core.verify`.

    Attributes:
        part: this rank's tokens in high precision [m, K].
        cast, dim, memory, role: as `fp8core.inputs.operands.cast_one` took them.
        local: codes of the part.
        whole: codes of all tokens [..., K], this rank's along `placement`.
        like: the DTensor that was gathered.
    """

    part: torch.Tensor
    cast: Cast
    dim: int
    memory: Amaxes | None
    role: str
    local: Float8Tensor
    whole: Float8Tensor
    like: DTensor


observers: list[Callable[[Gathered], None]] = []  # called with each gather
