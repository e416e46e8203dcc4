"""Suite `checksum`: one product of operands that are the same on every machine, by the bits of its result.

A GPU that computes wrongly now and then (silent corruption) is as fast as any other, and a tolerance hides it. So the
same product is made several times, the host hashes every result, and `resolved.checksum` names its bits: cards of one
model and software must agree (`python -m harness fleet`), and a card must agree with itself.

    integers   entries from -4 to 4. Every partial sum is an integer of fewer bits than any accumulator keeps (14 on
               Hopper's FP8 cores: DeepSeek-V3, arXiv:2412.19437, section 3.3.2), so each element has one right value
               for every order of summation, and the result is compared with it: a wrong card is found without another
               one beside it.
    codes      any finite code, so that every bit of the operands is used. The result depends on the order of
               summation, hence on the kernel: only equal cards with equal software give the same bits.

Operands come from an integer hash of their place, not from a generator that a release of torch may change.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fp8core.formats import native_pair
from fp8core.gemm import scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.recipe import RECIPES
from harness.store.case import Arm
from harness.suites.common import crossed_points, gemm_missing, gemm_refused, outcome
from harness.timing.workload import ArmInfo, Axis, Numerics, Unsupported, Workload, arm_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.store.case import Case
    from harness.suites.shapes import Axes

AXES = {
    "cube": Axis("rows, columns and contracted dimension of the product"),
    "data": Axis("integers: one right result; codes: any finite FP8 code", ("integers", "codes")),
}
ARMS = arm_table(
    {
        Arm("bf16", "eager"): ArmInfo("torch.mm on bfloat16"),
        Arm("tensorwise", "eager"): ArmInfo("torch._scaled_mm, one scale a tensor", baseline="bf16_eager"),
        Arm("rowwise", "eager"): ArmInfo("torch._scaled_mm, a scale a row and column", baseline="bf16_eager"),
    }
)
BASE, ROWWISE = "bf16_eager", "rowwise_eager"
REPEATS = 16  # of the product, each hashed
LARGEST = 4  # of the integers
WRONG = ": the device computes wrongly"
CUBE_MOST = 32768  # below 2^24 / LARGEST^2, so that float64 and float32 sum integers without error


def _inexact(axes: Axes) -> str:
    large = [n for n in axes["cube"] if isinstance(n, int) and n > CUBE_MOST]
    expected = f"expected at most {CUBE_MOST}, beyond which sums are not exact"
    return f"axes.cube={large[0]}: {expected}" if large else ""


points = crossed_points("checksum", "sizes by axes.cube", AXES, required=["cube"], refused=_inexact)


def unsupported(case: Case, arm: str, device: str) -> Unsupported | None:
    """FP8's sizes, and this device's FP8 units."""
    if arm == BASE:
        return None
    n, gemm = case.integer("cube"), RECIPES[ARMS[arm].arm.recipe].output
    return gemm_refused((n, n, n), gemm, "torch") or gemm_missing(gemm, "torch", device)


def work(case: Case) -> float:
    """Floating-point operations."""
    return 2.0 * case.integer("cube") ** 3


def build(case: Case, arm: str, device: str) -> Workload:
    """The product of the fixed operands; its check hashes it `REPEATS` times."""
    a, b = operands(case)
    multiply = _product(a.to(device), b.to(device), arm)
    resolved: dict[str, object] = {
        "timed": "the product of fixed operands",
        "operands": digest(a, b),
        "repeats": REPEATS,
        "out_dtype": "bfloat16",
        "backend": "torch.mm" if arm == BASE else "torch._scaled_mm",
    }

    def check() -> Numerics:
        """Every repeat must have the bits of the first; a product of integers those of the right one."""
        first = multiply().cpu()
        resolved["checksum"] = digest(first)
        for repeat in range(1, REPEATS):
            again = multiply().cpu()
            if digest(again) != resolved["checksum"]:
                count = int((first.view(torch.int16) != again.view(torch.int16)).sum())
                what = f"elements of repeat {repeat} have other bits than the first result"
                return outcome({"mismatches": float(count)}, f"{count} {what}{WRONG}")
        count = 0 if case["data"] == "codes" else _unequal(first, exact(a, b, arm))
        what = f"of {first.numel()} elements are not the exact product of small integers"
        return outcome({"mismatches": float(count)}, f"{count} {what}{WRONG}" if count else "")

    flops = {"bf16" if arm == BASE else "e4m3": work(case)}
    return Workload(run=multiply, check=check, flops=flops, resolved=resolved)


@functools.lru_cache(maxsize=1)  # of all arms of a case
def operands(case: Case) -> tuple[Tensor, Tensor]:
    """A [n, n] and B^T [n, n] as FP8 codes on the host, by `case.seed`."""
    n, dtype = case.integer("cube"), native_pair()[0].dtype
    first, second = (_codes(n, dtype, str(case["data"]), 2 * case.seed + i) for i in (0, 1))
    return first, second


def _codes(n: int, dtype: torch.dtype, data: str, stream: int) -> Tensor:
    """n x n codes from a hash of each element's place (splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    # uint64 arithmetic of numpy is modulo 2^64 by definition.
    z = (np.arange(n * n, dtype=np.uint64) + np.uint64((stream + 1) << 40)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    drawn = ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.int64)
    if data == "integers":
        values = torch.from_numpy(drawn % (2 * LARGEST + 1) - LARGEST)
        return values.to(torch.float32).to(dtype).view(n, n)
    codes = torch.from_numpy((drawn % 256).astype(np.uint8))
    broken = codes.view(dtype).float().isfinite().logical_not()
    return codes.masked_fill(broken, 0).view(dtype).view(n, n)


def _product(a: Tensor, b: Tensor, arm: str) -> Callable[[], Tensor]:
    """A @ B, times the scales that `_scales` gives."""
    if arm == BASE:
        left, right = a.to(torch.bfloat16), b.to(torch.bfloat16).t()
        return lambda: torch.mm(left, right)
    one, other = (scale.to(a.device) for scale in _scales(len(a), arm))
    first, second = Operand(a, one), Operand(b.t(), other)
    return lambda: scaled_mm(first, second, torch.bfloat16, backend="torch")


def _scales(n: int, arm: str) -> tuple[Tensor, Tensor]:
    """scale_inv of A and B: powers of two, which change no digit; rowwise, unlike in neighbouring lines."""
    if arm != ROWWISE:
        one = torch.tensor(1.0 if arm == BASE else 0.25)
        return one, one
    lines = torch.ldexp(torch.ones(n), torch.arange(n) % 5 - 2)
    return lines.view(n, 1), lines.view(1, n)


def exact(a: Tensor, b: Tensor, arm: str) -> Tensor:
    """The one right product of integers, rounded to bfloat16 once; made on the host."""
    one, other = _scales(len(a), arm)
    return (a.float() @ b.float().t()).mul(one).mul(other).to(torch.bfloat16)


def digest(*tensors: Tensor) -> str:
    """Sixteen hexadecimal digits of the SHA-256 of the bytes of tensors, on the host."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def _unequal(one: Tensor, other: Tensor) -> int:
    # -0.0 and 0.0 are one value of a sum of integers, and both occur.
    differ = (one.view(torch.int16) != other.view(torch.int16)) & ~((one == 0) & (other == 0))
    return int(differ.sum())
