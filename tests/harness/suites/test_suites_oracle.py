"""The oracles of the suites, against ml_dtypes and numpy; the layers of a model; the data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import model_for_tests
import numpy as np
import pytest
import torch
from configs_for_tests import PUBLISHED, written
from torch import Tensor, nn

from fp8core.cast import scale_and_cast
from fp8core.formats import as_element_format
from fp8core.gemm.layout import Operand
from fp8core.recipe import MX_MODES, RECIPES, Cast
from fp8core.tensor import quantize
from harness.suites import common, gemm, oracle

if TYPE_CHECKING:
    pass

from suite_checks import GEMM, case

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


@pytest.mark.usefixtures("hugging_face")
def test_layers_of_a_config(tmp_path: Path) -> None:
    """Mixtral's: 32 blocks, and 8 experts in each."""
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
