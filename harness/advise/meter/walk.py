"""Follows one program of a launch through its machine code and counts what it executes.

Integers, and predicates made of them, are evaluated for thread 0 of the program, with the launch's own arguments: so
loops run as often as they would, inner ones and those of a prologue too. Whatever came from memory or from floating
point is unknown. Where a branch depends on it:

    forward     not taken: the skipped part is executed, so the count is an upper bound. Slow paths of a division are an
                exception: FCHK says that the operands are normal numbers
    backward    not taken: the loop ends. Where the unknown is a wait for a barrier, that is one try and right; else the
                walk says so in `open_loops`, and the count is a lower bound

An instruction whose predicate is off still takes an issue slot, so it counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.advise.meter import integers
from harness.advise.meter.integers import MASK, Truth, Value
from harness.advise.meter.sass import UnreadableCodeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.advise.meter.sass import Instruction

MAX_STEPS = 1_000_000
_BLOCK_SIZE, _GRID_SIZE = {True: 0x360, False: 0x0}, {True: 0x370, False: 0xC}  # sm_100 and newer: True
_NO_RESULT = frozenset(
    {"ST", "STG", "STS", "STSM", "STL", "RED", "REDG", "UTMASTG", "SYNCS", "BSYNC", "BSSY"}
)


@dataclass
class Executed:
    """What a warp of one program executed.

    Attributes:
        opcodes: instructions issued, by opcode with suffixes.
        loaded: bytes that a thread loads from global memory, by bytes of one access.
        stored: bytes that a thread stores to global memory, by bytes of one access.
        waits: times that a program waits for global memory with nothing else in flight; a wait with one half of the
            requests of a software pipeline still under way counts 0.5.
        in_flight: most bytes that a thread has requested before it waits for any of them.
        open_loops: addresses of loops whose end depends on data, with the reason.
        forks: forward branches that depend on data; the skipped part was counted.
    """

    opcodes: Counter[str] = field(default_factory=Counter)
    loaded: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    waits: float = 0.0
    in_flight: int = 0
    open_loops: dict[int, str] = field(default_factory=dict)
    forks: int = 0


class Walk:
    """One thread's registers and the path of its program."""

    def __init__(
        self,
        code: Sequence[Instruction],
        words: Mapping[int, int],
        program: tuple[int, int, int],
        grid: tuple[int, int, int],
        threads: int,
        capability: int,
    ) -> None:
        """Starts at the entry of `code`.

        Args:
            code: of the kernel.
            words: the kernel's arguments as 32-bit words, by their offset in constant bank 0.
            program: its indices in the grid.
            grid: programs in three dimensions.
            threads: of a program.
            capability: 10 * major + minor of the compute capability.
        """
        newer = capability >= 100
        self.code, self.program = code, program
        self.words = {
            **words,
            **{_BLOCK_SIZE[newer] + 4 * i: size for i, size in enumerate((threads, 1, 1))},
            **{_GRID_SIZE[newer] + 4 * i: size for i, size in enumerate(grid)},
        }
        self.registers: dict[str, Value] = {}
        self.truths: dict[str, Truth] = {}
        self.executed = Executed()
        self._pending: dict[str, int] = {}  # destination of a load -> number of its request
        self._requests: dict[int, int] = {}  # request -> bytes
        self._groups: list[int] = []  # bytes of the committed groups of asynchronous copies
        self._group = 0

    def run(self) -> Executed:
        """Follows the program to its end.

        Raises:
            UnreadableCodeError: a jump by a register, or more steps than MAX_STEPS.
        """
        at, returns = 0, list[int]()
        for _ in range(MAX_STEPS):
            if at >= len(self.code):
                return self.executed
            instruction = self.code[at]
            self.executed.opcodes[instruction.opcode] += 1
            self._wait_for_operands(instruction)
            on = self.truth(instruction.guard) if instruction.guard else True
            name = instruction.name
            if name == "EXIT":
                if on is True:
                    return self.executed
            elif name == "RET":
                if on is not False:
                    if not returns:
                        return self.executed
                    at = returns.pop()
                    continue
            elif name in ("BRA", "JMP", "CALL", "BRX", "JMX"):
                if self._branches(instruction, on, at):
                    if instruction.target is None:
                        raise UnreadableCodeError(
                            f"{instruction.opcode} at {instruction.address:#x} jumps by a register"
                        )
                    if name == "CALL":
                        returns.append(at + 1)
                    at = instruction.target
                    continue
            elif on is not False:
                self._execute(instruction, on)
            at += 1
        raise UnreadableCodeError(f"the program has not ended after {MAX_STEPS:,} instructions")

    def _branches(self, instruction: Instruction, on: Truth, at: int) -> bool:
        if on is False or ".DIV" in instruction.opcode:
            return False
        for operand in instruction.operands:  # BRA P1, `(label): one more condition
            if operand.lstrip("!").rstrip("0123456789") in ("P", "UP"):
                condition = self.truth(operand)
                on = condition if on is True else on
                if condition is False:
                    return False
        if on is True:
            return True
        if instruction.target is not None and instruction.target <= at:
            if on != "barrier":
                self.executed.open_loops[instruction.address] = str(on)
        else:
            self.executed.forks += 1
        return False

    # Memory

    def _wait_for_operands(self, instruction: Instruction) -> None:
        """Reading a register that a load has not filled yet waits for all requests so far."""
        if not self._pending:
            return
        sources = instruction.operands if instruction.name in _NO_RESULT else instruction.operands[1:]
        for operand in sources:
            for name in _names(operand, _width_of_source(instruction, operand)):
                if name in self._pending:
                    self._settle(1.0)
                    return

    def _settle(self, waits: float) -> None:
        self.executed.waits += waits
        self._pending.clear()
        self._requests.clear()

    def _request(self, size: int) -> None:
        number = len(self._requests)
        self._requests[number] = size
        in_flight = sum(self._requests.values()) + self._group + sum(self._groups)
        self.executed.in_flight = max(self.executed.in_flight, in_flight)

    def _memory(self, instruction: Instruction) -> None:
        name, size = instruction.name, instruction.access_bytes
        if name in ("LDG", "LD"):
            self.executed.loaded[size] += size
            self._request(size)
            for register in _registers(instruction.operands[0], max(1, size // 4)):
                self._pending[register] = len(self._requests) - 1
        elif name == "LDGSTS":
            self.executed.loaded[size] += size
            self._group += size
            in_flight = sum(self._requests.values()) + self._group + sum(self._groups)
            self.executed.in_flight = max(self.executed.in_flight, in_flight)
        elif name == "LDGDEPBAR":
            self._groups.append(self._group)
            self._group = 0
        elif name == "DEPBAR":
            may_remain = next(
                (value for op in instruction.operands[1:] if (value := integers.literal(op)) is not None), 0
            )
            whole = sum(self._groups)
            done = self._groups[: max(0, len(self._groups) - may_remain)]
            if whole and sum(done):
                self.executed.waits += sum(done) / whole
            self._groups = self._groups[len(done) :]
        elif name in ("STG", "ST"):
            self.executed.stored[size] += size

    # Registers

    def word(self, text: str) -> Value:
        """The value of a source operand."""
        number = integers.literal(text)
        if number is not None:
            return number
        if text.startswith("c["):
            return self._constant(text)
        negated, inverted = text.startswith("-"), text.startswith("~")
        bare = text.lstrip("-~")
        absolute = bare.startswith("|")
        bare = bare.strip("|").split(".")[0]
        value: Value = 0 if bare in ("RZ", "URZ", "SRZ") else self.registers.get(bare, f"{bare} unset")
        if isinstance(value, str):
            return value
        if absolute:
            value = abs(integers.signed(value))
        if negated:
            value = -value & MASK
        return ~value & MASK if inverted else value

    def _constant(self, text: str, plus: int = 0) -> Value:
        parts = text.rstrip("]").replace("c[", "").split("][")
        if len(parts) != 2 or parts[0] != "0x0" or not parts[1].startswith("0x"):
            return "constant"
        return self.words.get(int(parts[1], 16) + plus, "argument")

    def truth(self, text: str) -> Truth:
        """The value of a predicate operand."""
        negated, bare = text.startswith("!"), text.lstrip("!")
        value: Truth = True if bare in ("PT", "UPT") else self.truths.get(bare, f"{bare} unset")
        return value if isinstance(value, str) else value != negated

    def _execute(self, instruction: Instruction, on: Truth) -> None:
        from harness.advise.meter.evaluate import evaluate

        self._memory(instruction)
        registers, truths = evaluate(self, instruction)
        for name, value in registers.items():
            self._pending.pop(name, None) if instruction.name not in ("LDG", "LD") else None
            self.registers[name] = value if on is True else on
        for name, truth in truths.items():
            if name not in ("PT", "UPT"):
                self.truths[name] = truth if on is True else on


def _registers(first: str, count: int) -> list[str]:
    """R4, 2 -> R4, R5."""
    bare = first.strip("-~|").split(".")[0]
    prefix = bare.rstrip("0123456789")
    if prefix not in ("R", "UR") or bare == prefix:
        return []
    number = int(bare[len(prefix) :])
    return [f"{prefix}{number + i}" for i in range(count)]


def _names(operand: str, width: int) -> list[str]:
    """Registers that an operand reads, those of an address too."""
    import re

    names = []
    for bare in re.findall(r"\bU?R\d+\b", operand):
        names += _registers(bare, width)
    return names


def _width_of_source(instruction: Instruction, operand: str) -> int:
    if instruction.name in ("STG", "ST", "STS", "STSM") and "[" not in operand:
        return max(1, instruction.access_bytes // 4)
    return 2 if ".64" in operand else 1
