"""amax -> cast with one scale for a tensor; no kernel of its own for the scale.

Every program of the cast reads the amax (4 bytes, from cache), computes the scale itself in the arithmetic of
`encode.scale_of`, and program 0 stores its reciprocal for the GEMM.

`_both` writes the codes as they are and transposed out of one read: Hopper's FP8 GEMM wants both operands
contiguous along the contracted dimension, so a tensor that enters two GEMMs is needed both ways. Each element is
encoded once; the transposed copy goes through shared memory (`quads`) so that it too leaves in 16-byte runs,
where a direct store would write single bytes, K apart.

*Delayed* scaling takes the amax of an earlier step and finds this one's in the same pass, see
`encode.leave_amax`.

The tensorwise amax pass runs from front to back and the cast from back to front, so that the cast finds the
end of the tensor still in the second-level cache.

Bytes an element (bfloat16): cast 2 + 1, both 2 + 1 + 1, and 2 more for the amax pass unless delayed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Functions under triton.jit are Triton's language: their parameters have no Python types.
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fp8core.kernels import launch, tuning
from fp8core.kernels.encode import encode, leave_amax, magnitude_bits, tensor_scale, widen
from fp8core.kernels.quads import largest_magnitude, load_quads, quads_of, store_quads, store_transposed

# The first is the default: 64 elements a thread, whole words and 16-byte accesses both ways, all loads in flight at once.
TILES: tuple[tuning.Candidate, ...] = (
    {"BLOCK_M": 128, "BLOCK_K": 64, "num_warps": 4},
    {"BLOCK_M": 64, "BLOCK_K": 128, "num_warps": 4},
    {"BLOCK_M": 128, "BLOCK_K": 64, "num_warps": 8},
)


@triton.jit
def _cast_kernel(
    x_ptr,
    codes_ptr,
    amax_ptr,
    scale_inv_bits_ptr,
    seen_bits_ptr,  # with DELAYED
    numel,
    FACTOR: tl.constexpr,
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    scale = tensor_scale(amax_ptr, scale_inv_bits_ptr, FACTOR, DELAYED, E5M2, POWER_OF_TWO)
    blocks = tl.cdiv(numel, BLOCK)
    offsets = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = (blocks - 1 - block).to(tl.int64) * BLOCK
        keep = offsets < numel - start
        x = tl.load(x_ptr + start + offsets, mask=keep, other=0.0)
        tl.store(codes_ptr + start + offsets, encode(widen(x) * scale, E5M2, NATIVE), mask=keep)
        if DELAYED:
            largest = tl.maximum(largest, magnitude_bits(x))
    if DELAYED:
        leave_amax(tl.max(largest, 0), seen_bits_ptr, scale_inv_bits_ptr)


@triton.jit
def _cast_both_kernel(
    x_ptr,
    codes_ptr,
    codes_t_ptr,
    amax_ptr,
    scale_inv_bits_ptr,
    seen_bits_ptr,  # with DELAYED
    M,
    K,
    FACTOR: tl.constexpr,
    DELAYED: tl.constexpr,
    E5M2: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    NATIVE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    scale = tensor_scale(amax_ptr, scale_inv_bits_ptr, FACTOR, DELAYED, E5M2, POWER_OF_TWO)
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_k
    largest = tl.zeros((BLOCK_M // 4, BLOCK_K), tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tiles - 1 - tile
        q = quads_of(tile // tiles_k, BLOCK_M)
        k = (tile % tiles_k) * BLOCK_K + tl.arange(0, BLOCK_K)
        x = load_quads(x_ptr, q, k, M, K)
        if DELAYED:
            largest = tl.maximum(largest, largest_magnitude(x))
        codes = [encode(widen(rows) * scale, E5M2, NATIVE) for rows in x]
        store_quads(codes_ptr, codes, q, k, M, K)
        store_transposed(codes_t_ptr, codes, q, k, M, K, WORDS, NATIVE)
    if DELAYED:
        leave_amax(tl.max(tl.max(largest, 1), 0), seen_bits_ptr, scale_inv_bits_ptr)


def cast(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.cast`, and of `cast_delayed` with a margin; x contiguous, of any shape."""
    return _cast(x, *given, both=False)


def cast_both(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """Triton version of `reference.cast_both`, and of `cast_delayed_both` with a margin; x [M, K] row-major."""
    return _cast(x, *given, both=True)


def _cast(
    x: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int | None = None,
    *,
    both: bool,
) -> tuple[torch.Tensor, ...]:
    """With a margin by an earlier step's amax, and then this one's is found."""
    delayed, target = margin is not None, launch.target_of(x.device)
    scale_inv = launch.zero(x.device) if delayed else torch.empty((), dtype=torch.float32, device=x.device)
    seen = launch.zero(x.device) if delayed else scale_inv  # else never touched
    bits = scale_inv.view(torch.int32), seen.view(torch.int32)
    constants: dict[str, Any] = {
        "FACTOR": 2.0 ** (margin or 0),
        "DELAYED": delayed,
        "E5M2": dtype == torch.float8_e5m2,
        "POWER_OF_TWO": power_of_two,
        "NATIVE": target.native_cast,
    }
    scales = (scale_inv, seen) if delayed else (scale_inv,)
    if not both:
        codes, block = torch.empty(x.shape, dtype=dtype, device=x.device), 8192
        launch.launch(
            _cast_kernel,
            launch.walking(launch.ceil_div(x.numel(), block)),
            *(x, codes.view(torch.uint8), amax, *bits, x.numel()),
            device=x.device,
            **constants,
            BLOCK=block,
        )
        return codes, *scales
    M, K = x.shape
    codes, codes_t = launch.both_codes(x, dtype)

    def run(tile: tuning.Candidate) -> None:
        launch.launch(
            _cast_both_kernel,
            launch.walking(launch.ceil_div(M, tile["BLOCK_M"]) * launch.ceil_div(K, tile["BLOCK_K"])),
            *(x, codes.view(torch.uint8), codes_t.view(torch.uint8), amax, *bits, M, K),
            device=x.device,
            **constants,
            WORDS=M % 4 == 0,
            **tile,
        )

    name = "cast_delayed_both" if delayed else "cast_both"
    run(tuning.choose(name, (M, K), x.dtype, target.name, TILES, run))
    return codes, codes_t, *scales
