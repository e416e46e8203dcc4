"""Memory of a device: what is free, and what one piece of work took at its peak."""

from __future__ import annotations

import resource
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.machine.processes import memory_of_machine, memory_of_this_process
from harness.timing.timers import release_memory

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(slots=True)
class Peak:
    """Bytes that a block took above what was there before; 0 until the block has ended.

    Attributes:
        allocated: of tensors.
        reserved: of the allocator, with what it lost to fragments and rounding.
    """

    allocated: int = 0
    reserved: int = 0


def free_bytes(device: str) -> int:
    """Bytes that could be allocated now: of a GPU what no process holds, of a CPU what the system could make free.

    No limit for a GPU that is not there, since a plan can be made for it elsewhere, and where a system does not say.
    """
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else sys.maxsize
    known = memory_of_machine("available")
    available = sys.maxsize if known is None else known
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)  # of a worker, see harness.engine.workers
    if limit == resource.RLIM_INFINITY:
        return available
    return max(0, min(available, limit - memory_of_this_process("VmData")))


@contextmanager
def peak_memory(cuda: Any = None) -> Iterator[Peak]:
    """Watches the allocator of the current GPU; what earlier work left in its cache is given back first.

    Args:
        cuda: the module with `memory_allocated` and its siblings; `torch.cuda` by default.
    """
    if cuda is None:
        import torch

        cuda = torch.cuda
        release_memory()
    peak = Peak()
    allocated, reserved = cuda.memory_allocated(), cuda.memory_reserved()
    cuda.reset_peak_memory_stats()
    yield peak
    cuda.synchronize()
    peak.allocated = cuda.max_memory_allocated() - allocated
    peak.reserved = cuda.max_memory_reserved() - reserved
