"""Grouped products against a Float8Linear for each expert, bit for bit, and against float64; padding; conversion."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import Experts, Mixture, by_expert, ends
from recipes import on_cpu
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core import (
    RECIPES,
    GroupedMatmul,
    audit,
    convert_experts_to_float8,
    convert_to_float8_training,
    dense_layers_only,
    grouped_mm,
    pad_groups,
    quantize,
    verify,
)
from fp8core.gemm.grouped import (
    Operand,
    arguments_of_one_call,
    check_offsets,
    one_call_reason,
    scaled_grouped_mm,
)
from fp8core.grouped import HIGH_PRECISION, aligned_grouped_mm, alignment, group_of_row
from fp8core.watching import profiled

EXACT = (
    "rowwise",
    "rowwise_with_gw_hp",
    "blockwise",
    "mxfp8",
)  # one expert's scales know nothing of another's
SIZES = {
    "uneven": (16, 48, 32),
    "not multiples of 16": (5, 17, 30),
    "an expert without tokens": (20, 0, 12),
    "all on one": (0, 40, 0),
    "more experts than tokens": (1, 0, 1, 0, 0, 0),
    "no tokens": (0, 0),
}


def operands(sizes: tuple[int, ...], N: int = 128, K: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] with outlier tokens, weight [E, N, K], gradient [T, N]."""
    x = torch.randn(sum(sizes), K) * torch.logspace(-2, 2, sum(sizes))[:, None]
    return x.requires_grad_(), torch.randn(len(sizes), N, K, requires_grad=True), torch.randn(sum(sizes), N)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
@pytest.mark.parametrize("name", EXACT)
def test_each_expert_is_a_float8linear(name: str, sizes: tuple[int, ...]) -> None:
    """Oracle: `Float8Linear` on each expert's tokens, filled up with zeros; the same bits of output and gradients."""
    recipe = on_cpu(name)
    x, weight, grad = operands(sizes)
    output = grouped_mm(x, weight, ends(*sizes), config=recipe)
    grads = torch.autograd.grad(output, [x, weight], grad)
    want = by_expert(x, weight, ends(*sizes), grad, recipe, alignment(recipe))
    for got, expected in zip((output, *grads), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_weights_may_lie_either_way(name: str) -> None:
    """Oracle: the contiguous weight; the same bits from one that lies as [E, K, N]."""
    x, weight, grad = operands((16, 32))
    offsets = ends(16, 32)
    turned = weight.detach().transpose(1, 2).contiguous().requires_grad_()
    one = grouped_mm(x, weight, offsets, config=on_cpu(name))
    other = grouped_mm(x, turned.transpose(1, 2), offsets, config=on_cpu(name))
    assert torch.equal(one, other)
    (grad_one,) = torch.autograd.grad(one, [weight], grad)
    (grad_other,) = torch.autograd.grad(other, [turned], grad)
    assert torch.equal(grad_one, grad_other.transpose(1, 2))


def test_tensorwise_has_one_scale_for_tokens_and_one_for_each_expert() -> None:
    """Oracle: Float8Linear where every expert sees the same largest token and gradient, so that its scale is all's.

    The experts' weights differ by a factor of 2**10: with one scale for all, the smaller would lose bits.
    """
    sizes, recipe = (16, 32, 16), RECIPES["tensorwise"]
    x, weight, grad = operands(sizes)
    weight = (weight.detach() * torch.tensor([1.0, 2.0**-10, 1.0])[:, None, None]).requires_grad_()
    with torch.no_grad():
        for first in itertools.accumulate((0, *sizes[:-1])):
            x[first, 0], grad[first, 0] = 1000.0, 50.0
    output = grouped_mm(x, weight, ends(*sizes), config=recipe)
    grads = torch.autograd.grad(output, [x, weight], grad)
    for got, expected in zip(
        (output, *grads), by_expert(x, weight, ends(*sizes), grad, recipe, 16), strict=True
    ):
        assert torch.equal(got, expected)
    with torch.no_grad():
        x[0, 0] = 1e6
    alone = by_expert(x, weight, ends(*sizes), grad, recipe, 16)[0]
    assert not torch.equal(grouped_mm(x, weight, ends(*sizes), config=recipe)[16:], alone[16:])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tensorwise", (28.53, 24.58, 24.58)),
        ("rowwise", (28.48, 28.48, 28.48)),
        ("blockwise", (28.48, 28.48, 28.48)),
        ("rowwise_with_gw_hp", (28.48, 28.48, None)),
    ],
)
def test_sqnr(
    name: str,
    expected: tuple[float, float, float | None],
    sqnr_db: Callable[[Tensor, Tensor], float],
) -> None:
    """Oracle: float64 products of the same operands; the table of test_gemm (bars of +-0.2 dB, mean of three seeds)."""
    sizes, recipe, found = (256, 0, 512), on_cpu(name), []
    for seed in range(3):
        torch.manual_seed(seed)
        x, grad = torch.randn(768, 256, requires_grad=True), torch.randn(768, 256)
        weight = (0.02 * torch.randn(3, 256, 256)).requires_grad_()
        output = grouped_mm(x, weight, ends(*sizes), config=recipe)
        got = (output, *torch.autograd.grad(output, [x, weight], grad))
        x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        want = torch.cat([x64[:256] @ w64[0].t(), x64[256:] @ w64[2].t()])
        reference = (want, *torch.autograd.grad(want, [x64, w64], grad.double()))
        found.append([sqnr_db(a.detach(), b.detach()) for a, b in zip(reference, got, strict=True)])
    for value, bar in zip(torch.tensor(found).mean(0).tolist(), expected, strict=True):
        assert value == pytest.approx(bar, abs=0.2) if bar is not None else value > 100


def test_high_precision_is_grouped_mm() -> None:
    """Oracle: torch's bfloat16 grouped product, forward; float64, with gradients, of float32."""
    x, weight, grad = operands((16, 48, 0))
    offsets = ends(16, 48, 0)
    low, low_weight = x.detach().bfloat16(), weight.detach().bfloat16()
    got = aligned_grouped_mm(low, low_weight, offsets, HIGH_PRECISION)
    torch.testing.assert_close(got, torch._grouped_mm(low, low_weight.transpose(1, 2), offs=offsets))
    output = aligned_grouped_mm(x, weight, offsets, HIGH_PRECISION)
    grads = torch.autograd.grad(output, [x, weight], grad)
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = torch.cat([x64[:16] @ w64[0].t(), x64[16:] @ w64[1].t()])
    for one, other in zip(
        (output, *grads), (want, *torch.autograd.grad(want, [x64, w64], grad.double())), strict=True
    ):
        assert (one.double() - other).norm() < 1e-6 * other.norm()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.sampled_from([2, 16, 32, 128]))
def test_padding(sizes: list[int], multiple: int) -> None:
    """Oracle: a loop over groups. Each is filled with zeros; nothing is lost, and gradients come back to their rows."""
    x = torch.randn(sum(sizes), 3, requires_grad=True)
    rows = pad_groups(x, ends(*sizes), multiple)
    want = [-(-size // multiple) * multiple for size in sizes]
    assert rows.offsets.tolist() == list(itertools.accumulate(want))
    assert rows.offsets.dtype == torch.int32
    assert rows.x.shape[0] % multiple == 0
    first = 0
    for group, end in zip(x.detach().split(sizes), rows.offsets.tolist(), strict=True):
        assert torch.equal(rows.x[first : first + len(group)], group)
        assert not rows.x[first + len(group) : end].any()
        first = end
    assert not rows.x[first:].any()
    assert torch.equal(rows.restore(rows.x), x)
    grad = torch.randn_like(x)
    assert torch.equal(torch.autograd.grad(rows.restore(rows.x * 2), [x], grad)[0], 2 * grad)


def test_groups_of_rows() -> None:
    """Oracle: counted by hand; rows after the last group belong to it."""
    assert group_of_row(ends(2, 0, 1), 5).tolist() == [0, 0, 2, 2, 2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_tokens_stay_with_their_expert(bad: float) -> None:
    """Oracle: the finite tokens alone. Rowwise, a bad token spoils its row, and its expert's grad_weight; no more."""
    sizes = (16, 16)
    x, weight, grad = operands(sizes)
    with torch.no_grad():
        x[3, 5] = bad
    output = grouped_mm(x, weight, ends(*sizes))
    (grad_weight,) = torch.autograd.grad(output, [weight], grad)
    assert output[3].isnan().all()
    assert output[torch.arange(32) != 3].isfinite().all()
    assert grad_weight[0, :, 5].isnan().all()
    assert grad_weight[1].isfinite().all()


def test_one_call_takes_these_arguments() -> None:
    """Oracle: torch's own checks of `_scaled_grouped_mm`, run on fake CUDA tensors, for all three GEMMs of "rowwise".

    They refuse the arguments if a layout, a dtype or a scale is not arranged, as the last lines show.
    """
    T, E, N, K = 64, 3, 32, 48
    e4m3 = torch.float8_e4m3fn
    with FakeTensorMode(), torch.device("cuda"):
        offsets = torch.empty(E, dtype=torch.int32)
        x, g = torch.empty(T, K, dtype=e4m3), torch.empty(T, N, dtype=e4m3)
        w = torch.empty(E, N, K, dtype=e4m3)
        row = torch.empty(T, 1)
        cases = {
            (T, N): (Operand(x, row), Operand(w.transpose(1, 2), torch.empty(E, N, 1).transpose(1, 2))),
            (T, K): (Operand(g, row), Operand(w, torch.empty(E, K, 1).transpose(1, 2))),
            (E, N, K): (
                Operand(g.t(), torch.empty(E, 1, N).transpose(1, 2)),
                Operand(x, torch.empty(E, 1, K)),
            ),
            (T, N, 0): (
                Operand(x, torch.empty(())),
                Operand(w.transpose(1, 2), torch.empty(E)),
            ),  # tensorwise
        }
        for shape, (a, b) in cases.items():
            left, right, scale_a, scale_b, offs = arguments_of_one_call(a, b, offsets)
            result = torch._scaled_grouped_mm(left, right, scale_a, scale_b, offs, out_dtype=torch.bfloat16)
            assert tuple(result.shape) == tuple(size for size in shape if size)
        a, b = cases[T, K]
        with pytest.raises(RuntimeError, match="column major"):
            torch._scaled_grouped_mm(a.qdata, b.qdata, row.flatten(), torch.empty(E, K), offsets)


def kernel(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    *,
    out_dtype: torch.dtype,
    **_: object,
) -> Tensor:
    """`torch._scaled_grouped_mm` as torch's test_scaled_matmul_cuda.py describes it: scales group by group in one row."""
    bounds = list(itertools.pairwise([0, *offs.tolist()]))
    if b.dim() == 3:
        rows = [
            (a[i:j].double() * scale_a[i:j, None]) @ (b[e].double() * scale_b[e])
            for e, (i, j) in enumerate(bounds)
        ]
        assert offs[-1] == len(a)
        return torch.cat(rows).to(out_dtype)
    of_a, of_b = scale_a.view(len(offs), -1), scale_b.view(len(offs), -1)
    groups = [
        (a[:, i:j].double() * of_a[e][:, None]) @ (b[i:j].double() * of_b[e])
        for e, (i, j) in enumerate(bounds)
    ]
    result = torch.stack(groups).to(out_dtype)
    result[[i == j for i, j in bounds]] = float("nan")  # what a kernel may leave in memory
    return result


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_one_call_means_what_the_loop_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the loop over experts. The kernel is stood in for by its description, in float64, rounded to bfloat16."""
    recipe, sizes = RECIPES[name], (20, 0, 12, 5)
    x, weight, grad = operands(sizes)
    want = grouped_mm(x, weight, ends(*sizes), config=recipe)
    want = (want, *torch.autograd.grad(want, [x, weight], grad))
    real = one_call_reason

    def as_on_a_gpu(device: torch.device, *args: object) -> str | None:
        e4m3 = args[2:] == (torch.float8_e4m3fn, torch.float8_e4m3fn)
        return None if e4m3 else real(device, *args)

    monkeypatch.setattr("fp8core.gemm.grouped.one_call_reason", as_on_a_gpu)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    got = grouped_mm(x, weight, ends(*sizes), config=recipe)
    got = (got, *torch.autograd.grad(got, [x, weight], grad))
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() < 2**-8 * other.norm()


def test_when_one_call_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: ATen's conditions, as the module lists them, with a device that pretends to be a GPU."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    assert one_call_reason(gpu, "torch", "rowwise", e4m3, e4m3) is None
    assert one_call_reason(gpu, "torch", "tensorwise", e4m3, e4m3) is None
    for backend, granularity, a, b, part in (
        ("triton", "rowwise", e4m3, e4m3, "backend"),
        ("torch", "128x128", e4m3, e4m3, "a scale for each row"),
        ("torch", "tensorwise", e5m2, e4m3, "e5m2"),
    ):
        assert part in str(one_call_reason(gpu, backend, granularity, a, b))
    assert "cpu" in str(one_call_reason(torch.device("cpu"), "torch", "rowwise", e4m3, e4m3))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert "10.0" in str(one_call_reason(gpu, "torch", "rowwise", e4m3, e4m3))
    monkeypatch.delattr(torch, "_scaled_grouped_mm")
    assert "has no _scaled_grouped_mm" in str(one_call_reason(gpu, "torch", "rowwise", e4m3, e4m3))


@pytest.mark.gpu
def test_one_call_equals_the_loop() -> None:
    """Oracle: backend "reference_bf16" on the same codes; bfloat16 results of sums in another order."""
    sizes = (32, 0, 96)
    x, weight, grad = (t.detach().bfloat16().cuda() for t in operands(sizes))
    results = []
    for recipe in (RECIPES["rowwise"], RECIPES["rowwise"].with_backend("reference_bf16")):
        x_, w_ = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output = grouped_mm(x_, w_, ends(*sizes).cuda(), config=recipe)
        results.append((output, *torch.autograd.grad(output, [x_, w_], grad)))
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() < 2**-8 * other.float().norm()


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("tensorwise", "aot_eager"),
        ("rowwise", "aot_eager"),
        ("blockwise", "aot_eager"),
        pytest.param("rowwise", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled(name: str, backend: str) -> None:
    """Oracle: eager. One graph: padding, casts and products have sizes that depend on no data; other offsets reuse it."""
    x, weight, grad = operands((16, 16, 16))
    torch._dynamo.reset()
    compiled = torch.compile(grouped_mm, fullgraph=True, backend=backend, dynamic=False)
    for sizes in ((5, 27, 16), (48, 0, 0)):
        with torch._dynamo.config.patch(error_on_recompile=sizes[0] == 48):
            output = compiled(x, weight, ends(*sizes), config=on_cpu(name))
        want = grouped_mm(x, weight, ends(*sizes), config=on_cpu(name))
        grads = torch.autograd.grad(output, [x, weight], grad)
        assert torch.equal(output, want)
        for got, expected in zip(grads, torch.autograd.grad(want, [x, weight], grad), strict=True):
            assert torch.equal(got, expected)


def test_operators() -> None:
    """Oracle: torch.library.opcheck: shapes of the fake; of FP8 inputs torch can't compare before and after."""
    x, w = quantize(torch.randn(32, 16), "e4m3fn", "rowwise", dim=1), torch.randn(2, 16, 32)
    codes = w.to(torch.float8_e4m3fn)
    rows = (x.qdata, codes, x.scale_inv, torch.ones(2), ends(16, 16))
    over = (x.qdata.t(), x.qdata, torch.ones(()), torch.ones(()), ends(16, 16))
    for arguments in (rows, over):
        torch.library.opcheck(
            torch.ops.fp8core.scaled_grouped_mm.default,
            (*arguments, "rowwise" if arguments is rows else "tensorwise", torch.float32, False, "reference"),
            test_utils="test_faketensor",
        )
    torch.library.opcheck(torch.ops.fp8core.grouped_mm.default, (torch.randn(32, 16), w, ends(16, 16)))


def test_autocast() -> None:
    """Oracle: the same call on bfloat16 tokens; weights are cast from float32."""
    x, weight, _ = operands((16, 16), 32, 48)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = grouped_mm(x, weight, ends(16, 16))
    assert mixed.dtype == torch.bfloat16
    assert torch.equal(mixed, grouped_mm(x.bfloat16(), weight, ends(16, 16)))


def test_experts_are_converted_on_request_alone() -> None:
    """Oracle: the seeds' rule. Neither conversion touches a router; parameters stay the same objects."""
    model = Mixture(experts=16)
    before = dict(model.named_parameters())
    convert_to_float8_training(model, config="tensorwise")
    report = audit(model)
    assert [layer.fqn for layer in report.converted] == ["head"]
    assert [(found.fqn, found.converted) for found in report.experts] == [
        (f"experts.{name}", False) for name in ("gate", "up", "down")
    ]
    assert all("convert_experts_to_float8" in found.reason for found in report.experts)
    convert_experts_to_float8(model, config="rowwise")
    report = audit(model)
    assert [found.recipe for found in report.experts] == ["rowwise"] * 3
    assert type(model.router).__name__ == "Router"
    dense, router, one = 3 * 32 * 32, 3 * 32 * 16, 2 * 3 * 3 * 32 * 48
    assert report.fp8_flop_share == pytest.approx((dense + one) / (dense + router + one))
    assert "3 of 3 stacks of experts converted" in str(report)
    assert "16 x 48 x 32" in str(report)
    assert all(dict(model.named_parameters())[name] is p for name, p in before.items())
    assert "recipe=rowwise" in repr(model.experts.multiply)


def test_a_plain_router_is_left_out_by_name() -> None:
    """Oracle: names. A router that is exactly nn.Linear has a shape that FP8 takes; the filter keeps it."""
    model = nn.ModuleDict(
        {name: nn.Linear(32, 16) for name in ("router", "shared_expert", "router_free", "up")}
        | {"experts": nn.ModuleList([nn.Linear(32, 16)])}
    )
    convert_to_float8_training(model, module_filter_fn=dense_layers_only)
    assert [layer.fqn for layer in audit(model).converted] == ["router_free", "up"]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_verify_counts_the_gemms_of_experts(name: str) -> None:
    """Oracle: the profiler. A loop runs a GEMM for each expert that has tokens; each step is proven."""
    model = Mixture()
    convert_experts_to_float8(model, config=name)
    x = torch.randn(24, 32)

    def step() -> None:
        model(x).square().mean().backward()

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.line
    (experts,) = proof.experts
    used = int((model.experts.gate.grad.abs().amax((1, 2)) > 0).sum())
    # x needs no gradient, so that gate and up run no grad_input
    assert experts.predicted == used * (3 * RECIPES[name].fp8_gemms - 2)
    assert proof.counted == profiled(step, False)[0] == experts.predicted
    assert experts.agreement_db is not None
    assert experts.agreement_db > 50
    assert "1 modules of experts" in proof.line


def test_verify_sees_what_is_not_fp8() -> None:
    """Oracle: planted. Emulated experts, experts that no token reaches, and a product with a wrong scale are no proof."""
    emulated, unused, wrong = Mixture(), Mixture(), Mixture()
    convert_experts_to_float8(emulated, config=RECIPES["rowwise"].emulated())
    for model in (unused, wrong):
        convert_experts_to_float8(model, config="rowwise")
    unused.experts.forward = lambda x, offsets: x
    wrong.experts.multiply.register_forward_hook(lambda module, args, output: output * 1.05)
    x = torch.randn(24, 32)
    for model, part in ((emulated, "emulated"), (unused, "never called"), (wrong, "not the recipe's")):
        proof = verify(lambda model=model: model(x).square().mean().backward(), model, announce=False)
        assert part in proof.line, proof.line


@pytest.mark.parametrize(
    ("recipe", "sizes", "part"),
    [
        ("delayed", (32, 32), "not defined for groups"),
        ("static", (32, 32), "not defined for groups"),
        ("blockwise", (32, 48), "multiple of 128"),
        ("mxfp8", (32, 32), "no kernel for 1x32"),
        ("rowwise", (32, 40), "not a multiple of 16"),
    ],
)
def test_recipes_that_are_refused(recipe: str, sizes: tuple[int, int], part: str) -> None:
    """Oracle: the message names the reason, when converting and when multiplying."""
    experts = Experts(2, *sizes)
    with pytest.raises(ValueError, match=part):
        convert_experts_to_float8(experts, config=recipe)
    kept = convert_experts_to_float8(experts, config=recipe, allow_no_conversion=True)
    assert part in audit(kept).experts[0].reason
    with pytest.raises(ValueError, match=part):
        grouped_mm(torch.randn(4, sizes[0]), experts.gate, ends(2, 2), config=recipe)


def test_conversion_refuses() -> None:
    """Oracle: the message says what is there and what to do."""
    with pytest.raises(ValueError, match="no module with a GroupedMatmul"):
        convert_experts_to_float8(nn.Linear(16, 16))
    model = Mixture()
    with pytest.raises(ValueError, match="that the filter takes"):
        convert_experts_to_float8(model, module_filter_fn=lambda module, fqn: fqn != "experts")
    assert audit(model).experts[0].reason == "left out by module_filter_fn"
    convert_experts_to_float8(model)
    with pytest.raises(ValueError, match="already runs recipe rowwise"):
        convert_experts_to_float8(model, config="tensorwise")
    with pytest.raises(ValueError, match="at least 1"):
        GroupedMatmul(experts_per_token=0)


@pytest.mark.parametrize(
    ("offsets", "error", "part"),
    [
        (torch.tensor([16, 31], dtype=torch.int32), ValueError, "end at 31, but there are 32 rows"),
        (torch.tensor([16, 48], dtype=torch.int32), ValueError, "end at 48, but there are 32 rows"),
        (torch.tensor([-16, 32], dtype=torch.int32), ValueError, "lies before 0"),
        (torch.tensor([32, 16], dtype=torch.int32), ValueError, "lies before 32"),
        (torch.tensor([16, 32]), TypeError, "int64; expected int32"),
        (torch.tensor([[16, 32]], dtype=torch.int32), ValueError, "expected \\[E\\]"),
        (torch.tensor([], dtype=torch.int32), ValueError, "expected \\[E\\]"),
        (torch.tensor([32], dtype=torch.int32), ValueError, "expected \\[E, N, K\\] = \\[1, N, 32\\]"),
        ([16, 32], TypeError, "offsets is a list"),
    ],
)
def test_bad_offsets(offsets: Tensor, error: type[Exception], part: str) -> None:
    """Oracle: the message names the offset and what is expected."""
    with pytest.raises(error, match=part):
        grouped_mm(torch.randn(32, 32), torch.randn(2, 16, 32), offsets)


@pytest.mark.parametrize(
    ("x", "weight", "error", "part"),
    [
        (torch.zeros(32, 48), torch.zeros(2, 16, 32), ValueError, "expected \\[E, N, K\\] = \\[2, N, 48\\]"),
        (torch.zeros(32, 32), torch.zeros(16, 32), ValueError, "weight has shape"),
        (torch.zeros(2, 16, 32), torch.zeros(2, 16, 32), ValueError, "expected \\[T, K\\]"),
        (torch.zeros(32, 32).double(), torch.zeros(2, 16, 32), TypeError, "x has dtype torch.float64"),
        (torch.zeros(32, 32), torch.zeros(2, 16, 32).double(), TypeError, "weight has dtype torch.float64"),
        (torch.zeros(32, 32), torch.zeros(2, 16, 32).int(), TypeError, "weight has dtype"),
    ],
)
def test_bad_operands(x: Tensor, weight: Tensor, error: type[Exception], part: str) -> None:
    """Oracle: the message names the operand and what is expected."""
    with pytest.raises(error, match=part):
        grouped_mm(x, weight, ends(16, 16))


def test_unaligned_groups_are_refused_by_the_product_itself() -> None:
    """Oracle: the rule of 16; in eager mode by the check, compiled by the operator."""
    with pytest.raises(ValueError, match="offsets\\[0\\] = 5 is not a multiple of 16"):
        aligned_grouped_mm(torch.randn(32, 32), torch.randn(2, 16, 32), ends(5, 27), RECIPES["rowwise"])
    with pytest.raises(ValueError, match="end at 48"):
        check_offsets(ends(16, 32), 40, exact=False)
    one = Operand(torch.zeros(32, 16, dtype=torch.float8_e4m3fn), torch.ones(()))
    other = Operand(torch.zeros(2, 16, 16, dtype=torch.float8_e4m3fn), torch.ones(2))
    with pytest.raises(ValueError, match="lies before 0"):
        scaled_grouped_mm(one, other, torch.tensor([-16, 32], dtype=torch.int32), "tensorwise")
