"""Triton's tutorial kernel as a peer. Oracles: torch's float64 product; sm_90 machine code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.peers import triton_tutorial

ROOT = Path(triton_tutorial.__file__).parents[2]
INTERPRETED = """
import sys, types
import torch
import triton
from fp8core.cast import scale_and_cast
from fp8core.formats import E4M3FN
from harness.peers import triton_tutorial

torch.manual_seed(0)
function = triton_tutorial.kernel()[1]
worst = 0.0
for M, K, N in ((16, 32, 16), (33, 100, 70), (64, 64, 48), (1, 16, 1)):
    for granularity in ("tensorwise", "rowwise"):
        a, a_inv = scale_and_cast(torch.randn(M, K), E4M3FN, granularity, dim=-1)
        b, b_inv = scale_and_cast(torch.randn(N, K).t(), E4M3FN, granularity, dim=0)
        tile = dict(TILE_M=16, TILE_N=32, TILE_K=32, GROUP=2)
        got = triton_tutorial.launch(function, a, b, a_inv, b_inv, torch.float32, **tile)
        right = (a.double() * a_inv) @ (b.double() * b_inv)
        worst = max(worst, float((got.double() - right).abs().max() / right.abs().max()))
print(worst)
"""


def test_the_tutorials_kernel_multiplies() -> None:
    """Oracle: float64 on the same codes; left is the rounding of at most 100 sums in float32, each 2^-24 of a partial sum.

    The interpreter cuts where a GPU rounds to bfloat16, so the result is taken in float32.
    """
    from interpreted import CANNOT_LOOP, interpreter_cannot_loop

    if interpreter_cannot_loop():
        pytest.skip(CANNOT_LOOP)
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) <= 100 * 2**-24


def test_the_tutorials_kernel_compiles_to_fp8_instructions_of_hopper() -> None:
    """Oracle: the PTX of each of its tiles, built ahead of time for sm_90."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, function = triton_tutorial.kernel()
    names = function.arg_names
    kinds = dict.fromkeys(names[:2], "*fp8e4nv") | {names[2]: "*bf16"} | dict.fromkeys(names[3:5], "*fp32")
    kinds |= dict.fromkeys(names[5:12], "i32")
    fixed = {"a_column": 1, "b_row": 1, "ROWWISE": True, "GROUP": triton_tutorial.GROUP}
    m, n, k, warps, stages = triton_tutorial.TILES[0]
    fixed |= {"TILE_M": m, "TILE_N": n, "TILE_K": k}
    signature = {name: "constexpr" if name in fixed else kinds[name] for name in names}
    places = [i for i, name in enumerate(names) if name not in fixed]
    source = ASTSource(function, signature, fixed, {(i,): [["tt.divisibility", 16]] for i in places})
    built = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages, **triton_tutorial.FUSION},
    )
    assert "wgmma.mma_async" in built.asm["ptx"]
    assert "e4m3.e4m3" in built.asm["ptx"]
    added = re.search(r"\badd\.(rn\.)?f32", built.asm["ptx"])
    assert triton_tutorial.PEER.fast_accum == (added is None), "no sum leaves the FP8 units"
