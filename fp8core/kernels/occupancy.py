"""Programs of a kernel that one streaming multiprocessor (SM) runs at once, from what the compiled kernel takes.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and the formula of NVIDIA's
occupancy calculator: registers are allocated to warps, in units, out of the file of one of four partitions.
"""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32
PARTITIONS = 4  # of an SM; a warp's registers lie in one
REGISTERS = 65536  # of an SM, 32 bits each, sm_80 to sm_120
_REGISTER_UNIT = 8  # of a thread: 256 of a warp
_SHARED_RESERVED = 1024  # bytes that the system takes of each program's shared memory, sm_80 and newer


@dataclass(frozen=True, slots=True)
class Processor:
    """What one SM holds at a time.

    Attributes:
        threads: at most.
        shared: bytes of shared memory.
        programs: at most, whatever they take.
    """

    threads: int
    shared: int
    programs: int


PROCESSORS: dict[int, Processor] = {  # by 10 * major + minor of the compute capability
    80: Processor(2048, 164 * 1024, 32),
    86: Processor(1536, 100 * 1024, 16),
    89: Processor(1536, 100 * 1024, 24),
    90: Processor(2048, 228 * 1024, 32),
    100: Processor(2048, 228 * 1024, 32),
    120: Processor(1536, 100 * 1024, 24),
}


def processor(capability: int) -> Processor:
    """The SM of this compute capability; of one that is not listed, the next older one's (of 75 and older, sm_80's)."""
    return PROCESSORS[max((known for known in PROCESSORS if known <= capability), default=80)]


def programs_per_processor(registers: int, num_warps: int, shared: int, capability: int) -> int:
    """Programs that one SM runs at once; 0 where not even one fits.

    >>> [programs_per_processor(registers=32, num_warps=8, shared=8192, capability=sm) for sm in (89, 90)]
    [6, 8]

    Args:
        registers: of a thread.
        num_warps: threads of a program / 32.
        shared: bytes of shared memory of a program.
        capability: 10 * major + minor.
    """
    limits = processor(capability)
    of_a_warp = -(-max(registers, 1) // _REGISTER_UNIT) * _REGISTER_UNIT * WARP
    warps = (REGISTERS // PARTITIONS // of_a_warp) * PARTITIONS
    return min(
        warps // num_warps,
        limits.threads // (WARP * num_warps),
        limits.shared // (shared + _SHARED_RESERVED),
        limits.programs,
    )
