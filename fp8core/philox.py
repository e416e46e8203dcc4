"""Philox4x32-10 in integer torch operators: the same random bits on any device, eager and compiled.

A block of four 32-bit words is a bijection of a 128-bit counter under a 64-bit key, so that any draw can be made again
from its address. Here the key is the seed, and the counter is (block, step, layer, role).

Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11), and its library Random123,
whose published vectors (`kat_vectors`) the tests hold this to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = 0xFFFF_FFFF  # 32 bits, in the lower half of an int64
_MULTIPLIERS = 0xD251_1F53, 0xCD9E_8D57
_KEY_STEPS = 0x9E37_79B9, 0xBB67_AE85
_ROUNDS = 10


def words(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four words of each counter.

    Args:
        counter: int64, broadcastable, each in [0, 2**32).
        key: int64, 0-dimensional, each in [0, 2**32).

    Returns:
        int64, each in [0, 2**32).
    """
    left, right, left_2, right_2 = torch.broadcast_tensors(*counter)
    key_1, key_2 = key
    for _ in range(_ROUNDS):
        # Bits above the 32nd are garbage until the mask: a product of two words overflows into the sign. In place: in eager
        # mode memory costs more than arithmetic
        product, product_2 = left * _MULTIPLIERS[0], left_2 * _MULTIPLIERS[1]
        left = (product_2 >> 32).bitwise_xor_(right).bitwise_xor_(key_1).bitwise_and_(_WORD)
        left_2 = (product >> 32).bitwise_xor_(right_2).bitwise_xor_(key_2).bitwise_and_(_WORD)
        right, right_2 = product_2, product
        key_1, key_2 = (key_1 + _KEY_STEPS[0]) & _WORD, (key_2 + _KEY_STEPS[1]) & _WORD
    return left, right & _WORD, left_2, right_2 & _WORD


def uniform(
    shape: Sequence[int], key: torch.Tensor | Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Uniform draws (k + 1/2) / 2**21 of the upper 21 bits of a word: their mean is 1/2, and no draw is 0 or 1.

    Args:
        shape: of the result, at most 2**34 elements.
        key: (seed, layer, step, role), integers or an int64 tensor [4]. 64 bits of the seed count, 32 of the others. A
            tensor lets a compiled graph take another step without another compilation.
        device: of the result.

    Returns:
        float32 of the shape, contiguous: the first words of all blocks, then the second ones.

    Raises:
        ValueError: key is not four integers, or the shape has more elements than 32 bits can number.
    """
    numbers = torch.as_tensor(key, dtype=torch.int64, device=device)
    if numbers.shape != (4,):
        raise ValueError(
            f"a key of shape {tuple(numbers.shape)}; expected four integers: seed, layer, step, role"
        )
    count = math.prod(shape)
    blocks = -(-count // 4)
    if blocks > _WORD + 1:
        raise ValueError(
            f"{count} draws of one key; at most 2**34 have an address: split the tensor, or vary role"
        )
    low, high = numbers & _WORD, numbers >> 32 & _WORD
    block = torch.arange(blocks, device=device)
    made = words((block, low[2], low[1], low[3]), (low[0], high[0]))
    odd = [word.bitwise_right_shift_(10).bitwise_or_(1).float() for word in made]
    return torch.cat(odd)[:count].mul_(2.0**-22).view(shape)
