"""The kernel of `harness.timing.timers.HostReleased`; importing this imports triton.

`volatile` loads are relaxed loads of system scope (PTX ISA, memory consistency model), so each one asks the host's
memory anew. %globaltimer counts nanoseconds in steps of up to some microseconds, which is fine for a limit.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _nanoseconds():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["turn", "limit_us"])
def wait_for_host(flag, turn, limit_us):  # type: ignore[no-untyped-def]
    """Returns once flag[0] >= turn, or after `limit_us` microseconds.

    Args:
        flag: int32 [1] in host memory that is mapped into the device's.
        turn: int32.
        limit_us: int32.
    """
    ends = _nanoseconds() + limit_us.to(tl.int64) * 1000
    waits = tl.load(flag, volatile=True) < turn
    while waits:
        waits = (tl.load(flag, volatile=True) < turn) & (_nanoseconds() < ends)
