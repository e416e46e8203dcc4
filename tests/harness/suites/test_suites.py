"""Oracles: ml_dtypes for casts, numpy for products, autograd's counts for FLOPs: what is right is accepted on every arm.

What is wrong is refused: `test_suites_wrong.py`. A check is what stands between a wrong kernel and a published speed.
"""

from __future__ import annotations

import math

import pytest
import torch
from suite_checks import CAST, GEMM, LINEAR, assert_right, case, checked, runnable

from fp8core.recipe import RECIPES
from harness.store.case import Case
from harness.suites import SUITES, cast, ceilings, common, gemm, linear
from harness.suites.shapes import ROLES
from harness.timing.compiling import CompileWatch, compile_unavailable

needs_compiler = pytest.mark.skipif(
    compile_unavailable("cpu") is not None, reason=f"compile arms are off: {compile_unavailable('cpu')}"
)


# The contract


@pytest.mark.parametrize("source", ["bf16", "fp32"])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (16, 1), (63, 65)])
def test_cast(shape: tuple[int, int], dtype: str, granularity: str, source: str) -> None:
    """Fused ones by their plain twins here; on a CPU the arms are skipped, since twins have no speed."""
    which = case("cast", CAST, M=shape[0], K=shape[1], dtype=dtype, granularity=granularity, src=source)
    for arm in ("eager", *cast.FUSED):
        workload, numerics = checked(cast, which, arm, twins=True)
        assert_right(workload, numerics)
        assert numerics.values["mismatches"] == numerics.values["saturated_frac"] == 0
        assert workload.bytes_moved == cast.bytes_moved(which, arm, cast.last_cache("cpu"))
    assert cast.work(which) == shape[0] * shape[1] * {"bf16": 2, "fp32": 4}[source]


def test_bytes_of_a_cast_by_hand() -> None:
    """A second read where scales need a first pass, of what the cache can't have kept; codes of each layout."""
    n = 64 * 1024
    which = {g: case("cast", CAST, M=64, K=1024, granularity=g) for g in ("tensorwise", "rowwise")}
    for granularity, arm, cache, expected in (
        ("tensorwise", "eager", 0, 2 + 2 + 1),
        ("tensorwise", "fused", 0, 2 + 2 + 1),
        ("tensorwise", "fused", n, 2 + 1 + 1),  # half of it is still there
        ("tensorwise", "fused", 10**9, 2 + 1),
        ("rowwise", "fused", 0, 2 + 1),
        ("rowwise", "eager", 0, 2 + 1),
        ("tensorwise", "fused_both", 0, 2 + 2 + 2),
        ("rowwise", "fused_both", 0, 2 + 2 + 2),
    ):
        assert cast.bytes_moved(which[granularity], arm, cache) == expected * n


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("arm", [arm for arm in gemm.ARMS if "_triton" in arm])
def test_own_gemms(arm: str, role: str) -> None:
    """By the plain twins here; sizes that the library's kernel refuses are none of their concern."""
    which = case("gemm", GEMM, M=150, K=270, N=140, role=role)
    workload, numerics = checked(gemm, which, arm, twins=True)
    assert numerics.ok, numerics.reason
    assert workload.resolved["backend"] == "fp8core::matmul"


@pytest.mark.parametrize(
    ("size", "role", "data"),
    [
        *((size, role, "randn") for size in ((16, 16, 16), (33, 64, 48), (300, 96, 112)) for role in ROLES),
        ((300, 256, 256), "output", "randn"),
        *(((33, 64, 48), "output", data) for data in common.DATA),
    ],
)
def test_gemm(size: tuple[int, int, int], role: str, data: str) -> None:
    which = case("gemm", GEMM, role=role, data=data, **dict(zip("MKN", size, strict=True)))
    arms = runnable(gemm, which)
    assert arms == [
        "bf16_eager", "tensorwise_eager", "rowwise_eager", "scaled_mm_tensorwise_eager", "scaled_mm_rowwise_eager",
    ]  # fmt: skip
    whole = math.prod(size) <= gemm.CHECKED_WHOLE
    for arm in arms:
        workload, numerics = checked(gemm, which, arm)
        assert_right(workload, numerics)
        left = "float8_e5m2" if "tensorwise" in arm and role != "output" else "float8_e4m3fn"
        assert workload.resolved["a_dtype"] == ("bfloat16" if arm == "bf16_eager" else left)
        assert workload.resolved["checked_rows"] == (size[0] if whole else gemm.CHECKED_ROWS)
        M, K, N = size
        scales = M + N if "rowwise" in arm else 2
        in_fp8 = M * K + K * N + 4 * scales
        assert workload.bytes_moved == 2 * M * N + (2 * (M * K + K * N) if arm == "bf16_eager" else in_fp8)
        assert sum(workload.flops.values()) == 2 * math.prod(size)


@pytest.mark.parametrize("size", [(16, 32, 48), (80, 64, 96)])
@pytest.mark.parametrize("arm", [arm for arm in linear.ARMS if arm.endswith("_eager")])
def test_linear(arm: str, size: tuple[int, int, int]) -> None:
    which = case("linear", LINEAR, **dict(zip("MKN", size, strict=True)))
    why = linear.unsupported(which, arm, "cpu")
    if why is not None:
        pytest.skip(why.reason)
    workload, numerics = checked(linear, which, arm)
    assert_right(workload, numerics)
    recipe = RECIPES.get(str(workload.resolved["recipe"]))
    assert (recipe is None) == (arm == "bf16_eager")
    assert workload.resolved["fp8_gemms"] == (recipe.fp8_gemms if recipe and not recipe.is_four_bit else 0)
    assert sum(workload.flops.values()) == linear.work(which) == 6 * math.prod(size)


QUICKEST = ("rowwise_compile", "compile")


@needs_compiler
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_arms_are_whole_graphs_that_count_the_same_fp8_gemms(every: bool) -> None:
    """Compiled arms of one case, prepared in turn as the executor does, then called again: nothing recompiles."""
    workloads = []
    for suite, which in ((linear, case("linear", LINEAR)), (cast, case("cast", CAST))):
        arms = [
            arm for arm in runnable(suite, which) if arm.endswith("compile") and (every or arm in QUICKEST)
        ]
        for arm in arms:
            watch = CompileWatch()
            workload, numerics = checked(suite, which, arm)
            assert workload.compiled
            assert_right(workload, numerics)
            assert watch.fault() == ""
            workloads.append(workload)
            if suite is linear:
                recipe = RECIPES.get(str(workload.resolved["recipe"]))
                assert workload.resolved["fp8_gemms"] == (recipe.fp8_gemms if recipe else 0)
    watch = CompileWatch()
    for workload in workloads * 2:
        workload.run()
        workload.variants[1]()
    assert watch.steady_fault() == ""
    assert len(workloads) >= (6 if every else 2)


@pytest.mark.parametrize("what", ceilings.WHAT)
def test_ceilings(what: str) -> None:
    for point in ceilings.points([], {"what": [what], "mib": [1], "cube": [48]}, None):
        which = Case.of("ceilings", point)
        workload, numerics = checked(ceilings, which, "torch")
        assert_right(workload, numerics)
        expected = {"copy": 2**21, "read": 2**20, "transpose": 2**21}
        if what in expected:
            assert workload.bytes_moved == expected[what] == ceilings.work(which)
        assert workload.metric == ("launch_us" if what == "launch" else "time_ms")


ON_GPU = {  # sizes that the kernels tile
    "cast": CAST | {"M": 256, "K": 512},
    "gemm": GEMM | {"M": 512, "K": 1024, "N": 256},
    "linear": LINEAR | {"M": 512, "K": 256, "N": 512},
    "ceilings": {"what": "transpose", "mib": 16},
    "recipes": LINEAR | {"M": 512, "K": 256, "N": 512},
    "checksum": {"cube": 512, "data": "integers"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_every_arm_is_right_on_the_gpu(name: str) -> None:
    """Every arm that the device has, operand sets rotating."""
    suite, which = SUITES[name], case(name, ON_GPU[name])
    for arm in runnable(suite, which, "cuda"):
        workload, numerics = checked(suite, which, arm, "cuda")
        assert_right(workload, numerics)
        for variant in workload.variants:
            variant()
        if name == "linear":
            assert workload.resolved["kernels"]
    torch.cuda.synchronize()
