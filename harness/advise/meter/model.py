"""Predicted share of copy bandwidth from what the machine code shows.

Fixed on 2026-11-22, before any kernel was tuned by it, and not changed since; no GPU has confirmed it. No number in it
is fitted: the constants below are published or stated guesses. Three times bound one program's work:

    t_bytes   its bytes / (copy bandwidth / SMs)              the memory of the SM's share
    t_pipes   cycles of its busiest unit / clock              `pipes.cycles`
    t_wait    (waits * LATENCY + t_pipes) / CTAs per SM       what n programs leave idle while each waits in turn

They overlap, but not perfectly, so time = sqrt(t_bytes^2 + t_pipes^2 + t_wait^2): a kernel for which two of them are
equal reaches 71 %. Whole waves run with all CTAs, the rest of the last wave with those it has.

    share = bytes / time / copy bandwidth

A copy with 64 KB in flight and few instructions comes out at 98 %, which stands for "as a copy".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LATENCY_S = 0.8e-6  # of global memory under load: between the idle latency (0.5-0.6) and 40 KB an SM at 4.3 TB/s (1.2)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the model knows of a GPU.

    Attributes:
        name: short name.
        copy_bytes_s: what a large copy reaches, reads and writes together, bytes/s.
        processors: SMs.
        clock_hz: under load.
    """

    name: str
    copy_bytes_s: float
    processors: int = 132
    clock_hz: float = 1.755e9


H100 = Gpu("H100", 3.0e12)
H200 = Gpu("H200", 4.3e12)
GPUS = (H100, H200)


@dataclass(frozen=True, slots=True)
class Work:
    """One program of a launch, the mean over its grid.

    Attributes:
        bytes_moved: read and written from and to global memory.
        busiest_cycles: of the unit of an SM that its warps keep busy longest, all warps together.
        waits: times that it waits for global memory.
        ctas_per_sm: programs that fit on one SM at a time.
        programs: of the whole launch.
    """

    bytes_moved: float
    busiest_cycles: float
    waits: float
    ctas_per_sm: int
    programs: int


def share_of_copy(work: Work, gpu: Gpu) -> float:
    """Predicted bandwidth of the launch as a share of the GPU's copy bandwidth, 0 to 1.

    >>> copy = Work(bytes_moved=32768, busiest_cycles=100, waits=1, ctas_per_sm=4, programs=132 * 4 * 100)
    >>> round(share_of_copy(copy, H200), 2)
    0.98

    Raises:
        ValueError: nothing is moved, or no program fits on an SM.
    """
    if work.bytes_moved <= 0 or work.programs <= 0:
        raise ValueError(
            f"a launch of {work.programs} programs that moves {work.bytes_moved} bytes has no bandwidth"
        )
    if work.ctas_per_sm < 1:
        raise ValueError("no program fits on an SM, so the launch fails")
    at_once = work.ctas_per_sm * gpu.processors
    whole, rest = divmod(work.programs, at_once)
    seconds = whole * at_once * _seconds(work, gpu, work.ctas_per_sm)
    if rest:
        seconds += rest * _seconds(work, gpu, rest / gpu.processors)
    return work.programs * work.bytes_moved / seconds / gpu.copy_bytes_s


def _seconds(work: Work, gpu: Gpu, ctas: float) -> float:
    """Seconds of the whole GPU for one program, while `ctas` of them run on each SM."""
    busy = min(ctas, 1.0) * gpu.processors  # SMs that have any
    alone = work.busiest_cycles / gpu.clock_hz
    t_bytes = work.bytes_moved / gpu.copy_bytes_s
    t_pipes = alone / busy
    t_wait = (work.waits * LATENCY_S + alone) / (ctas * gpu.processors)
    return math.sqrt(t_bytes**2 + t_pipes**2 + t_wait**2)
