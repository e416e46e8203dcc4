"""Oracles: ml_dtypes for casts, numpy for products, autograd's counts for FLOPs; faults are planted on purpose.

A suite must accept what is right, on every arm, and refuse what is wrong: its check is what stands between a
wrong kernel and a published speed.
"""

from __future__ import annotations

import inspect
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import model_for_tests
import numpy as np
import pytest
import torch
from configs_for_tests import PUBLISHED, written
from torch import Tensor, nn

import fp8core.scaled_linear
import harness.suites
from fp8core.cast import scale_and_cast
from fp8core.formats import as_element_format
from fp8core.gemm import scaled_mm
from fp8core.gemm.layout import Operand
from fp8core.recipe import MX_MODES, RECIPES, Cast
from fp8core.tensor import Float8Tensor, quantize
from harness.store.case import Case, expand
from harness.store.measurement import METRICS
from harness.suites import SUITES, cast, ceilings, common, gemm, linear, oracle, outliers, recipes
from harness.timing.compiling import CompileWatch, compile_unavailable
from harness.timing.workload import ArmInfo, Axis, Numerics, Workload
from harness.training.models import hugging_face_meta

if TYPE_CHECKING:
    from collections.abc import Callable

HELPERS = {"ablation", "common", "extended", "oracle", "shapes", "training_plan"}
# Dynamo's own imports and tracing use functions that torch itself deprecates.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
needs_compiler = pytest.mark.skipif(
    compile_unavailable("cpu") is not None, reason=f"compile arms are off: {compile_unavailable('cpu')}"
)

CAST = {"dtype": "e4m3fn", "granularity": "rowwise", "src": "bf16", "M": 33, "K": 48}
GEMM = {
    "shape_set": "custom",
    "layer": "custom",
    "role": "output",
    "data": "randn",
    "M": 33,
    "K": 64,
    "N": 48,
}
LINEAR = {"shape_set": "custom", "layer": "custom", "M": 48, "K": 64, "N": 80}


def case(suite: str, axes: dict[str, Any], seed: int = 0, **changed: Any) -> Case:
    return Case.of(suite, {**axes, **changed}, seed)


def checked(suite: Any, which: Case, arm: str, device: str = "cpu") -> tuple[Workload, Numerics]:
    """Do what the executor does: build, first call, check."""
    assert suite.unsupported(which, arm, device) is None
    workload = suite.build(which, arm, device)
    workload.run()
    return workload, workload.check()


def by_twins(suite: Any, which: Case, arm: str) -> tuple[Workload, Numerics]:
    """Do what `checked` does for an arm of kernels that a CPU skips: its operators have plain versions there."""
    why = suite.unsupported(which, arm, "cpu")
    assert why is not None
    assert why.kind == "device"
    assert "kernels run on NVIDIA GPUs" in why.reason
    workload: Workload = suite.build(which, arm, "cpu")
    return workload, workload.check()


def runnable(suite: Any, which: Case, device: str = "cpu") -> list[str]:
    return [arm for arm in suite.ARMS if suite.unsupported(which, arm, device) is None]


# The contract


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_keeps_the_protocol(name: str) -> None:
    suite = SUITES[name]
    assert all(isinstance(axis, Axis) and axis.doc for axis in suite.AXES.values())
    assert all(isinstance(arm, ArmInfo) and arm.doc for arm in suite.ARMS.values())
    assert next(iter(suite.ARMS.values())).baseline == ""
    for info in suite.ARMS.values():
        assert info.baseline == "" or info.baseline in suite.ARMS
    made = {"build": ["case", "arm", "device"]}
    if hasattr(suite, "trial"):  # an arm is a run, not a closure
        made = {"trial": ["case", "arm", "device", "workspace", "on_step"]}
    for function, parameters in {
        "points": ["shapes", "axes", "model"],
        "unsupported": ["case", "arm", "device"],
        "work": ["case"],
        **made,
    }.items():
        assert list(inspect.signature(getattr(suite, function)).parameters) == parameters


def test_every_file_is_in_the_table() -> None:
    folder = str(Path(str(harness.suites.__file__)).parent)
    assert {m.name for m in pkgutil.iter_modules([folder])} == set(SUITES) | HELPERS


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("cast", {"M": [16], "K": [32]}),
        ("gemm", {"M": [16], "K": [32], "N": [48]}),
        ("linear", {"M": [16], "K": [32], "N": [48]}),
        ("recipes", {"M": [16], "K": [32], "N": [48]}),
        ("outliers", {"M": [16], "K": [32], "N": [48]}),
        ("ceilings", {"mib": [1], "cube": [32]}),
    ],
)
def test_axes_left_open_take_their_first_choice(name: str, axes: dict[str, list[Any]]) -> None:
    suite = SUITES[name]
    crossed = {axis: values for axis, values in axes.items() if not suite.AXES[axis].linked}
    for which in expand(name, crossed, suite.points([], axes, None)):
        arm = next(iter(suite.ARMS))
        _, numerics = checked(suite, which, arm)
        assert numerics.ok, (which, numerics.reason)


# What is right is accepted


def assert_right(workload: Workload, numerics: Numerics) -> None:
    assert numerics.ok, numerics.reason
    assert numerics.reason == ""
    assert set(numerics.values) <= set(METRICS)
    assert workload.resolved["timed"]
    assert all(flops > 0 for flops in workload.flops.values())


@pytest.mark.parametrize("source", ["bf16", "fp32"])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 17), (16, 1), (63, 65)])
def test_cast(shape: tuple[int, int], dtype: str, granularity: str, source: str) -> None:
    which = case("cast", CAST, M=shape[0], K=shape[1], dtype=dtype, granularity=granularity, src=source)
    workload, numerics = checked(cast, which, "eager")
    assert_right(workload, numerics)
    assert numerics.values["mismatches"] == numerics.values["saturated_frac"] == 0
    itemsize = {"bf16": 2, "fp32": 4}[source]
    assert cast.work(which) == shape[0] * shape[1] * itemsize
    assert workload.bytes_moved == cast.bytes_moved(which, "eager", cast.last_cache("cpu"))


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


@pytest.mark.parametrize("source", ["bf16", "fp32"])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("arm", cast.FUSED)
def test_fused_casts_are_right_and_a_wrong_second_layout_is_refused(
    arm: str, granularity: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By their plain twins here; on a CPU the arms are skipped, since twins have no speed."""
    which = case("cast", CAST, M=33, K=48, granularity=granularity, src=source)
    assert_right(*by_twins(cast, which, arm))
    if arm == "fused_both":
        right = cast.cast_both

        def swapped(*args: Any, **kwargs: Any) -> Any:
            first, second = right(*args, **kwargs)
            codes = second.qdata.view(torch.uint8).roll(1, 1).view(second.qdata.dtype)
            return first, Float8Tensor(codes, second.scale_inv, second.dtype, second.granularity)

        monkeypatch.setattr(cast, "cast_both", swapped)
        assert not by_twins(cast, which, arm)[1].ok


TRITON = [arm for arm in gemm.ARMS if arm.endswith("_triton")]


@pytest.mark.parametrize("role", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("arm", TRITON)
def test_own_gemms_are_right_and_skipped_on_a_cpu(arm: str, role: str) -> None:
    """By the plain twin here; sizes that the library's kernel refuses are none of its concern."""
    which = case("gemm", GEMM, M=150, K=270, N=140, role=role)
    workload, numerics = by_twins(gemm, which, arm)
    assert numerics.ok, numerics.reason
    assert workload.resolved["backend"] == "fp8core::matmul"
    assert gemm.ARMS[arm].baseline in gemm.ARMS


@pytest.mark.parametrize("chosen", ["torch", "triton"])
@pytest.mark.parametrize("arm", ["tensorwise_fastest_eager", "rowwise_fastest_eager"])
def test_the_faster_gemm_is_right_and_says_which_it_is(
    arm: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: a choice settled beforehand; what is timed asks for backend "fastest". A CPU has no choice to make."""
    asked: list[str] = []

    def product(*args: Any, backend: str, **kwargs: Any) -> Tensor:
        asked.append(backend)
        return scaled_mm(*args, backend=backend, **kwargs)

    monkeypatch.setattr(gemm, "scaled_mm", product)
    monkeypatch.setattr(gemm.FASTEST, "choice", lambda *_: chosen)
    workload, numerics = by_twins(gemm, case("gemm", GEMM), arm)
    assert numerics.ok, numerics.reason
    assert (workload.resolved["chosen"], workload.resolved["backend"]) == (chosen, gemm.OPERATORS[chosen])
    assert set(asked) == {"fastest"}
    why = gemm.unsupported(case("gemm", GEMM), arm, "cpu")
    assert why is not None
    assert f"here this arm would repeat {arm.replace('_fastest', '')}" in why.reason


def test_a_wrong_block_scale_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gemm.scaled_mm

    def neighbours(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
        return right(Operand(x.qdata, x.scale_inv.roll(1, 1)), y, *args, **kwargs)

    monkeypatch.setattr(gemm, "scaled_mm", neighbours)
    which = case("gemm", GEMM, M=64, K=256, N=128)
    assert not by_twins(gemm, which, "blockwise_triton_eager")[1].ok


def test_arms_that_move_the_casts_elsewhere() -> None:
    """On a CPU they would repeat others; what they are is written into their rows."""
    which = case("linear", LINEAR, M=32, K=32, N=48)
    for arm, casts in (
        ("rowwise_eager", "plain PyTorch: the kernels run on NVIDIA GPUs, not on cpu"),
        ("rowwise_plain_eager", "plain PyTorch: the recipe says kernels='never'"),
        ("rowwise_with_gw_hp_kernels_compile", "kernels"),
    ):
        assert linear.build(which, arm, "cpu").resolved["casts"] == casts
    why = linear.unsupported(which, "tensorwise_plain_eager", "cpu")
    assert why is not None
    assert "here this arm would repeat tensorwise_eager" in why.reason
    assert linear.build(which, "blockwise_eager", "cpu").resolved["backend"] == "triton, its plain twin"


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("role", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("size", [(16, 16, 16), (33, 64, 48), (128, 96, 112)])
def test_gemm(size: tuple[int, int, int], role: str, seed: int) -> None:
    which = case("gemm", GEMM, seed, role=role, **dict(zip("MKN", size, strict=True)))
    arms = runnable(gemm, which)
    assert arms == [
        "bf16_eager", "tensorwise_eager", "rowwise_eager", "scaled_mm_tensorwise_eager", "scaled_mm_rowwise_eager",
    ]  # fmt: skip
    for arm in arms:
        workload, numerics = checked(gemm, which, arm)
        assert_right(workload, numerics)
        assert sum(workload.flops.values()) == 2 * size[0] * size[1] * size[2]


@pytest.mark.parametrize("data", [name for name in common.DATA if name != "randn"])
def test_gemm_on_other_data(data: str) -> None:
    for arm in ("bf16_eager", "tensorwise_eager", "rowwise_eager"):
        workload, numerics = checked(gemm, case("gemm", GEMM, data=data), arm)
        assert_right(workload, numerics)


def test_gemm_is_checked_on_some_rows_where_it_is_large() -> None:
    which = case("gemm", GEMM, M=300, K=256, N=256)
    workload, numerics = checked(gemm, which, "rowwise_eager")
    assert_right(workload, numerics)
    assert workload.resolved["checked_rows"] == gemm.CHECKED_ROWS


def test_the_role_chooses_the_formats_of_the_recipe() -> None:
    """Recipe tensorwise: gradients in e5m2 on the left; rowwise: e4m3 throughout (torchao's recipes)."""
    for role, left in {
        "output": "float8_e4m3fn",
        "grad_input": "float8_e5m2",
        "grad_weight": "float8_e5m2",
    }.items():
        workload = gemm.build(case("gemm", GEMM, role=role), "tensorwise_eager", "cpu")
        assert (workload.resolved["a_dtype"], workload.resolved["b_dtype"]) == (left, "float8_e4m3fn")
        assert set(workload.flops) == {"e4m3" if left == "float8_e4m3fn" else "e5m2"}
        assert (
            gemm.build(case("gemm", GEMM, role=role), "rowwise_eager", "cpu").resolved["a_dtype"]
            == "float8_e4m3fn"
        )


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
    assert workload.resolved["fp8_gemms"] == (recipe.fp8_gemms if recipe else 0)
    assert sum(workload.flops.values()) == linear.work(which) == 6 * size[0] * size[1] * size[2]


@needs_compiler
def test_compiled_arms_are_whole_graphs_that_count_the_same_fp8_gemms() -> None:
    """All compiled arms of one case, prepared in turn as the executor does, then called again: nothing recompiles."""
    workloads = []
    for suite, which in ((linear, case("linear", LINEAR)), (cast, case("cast", CAST))):
        arms = [arm for arm in runnable(suite, which) if arm.endswith("compile")]
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
    assert len(workloads) >= 2 + 2 * len(("tensorwise", "rowwise"))


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", SUITES)
def test_every_arm_is_right_on_the_gpu(name: str) -> None:
    """Each suite at a size that its kernels tile, every arm that the device has, operand sets rotating."""
    axes = {
        "cast": CAST | {"M": 256, "K": 512},
        "gemm": GEMM | {"M": 512, "K": 1024, "N": 256},
        "linear": LINEAR | {"M": 512, "K": 256, "N": 512},
        "ceilings": {"what": "transpose", "mib": 16},
        "recipes": LINEAR | {"M": 512, "K": 256, "N": 512},
        "outliers": {"data": "outliers_1e5", "role": "output", "M": 128, "K": 4096, "N": 128},
    }[name]
    suite, which = SUITES[name], case(name, axes)
    for arm in runnable(suite, which, "cuda"):
        workload, numerics = checked(suite, which, arm, "cuda")
        assert_right(workload, numerics)
        for variant in workload.variants:
            variant()
        if name == "linear":
            assert workload.resolved["kernels"]
    torch.cuda.synchronize()


# What is wrong is refused


def with_scales(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor] = lambda s: s) -> Any:
    """A product that uses other scales than it was given."""

    def wrong(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
        return scaled_mm(Operand(x.qdata, a(x.scale_inv)), Operand(y.qdata, b(y.scale_inv)), *args, **kwargs)

    return wrong


def swap_first_rows(scale_inv: Tensor) -> Tensor:
    swapped = scale_inv.clone()
    swapped[0], swapped[1] = scale_inv[1], scale_inv[0]
    return swapped


def without_transpose(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    b = y.qdata.t().contiguous().t().contiguous()  # [K, N] row-major; read as if it were [N, K]
    return scaled_mm(
        x, Operand(b.t(), y.scale_inv.reshape(1, -1) if y.scale_inv.dim() else y.scale_inv), *args, **kwargs
    )


def last_block_missing(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    a = x.qdata.clone()
    a.view(torch.uint8)[:, -16:] = 0
    return scaled_mm(Operand(a, x.scale_inv), y, *args, **kwargs)


def biased(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    return scaled_mm(x, y, *args, **kwargs) * 1.02


def one_nan(x: Operand, y: Operand, *args: Any, **kwargs: Any) -> Tensor:
    result = scaled_mm(x, y, *args, **kwargs)
    result[0, 0] = float("nan")
    return result


ANY_SCALING = {
    "scale missing": with_scales(torch.ones_like),
    "scale twice": with_scales(lambda s: s * s),
    "scale doubled": with_scales(lambda s: s * 2),
    "scale instead of its inverse": with_scales(lambda s: 1 / s),
    "no transpose": without_transpose,
    "last block of K missing": last_block_missing,
    "2 % too large": biased,
    "one NaN": one_nan,
}
ROWWISE = {
    "row scales rolled": with_scales(lambda s: s.roll(1, 0)),
    "column scales rolled": with_scales(lambda s: s, lambda s: s.roll(1, 1)),
    "two row scales swapped": with_scales(swap_first_rows),
    "one scale for all rows": with_scales(lambda s: s.mean().expand_as(s).contiguous()),
}


@pytest.mark.parametrize("role", ["output", "grad_input"])
@pytest.mark.parametrize(
    ("arm", "fault"),
    [("tensorwise_eager", f) for f in ANY_SCALING] + [("rowwise_eager", f) for f in (ANY_SCALING | ROWWISE)],
)
def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch, arm: str, fault: str, role: str) -> None:
    which = case("gemm", GEMM, M=48, K=48, N=48, role=role)
    assert checked(gemm, which, arm)[1].ok
    monkeypatch.setattr(gemm, "scaled_mm", (ANY_SCALING | ROWWISE)[fault])
    _, numerics = checked(gemm, which, arm)
    assert not numerics.ok
    assert "dB expected" in numerics.reason


def test_a_product_that_ran_in_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closer to the truth than FP8 can be, which is how it is found."""
    which = case("gemm", GEMM)

    def honest_but_not_fp8(*args: Any, **kwargs: Any) -> Tensor:
        return torch.mm(*gemm._operands(which, "cpu"))

    monkeypatch.setattr(gemm, "scaled_mm", honest_but_not_fp8)
    assert not checked(gemm, which, "tensorwise_eager")[1].ok


def test_an_operand_cast_without_scaling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of its codes is right, so only the known SQNR of Gaussian data can tell (docs/numerics-gemm.md, section 4)."""

    def unscaled(x: Tensor, fmt: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return (x.float() / 64).to(fmt.dtype), torch.tensor(64.0)

    which = case("gemm", GEMM, M=256, K=256, N=64)
    assert checked(gemm, which, "tensorwise_eager")[1].ok
    monkeypatch.setattr(gemm, "scale_and_cast", unscaled)
    _, numerics = checked(gemm, which, "tensorwise_eager")
    assert not numerics.ok
    assert "docs/numerics-gemm.md, section 4)" in numerics.reason


def replaced(change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """A cast whose codes and scale_inv are changed after the fact."""

    def wrong(x: Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
        right = quantize(x, *args, **kwargs)
        codes, scale_inv = change(x, right.qdata, right.scale_inv)
        return Float8Tensor(codes, scale_inv, x.dtype)

    return wrong


def truncated(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    scaled = (x.float() * (1 / scale_inv)).abs()
    raw = codes.view(torch.uint8)
    return torch.where(codes.float().abs() > scaled, raw - 1, raw).view(codes.dtype), scale_inv


def nan_to_zero(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    raw = codes.view(torch.uint8)
    return torch.where(codes.float().isnan(), torch.zeros_like(raw), raw).view(codes.dtype), scale_inv


def ties_away(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    raw = codes.view(torch.uint8)
    scaled = (x.float() * (1 / scale_inv)).abs().double()
    value, above = codes.double().abs(), (raw + 1).view(codes.dtype).double().abs()
    return torch.where(scaled * 2 == value + above, raw + 1, raw).view(codes.dtype), scale_inv


def one_ulp_of_scale(x: Tensor, codes: Tensor, scale_inv: Tensor) -> tuple[Tensor, Tensor]:
    return codes, scale_inv.nextafter(torch.tensor(float("inf")))


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("change", [truncated, nan_to_zero, ties_away, one_ulp_of_scale])
def test_a_wrong_cast_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, dtype: str, granularity: str
) -> None:
    which = case("cast", CAST, M=40, K=300, dtype=dtype, granularity=granularity)
    assert checked(cast, which, "eager")[1].ok
    monkeypatch.setattr(cast, "quantize", replaced(change))
    _, numerics = checked(cast, which, "eager")
    assert not numerics.ok
    assert numerics.values["mismatches"] > 0


def test_a_cast_of_another_granularity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def tensorwise(x: Tensor, dtype: Any, granularity: str, **kwargs: Any) -> Float8Tensor:
        right = quantize(x, dtype, "tensorwise")
        return Float8Tensor(right.qdata, right.scale_inv.expand(len(x), 1), x.dtype)

    monkeypatch.setattr(cast, "quantize", tensorwise)
    assert not checked(cast, case("cast", CAST), "eager")[1].ok


@pytest.mark.parametrize(
    ("recipe", "fault"),
    [
        (recipe, fault)
        for recipe in RECIPES
        for fault in ("scale doubled", "scale missing", "last block of K missing", "2 % too large")
        # an E8M0 scale has no arithmetic to double it by
        if not (RECIPES[recipe].output.granularity == "1x32" and fault == "scale doubled")
    ],
)
def test_a_wrong_product_in_the_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: str, fault: str
) -> None:
    """Through the suite `recipes`, which emulates what a CPU has no kernel for and checks like `linear`."""
    monkeypatch.setattr(fp8core.scaled_linear, "scaled_mm", ANY_SCALING[fault])
    _, numerics = checked(recipes, case("recipes", LINEAR), f"{recipe}_eager")
    assert not numerics.ok
    for name in [n for n, g in RECIPES[recipe].gemms.items() if g.is_fp8]:
        assert name in numerics.reason


def test_a_layer_that_stayed_in_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "convert_to_float8_training", lambda layer, config: layer)
    workload, numerics = checked(linear, case("linear", LINEAR), "tensorwise_eager")
    assert not numerics.ok
    assert "0 FP8 GEMMs ran where 3 were due" in numerics.reason
    assert workload.resolved["module"] == "Linear"


def test_an_emulated_layer_is_refused_though_its_numbers_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantising before each product yields FP8's numbers and none of its speed; only the profiler can tell."""
    emulate = fp8core.Float8LinearConfig(emulate=True)
    convert = fp8core.convert_to_float8_training
    monkeypatch.setattr(
        linear, "convert_to_float8_training", lambda layer, config: convert(layer, config=emulate)
    )
    _, numerics = checked(linear, case("linear", LINEAR), "tensorwise_eager")
    assert not numerics.ok
    assert numerics.reason == "0 FP8 GEMMs ran where 3 were due: FP8 did not run as asked"


def test_a_wrong_ceiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, source: copy(self[:-1], source[:-1]))
    for what in ("copy", "transpose"):
        assert not checked(ceilings, Case.of("ceilings", {"what": what, "mib": 1}), "torch")[1].ok
    monkeypatch.undo()
    amax = torch.amax
    monkeypatch.setattr(torch, "amax", lambda x, dim, out: amax(x[:-1], dim, out=out))
    assert not checked(ceilings, Case.of("ceilings", {"what": "read", "mib": 1}), "torch")[1].ok


# What can't run says why


def test_sizes_that_fp8_cannot_take_name_the_way_out() -> None:
    which = case("gemm", GEMM, K=100)
    for arm in ("tensorwise_eager", "rowwise_eager", "tensorwise_fast_eager", "rowwise_fast_eager"):
        why = gemm.unsupported(which, arm, "cpu")
        assert why is not None
        assert why.kind == "shape"
        for part in ("K=100", "multiple of 16", "96 or 112", "pad_inner_dim", "arms=[bf16]"):
            assert part in why.reason
    assert gemm.unsupported(which, "bf16_eager", "cpu") is None
    why = gemm.unsupported(case("gemm", GEMM, N=8), "rowwise_eager", "cpu")
    assert why is not None
    assert "nearest: N=16;" in why.reason


def test_tokens_must_fit_where_grad_weight_is_fp8() -> None:
    which = case("linear", LINEAR, M=33)
    for recipe in ("tensorwise", "rowwise"):
        why = linear.unsupported(which, f"{recipe}_eager", "cpu")
        assert why is not None
        assert why.kind == "shape"
        assert "GEMM grad_weight: K=33" in why.reason
    assert checked(linear, which, "rowwise_with_gw_hp_eager")[1].ok
    assert checked(linear, which, "bf16_eager")[1].ok


def test_fast_accumulation_is_no_arm_of_a_cpu() -> None:
    why = gemm.unsupported(case("gemm", GEMM), "rowwise_fast_eager", "cpu")
    assert why is not None
    assert why.kind == "device"
    assert "use_fast_accum" in why.reason


def test_compiled_arms_need_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    suites = ((cast, case("cast", CAST)), (linear, case("linear", LINEAR)))
    arms = [runnable(suite, which) for suite, which in suites]
    monkeypatch.setattr(common, "compile_unavailable", lambda device: "no compiler here")
    for (suite, which), could in zip(suites, arms, strict=True):
        for arm in could:
            why = suite.unsupported(which, arm, "cpu")
            assert (why is not None) == arm.endswith("compile")
            assert why is None or (why.kind, why.reason) == ("device", "no compiler here")


def test_requests_that_a_suite_cannot_expand() -> None:
    for suite, axes, shapes, said in (
        (cast, {"M": [4]}, [], "axes.K"),
        (cast, {"M": [4], "K": [4]}, ["tiny"], "shapes="),
        (ceilings, {"what": ["copy"], "cube": [64]}, [], "axes.mib"),
        (ceilings, {"mib": [1]}, [], "axes.cube"),
        (ceilings, {"mib": [1], "cube": [16]}, ["tiny"], "shapes="),
        (gemm, {"M": [4]}, [], "axes.K"),
        (linear, {}, [], "no shapes"),
        (recipes, {}, [], "no shapes"),
        (outliers, {"M": [4], "N": [4]}, [], "axes.K"),
        (outliers, {"M": [4], "K": [4], "N": [4]}, ["tiny"], "shapes="),
    ):
        with pytest.raises(ValueError, match=said):
            suite.points(shapes, axes, None)


# Models


def test_layers_of_a_model_on_meta() -> None:
    spec = {"_target_": "model_for_tests.mlp", "width": 32, "blocks": 5}
    for model in (spec, model_for_tests.mlp(32, 5)):
        found = common.model_layers(["from_model"], model)
        assert [(x.name, x.in_features, x.out_features, x.count) for x in found] == [
            ("blocks.*.up", 32, 128, 5),
            ("blocks.*.down", 128, 32, 5),
        ]
    assert common.model_layers(["tiny"], None) == []
    assert common.model_layers(["from_model"], nn.Linear(3, 5))[0].name == "linear"


def test_layers_of_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's: 32 blocks, and 8 experts in each."""
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: False)
    path = written(tmp_path, PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0])
    found = {
        x.name: (x.in_features, x.out_features, x.count)
        for x in common.model_layers(["from_model"], str(path))
    }
    assert found == {
        "model.layers.*.self_attn.q_proj": (4096, 4096, 32),
        "model.layers.*.self_attn.k_proj": (4096, 1024, 32),
        "model.layers.*.self_attn.v_proj": (4096, 1024, 32),
        "model.layers.*.self_attn.o_proj": (4096, 4096, 32),
        "model.layers.*.mlp.gate": (4096, 8, 32),
        "model.layers.*.mlp.experts.gate_up_proj": (4096, 28672, 32 * 8),
        "model.layers.*.mlp.experts.down_proj": (14336, 4096, 32 * 8),
        "lm_head": (4096, 32000, 1),
    }
    with pytest.raises(ValueError, match="cannot read"):
        common.model_layers(["from_model"], str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "model._target_="),
        ({"width": 3}, "model._target_="),
        ({"_target_": "no_such_module.make"}, "cannot be imported"),
        ({"_target_": "model_for_tests.no_such"}, "cannot be imported"),
        ({"_target_": "mlp"}, "expected a dotted name"),
        ({"_target_": "model_for_tests.mlp", "depth": 3}, "unexpected keyword argument 'depth'"),
        ({"_target_": "model_for_tests.not_a_model"}, "made a int"),
        (nn.Conv2d(1, 1, 1), "no nn.Linear"),
    ],
)
def test_a_model_that_cannot_be_had(model: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        common.model_layers(["from_model"], model)


# The oracle and the data


@pytest.mark.parametrize(
    ("dtype", "other"), [("e4m3fn", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)]
)
def test_the_reference_cast_against_ml_dtypes(dtype: str, other: Any) -> None:
    """All 65,536 bf16 patterns at scale 1 (amax = the largest value), ml_dtypes on the clipped input; 0 differ."""
    torch_dtype = getattr(torch, f"float8_{dtype}")
    top = float(torch.finfo(torch_dtype).max)
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    codes, scale_inv = oracle.reference_cast(x, torch_dtype, "tensorwise", amax=torch.tensor(top))
    assert scale_inv == 1
    nan = x.isnan().numpy()
    expected = np.clip(x.float().nan_to_num(0.0).numpy(), -top, top).astype(other).view(np.uint8)
    assert (codes.view(torch.uint8).numpy() == expected)[~nan].all()
    assert codes.float().isnan().numpy()[nan].all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_reference_cast_agrees_with_the_library(dim: int, power_of_two: bool) -> None:
    """Two implementations that share no code: codes and scales of rows from 2^-60 to 2^60."""
    x = torch.randn(64, 64) * 2.0 ** torch.randint(-60, 60, (64, 64) if dim else (1, 64))
    for fmt in ("e4m3fn", "e5m2"):
        codes, scale_inv = scale_and_cast(x, fmt, "rowwise", dim=dim, power_of_two=power_of_two)
        own, own_inv = oracle.reference_cast(x, codes.dtype, "rowwise", dim=dim, power_of_two=power_of_two)
        assert torch.equal(own.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(own_inv, scale_inv)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("granularity", ["1x128", "128x128", "1x32"])
def test_the_amax_of_blocks_against_a_loop(granularity: str, dim: int) -> None:
    """Element by element with numpy, on a matrix that the blocks do not divide."""
    x = torch.randn(150, 270) * 2.0 ** torch.randint(-20, 20, (150, 270))
    across, along = {"1x128": (1, 128), "128x128": (128, 128), "1x32": (1, 32)}[granularity]
    height, width = (across, along) if dim == 1 else (along, across)
    magnitude = x.abs().numpy()
    expected = np.empty_like(magnitude)
    for i in range(0, 150, height):
        for j in range(0, 270, width):
            block = magnitude[i : i + height, j : j + width]
            expected[i : i + height, j : j + width] = block.max()
    assert np.array_equal(oracle.group_amax(x, granularity, dim).numpy(), expected)
    assert np.array_equal(oracle.group_amax(x, granularity, dim - 2).numpy(), expected)


def test_a_granularity_without_a_reference_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'2x2' has no reference in .*known: tensorwise, rowwise, 1x128"):
        oracle.group_amax(torch.ones(4, 4), "2x2", 1)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_lines_of_an_operand_are_cast_as_part_of_the_whole(recipe: str, dim: int) -> None:
    """The library's cast of the whole operand, of which the lines are taken."""
    x = torch.randn(192, 160) * 2.0 ** torch.randint(-6, 6, (192, 1) if dim else (1, 160))
    cast = RECIPES[recipe].output.a if dim else RECIPES[recipe].output.b
    assert cast is not None
    lines = torch.tensor([0, 5, 129, 150])
    codes, scale_inv = oracle.reference_operand(x, cast, dim, lines)
    whole = quantize(x, cast.format, cast.granularity, dim=dim, power_of_two=cast.power_of_two)
    assert torch.equal(
        oracle.values(codes, scale_inv), whole.dequantize(torch.float64).index_select(1 - dim, lines)
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("mode", MX_MODES)
def test_mx_rounding_modes_of_the_reference(mode: str, dtype: torch.dtype) -> None:
    """gfloat's OCP scale for floor (and for the others by hand in its terms), ml_dtypes' codes; then the library's."""
    gfloat = pytest.importorskip("gfloat")  # alone in this file, whose tests on a device do without it
    ocp = pytest.importorskip("gfloat.formats")
    info = {torch.float8_e4m3fn: ocp.format_info_ocp_e4m3, torch.float8_e5m2: ocp.format_info_ocp_e5m2}[dtype]
    other = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}[dtype]
    x = torch.randn(64, 96) * 2.0 ** torch.randint(-20, 20, (64, 1))
    x[0], x[1, :32], x[2, 0] = 0.0, 448.0, 2.0**-140
    lines = torch.arange(64)
    cast = Cast(as_element_format(dtype), "1x32", mx_mode=mode)
    codes, scale_inv = oracle.reference_operand(x, cast, 1, lines)
    whole = quantize(x, dtype, "1x32", dim=1, mx_mode=mode)
    assert torch.equal(oracle.values(codes, scale_inv), whole.dequantize(torch.float64))
    for row in range(3, 64):
        block = x[row, :32].double().numpy()
        floor = gfloat.compute_scale_amax(info.emax, block)
        biggest = np.abs(block).max()
        ratio = {"floor": 1.0, "ceil": 2.0 if np.log2(biggest) % 1 else 1.0}.get(mode)
        if mode == "rceil":
            ratio = 2.0 if biggest / floor > info.max else 1.0
        elif mode == "even":
            steps = 2.0**info.tSignificandBits
            ratio = 2.0 if np.floor(biggest / floor / 2.0**info.emax * steps + 0.5) == 2 * steps else 1.0
        assert float(scale_inv[row, 0]) == floor * ratio
        want = np.clip(block / (floor * ratio), -info.max, info.max).astype(np.float32).astype(other)
        assert codes[row, :32].view(torch.uint8).numpy().tolist() == want.view(np.uint8).tolist()


def test_an_unknown_mx_rounding_has_no_reference() -> None:
    with pytest.raises(
        ValueError, match=r"MX rounding 'trunc' has no reference.*known: floor, ceil, rceil, even"
    ):
        oracle.mx_scale_inv(torch.ones(1), torch.float8_e4m3fn, "trunc")


def test_the_exact_product_against_numpy() -> None:
    a = Operand(*scale_and_cast(torch.randn(20, 32), "e5m2", "rowwise", dim=1))
    b = Operand(*scale_and_cast(torch.randn(48, 32).t(), "e4m3fn", "rowwise", dim=0))
    rows = torch.tensor([3, 7, 19])
    wide = [(x.qdata.double() * x.scale_inv.double()).numpy() for x in (a, b)]
    assert np.allclose(
        oracle.product_of_codes(a, b, rows).numpy(), wide[0][rows.numpy()] @ wide[1], rtol=1e-13
    )


def test_rows_are_sampled_with_both_ends_and_the_same_for_one_seed() -> None:
    assert oracle.sample_rows(5, 0, 64, "cpu").tolist() == [0, 1, 2, 3, 4]
    rows = oracle.sample_rows(1000, 3, 64, "cpu")
    assert len(set(rows.tolist())) == len(rows) <= 64
    assert {0, 999} <= set(rows.tolist())
    assert rows.tolist() == oracle.sample_rows(1000, 3, 64, "cpu").tolist()
    assert rows.tolist() != oracle.sample_rows(1000, 4, 64, "cpu").tolist()


def test_operands_depend_on_the_seed_and_not_on_the_arm() -> None:
    first, second = (gemm._operands(case("gemm", GEMM, seed), "cpu") for seed in (0, 1))
    again = gemm._operands(case("gemm", GEMM, 0), "cpu")
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0][:, :48], first[1].t()[:33, :48])


def test_the_distributions_are_what_they_say() -> None:
    def random() -> torch.Generator:
        return common.generator("cpu", 0, 0)

    n = 2**16
    assert common.draw("zeros", (n,), random()).abs().max() == 0
    assert common.draw("ones", (n,), random()).min() == 1
    uniform = common.draw("uniform", (n,), random(), torch.float32)
    assert -1 <= uniform.min() < -0.99 < 0.99 < uniform.max() < 1
    normal = common.draw("randn", (n,), random(), torch.float32)
    assert abs(float(normal.mean())) < 0.02
    assert abs(float(normal.std()) - 1) < 0.02
    outliers = common.draw("outlier_1e-3", (n,), random(), torch.float32)
    assert 30 < int((outliers != normal).sum()) < 110  # binomial, mean 65.5, sd 8.1
    assert torch.equal(outliers[outliers != normal], normal[outliers != normal] * 100)
    with pytest.raises(ValueError, match="randn, uniform"):
        common.draw("cauchy", (n,), random())


def test_rotating_operands_are_equal_copies_at_other_addresses() -> None:
    codes = torch.randn(8, 16).to(torch.float8_e4m3fn).t()
    grad = torch.randn(4, requires_grad=True)
    seen: list[tuple[Tensor, Tensor]] = []
    rotation = common.Rotation(lambda *x: seen.append(x), (codes, grad), "cpu")
    assert len(rotation) == 16
    for closure in rotation:
        closure()
    assert len({x.data_ptr() for x, _ in seen} | {codes.data_ptr()}) == 17
    for x, y in seen:
        assert torch.equal(x.view(torch.uint8), codes.view(torch.uint8))
        assert x.stride() == codes.stride()
        assert torch.equal(y, grad)
        assert y.requires_grad
        assert y.is_leaf
    large = torch.empty(2**27, dtype=torch.uint8, device="meta")
    assert len(common.Rotation(lambda x: x, (large,), "cpu")) == 3
