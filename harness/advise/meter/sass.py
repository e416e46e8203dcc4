"""Machine code as nvdisasm prints it -> instructions with their operands."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_x_?\d+|\.?L\d+|\$?[\w$.]+):$")
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(?:@(!?U?P[T\d]+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\(([^)]+)\)|\b(0x[0-9a-f]+)$")
_WIDTH = re.compile(r"\.(?:[US])?(8|16|32|64|128|256)(?=\.|$)")


class UnreadableCodeError(ValueError):
    """The machine code has a form that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: byte offset in its function's section.
        guard: predicate that switches it on, for example "!P0"; "" for always. An instruction that is switched off
            still takes its issue slot.
        opcode: with all its suffixes, for example "LDG.E.128".
        operands: as printed, without ".reuse".
        target: index of the instruction that a branch or call names; None for all others.
    """

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]
    target: int | None = None

    @property
    def name(self) -> str:
        """The opcode without suffixes."""
        return self.opcode.split(".", 1)[0]

    @property
    def access_bytes(self) -> int:
        """Bytes that a memory instruction moves for one thread; the default is 4."""
        found = _WIDTH.findall(self.opcode)
        return int(found[-1]) // 8 if found else 4


def parse(text: str) -> list[Instruction]:
    """The first code section of `nvdisasm -c`, in order of addresses; `target` is an index into the list.

    Raises:
        UnreadableCodeError: no instruction, or a branch to a label that is not there.
    """
    labels: dict[str, int] = {}
    raw: list[tuple[int, str, str, str]] = []
    sections = 0
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(".section") and ".text." in stripped:
            sections += 1
            if sections > 1 and raw:
                break
        elif label := _LABEL.match(stripped):
            labels[label[1]] = len(raw)
        elif found := _INSTRUCTION.search(line):
            raw.append((int(found[1], 16), found[2] or "", found[3], found[4].rstrip("} ")))
    if not raw:
        raise UnreadableCodeError("no machine instruction in the disassembler's output")
    by_address = {address: index for index, (address, *_) in enumerate(raw)}
    return [
        Instruction(
            address, guard, opcode, _operands(rest), _target(opcode, rest, labels, by_address, len(raw))
        )
        for address, guard, opcode, rest in raw
    ]


def _operands(text: str) -> tuple[str, ...]:
    return tuple(part.strip().replace(".reuse", "") for part in text.split(",")) if text else ()


def _target(
    opcode: str, rest: str, labels: dict[str, int], by_address: dict[int, int], size: int
) -> int | None:
    if opcode.split(".")[0] not in ("BRA", "CALL", "JMP", "BSSY"):
        return None
    found = _TARGET.search(rest)
    if not found:
        return None  # by a register: the walk refuses it if it gets there
    index = labels.get(found[1]) if found[1] else by_address.get(int(found[2], 16))
    if index is None or index > size:
        raise UnreadableCodeError(f"branch to {found[0]}, which is not in the disassembler's output")
    return index
