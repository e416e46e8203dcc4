"""four_bits: each code, tie and scale against ml_dtypes, float64 and other quantisers; stochastic rounding, counted."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from fp8core import four_bits, philox
from fp8core.formats import E2M1FN, E4M3FN, E8M0FNU, Format, as_element_format
from fp8core.scaling import Granularity, MxMode, Operand

ml_dtypes = pytest.importorskip("ml_dtypes")
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # MX 1.0, section 5.3.3
SIGNS = four_bits.SIGNS


@dataclass(frozen=True)
class Cast:
    granularity: Granularity = "1x16"
    rounding: str = "nearest"
    hadamard: tuple[int, ...] | None = None
    mx_mode: MxMode = "rceil"
    format: Format = E2M1FN


def gaussian(*shape: int, spread: int = 0, seed: int = 0) -> torch.Tensor:
    """N(0, 1), each 16 neighbours times a power of two down to 2**-spread."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    blocks = torch.randint(-spread, 1, (*shape[:-1], shape[-1] // 16, 1), generator=generator)
    return (x.unflatten(-1, (-1, 16)) * torch.exp2(blocks.float())).flatten(-2)


def bits(x: torch.Tensor) -> torch.Tensor:
    return (x if x.dim() else x[None]).view(torch.uint8)


def hard_float32() -> torch.Tensor:
    """Every value and midpoint of e2m1 with both float32 neighbours and both signs; all bfloat16 numbers; special values."""
    grid = torch.tensor(VALUES)
    exact = torch.cat([grid, (grid[1:] + grid[:-1]) / 2, torch.tensor([7.0, 1e-45, 3e38, torch.inf])])
    exact = torch.cat([exact, -exact])
    bf16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    infinity = torch.tensor(torch.inf)
    return torch.cat([exact, exact.nextafter(infinity), exact.nextafter(-infinity), bf16[~bf16.isnan()]])


def test_every_code_and_tie_is_that_of_ml_dtypes() -> None:
    """Oracle: ml_dtypes.float4_e2m1fn of the clipped input, the sign of zero included; its values of all 16 codes."""
    x = hard_float32()
    want = np.clip(x.numpy(), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(four_bits.encode(x).numpy(), want & 15)
    codes = torch.arange(16, dtype=torch.uint8)
    values = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(four_bits.decode(codes).numpy().view(np.int32), values.view(np.int32))
    assert (four_bits.encode(torch.tensor([torch.nan, -torch.nan])) & 7 == 0).all()


def test_derived_constants_are_those_of_ml_dtypes() -> None:
    """Oracle: ml_dtypes.finfo(float4_e2m1fn)."""
    info = ml_dtypes.finfo(ml_dtypes.float4_e2m1fn)
    assert (float(info.max), float(info.smallest_normal)) == (E2M1FN.max, E2M1FN.min_normal)
    assert (info.nmant, float(info.eps), E2M1FN.emax) == (E2M1FN.mantissa_bits, E2M1FN.eps, 2)
    with pytest.raises(ValueError, match="quantize_lines"):
        as_element_format("e2m1fn")  # no FP8 cast takes it


def test_packing_has_the_even_element_in_the_low_bits() -> None:
    """Oracle: torch's Float4_e2m1fn_x2.h, "val1 : val0" from bit 7 down; packing and its inverse over all 256 bytes."""
    assert four_bits.pack(torch.tensor([[2, 15]], dtype=torch.uint8)).item() == 0xF2
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert torch.equal(four_bits.pack(four_bits.unpack(every)), every)
    assert every.view(E2M1FN.dtype).shape == every.shape  # torch's dtype counts bytes


@pytest.mark.parametrize("scale", [E4M3FN, E8M0FNU], ids=str)
@pytest.mark.parametrize("tensor_scale", [None, 0.1234567])
def test_all_codes_with_all_scales_come_back_exactly(scale: Format, tensor_scale: float | None) -> None:
    """Oracle: ml_dtypes' values of both, multiplied in float64; in float32 where that holds the product. 16 x 256, 0 wrong."""
    block = 16 if scale is E4M3FN else 32
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, block // 16)
    scale_inv = torch.arange(256, dtype=torch.uint8).view(scale.dtype)[:, None]
    second = None if tensor_scale is None else torch.tensor(tensor_scale)
    operand = Operand(four_bits.pack(codes), scale_inv, second)
    values = codes.numpy().view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    scales = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, f"float8_{scale.name}"))
    want = values * scales.astype(np.float64)[:, None] * (1.0 if second is None else second.double().item())
    np.testing.assert_array_equal(four_bits.dequantize(operand, torch.float64).numpy(), want)
    if second is None:
        with np.errstate(over="ignore"):  # 4 and 6 times 2**127
            np.testing.assert_array_equal(four_bits.dequantize(operand).numpy(), want.astype(np.float32))


def nvfp4_by_numpy(x: np.ndarray, amax: np.float32) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """(codes, e4m3 bytes, tensor scale) of rows by the published rule: NumPy's float32, ml_dtypes' roundings."""
    largest, one = np.float32(np.finfo(np.float32).max), np.float32(1)
    with np.errstate(all="ignore"):
        encode = np.minimum(np.float32(2688) / amax, largest) if amax else one
        decode = one / encode
        of_blocks = np.abs(x.reshape(len(x), -1, 16)).max(2)
        scaled = np.minimum(of_blocks * (encode * (one / np.float32(6))), np.float32(448))
        scales = scaled.astype(ml_dtypes.float8_e4m3fn)
        factor = np.minimum(one / (scales.astype(np.float32) * decode), largest)
        values = np.clip(x.reshape(len(x), -1, 16) * factor[..., None], -6, 6)
    codes = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape) & 15
    return codes, scales.view(np.uint8), decode


NVFP4_TENSORS = {
    "gaussian": gaussian(64, 256),
    "bfloat16": gaussian(64, 256, seed=240).bfloat16(),  # 32 of whose scales tell the order of products
    "float16": gaussian(64, 256).half(),
    "subnormal and zero scales": gaussian(64, 256, spread=24),
    "zeros": gaussian(4, 64) * 0,
    "zero blocks": gaussian(4, 64) * torch.tensor([0.0, 1.0, 0.0, 1.0]).repeat_interleave(16),
    "subnormal": gaussian(64, 64) * 1e-39,
    "tiny": gaussian(64, 64) * 1e-37,
    "huge": gaussian(64, 64) * 5e37,
    "one row": gaussian(1, 32),
    "odd rows": gaussian(37, 48),
}


@pytest.mark.parametrize("name", NVFP4_TENSORS)
def test_nvfp4_follows_the_published_rule(name: str) -> None:
    """Oracle: the rule in NumPy and ml_dtypes: codes, block scales and the tensor's scale, 0 differ."""
    x = NVFP4_TENSORS[name]
    codes, scales, tensor_scale = nvfp4_by_numpy(x.float().numpy(), np.float32(x.float().abs().max()))
    got = four_bits.quantize_lines(x, Cast(), 1)
    np.testing.assert_array_equal(bits(got.scale_inv).numpy(), scales)
    np.testing.assert_array_equal(four_bits.unpack(got.qdata).numpy(), codes)
    assert got.tensor_scale_inv is not None
    assert got.tensor_scale_inv.item() == tensor_scale
    if name == "subnormal and zero scales":
        seen = got.scale_inv.float()
        assert (seen == 0).any()
        assert ((seen > 0) & (seen < E4M3FN.min_normal)).any()


def test_a_part_of_a_tensor_goes_by_the_amax_of_the_whole() -> None:
    """Oracle: the scales of the whole tensor; an amax that is too small saturates at e4m3's 448."""
    x = gaussian(32, 64, spread=6)
    whole, tensor_scale = four_bits.block_scales(x, "1x16", 1)
    part, same = four_bits.block_scales(x[16:], "1x16", 1, amax=x.abs().amax())
    assert torch.equal(bits(part), bits(whole[16:]))
    assert same is not None
    assert same == tensor_scale
    assert four_bits.block_scales(x, "1x16", 1, amax=x.abs().amax() / 64)[0].float().amax() == E4M3FN.max


@pytest.mark.parametrize("granularity", ["1x16", "16x16", "1x32"])
def test_no_value_is_off_by_more_than_half_a_gap(granularity: Granularity) -> None:
    """Oracle: the widest gap of e2m1 is 2 of 6, so half of it 1/6 of what 6 stands for; e4m3 may round that down by 1/17, which
    saturates by as much."""
    x = gaussian(64, 96)
    got = four_bits.dequantize(four_bits.quantize_lines(x, Cast(granularity), 1), torch.float64)
    length = 32 if granularity == "1x32" else 16
    blocks = x.abs().unflatten(1, (-1, length)).amax(2)
    if granularity == "16x16":
        blocks = blocks.unflatten(0, (-1, 16)).amax(1).repeat_interleave(16, 0)
    bound = blocks.repeat_interleave(length, 1) * (18 / 17 if length == 16 else 2) / 6
    assert ((got - x).abs() <= bound).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_comes_back_as_nan(bad: float) -> None:
    """Oracle: the rule. A group with Inf or NaN is NaN throughout: the block of MXFP4, and in NVFP4 the tensor too."""
    x = gaussian(4, 64)
    x[1, 3] = bad
    block = four_bits.dequantize(four_bits.quantize_lines(x, Cast("1x32"), 1)).isnan()
    assert block[1, :32].all()
    assert block.sum() == 32
    operand = four_bits.quantize_lines(x, Cast(), 1)
    assert four_bits.dequantize(operand).isnan().all()
    exact = four_bits.dequantize(operand._replace(tensor_scale_inv=None))
    assert exact[1, :16].isnan().all()


def test_squares_have_the_same_codes_along_both_axes() -> None:
    """Oracle: the transpose. Without squares they differ, so the test can fail."""
    x = gaussian(48, 64, spread=3)
    same = {}
    for granularity in ("16x16", "1x16"):
        rows, columns = (four_bits.quantize_lines(x, Cast(granularity), dim) for dim in (1, 0))
        same[granularity] = torch.equal(four_bits.unpack(rows.qdata), four_bits.unpack(columns.qdata).t())
    assert same == {"16x16": True, "1x16": False}
    # A last square may be lower, not narrower: rows need no multiple of 16
    assert four_bits.quantize_lines(gaussian(37, 32), Cast("16x16"), 1).scale_inv.shape == (37, 2)


def test_the_transform_is_scipys_matrix_with_signs_and_its_own_inverse() -> None:
    """Oracles: scipy.linalg.hadamard(16) / 4, exact; H H = 16 I, so a second transform with the signs outside is the identity;
    integers, whose sums are exact, keep the product of two operands to the last bit."""
    linalg = pytest.importorskip("scipy.linalg")
    want = torch.tensor(SIGNS)[:, None] * torch.from_numpy(linalg.hadamard(16)) / 4
    matrix = four_bits.hadamard(torch.eye(16), 1, SIGNS)
    assert torch.equal(matrix, want)
    assert torch.equal(matrix.double() @ matrix.double().t(), torch.eye(16, dtype=torch.float64))
    x, y = torch.randint(-64, 64, (2, 24, 64), generator=torch.Generator().manual_seed(0)).float().unbind()
    turned, turned_y = four_bits.hadamard(x, 1, SIGNS), four_bits.hadamard(y.t(), 0, SIGNS)
    assert torch.equal(turned.double() @ turned_y.double(), x.double() @ y.double().t())
    assert torch.equal(four_bits.hadamard(turned, 1, (1,) * 16) * torch.tensor(SIGNS).repeat(4), x)
    assert torch.equal(four_bits.hadamard(x[0], 0, SIGNS), turned[0])


def test_a_cast_transforms_first() -> None:
    """Oracle: the same cast of the transformed matrix."""
    x = gaussian(32, 64)
    got = four_bits.quantize_lines(x, Cast(hadamard=SIGNS), 0)
    want = four_bits.quantize_lines(four_bits.hadamard(x, 0, SIGNS), Cast(), 0)
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got[:2], want[:2], strict=True))


def test_stochastic_rounding_goes_up_as_often_as_it_should() -> None:
    """Oracle: (x - a) / (b - a) in float64, against a count over *all* 2**21 draws that there are: no share is off by more than
    2**-21, one standard deviation of a share in 2**40 samples. A value of e2m1, zero above all, stays for every draw."""
    draws = (torch.arange(2**21) * 2 + 1) * 2.0**-22
    grid = torch.tensor(VALUES, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for index, (low, high) in enumerate(pairwise(grid)):
        between = low + (high - low) * torch.rand(4, dtype=torch.float64, generator=generator)
        for x in torch.cat([between, low[None], high[None], low[None] + 2**-21]).float():
            codes = four_bits.encode(-x.expand_as(draws), draws)
            assert bool(((codes == 8 + index) | (codes == 9 + index)).all())
            share = (codes == 9 + index).double().mean()
            assert abs(share - (x.double() - low) / (high - low)) <= 2**-21
            assert share in (0, 1) or x not in grid
    assert (four_bits.encode(torch.full((2**21,), 1e30), draws) == 7).all()


def test_the_mean_of_stochastic_casts_is_the_input() -> None:
    """Oracle: the input. Power: the mean of 2**22 roundings within a gap has a standard deviation of at most 2**-12 of the gap,
    so a bias of 0.25 % of a gap (10 deviations) passes the limit of 5 in less than one of a million tests, and a run without
    bias fails in about as many. To nearest fails by 40 % of a gap, so the test sees what it is for."""
    x = torch.full((4096, 1024), 2.6)
    for key in product((1, 2**40 + 3), (7,), (0, 1), (2,)):
        draws = philox.uniform(x.shape, key)
        mean = four_bits.decode(four_bits.encode(x, draws)).double().mean()
        assert abs(mean - 2.6) < 5 * 2.0**-12
    assert abs(four_bits.decode(four_bits.encode(x[:1])).double().mean() - 2.6) > 0.39


def test_bad_input_names_the_way_out() -> None:
    """Oracle: the contract; the number, the nearest that fit and what to call."""
    x, stochastic = gaussian(24, 48), Cast(rounding="stochastic")
    with pytest.raises(ValueError, match=r"24 elements.* 16 and 32; pad"):
        four_bits.quantize_lines(x, Cast(), 0)
    with pytest.raises(ValueError, match="multiple of 32"):
        four_bits.quantize_lines(x, Cast("1x32"), 1)
    with pytest.raises(ValueError, match="multiple of 16"):
        four_bits.hadamard(x, 0, SIGNS)
    with pytest.raises(ValueError, match="SIGNS"):
        four_bits.hadamard(x, 1, (1, 0))
    with pytest.raises(ValueError, match=r"philox\.uniform"):
        four_bits.quantize_lines(x, stochastic, 1)
    with pytest.raises(ValueError, match="with draws"):
        four_bits.quantize_lines(x, Cast(), 1, torch.rand(24, 48))
    with pytest.raises(ValueError, match="matrix"):
        four_bits.quantize_lines(x[0], Cast(), 1)
    with pytest.raises(ValueError, match="e4m3fn"):
        four_bits.quantize_lines(x, Cast(format=E4M3FN), 1)
    with pytest.raises(TypeError, match="float64"):
        four_bits.quantize_lines(x.double(), Cast(), 1)


@pytest.mark.parametrize("granularity", ["1x16", "16x16", "1x32"])
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (1, 32), (33, 64)])
def test_shapes_and_layouts_change_nothing(granularity: Granularity, shape: tuple[int, int]) -> None:
    """Oracle: the same cast of a contiguous float32 copy."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn((shape[0], shape[1] * 2), generator=generator).bfloat16()
    x = base[:, ::2].requires_grad_()
    want = four_bits.quantize_lines(x.detach().float().contiguous(), Cast(granularity), 1)
    for got in (
        four_bits.quantize_lines(x, Cast(granularity), -1),
        four_bits.quantize_lines(x.t(), Cast(granularity), 0),
    ):
        assert got.qdata.shape == (shape[0], shape[1] // 2)
        assert not got.qdata.requires_grad
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(got[:2], want[:2], strict=True))
        assert four_bits.dequantize(got).shape == shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_casts_are_bit_equal_to_eager() -> None:
    """Oracle: the eager cast, in one graph for all of NVFP4; the share of other codes is 0. MXFP4 without code generation:
    torch 2.13's for a CPU has no float8_e8m0fnu."""
    casts = [Cast(), Cast("16x16"), Cast("1x16", "stochastic", SIGNS)]
    mx = [Cast("1x32", rounding) for rounding in ("nearest", "stochastic")]

    def everything(x: torch.Tensor, key: torch.Tensor, casts: list[Cast]) -> list[torch.Tensor | None]:
        draws = philox.uniform(x.shape, key)
        return [draws] + [
            part
            for cast in casts
            for dim in (0, 1)
            for part in four_bits.quantize_lines(
                x, cast, dim, draws if cast.rounding == "stochastic" else None
            )
        ]

    hard = hard_float32()[-(2**15) :].clamp(-1e4, 1e4).reshape(128, 256)
    for backend, chosen in (("inductor", casts), ("aot_eager", mx)):
        compiled = torch.compile(everything, fullgraph=True, dynamic=False, backend=backend)
        for x, step in ((gaussian(256, 256, spread=24), 0), (hard, 2**31 + 5), (hard * 0, 3)):
            key = torch.tensor([2**40 + 7, 3, step, 1])
            for want, got in zip(everything(x, key, chosen), compiled(x, key, chosen), strict=True):
                assert (want is None) == (got is None)
                assert want is None or torch.equal(bits(want), bits(got))
        torch._dynamo.reset()


@pytest.mark.gpu
def test_a_gpu_makes_the_same_bits() -> None:
    """Oracle: the CPU's draws, codes and scales."""
    for x, dim in product((x for x in NVFP4_TENSORS.values() if len(x) % 32 == 0), (0, 1)):
        draws, there = (philox.uniform(x.shape, (1, 2, 3, 4), device) for device in ("cpu", "cuda"))
        assert torch.equal(draws, there.cpu())
        for cast in (Cast(), Cast("16x16"), Cast("1x32"), Cast("1x16", "stochastic", SIGNS)):
            given, given_there = (draws, there) if cast.rounding == "stochastic" else (None, None)
            want = four_bits.quantize_lines(x, cast, dim, given)
            got = four_bits.quantize_lines(x.cuda(), cast, dim, given_there)
            for one, other in zip(want, got, strict=True):
                assert (one is None) == (other is None)
                assert one is None or other is None or torch.equal(bits(one), bits(other.cpu()))


def test_torchao_casts_alike() -> None:
    """Oracle: torchao 0.18. MXFP4: every scale by each rule, and every code but of blocks with the scale 2**-127,
    by whose double it divides. NVFP4: those of float32 Gaussian data; of bfloat16 data its
    order of roundings moves a scale to its neighbour where amax_block * (s_enc / 6) is within an ulp of a tie, less than 1 % of the
    blocks; and it has no block scale below 2**-6."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    modes = pytest.importorskip("torchao.prototype.mx_formats.config").ScaleCalculationMode
    for mode, x in product(
        ("floor", "ceil", "rceil", "even"),
        (gaussian(64, 1024, spread=24), hard_float32()[-(2**15) :].view(32, 1024)),
    ):
        x = x.clamp(-1e30, 1e30)
        ours = four_bits.quantize_lines(x, Cast("1x32", mx_mode=mode), 1)
        scale, codes = mx_tensor.to_mx(x, E2M1FN.dtype, 32, modes[mode.upper()])
        assert torch.equal(bits(scale).view(len(x), 32), bits(ours.scale_inv))
        subnormal = (bits(ours.scale_inv) == 0).repeat_interleave(16, 1)
        assert torch.equal(bits(codes)[~subnormal], ours.qdata[~subnormal])
        assert subnormal.any() == (len(x) == 32)
    for x, spread in (
        (gaussian(512, 1024), 0),
        (gaussian(512, 1024).bfloat16(), 0),
        (gaussian(512, 1024, spread=24), 24),
    ):
        ours = four_bits.quantize_lines(x, Cast(), 1)
        scale, codes = nvfp4.nvfp4_quantize(x, 16, nvfp4.per_tensor_amax_to_scale(x.float().abs().amax()))
        scale = scale.view(512, 64)
        other = bits(scale) != bits(ours.scale_inv)
        floored = ours.scale_inv.float() < 2**-6
        assert (scale[floored].float() == 2**-6).all()
        assert floored.any() == (spread > 0)
        moved = other & ~floored
        assert moved.float().mean() <= (0.01 if x.dtype == torch.bfloat16 else 0)
        assert ((bits(scale)[moved].int() - bits(ours.scale_inv)[moved].int()).abs() == 1).all()
        if spread == 0:
            wrong = (codes != ours.qdata) & ~other.repeat_interleave(8, 1)
            assert wrong.float().mean() <= (1e-4 if x.dtype == torch.bfloat16 else 0)


def test_transformer_engine_casts_alike() -> None:
    """Oracle: Transformer Engine's `NVFP4QuantizerRef`, where that library is installed; all bytes but the sign of zero. It takes
    float32 and bfloat16, and whole squares."""
    module = "transformer_engine.pytorch.custom_recipes.quantization_nvfp4"
    reference = pytest.importorskip(module, reason="Transformer Engine is not installed").NVFP4QuantizerRef
    for x, (granularity, height) in product(NVFP4_TENSORS.values(), (("1x16", 1), ("16x16", 16))):
        if x.dtype == torch.float16 or len(x) % height:
            continue
        amax = x.float().abs().amax().view(1)
        codes, scale = reference._quantize_blockwise_reference(
            x, amax, 16, height, pow_2_scales=False, eps=0.0
        )
        ours = four_bits.quantize_lines(x, Cast(granularity), 1)
        assert torch.equal(bits(scale), bits(ours.scale_inv))
        theirs, own = (torch.where(one == 8, 0, one) for one in map(four_bits.unpack, (codes, ours.qdata)))
        assert torch.equal(theirs, own)
