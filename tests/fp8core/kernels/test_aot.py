"""What the kernels become on sm_89, sm_90, sm_100 and sm_120: compiled here, without a GPU, and read (`kernel_facts`).

Oracle: the PTX ISA's names, and `cuobjdump`'s count of stack and local memory.
"""

from __future__ import annotations

import re

import pytest
import torch
from kernel_facts import BF16, E4M3, E5M2, ONE, Built, build, calls, record

from fp8core.kernels import launch, launchers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(launch.INTERPRETED, reason="an interpreted kernel cannot be compiled"),
]
TARGETS = (89, 90, 100, 120)
READ = (89, 90, 100)  # whose instructions are asserted; sm_120 only has to build
M, K, N = 4096, 2048, 1024
X = torch.empty(M, K, dtype=BF16, device="meta")
CASTS = [name for name in calls(X) if "cast" in name]
OTHERS = [name for name in calls(X) if "cast" not in name]


def assert_wide_and_unspilled(built: Built, stores_tensors: bool = True) -> None:
    """No spill; tensors are read and written 16 bytes at a time, and nothing is stored byte by byte."""
    assert built.stack == 0
    assert re.search(
        r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global", built.ptx
    )  # which copies 16 bytes
    assert not re.search(r"ld\.global\S*\.(?:b|u)(?:8|16)\b", built.ptx)
    if stores_tensors:
        assert re.search(r"st\.global\S*\.v4\.b32", built.ptx)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str, dtype: torch.dtype) -> None:
    """The conversion is the hardware's, saturating and from float32 in one rounding; division is correctly rounded."""
    instruction = "cvt.rn.satfinite.e4m3x2.f32" if dtype == E4M3 else "cvt.rn.satfinite.e5m2x2.f32"
    for capability in TARGETS if dtype == E4M3 else (90,):
        recorded_launches = record(name, calls(X, dtype, grouped=dtype == E4M3)[name], capability)
        if capability not in READ:
            build(recorded_launches[0], capability)
            continue
        for recorded in recorded_launches:
            built = build(recorded, capability)
            assert_wide_and_unspilled(built, stores_tensors="amax" not in recorded.kernel.__name__)
            constants = dict(recorded.constants)
            if "NATIVE" not in constants:
                continue  # the amax pass before a cast
            assert instruction in built.ptx
            assert "cvt.rz" not in built.ptx
            assert "mul.ftz" not in built.ptx
            if name.startswith(
                "cast"
            ):  # the mean of a norm and a sigmoid may be approximate, a scale may not
                assert not re.search(r"\bdiv\.(?:full|approx)", built.ptx)
            divides = not constants.get("POWER_OF_TWO", True)
            assert ("div.rn.f32" in built.ptx) == divides or not name.startswith("cast")
            if "mx" not in name:
                assert not re.search(r"st\.global\S*\.b8\b", built.ptx)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name: str) -> None:
    """16-byte accesses, no spills."""
    for capability in TARGETS:
        for recorded in record(name, calls(X)[name], capability):
            built = build(recorded, capability)
            if capability in READ:
                assert_wide_and_unspilled(built, stores_tensors=not name.startswith("amax"))


def test_every_operator_is_compiled() -> None:
    assert calls(X).keys() | {"matmul"} == launchers.LAUNCHERS.keys()


def test_bit_encoder_builds_where_there_is_no_instruction() -> None:
    """sm_80 has no FP8 conversion; the casts must build there all the same, and add after rounding the product."""
    for name in ("cast_both", "cast_mx_both", "cast_1x128_both"):
        for recorded in record(name, calls(X)[name], 80):
            ptx = build(recorded, 80).ptx
            assert "e4m3" not in ptx
            assert not re.search(r"\bfma\.rn\.f32", ptx)


MATMULS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "tensorwise": (ONE, ONE),
    "rowwise": (torch.ones(M, 1), torch.ones(N, 1)),
    "1x128 x 128x128": (torch.ones(K // 128, M).t(), torch.ones(N // 128, K // 128)),
    "1x128 x 1x128": (torch.ones(K // 128, M).t(), torch.ones(K // 128, N).t()),
}
FP8_INSTRUCTION = {
    89: r"mma\.sync\S*m16n8k32\S*f32\.e4m3\.e4m3\.f32",
    90: r"wgmma\.mma_async\S*m64n\d+k32\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\S*kind::f8f6f4",
}


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("promote_every", [0, 128])
@pytest.mark.parametrize("scaling", MATMULS)
def test_matmul(scaling: str, promote_every: int, out_dtype: torch.dtype) -> None:
    """The FP8 matrix instruction and no other; operands by TMA from sm_90 on; promotion only where asked for."""
    a, b_t = torch.empty(M, K, dtype=E4M3, device="meta"), torch.empty(N, K, dtype=E4M3, device="meta")
    args = (a, b_t, *MATMULS[scaling], out_dtype, promote_every)
    for capability in TARGETS:
        recorded_launches = record("matmul", args, capability)
        if capability not in READ:
            build(recorded_launches[0], capability)
            continue
        for recorded in recorded_launches:
            built = build(recorded, capability)
            constants = dict(recorded.constants)
            assert re.search(FP8_INSTRUCTION[capability], built.ptx)
            assert not re.search(r"mma\S*\.f16", built.ptx)
            assert built.stack == 0, recorded
            assert re.search(r"st\.global\S*\.v4\.b32", built.ptx)
            assert ("cp.async.bulk.tensor" in built.ptx) == (capability >= 90)
            if capability < 100 and scaling in ("tensorwise", "rowwise"):
                threads = 32 * dict(recorded.options)["num_warps"]
                sums = constants["BLOCK_M"] * constants["BLOCK_N"] // threads
                adds = len(re.findall(r"\badd(?:\.rn)?\.f32\b", built.ptx))
                assert adds == (sums if promote_every else 0)


def test_gradients_multiply_e5m2_by_e4m3() -> None:
    a, b_t = torch.empty(M, K, dtype=E5M2, device="meta"), torch.empty(N, K, dtype=E4M3, device="meta")
    for recorded in record("matmul", (a, b_t, ONE, ONE, BF16, 128)):
        assert re.search(r"wgmma\.mma_async\S*\.f32\.e5m2\.e4m3", build(recorded, 90).ptx)


def test_old_gpu_is_refused() -> None:
    a = torch.empty(16, 16, dtype=E4M3, device="meta")
    with pytest.raises(ValueError, match="sm_80 has no FP8 matrix units"):
        record("matmul", (a, a, ONE, ONE, BF16, 0), 80)
