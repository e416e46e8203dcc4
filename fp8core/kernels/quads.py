"""A tile read in quads, four rows below each other, whose codes leave as they are and transposed.

    x [M, K]     rows 4 q, 4 q + 1, 4 q + 2, 4 q + 3: four blocks [Q, C] in one and the same layout
    codes        four stores of the same kind
    codes_t      the four codes of a column of a quad are 4 bytes in a row of the transposed matrix: one word

A thread holds the same columns of all four rows, so it forms a word from its own registers. Words of 32 bits, not
bytes, then change places through shared memory: a quarter of the accesses, without taking bytes out of registers and
putting them in. A transposition of single codes (`tl.trans` of the tile) takes about twice the instructions, or is
replaced by the compiler (Triton 3.6) by one of the source, which is then converted a second time.

Where M is no multiple of 4, words would not be aligned: codes are then stored one by one, correct and slow. No FP8
matrix multiplication takes such a matrix as its operand.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

import triton
import triton.language as tl

from fp8core.kernels.encode import E4M3_ASM, E5M2_ASM, encode, magnitude_bits

# Four registers of four codes, one of each row -> four words, one of each column: a transposition of 4 x 4 bytes.
WORDS_ASM = tl.constexpr(
    "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140; prmt.b32 c, $4, $5, 0x7362; "
    "prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, b, 0x5410; prmt.b32 $1, a, b, 0x7632; "
    "prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }"
)


@triton.jit
def quads_of(tile, BLOCK_M: tl.constexpr):
    """Numbers of the quads in the tile'th block of BLOCK_M rows, [BLOCK_M / 4]."""
    return tile * (BLOCK_M // 4) + tl.arange(0, BLOCK_M // 4)


@triton.jit
def load_quads(x_ptr, q, k, M, K):
    """x [M, K] row-major -> its rows 4 q .. 4 q + 3 at columns k: a tuple of four blocks, 0 outside of x."""
    at = q.to(tl.int64)[:, None] * (4 * K) + k[None, :]
    row, in_k = 4 * q[:, None], k[None, :] < K
    return (
        tl.load(x_ptr + at, mask=(row < M) & in_k, other=0.0),
        tl.load(x_ptr + K + at, mask=(row + 1 < M) & in_k, other=0.0),
        tl.load(x_ptr + 2 * K + at, mask=(row + 2 < M) & in_k, other=0.0),
        tl.load(x_ptr + 3 * K + at, mask=(row + 3 < M) & in_k, other=0.0),
    )


@triton.jit
def encode_rows(x, scales, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Four float32 blocks [Q, C], each by its own scales [Q] -> their codes."""
    return (
        encode(x[0] * scales[0][:, None], E5M2, NATIVE),
        encode(x[1] * scales[1][:, None], E5M2, NATIVE),
        encode(x[2] * scales[2][:, None], E5M2, NATIVE),
        encode(x[3] * scales[3][:, None], E5M2, NATIVE),
    )


@triton.jit
def store_quads(codes_ptr, codes, q, k, M, K):
    """Stores four blocks as rows 4 q .. 4 q + 3 of codes [M, K]."""
    at = q.to(tl.int64)[:, None] * (4 * K) + k[None, :]
    row, in_k = 4 * q[:, None], k[None, :] < K
    tl.store(codes_ptr + at, codes[0], mask=(row < M) & in_k)
    tl.store(codes_ptr + K + at, codes[1], mask=(row + 1 < M) & in_k)
    tl.store(codes_ptr + 2 * K + at, codes[2], mask=(row + 2 < M) & in_k)
    tl.store(codes_ptr + 3 * K + at, codes[3], mask=(row + 3 < M) & in_k)


@triton.jit
def largest_of(bits):
    """The elementwise maximum of four blocks."""
    return tl.maximum(tl.maximum(bits[0], bits[1]), tl.maximum(bits[2], bits[3]))


@triton.jit
def largest_magnitude(x):
    """The elementwise maximum of the magnitudes of four blocks, as bits."""
    return largest_of([magnitude_bits(rows) for rows in x])


@triton.jit
def store_of_quads(ptr, values, q, M):
    """Stores four blocks [Q], one number for each of the rows 4 q .. 4 q + 3."""
    row = 4 * q
    tl.store(ptr + row, values[0], mask=row < M)
    tl.store(ptr + row + 1, values[1], mask=row + 1 < M)
    tl.store(ptr + row + 2, values[2], mask=row + 2 < M)
    tl.store(ptr + row + 3, values[3], mask=row + 3 < M)


@triton.jit
def store_transposed(codes_t_ptr, codes, q, k, M, K, WORDS: tl.constexpr, NATIVE: tl.constexpr):
    """Stores four blocks of codes as columns 4 q .. 4 q + 3 of codes_t [K, M]. WORDS: M is a multiple of 4."""
    if WORDS:
        if NATIVE:
            words = tl.inline_asm_elementwise(
                WORDS_ASM, "=&r,=&r,=&r,=&r,r,r,r,r", codes, dtype=tl.uint32, is_pure=True, pack=4
            )
        else:
            words = _word(codes)
        _store_words(codes_t_ptr, words, q, k, M, K)
    else:
        _store_bytes(codes_t_ptr, codes, q, k, M, K)


@triton.jit
def encode_transposed(
    codes_t_ptr, v, q, k, M, K, E5M2: tl.constexpr, WORDS: tl.constexpr, NATIVE: tl.constexpr
):
    """Encodes four float32 blocks and stores the codes as columns 4 q .. 4 q + 3 of codes_t [K, M]."""
    if WORDS and NATIVE:
        ASM: tl.constexpr = E5M2_ASM if E5M2 else E4M3_ASM
        words = tl.inline_asm_elementwise(ASM, "=r,f,f,f,f", v, dtype=tl.uint32, is_pure=True, pack=1)
        _store_words(codes_t_ptr, words, q, k, M, K)
    else:
        codes = [encode(rows, E5M2, NATIVE) for rows in v]
        store_transposed(codes_t_ptr, codes, q, k, M, K, WORDS, NATIVE)


@triton.jit
def _word(codes):
    upper = (codes[3].to(tl.uint32) << 24) | (codes[2].to(tl.uint32) << 16)
    return upper | (codes[1].to(tl.uint32) << 8) | codes[0].to(tl.uint32)


@triton.jit
def _store_words(codes_t_ptr, words, q, k, M, K):
    at = k.to(tl.int64)[:, None] * (M // 4) + q[None, :]
    keep = (k[:, None] < K) & (q[None, :] < M // 4)
    tl.store(codes_t_ptr.to(tl.pointer_type(tl.uint32)) + at, tl.trans(words), mask=keep)


@triton.jit
def _store_bytes(codes_t_ptr, codes, q, k, M, K):
    at = k.to(tl.int64)[None, :] * M + 4 * q[:, None]
    row, in_k = 4 * q[:, None], k[None, :] < K
    tl.store(codes_t_ptr + at, codes[0], mask=(row < M) & in_k)
    tl.store(codes_t_ptr + 1 + at, codes[1], mask=(row + 1 < M) & in_k)
    tl.store(codes_t_ptr + 2 + at, codes[2], mask=(row + 2 < M) & in_k)
    tl.store(codes_t_ptr + 3 + at, codes[3], mask=(row + 3 < M) & in_k)
