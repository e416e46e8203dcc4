"""Compiles a kernel ahead of time with the installed Triton and takes the machine code apart. Needs no GPU."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.advise.meter.sass import UnreadableCodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ARGUMENTS_AT = {8: 0x160, 9: 0x210, 10: 0x380, 12: 0x380}  # in constant bank 0, by major compute capability
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w)(\d+)[^,()\[]*?(?:\[(\d+)\])?\s*(?=[,)\n])")


class BuildError(ValueError):
    """The kernel cannot be compiled or taken apart; the message is one line."""


@dataclass(frozen=True)
class Built:
    """One compiled kernel.

    Attributes:
        ptx: the compiler's assembly.
        sass: machine code as nvdisasm prints it.
        registers: of a thread.
        stack: bytes of a thread's stack: 0 unless registers spill or arrays are indexed.
        local: bytes of local memory.
        shared: bytes of shared memory of a program.
        triton: version.
    """

    ptx: str
    sass: str
    registers: int
    stack: int
    local: int
    shared: int
    triton: str

    def places(self, start: int) -> list[tuple[int, int]]:
        """(address, bytes) of each parameter that the PTX declares, the first one at `start`, suitably aligned."""
        head = self.ptx.split(".entry", 1)[1].split(")", 1)[0] + ")"
        declared = [
            (_SIZES[bits] * int(count or 1), int(align or _SIZES[bits]))
            for align, _, bits, count in _PARAMETER.findall(head)
        ]
        at = _up(start, max((align for _, align in declared), default=1))
        found = []
        for size, align in declared:
            at = _up(at, align)
            found.append((at, size))
            at += size
        return found


def _up(address: int, to: int) -> int:
    return -(-address // to) * to


def tools() -> Path:
    """The folder with cuobjdump and nvdisasm, which lie in Triton's wheel.

    Raises:
        BuildError: they are not there.
    """
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for tool in ("cuobjdump", "nvdisasm"):
        if not (folder / tool).is_file():
            raise BuildError(
                f"{tool} is not in {folder}: this Triton comes without the tools that read machine code"
            )
    return folder


def build(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: Sequence[int],
    options: Mapping[str, Any],
    capability: int,
) -> Built:
    """Compiles one specialisation for `sm_<capability>` and disassembles it.

    Raises:
        BuildError: Triton or its assembler refuses it; its last line says why.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    folder = tools()
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    try:
        source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants), attrs=attributes)
        with contextlib.redirect_stdout(io.StringIO()):  # ptxas errors dump the whole PTX there
            built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    except Exception as error:
        raise BuildError(
            f"Triton {triton.__version__} refuses it for sm_{capability}: {_gist(error)}"
        ) from error
    with tempfile.TemporaryDirectory() as temporary:
        cubin = Path(temporary) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        usage = _run([folder / "cuobjdump", "-res-usage", cubin])
        sass = _run([folder / "nvdisasm", "-c", cubin])
    figures = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if not figures:
        raise UnreadableCodeError(f"cuobjdump -res-usage printed no registers: {usage.strip()[-200:]!r}")
    registers, stack, local = (int(n) for n in figures.groups())
    return Built(built.asm["ptx"], sass, registers, stack, local, built.metadata.shared, triton.__version__)


def _run(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"{Path(command[0]).name} ended with code {done.returncode}: {done.stderr.strip()[-200:]}"
        )
    return done.stdout


def _gist(error: Exception) -> str:
    """The lines of a compiler's message that say what is wrong, as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|Error|not supported|must|expected", line)]
    return f"{type(error).__name__}: {(telling or lines or ['no message'])[-1][:300]}"
