"""A model of how FP8 matrix units add up: which sum a kernel claims to form, so that it is judged by that.

    Register(13)         Hopper's tensor core: a register of 1 + 8 + 13 bits, no promotion
    Register(13, 128)    the same; every 128 elements of K the register is added to a float32 sum and cleared

`registers_of` names the registers that a device may have.

One step of the model takes 32 products. They and the register are shifted to the largest exponent among them and
cut, toward zero, to 13 bits below it; their sum is cut to 13 fraction bits again. Cutting toward zero is a bias:
the sum of all-positive products shrinks with K, while zero-mean data hide it.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2 (about 14 bits; promotion every 128 elements of K). That 32
products are aligned at once, and where bits are cut, agrees with an H200 to one in the last bit (Triton, K <= 400, all-positive
operands, 2026-11-27). Blackwell's 25 bits are reported (DeepGEMM issue 176), and no device has shown them here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ALIGNED_PRODUCTS = 32


class Register(NamedTuple):
    """What a matrix unit adds in.

    Attributes:
        fraction_bits: that are kept below the largest exponent.
        promote_every: elements of K after which it is added to a float32 sum; 0: never.
    """

    fraction_bits: int
    promote_every: int = 0


def registers_of(device: torch.device, fast: bool) -> tuple[Register, ...]:
    """The registers that FP8 products of a device may be added in; none where it adds in float32.

    Args:
        device: a GPU of NVIDIA's from compute capability 8.9 has such units.
        fast: all of K stays in the register, else it is promoted every 128 elements.
    """
    if device.type != "cuda" or torch.version.hip:
        return ()
    major, _ = torch.cuda.get_device_capability(device)
    bits = (25,) if major >= 10 else (13, 14)  # "about 14": of 14 significant bits 13 are fraction
    return tuple(Register(count, 0 if fast else 128) for count in bits)


def accumulate(a: torch.Tensor, b: torch.Tensor, register: Register) -> torch.Tensor:
    """A [M, K] @ B [K, N] summed in a register.

    Args:
        a: float64 that hold FP8 values, so that a product is exact.
        b: the same.
        register: of the unit.

    Returns:
        float64 [M, N]. Inf and NaN propagate.
    """
    bits, promote_every = register
    total = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    held = a.new_zeros(total.shape)
    for start in range(0, a.shape[1], ALIGNED_PRODUCTS):
        products = a[:, start : start + ALIGNED_PRODUCTS, None] * b[None, start : start + ALIGNED_PRODUCTS]
        step = _last_bit(torch.maximum(products.abs().amax(1), held.abs()), bits)
        held = (products.div_(step[:, None]).trunc_().sum(1) + (held / step).trunc()) * step
        step = _last_bit(held, bits)
        held = (held / step).trunc_() * step
        if promote_every and (start + ALIGNED_PRODUCTS) % promote_every == 0:
            total += held.float()
            held.zero_()
    return (total + held.float()).double()


def _last_bit(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What the last kept bit of x is worth: 2**(floor(log2|x|) - bits); 1 for zero, where it cuts nothing."""
    _, exponent = torch.frexp(x)  # |x| = m * 2**exponent with m in [0.5, 1)
    return torch.ldexp(torch.ones_like(x), torch.where(x == 0, 0, exponent - 1 - bits))
