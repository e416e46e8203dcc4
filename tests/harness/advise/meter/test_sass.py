"""Oracle: machine code written by hand, with counts that a reader can check on paper."""

from __future__ import annotations

import pytest

from harness.advise.meter import pipes, walk
from harness.advise.meter.sass import UnreadableCodeError, parse

GRID = (4, 1, 1)


def executed(text: str, words: dict[int, int] | None = None, program: int = 0) -> walk.Executed:
    return walk.Walk(parse(text), words or {}, (program, 0, 0), GRID, 128, 90).run()


def listing(*lines: str) -> str:
    """Lines as nvdisasm prints them: labels as they are, instructions with their addresses."""
    text, address = [".section\t.text.kernel"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(text)


STRAIGHT = listing(
    "MOV R2, c[0x0][0x210]",
    "@!P0 LDG.E.128 R4, desc[UR4][R2.64]",
    "FMUL R4, R4.reuse, R5",
    "STG.E.64 desc[UR4][R2.64], R4",
    "EXIT",
)
NESTED = listing(
    "MOV R0, RZ",
    ".L_x_0:",
    "MOV R1, RZ",
    ".L_x_1:",
    "LDG.E.128 R8, desc[UR4][R2.64]",
    "FADD R12, R8, R12",
    "VIADD R1, R1, 0x1",
    "ISETP.LT.AND P0, PT, R1, 0x5, PT",
    "@P0 BRA `(.L_x_1)",
    "VIADD R0, R0, 0x1",
    "ISETP.GE.AND P1, PT, R0, c[0x0][0x210], PT",
    "@!P1 BRA `(.L_x_0)",
    "EXIT",
)


def test_operands_and_widths() -> None:
    code = parse(STRAIGHT)
    load = code[1]
    assert (load.guard, load.name, load.operands) == ("!P0", "LDG", ("R4", "desc[UR4][R2.64]"))
    assert load.access_bytes == 16
    assert code[2].operands == ("R4", "R4", "R5")
    assert code[3].access_bytes == 8


def test_nested_loops_run_as_often_as_the_launch_says() -> None:
    """1 + outer * (1 + 5 * 5 + 3) + 1 instructions."""
    for outer in (1, 3, 7):
        found = executed(NESTED, {0x210: outer})
        assert sum(found.opcodes.values()) == 2 + outer * (1 + 5 * 5 + 3)
        assert found.opcodes["LDG.E.128"] == found.waits == 5 * outer
        assert found.loaded == {16: 16 * 5 * outer}


def test_an_instruction_that_is_switched_off_counts_but_moves_nothing() -> None:
    text = listing("ISETP.GT.AND P0, PT, RZ, 0x1, PT", "@P0 LDG.E R2, desc[UR4][R2.64]", "EXIT")
    found = executed(text)
    assert found.opcodes["LDG.E"] == 1
    assert not found.loaded


def test_a_loop_over_programs_depends_on_the_program() -> None:
    """Program p of 4 does rounds p, p + 4, ... below 10: three of them for 0 and 1, two for 2 and 3."""
    text = listing(
        "S2R R0, SR_CTAID.X",
        ".L_x_0:",
        "LDG.E R4, desc[UR4][R2.64]",
        "IADD3 R0, R0, c[0x0][0xc], RZ",
        "ISETP.GE.AND P0, PT, R0, 0xa, PT",
        "@!P0 BRA `(.L_x_0)",
        "EXIT",
    )
    assert [executed(text, program=p).opcodes["LDG.E"] for p in range(4)] == [3, 3, 2, 2]


def test_a_loop_that_ends_by_data_is_reported() -> None:
    text = listing(
        ".L_x_0:",
        "LDG.E R4, desc[UR4][R2.64]",
        "ISETP.GE.AND P0, PT, R4, RZ, PT",
        "@!P0 BRA `(.L_x_0)",
        "EXIT",
    )
    found = executed(text)
    assert found.open_loops == {0x20: "load"}


def test_a_wait_for_a_barrier_is_one_try() -> None:
    text = listing(".L_x_0:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR7], R2", "@!P0 BRA `(.L_x_0)", "EXIT")
    found = executed(text)
    assert not found.open_loops
    assert sum(found.opcodes.values()) == 3


def test_the_slow_path_of_a_division_is_skipped_and_its_return_understood() -> None:
    """FCHK says that the operands are normal numbers. Without it the call is made and comes back."""
    body = (
        "@!P0 BRA `(.L_x_0)",
        "CALL.REL.NOINC `($slow)",
        ".L_x_0:",
        "EXIT",
        "$slow:",
        "FADD R1, R1, R1",
        "RET.REL.NODEC R8 `(kernel)",
    )
    fast = executed(listing("FCHK P0, R1, R2", *body))
    assert "FADD" not in fast.opcodes
    slow = executed(listing("ISETP.EQ.AND P0, PT, RZ, RZ, PT", *body))
    assert slow.opcodes["FADD"] == 1
    assert slow.opcodes["EXIT"] == 1


def test_loads_are_in_flight_until_one_is_read() -> None:
    """Two loads before the first use wait once with 32 bytes under way; a use after each waits twice with 16."""
    together = executed(
        listing(
            "LDG.E.128 R4, desc[UR4][R2.64]",
            "LDG.E.128 R8, desc[UR4][R2.64+0x10]",
            "FADD R1, R4, R8",
            "FADD R1, R1, R9",
            "EXIT",
        )
    )
    assert (together.waits, together.in_flight) == (1, 32)
    apart = executed(
        listing(
            "LDG.E.128 R4, desc[UR4][R2.64]",
            "FADD R1, R4, R5",
            "LDG.E.128 R8, desc[UR4][R2.64]",
            "FADD R1, R8, R9",
            "EXIT",
        )
    )
    assert (apart.waits, apart.in_flight) == (2, 16)


def test_asynchronous_copies_wait_for_the_part_that_they_need() -> None:
    """Two groups under way, one must be there: half a wait."""
    found = executed(
        listing(
            "LDGSTS.E.128 [R1], desc[UR4][R2.64]",
            "LDGDEPBAR",
            "LDGSTS.E.128 [R1], desc[UR4][R2.64]",
            "LDGDEPBAR",
            "DEPBAR.LE SB0, 0x1",
            "EXIT",
        )
    )
    assert (found.waits, found.in_flight) == (0.5, 32)


def test_division_by_a_number_that_is_not_known_when_compiled() -> None:
    """The sequence that ptxas makes of 1000000 // 384; oracle: Python's //."""
    for a, b in ((1_000_000, 384), (8191, 64), (7, 12), (2**31 - 1, 3)):
        text = listing(
            "MOV R2, c[0x0][0x214]", "I2F.U32.RP R3, R2", "MUFU.RCP R3, R3", "VIADD R3, R3, 0xffffffe",
            "F2I.FTZ.U32.TRUNC.NTZ R5, R3", "MOV R4, RZ", "IMAD.MOV R6, RZ, RZ, -R5", "IMAD R6, R6, R2, RZ",
            "IMAD.HI.U32 R5, R5, R6, R4", "MOV R7, c[0x0][0x210]", "IMAD.HI.U32 R8, R5, R7, RZ", "IMAD.MOV R9, RZ, RZ, -R8",
            "IMAD R9, R9, R2, R7", "ISETP.GE.U32.AND P0, PT, R9, R2, PT", "@P0 IMAD.IADD R9, R9, 0x1, -R2",
            "@P0 VIADD R8, R8, 0x1", "ISETP.GE.U32.AND P0, PT, R9, R2, PT", "@P0 VIADD R8, R8, 0x1", "EXIT",
        )  # fmt: skip
        walked = walk.Walk(parse(text), {0x210: a, 0x214: b}, (0, 0, 0), GRID, 128, 90)
        walked.run()
        assert walked.registers["R8"] == a // b


def test_sums_of_64_bits_carry() -> None:
    """Oracle: Python's integers. a - b in two halves, with the borrow as the hardware makes it."""
    for a, b in ((5, 0), (1 << 32, 1), (0, 0), (7, 9)):
        text = listing(
            "MOV R0, c[0x0][0x210]", "MOV R1, c[0x0][0x214]", "MOV R2, c[0x0][0x218]", "MOV R3, c[0x0][0x21c]",
            "IADD3 R4, P0, -R2, R0, RZ", "IADD3.X R5, R1, ~R3, RZ, P0, !PT", "EXIT",
        )  # fmt: skip
        words = {0x210: a & 0xFFFFFFFF, 0x214: a >> 32, 0x218: b & 0xFFFFFFFF, 0x21C: b >> 32}
        walked = walk.Walk(parse(text), words, (0, 0, 0), GRID, 128, 90)
        walked.run()
        low, high = walked.registers["R4"], walked.registers["R5"]
        assert isinstance(low, int)
        assert isinstance(high, int)
        assert (high << 32 | low) == (a - b) % 2**64


def test_pipes() -> None:
    """By the table of the CUDA C++ Programming Guide: 128, 64 and 16 results a clock."""
    cycles = pipes.cycles(
        {"FMUL": 4, "IMAD": 2, "LOP3.LUT": 3, "MUFU.RCP": 1, "STG.E.128": 1}, {"STG.E.128": 16}
    )
    assert cycles == {"issue": 11, "fma": 6, "alu": 6, "xu": 8, "memory": 16}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing here", "no machine instruction"),
        (listing("BRA `(.L_x_9)", "EXIT"), "not in the disassembler's output"),
        (listing(".L_x_0:", "BRA `(.L_x_0)"), "has not ended after"),
        (listing("BRX R2 -0x10", "EXIT"), "jumps by a register"),
    ],
)
def test_code_that_cannot_be_followed(text: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "MAX_STEPS", 1000)
    with pytest.raises(UnreadableCodeError, match=message):
        executed(text)
