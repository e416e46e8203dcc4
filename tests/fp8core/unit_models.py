"""FP8 matrix units bit by bit, in integers: an oracle that shares nothing with `fp8core.proof.adders`.

Every e4m3 or e5m2 value is an integer times a power of two, so is every product. One step of a unit takes 32 products:
they and the register are shifted to the largest exponent among them, what falls below the kept bits is dropped, and the
sum is dropped to the kept bits again. Hopper keeps 13 or 14 bits below the leading one ("about 14", DeepSeek-V3) and may
add its register to a float32 sum every 128 elements of K; Blackwell is reported to keep 25 (DeepGEMM issue 176).
"""

from __future__ import annotations

import numpy as np
import torch

HOPPER, HOPPER_WIDE, BLACKWELL = 13, 14, 25
IN_CACHE = 1 << 15  # products of a step, 256 KiB of them
_SMALLEST = {torch.float8_e4m3fn: -9, torch.float8_e5m2: -16}


def integers(codes: torch.Tensor) -> tuple[np.ndarray, int]:
    """Codes as int64 and the exponent of their unit."""
    unit = _SMALLEST[codes.dtype]
    return np.ldexp(codes.double().numpy(), -unit).astype(np.int64), unit


def leading(x: np.ndarray) -> np.ndarray:
    """The place of the leading bit of |x|, 0 for 0; exact: no value here has more than 53 significant bits."""
    return np.maximum(np.frexp(np.abs(x).astype(np.float64))[1] - 1, 0)


def dropped(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The lowest `places` bits of the magnitude cleared."""
    return np.sign(x) * ((np.abs(x) >> places) << places)


def unit_sum(a: torch.Tensor, b: torch.Tensor, bits: int, promote_every: int) -> torch.Tensor:
    """Codes a [M, K] and b [N, K] multiplied and added as a unit does; float64 [M, N]."""
    if len(a) > len(b):
        return unit_sum(b, a, bits, promote_every).t()
    (left, unit_a), (right, unit_b) = integers(a), integers(b)
    columns = max(1, IN_CACHE // (32 * max(1, len(left))))
    total = [
        _sum(left.T.copy(), right[start : start + columns].T.copy(), unit_a + unit_b, bits, promote_every)
        for start in range(0, len(right), columns)
    ]
    return torch.from_numpy(np.concatenate(total, axis=1).astype(np.float64))


def _sum(left: np.ndarray, right: np.ndarray, unit: int, bits: int, promote_every: int) -> np.ndarray:
    """Integers [K, M] and [K, N] of one tile, float32 [M, N]."""
    register = np.zeros((left.shape[1], right.shape[1]), dtype=np.int64)
    total = np.zeros(register.shape, dtype=np.float32)
    for start in range(0, len(left), 32):
        one, other = left[start : start + 32, :, None], right[start : start + 32, None, :]
        sizes = np.abs(one) * np.abs(other)
        top = np.maximum(leading(sizes.max(0)), leading(register))
        places = np.maximum(top - bits, 0)
        sizes &= np.int64(-1) << places  # the lowest bits cleared
        negative = (one >> 63) ^ (other >> 63)  # -1 or 0: with it, x becomes -x or stays
        sizes ^= negative
        register = sizes.sum(0) - negative.sum(0) + dropped(register, places)
        register = dropped(register, np.maximum(leading(register) - bits, 0))
        if promote_every and (start + 32) % promote_every == 0:
            total += np.ldexp(register.astype(np.float32), unit)
            register[:] = 0
    return total + np.ldexp(register.astype(np.float32), unit)
