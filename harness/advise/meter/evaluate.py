"""One instruction -> the registers and predicates that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from harness.advise.meter import integers
from harness.advise.meter.integers import Truth, Value

if TYPE_CHECKING:
    from harness.advise.meter.sass import Instruction

Results = tuple[dict[str, Value], dict[str, Truth]]
_MOVES = frozenset({"MOV", "UMOV", "R2UR", "MOV32I"})
_FLOATING = ("F", "H", "D", "MUFU", "Q")
_WAITS = frozenset({"SYNCS", "UCGABAR", "WARPGROUP", "ELECT", "ACQBULK"})
_FROM_MEMORY = frozenset(
    {"LDG", "LD", "LDS", "LDSM", "LDL", "ATOM", "ATOMG", "ATOMS", "SHFL", "REDUX", "CREDUX", "UTMA"}
)
_NO_RESULT = frozenset(
    {"STG", "ST", "STS", "STSM", "STL", "RED", "REDG", "LDGSTS", "BAR", "DEPBAR", "LDGDEPBAR"}
)
_SPECIAL = {"SR_TID.X": 0, "SR_TID.Y": 0, "SR_TID.Z": 0, "SR_LANEID": 0, "SR_CgaCtaId": 0, "SRZ": 0}


class State(Protocol):
    """What an instruction reads."""

    program: tuple[int, int, int]

    def word(self, text: str) -> Value: ...
    def truth(self, text: str) -> Truth: ...
    def _constant(self, text: str, plus: int = 0) -> Value: ...


def evaluate(state: State, instruction: Instruction) -> Results:
    """(registers, predicates) that it writes; unknown ones with the reason."""
    name = instruction.name
    parts = instruction.opcode.split(".")[1:]
    plain = name[1:] if name.startswith("U") and name not in ("UTMALDG", "UTMASTG") else name
    if name in _NO_RESULT or not instruction.operands:
        return {}, {}
    heads, sources = _split(instruction.operands)
    if not heads:
        return {}, {}
    if plain in ("ISETP",):
        return _compare(state, parts, heads, sources)
    if name == "FCHK":
        return {}, {heads[0]: False}
    if plain == "PLOP3":
        table = integers.literal(sources[3]) if len(sources) > 3 else None
        if table is None:
            return _unknown(instruction, heads, name)
        truths: dict[str, Truth] = {
            heads[0]: integers.look_up_truth(table, [state.truth(s) for s in sources[:3]])
        }
        return {}, truths | dict.fromkeys(heads[1:], name)
    registers = [head for head in heads if not _is_predicate(head)]
    predicates = [head for head in heads if _is_predicate(head)]
    if not registers and plain != "LOP3":
        return {}, dict.fromkeys(predicates, _reason(name))
    values = _value(state, name, plain, set(parts), sources)
    target = registers[0] if registers else "RZ"
    written: dict[str, Value] = {}
    if values is None or isinstance(values, str):
        reason = values or _reason(name)
        written = dict.fromkeys(_span(target, _count(instruction)), reason)
        return written, dict.fromkeys(predicates, reason)
    numbers, carry = values
    written = dict(zip(_span(target, len(numbers)), numbers, strict=False))
    truths = dict.fromkeys(predicates, name)
    if predicates and carry is not None:
        truths[predicates[0]] = carry
    return written, truths


def _reason(name: str) -> str:
    if name in _WAITS:
        return "barrier"
    if name in _FROM_MEMORY:
        return "load"
    return "float" if name.startswith(_FLOATING) and name != "FLO" else name


def _unknown(instruction: Instruction, heads: list[str], reason: str) -> Results:
    registers = [head for head in heads if not _is_predicate(head)]
    spans = [name for head in registers for name in _span(head, _count(instruction))]
    return dict.fromkeys(spans, reason), dict.fromkeys((h for h in heads if _is_predicate(h)), reason)


def _count(instruction: Instruction) -> int:
    if "WIDE" in instruction.opcode:
        return 2
    if instruction.name == "LDSM":
        last = instruction.opcode.rsplit(".", 1)[1]
        return int(last) if last.isdigit() else 1
    return max(1, instruction.access_bytes // 4)


def _is_predicate(text: str) -> bool:
    return text in ("PT", "UPT") or (text.lstrip("U").startswith("P") and text.lstrip("UP").isdigit())


def _is_register(text: str) -> bool:
    bare = text.removeprefix("U")
    return bare == "RZ" or (bare.startswith("R") and bare[1:].isdigit())


def _split(operands: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Destinations, then sources: one register with the predicates around it, or one or two predicates."""
    heads: list[str] = []
    at = 0
    if _is_predicate(operands[0]):
        while at < min(2, len(operands)) and _is_predicate(operands[at]):
            heads.append(operands[at])
            at += 1
        if (
            at == 1 and at < len(operands) and _is_register(operands[at]) and len(operands) > 5
        ):  # LOP3 P0, R1, ...
            heads.append(operands[at])
            at += 1
        return heads, list(operands[at:])
    if not _is_register(operands[0]):
        return [], list(operands)
    heads.append(operands[0])
    at = 1
    while at < len(operands) - 1 and _is_predicate(operands[at]) and at < 3:
        heads.append(operands[at])
        at += 1
    return heads, list(operands[at:])


def _span(first: str, count: int) -> list[str]:
    prefix = first.rstrip("0123456789")
    if prefix in ("RZ", "URZ") or first == prefix:
        return []
    return [f"{prefix}{int(first[len(prefix) :]) + i}" for i in range(count)]


def _pair(state: State, text: str) -> Value:
    """A 64-bit operand: a register and the next."""
    low = state.word(text)
    if isinstance(low, str) or not _is_register(text.lstrip("-")) or text in ("RZ", "URZ"):
        return low
    high = state.word(_span(text.lstrip("-"), 2)[1])
    return high if isinstance(high, str) else (high << 32) | low


def _carry(state: State, texts: list[str]) -> Value:
    total = 0
    for text in texts:
        truth = state.truth(text)
        if isinstance(truth, str):
            return truth
        total += truth
    return total


def _value(
    state: State, name: str, plain: str, parts: set[str], sources: list[str]
) -> tuple[tuple[int, ...], bool | None] | str | None:
    """(words, carry out), the reason why they are unknown, or None for an instruction that is not evaluated."""
    flags = [text for text in sources if _is_predicate(text.lstrip("!"))]
    rest = [text for text in sources if text not in flags]
    if name in ("S2R", "S2UR", "CS2R"):
        words: list[Value] = [_special(state, rest[0])]
        if name == "CS2R" and "32" not in parts:
            words.append(0)
        reason = integers.unknown(words)
        return reason or (tuple(w for w in words if isinstance(w, int)), None)
    if name in ("LDC", "ULDC", "LDCU"):
        count = 4 if "128" in parts else 2 if "64" in parts else 1
        constants = [state._constant(rest[0], 4 * i) for i in range(count)]
        return integers.unknown(constants) or (tuple(c for c in constants if isinstance(c, int)), None)
    if plain in _MOVES or name in _MOVES:
        return _known(state, rest[:1], lambda a: ((a,), None))
    if plain == "IMAD" or plain == "IMAD32I":
        if {"WIDE", "HI"} & parts:
            third = _pair(state, rest[2])
            return _known(
                state, rest[:2], lambda a, b, c: (integers.multiply_add(parts, a, b, c), None), third
            )
        carry = _carry(state, flags) if "X" in parts else 0
        return _known(
            state, rest[:3], lambda a, b, c, n: (integers.multiply_add(parts, a, b, c, n), None), carry
        )
    if plain in ("IADD3", "VIADD", "IADD", "VIADD3"):
        carry = _carry(state, flags) if "X" in parts else 0
        return _add(state, rest[:3], carry)
    if plain == "LEA":
        if "HI" in parts and "SX32" not in parts:
            a, b, high, by = rest[0], rest[1], rest[2], rest[3]
        else:
            a, b, high, by = rest[0], rest[1], "RZ", rest[-1]
        carry = _carry(state, flags[:1]) if "X" in parts else 0

        def add(a: int, b: int, high: int, by: int, n: int) -> tuple[tuple[int, ...], bool]:
            total, out = integers.shifted_add(parts, a, b, high, by, n)
            return (total,), bool(out)

        return _known(state, [a, b, high, by], add, carry)
    if plain == "SHF":
        return _known(state, rest[:3], lambda a, by, c: ((integers.shift(parts, a, by, c),), None))
    if plain == "LOP3":

        def words3(a: int, b: int, c: int, table: int) -> tuple[tuple[int, ...], bool]:
            result = integers.look_up(table, a, b, c)
            return (result,), result != 0

        return _known(state, rest[:4], words3)
    if plain == "SEL":
        picked = state.truth(flags[0])
        if isinstance(picked, str):
            first, second = state.word(rest[0]), state.word(rest[1])
            return ((first,), None) if isinstance(first, int) and first == second else picked
        return _known(state, [rest[0 if picked else 1]], lambda a: ((a,), None))
    if plain in ("IMNMX", "VIMNMX"):
        smaller = state.truth(flags[-1])
        if isinstance(smaller, str):
            return smaller
        order = (lambda v: v) if "U32" in parts else integers.signed
        pick = min if smaller else max
        return _known(state, rest[:2], lambda a, b: ((pick(a, b, key=order),), None))
    if plain == "IABS":
        return _known(state, rest[:1], lambda a: ((abs(integers.signed(a)),), None))
    if plain == "SGXT":

        def extend(a: int, width: int) -> tuple[tuple[int, ...], None]:
            low = a & ((1 << width) - 1)
            if "U32" not in parts and width and low >> (width - 1) & 1:
                low -= 1 << width
            return (low & integers.MASK,), None

        return _known(state, rest[:2], extend)
    if plain == "PRMT":
        return _known(state, rest[:3], lambda a, s, b: ((integers.permute(a, s, b),), None))
    if name == "HFMA2" and rest[:2] == ["-RZ", "RZ"]:  # how a constant is made on the floating-point pipe
        return _halves(rest[2:4])
    if name == "I2F" or name == "I2FP":
        return _known(state, rest[:1], lambda a: ((integers.from_integer(parts, a),), None))
    if name == "F2I":
        return _known(state, rest[:1], lambda a: ((integers.to_integer(parts, a),), None))
    if name == "MUFU" and "RCP" in parts:
        return _known(state, rest[:1], lambda a: ((integers.reciprocal(a),), None))
    return None


def _special(state: State, text: str) -> Value:
    for axis, index in zip("XYZ", state.program, strict=True):
        if text == f"SR_CTAID.{axis}":
            return index
    return _SPECIAL.get(text, text)


def _halves(texts: list[str]) -> tuple[tuple[int, ...], None]:
    import struct

    high, low = (int(struct.unpack("<H", struct.pack("<e", float(text)))[0]) for text in texts)
    return ((high << 16) | low,), None


def _add(state: State, texts: list[str], carry: Value) -> tuple[tuple[int, ...], bool | None] | str:
    """A sum whose carry out is that of adding complements, as the hardware's."""
    if isinstance(carry, str):
        return carry
    total = carry
    for text in texts:
        negative = text.startswith("-") and integers.literal(text) is None
        value = state.word(text.lstrip("-") if negative else text)
        if isinstance(value, str):
            return value
        total += (~value & integers.MASK) + 1 if negative else value
    return (total & integers.MASK,), bool(total >> 32)


def _known(
    state: State, texts: list[str], function: object, *more: Value
) -> tuple[tuple[int, ...], bool | None] | str:
    values = [*(state.word(text) for text in texts), *more]
    reason = integers.unknown(values)
    if reason is not None:
        return reason
    return function(*values)  # type: ignore[operator]


def _compare(state: State, parts: list[str], heads: list[str], sources: list[str]) -> Results:
    flags = [text for text in sources if _is_predicate(text.lstrip("!"))]
    a, b = (state.word(text) for text in sources[:2])
    lower: Truth = state.truth(flags[1]) if "EX" in parts and len(flags) > 1 else True
    reason = integers.unknown([a, b, lower])
    if reason is not None or isinstance(a, str) or isinstance(b, str) or isinstance(lower, str):
        return {}, dict.fromkeys(heads, reason or "ISETP")
    result = integers.compare(parts, a, b, lower)
    other: Truth = state.truth(flags[0]) if flags else True
    truths: dict[str, Truth] = {heads[0]: integers.combine(parts, result, other)}
    if len(heads) > 1:
        truths[heads[1]] = integers.combine(parts, not result, other)
    return {}, truths
