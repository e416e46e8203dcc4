"""What the ranks of an arm tell each other, so that all decide alike: JSON, by collectives, in which a rank that waits is seen."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gathered(mine: Any) -> list[Any]:
    """What each rank has, in their order; all must ask at once. Alone, what was given.

    Args:
        mine: a JSON value.
    """
    if not dist.is_initialized():
        return [mine]
    message = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(message)]))
    longest = int(max(sizes))
    every = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(every, torch.cat([message, message.new_zeros(longest - len(message))]))
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(every, sizes, strict=True)]


def first_fault(faults: list[str]) -> str:
    """The first rank's that has one, named where there are several; "" where none has."""
    many = len(faults) > 1
    found = (
        f"rank {rank} of {len(faults)}: {why}" if many else why for rank, why in enumerate(faults) if why
    )
    return next(found, "")
