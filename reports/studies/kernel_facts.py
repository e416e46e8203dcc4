"""What fp8core's Triton kernels become on a Hopper GPU, read without one: `make aot` writes it into reports/published/studies/kernels.md.

Every launcher runs on tensors without memory for a device that is only claimed. What it would start is recorded, compiled
for sm_90 and disassembled by the tools in Triton's wheel. All figures are static: of the kernel's longest loop, or of the
whole kernel where none is left, each instruction counted once.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8core.kernels import launch, launchers, tuning
from fp8core.kernels.occupancy import programs_per_processor

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "reports" / "published" / "studies" / "kernels.md"
BEGIN, END = "<!-- made by make aot: begin -->", "<!-- made by make aot: end -->"
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
TYPES = {
    torch.float32: "fp32",
    BF16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    E4M3: "fp8e4nv",
    E5M2: "fp8e5",
}
# Units by the CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions", and Nsight Compute's pipelines.
PIPES = {
    "fma": "FADD|FMUL|FFMA|FADD2|FMUL2|FFMA2|HADD2|HMUL2|HFMA2|IMAD|IDP",
    "xu": "MUFU|I2F|F2I|F2F|FRND|POPC|FLO|BREV",
    "memory": "LD.*|ST.*|ATOM.*|RED.*",
    "": r"BRA|EXIT|BAR|BSSY|BSYNC|CALL|RET|NOP|WARPSYNC|DEPBAR|BREAK|U.*|SYNCS|WARPGROUP|R2UR|S2.*|\w*MMA",
}  # all others: "alu"
_WAIT = 4  # instructions of a loop that waits for a barrier
ONE = torch.ones(())


class Launch(NamedTuple):
    """One specialisation; hashable, so that each is compiled once."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.kernel.fn.__name__} {self.tile} {dict(self.options)}"

    @property
    def tile(self) -> tuple[int, ...]:
        """Sides of the block that one pass of the main loop handles."""
        sides = tuple(value for name, value in self.constants if name.startswith("BLOCK"))
        return 2 * sides if "SQUARE" in dict(self.constants) else sides

    @property
    def warps(self) -> int:
        return int(dict(self.options)["num_warps"])


class Built(NamedTuple):
    """One compiled kernel: assembly, machine code, and bytes of a thread's stack and of a program's shared memory."""

    ptx: str
    sass: str
    registers: int
    stack: int
    shared: int


class Facts(NamedTuple):
    """What a kernel's machine code shows.

    Attributes:
        registers: of a thread.
        stack: bytes that a thread spills.
        shared: bytes of a program.
        ctas_per_sm: programs that an SM runs at a time.
        issued: instructions of the main loop for each element of its tile, all threads.
        pipes: of these, by the unit that they occupy.
        conversions: to FP8, for each element of the tile.
        loaded: bytes of global memory that one pass of the main loop reads, in all programs of an SM.
    """

    registers: int
    stack: int
    shared: int
    ctas_per_sm: int
    issued: float
    pipes: dict[str, float]
    conversions: float
    loaded: int


def calls(x: torch.Tensor, dtype: torch.dtype = E4M3, grouped: bool = True) -> dict[str, tuple[Any, ...]]:
    """Arguments of each operator but the product, for one activation.

    Args:
        x: two sides.
        dtype: of the codes.
        grouped: scales of rows and blocks are powers of two and those of whole tensors are not, as in the recipes; or the
            other way round.
    """
    row, rstd = x[0], torch.ones(len(x), 1)
    delayed = (ONE, dtype, not grouped, 0)
    return {
        "amax": (x,),
        "amax_rows_cols": (x,),
        "cast": (x, ONE, dtype, not grouped),
        "cast_both": (x, ONE, dtype, not grouped),
        "cast_delayed": (x, *delayed),
        "cast_delayed_both": (x, *delayed),
        "cast_rowwise": (x, dtype, grouped),
        "cast_rowwise_both": (x, dtype, grouped),
        "cast_1x128": (x, dtype, grouped),
        "cast_1x128_both": (x, dtype, grouped),
        "cast_128x128_both": (x, dtype, grouped),
        "cast_mx": (x, dtype, "rceil"),
        "cast_mx_both": (x, dtype, "even"),
        "rms_norm": (x, row, 1e-5),
        "rms_norm_amax": (x, row, 1e-5),
        "rms_norm_backward": (x, x, row, rstd),
        "add_rms_norm": (x, x, row, 1e-5),
        "add_rms_norm_amax": (x, x, row, 1e-5),
        "add_rms_norm_backward": (x, x, x, row, rstd),
        "swiglu": (x, x),
        "swiglu_amax": (x, x),
        "swiglu_backward": (x, x, x),
    }


def record(operator: str, args: Sequence[Any], capability: int = 90) -> list[Launch]:
    """What the operator's launcher starts on such a device, in order; of a tuned one all candidates, the default last."""
    found: list[Launch] = []

    def started(kernel: Any, grid: Any, *args: Any, device: torch.device, **keywords: Any) -> None:
        options = {
            "num_warps": keywords.pop("num_warps", 8),
            "num_stages": keywords.pop("num_stages", 2),
            "enable_fp_fusion": keywords.pop("fp_fusion", False),
        }
        signature = dict(zip(kernel.arg_names, map(_type, args), strict=False))
        signature |= dict.fromkeys(keywords, "constexpr")
        assert list(signature) == kernel.arg_names, "arguments of the launch are not those of the kernel"
        aligned = tuple(i for i, arg in enumerate(args) if _is_aligned(arg))
        tuples = (tuple(each.items()) for each in (keywords, options))
        found.append(Launch(kernel, tuple(signature.items()), aligned, *tuples))

    def choose(*args: Any) -> Any:
        default, *others = args[4]
        for candidate in others:
            args[5](candidate)
        return default

    target = launch.Target(capability, 132, launch.native_cast(capability), f"sm_{capability}")
    with (
        patch.multiple(launch, launch=started, target_of=lambda device: target),
        patch.object(tuning, "choose", choose),
    ):
        launchers.LAUNCHERS[operator](*args)
    assert found
    return found


def _type(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return "*" + TYPES[arg.dtype]
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{TYPES[arg.base.dtype]}{list(arg.block_shape)}>"
    return "fp32" if isinstance(arg, float) else "i32"


def _is_aligned(arg: Any) -> bool:
    """PyTorch's memory is, integers are where they are multiples of 16."""
    return isinstance(arg, torch.Tensor) or (isinstance(arg, int) and arg % 16 == 0)


@cache
def build(started: Launch, capability: int = 90) -> Built:
    """Compiles ahead of time and takes the machine code apart."""
    attributes = {(i,): [["tt.divisibility", 16]] for i in started.aligned}
    source = ASTSource(
        fn=started.kernel,
        signature=dict(started.signature),
        constexprs=dict(started.constants),
        attrs=attributes,
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(started.options))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = _output("cuobjdump", "-res-usage", cubin)
        sass = _output("nvdisasm", "-c", cubin)
    figures = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert figures, usage
    registers, stack, local = map(int, figures.groups())
    return Built(built.asm["ptx"], sass, registers, max(stack, local), built.metadata.shared)


def _output(tool: str, *words: str | Path) -> str:
    return subprocess.run([TOOLS / tool, *words], capture_output=True, text=True, check=True).stdout


def main_loop(sass: str) -> list[str]:
    """Opcodes from the target of the farthest backward branch to that branch; without one, all up to the last exit.

    Waits for a barrier are no loops, nor is the branch to itself behind the last exit.
    """
    at: dict[str, int] = {}
    code: list[str] = []
    loop = range(0)
    for line in map(str.strip, sass.splitlines()):
        if line.startswith("$"):
            break  # the slow path of a division
        if label := re.match(r"(\.L_x?_?\d+):", line):
            at[label[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", line):
            code.append(found[1])
            back = re.search(r"\.L_x?_?\d+", found[2]) if found[1].startswith("BRA") else None
            if back and len(code) - at.get(back[0], len(code)) > max(len(loop), _WAIT):
                loop = range(at[back[0]], len(code))
    if not loop:
        loop = range(len(code) - code[::-1].index("EXIT"))
    return [code[i] for i in loop]


def pipe_of(opcode: str) -> str:
    """The unit of an SM that an instruction occupies; "" where only the issue slot counts.

    >>> pipe_of("FMUL"), pipe_of("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"), pipe_of("LDG.E.128"), pipe_of("QGMMA.64x8x32")
    ('fma', 'alu', 'memory', '')
    """
    name = opcode.split(".", 1)[0]
    return next((pipe for pipe, names in PIPES.items() if re.fullmatch(names, name)), "alu")


def facts(started: Launch, capability: int = 90) -> Facts:
    """Compiles one launch and reads it."""
    built = build(started, capability)
    code = main_loop(built.sass)
    threads, elements = 32 * started.warps, math.prod(started.tile)
    pipes = Counter(map(pipe_of, code))
    conversions = sum(2 * bool(re.match(r"F2FP.*E[45]M[23]", op)) for op in code)
    loads = (re.search(r"\.(?:[US])?(8|16|64|128)\b", op) for op in code if op.startswith("LDG"))
    loaded = sum(int(width[1]) if width else 32 for width in loads) // 8
    resident = programs_per_processor(built.registers, started.warps, built.shared, capability)
    return Facts(
        *(built.registers, built.stack, built.shared, resident, len(code) * threads / elements),
        {pipe: count * threads / elements for pipe, count in pipes.items()},
        conversions * threads / elements,
        loaded * threads * resident,
    )


def table() -> str:
    """Each kernel's default tile on the largest activation of a Llama-3-8B block, with this process's Triton."""
    units = ("fma", "alu", "xu", "memory")
    lines = [
        f"### bfloat16 to e4m3, Triton {triton.__version__}",
        "",
        "| operator, kernel | tile, warps | registers | spilled B | shared KB | CTA/SM | instr./element "
        f"| {' | '.join(units)} | conv./element | KB loaded/SM |",
        "|---" * (9 + len(units)) + "|",
    ]
    for operator, args in calls(torch.empty(16384, 4096, dtype=BF16, device="meta")).items():
        last = {started.kernel: started for started in record(operator, args)}
        for started in last.values():
            read = facts(started)
            tile = "x".join(map(str, started.tile))
            lines.append(
                f"| `{operator}`, `{started.kernel.fn.__name__}` | {tile},{started.warps} | {read.registers} | {read.stack} "
                f"| {read.shared / 1024:.0f} | {read.ctas_per_sm} | {read.issued:.1f} "
                f"| {' | '.join(f'{read.pipes.get(unit, 0):.1f}' for unit in units)} "
                f"| {read.conversions:.2f} | {read.loaded / 1024:.0f} |"
            )
    return "\n".join(lines) + "\n"


def main(folders: Sequence[str]) -> int:
    """`kernel_facts.py FOLDER...` writes the page's tables, with the Triton in each folder and with the installed one;
    without a folder the table is printed."""
    if not folders:
        print(table())
        return 0
    tables = []
    for folder in (*folders, ""):
        path = os.pathsep.join(filter(None, (folder, str(ROOT), os.environ.get("PYTHONPATH"))))
        words = [sys.executable, __file__]
        tables.append(
            subprocess.run(
                words, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{''.join(tables)}{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
