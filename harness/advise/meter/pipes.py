"""Which unit of an SM an instruction occupies, and for how long.

Cycles for one warp instruction on one of the four partitions of an SM, from the table "Throughput of Native Arithmetic
Instructions" of the CUDA C++ Programming Guide (compute capability 9.0: results per clock per SM; 128 -> 1 cycle,
64 -> 2, 16 -> 8) and Nsight Compute's list of pipelines (ALU, FMA heavy and lite, XU, LSU):

    issue    1 for every instruction
    fma      float multiply and add: 1; integer multiply-add runs on half of this unit: 2
    alu      integer, logic, compare, select, byte permutation, packing conversions to FP8 and bf16: 2
    xu       reciprocal, exponential, conversions between float and integer: 8
    memory   shared memory and L1 move 128 bytes a cycle for the whole SM: an access of 16 bytes a thread takes 4 cycles
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PARTITIONS = 4
_FLOAT = ("FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2", "HADD2", "HMUL2", "HFMA2")
_INTEGER_MULTIPLY = ("IMAD", "IMAD32I", "IDP")
_TRANSCENDENTAL = ("MUFU", "I2F", "F2I", "F2F", "FRND", "POPC", "FLO", "BREV")
_CONTROL = (
    "BRA",
    "EXIT",
    "BAR",
    "BSSY",
    "BSYNC",
    "CALL",
    "RET",
    "NOP",
    "WARPSYNC",
    "DEPBAR",
    "LDGDEPBAR",
    "BREAK",
)
_MEMORY = ("LD", "ST", "ATOM", "RED")
_MATRIX = ("HMMA", "QMMA", "HGMMA", "QGMMA", "IMMA", "IGMMA", "UTCQMMA", "UTCHMMA", "UTCOMMA")


def pipe_of(opcode: str) -> str:
    """The unit: "fma", "imad" (half of it), "alu", "xu", "memory", or "" where only the issue slot counts.

    >>> pipe_of("FMUL"), pipe_of("IMAD.U32"), pipe_of("F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C")
    ('fma', 'imad', 'alu')
    """
    name = opcode.split(".", 1)[0]
    if name in _FLOAT:
        return "fma"
    if name in _INTEGER_MULTIPLY:
        return "imad"
    if name in _TRANSCENDENTAL:
        return "xu"
    if name.startswith(_MEMORY):
        return "memory"
    if name in _CONTROL or name in _MATRIX or name.startswith(("U", "SYNCS", "WARPGROUP", "R2UR", "S2R")):
        return ""
    return "alu"


def is_matrix(opcode: str) -> bool:
    """Whether it multiplies matrices."""
    return opcode.split(".", 1)[0] in _MATRIX


def cycles(opcodes: Mapping[str, int], access_bytes: Mapping[str, int]) -> dict[str, float]:
    """Cycles that a warp's instructions keep each unit of its partition busy, one unit at a time.

    Args:
        opcodes: instructions executed by one warp.
        access_bytes: bytes that a thread moves, by opcode of the memory instructions.
    """
    count = dict.fromkeys(("fma", "imad", "alu", "xu"), 0)
    memory = 0.0
    for opcode, times in opcodes.items():
        pipe = pipe_of(opcode)
        if pipe == "memory":
            memory += times * max(1.0, 32 * access_bytes.get(opcode, 4) / 128)
        elif pipe:
            count[pipe] += times
    return {
        "issue": float(sum(opcodes.values())),
        "fma": float(max(2 * count["imad"], count["imad"] + count["fma"])),
        "alu": 2.0 * count["alu"],
        "xu": 8.0 * count["xu"],
        "memory": memory * PARTITIONS,  # one unit for all four partitions
    }
