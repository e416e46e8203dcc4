"""`python -m harness kernel`: the facts of one kernel, from anybody's file, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import sys
from typing import TYPE_CHECKING

from harness.store.errors import UsageError
from harness.store.words import helped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.advise.meter.facts import Facts
    from harness.advise.meter.launches import Launch

HELP = """\
usage: python -m harness kernel FILE.py:NAME PARAMETER=... [grid=N] [elements=N] [num_warps=4] [arch=sm_90] ...

Compiles a Triton kernel ahead of time and reads its machine code: registers, spills, shared memory, programs (CTAs) per
SM, waves, executed instructions and FP8 conversions per element, bytes in flight per SM, access widths, the matrix
instruction; and predicts, by the model of docs/kernels.md, which share of a copy's bandwidth it reaches. No GPU needed.

  NAME=*bf16            a pointer, aligned to 16 bytes; *bf16:1 says that it is not
  NAME=i32:16384        a number with the value of the launch: loops run as often as it says; multiples of 16 are
                        known to be such, and 1 becomes a constant, as in Triton's own launches
  NAME=fp32             a number whose value does not matter to the kernel's path
  NAME=128              a tl.constexpr: number, true, false, none or tl.float32; left out: its default
  grid=528 or 64,32     programs of the launch; left out: 1, and no waves and no prediction
  elements=67108864     handled by the whole launch; left out: instructions are counted for a program
  bytes=N               moved by the whole launch; left out: what the code's accesses add up to
  num_warps=4  num_stages=3  num_ctas=1  fp_fusion=true|false  arch=sm_80|sm_86|sm_89|sm_90|sm_100|sm_120
  --json                the same as JSON

example
  python -m harness kernel my.py:add_kernel x_ptr=*fp32 y_ptr=*fp32 out_ptr=*fp32 n=i32:16777216 BLOCK=1024 \\
      grid=16384 elements=16777216
exit  0 printed; 2 the request could not be carried out
"""


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    if helped(words, HELP, alone=True):
        return 0
    as_json = "--json" in words
    name, *rest = [word for word in words if word != "--json"]
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise UsageError("TRITON_INTERPRET=1 is set, so Triton compiles nothing; unset it")
    if importlib.util.find_spec("triton") is None:
        raise UsageError(
            "kernel compiles with Triton, and Triton is not installed: pip install 'fp8-harness[interpreter]'"
        )
    from harness.advise.meter.build import BuildError
    from harness.advise.meter.request import launch_of_words, load_kernel
    from harness.advise.meter.sass import UnreadableCodeError
    from harness.advise.meter.worker import meter

    kernel = load_kernel(name)
    launch, arch = launch_of_words(kernel, rest)
    ready = dataclasses.replace(
        launch, grid=(launch.grid[0] or 1, *launch.grid[1:]), elements=launch.elements or 1
    )
    try:
        facts = meter(ready, arch, kernel)
    except (BuildError, UnreadableCodeError) as error:
        raise UsageError(f"{name}: {error}") from error
    if as_json:
        sys.stdout.write(json.dumps(facts.to_json(), indent=1) + "\n")
    else:
        sys.stdout.write("\n".join(describe(name, launch, facts, arch)) + "\n")
    return 0


def describe(name: str, launch: Launch, facts: Facts, arch: int) -> list[str]:
    """The facts as lines of text; what the launch did not say is not made up."""
    warps = launch.options["num_warps"]
    has_grid, per = launch.grid[0] > 0, "element" if launch.elements else "program"
    lines = [
        f"{name}, sm_{arch}, Triton {facts.triton}, {warps} warps; read from machine code, no GPU has run it",
        f"  registers          {facts.registers} a thread"
        + (f", {facts.stack} bytes of stack: it spills" if facts.stack else ", no spill"),
        f"  shared memory      {facts.shared:,} bytes a program",
        f"  programs per SM    {facts.ctas_per_sm}" + ("" if facts.ctas_per_sm else ": the launch will fail"),
    ]
    if has_grid:
        lines.append(
            f"  grid               {math.prod(launch.grid):,} programs, {facts.waves:.2f} waves of 132 SMs"
        )
    if facts.matrix:
        lines.append(
            f"  matrix             {facts.matrix}; executed instructions are not counted in kernels that multiply matrices"
        )
        return lines + [f"  note               {doubt}" for doubt in facts.doubts]
    threads = 32 * warps
    count = facts.per_element if launch.elements else facts.per_element / threads
    unit = per if launch.elements else "thread of a program"
    lines += [
        f"  instructions       {count:,.1f} executed a{'n' if unit[0] == 'e' else ''} {unit}, busiest unit: {facts.busiest}",
        f"  FP8 conversions    {facts.conversions:,.2f} a{'n' if per == 'element' else ''} {per}",
        f"  bytes              {facts.code_bytes:,.2f} a{'n' if per == 'element' else ''} {per}, masks taken as on",
        f"  in flight          {facts.in_flight / 1024:.0f} KiB per SM before a wait; {facts.waits:.1f} waits a program",
        f"  accesses           loads {_widths(facts.loads)}; stores {_widths(facts.stores)}",
    ]
    if facts.doubts:
        lines += [f"  note               {doubt}" for doubt in facts.doubts]
        lines.append("  predicted          nothing: loop counts are in doubt")
    elif has_grid and facts.share:
        shares = ", ".join(f"{gpu} {share:.0%}" for gpu, share in facts.share.items())
        lines.append(
            f"  predicted          share of copy bandwidth: {shares} (docs/kernels.md)"
            if arch == 90
            else "  predicted          nothing: the model is of sm_90"
        )
    else:
        lines.append("  predicted          nothing: it takes grid=N")
    return lines


def _widths(shares: dict[int, float]) -> str:
    return " + ".join(f"{8 * size} bits {part:.0%}" for size, part in shares.items()) or "none"
