"""Counted matrix products. Oracles: shapes and configurations by hand, in whole numbers; torch's own FlopCounterMode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from client_models import Gpt2, Mixture
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp8core import (
    RECIPES,
    convert_experts_to_float8,
    convert_to_float8_training,
    count_matmuls,
    grouped_mm,
    microbatches,
)
from fp8core.proof.flops import MatmulCount, percent

aten = torch.ops.aten
TOKENS, WIDTH = 32, 64


def by_owner(count: MatmulCount, phase: str | None = None) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in count.matmuls:
        if phase in (None, row.phase):
            name = row.owner if row.role in ("weight", "convolution") else f"{row.owner} {row.role}".strip()
            sums[name] = sums.get(name, 0.0) + row.flops
    return sums


def counted(run: Callable[[], object]) -> float:
    return sum(row.flops for row in count_matmuls(run, nn.Identity()).matmuls)


a, b, vector = torch.randn(8, 24), torch.randn(24, 40), torch.randn(24)
batched = torch.randn(3, 8, 24), torch.randn(3, 24, 40)
ONE = 2 * 8 * 24 * 40


@pytest.mark.parametrize(
    ("run", "flops"),
    [
        (lambda: a @ b, ONE),
        (lambda: torch.addmm(torch.zeros(40), a, b), ONE),
        (lambda: torch.einsum("bmk,bkn->bmn", *batched), 3 * ONE),
        (lambda: a @ vector, 2 * 8 * 24),
        (lambda: functional.linear(batched[0], b.t()), 3 * ONE),
        (lambda: functional.conv1d(torch.randn(1, 4, 10), torch.randn(6, 4, 3)), 2 * 8 * 6 * 4 * 3),
        (lambda: functional.softmax(a + 1, -1).sum().sqrt(), 0),
    ],
)
def test_products_by_hand(run: Callable[[], object], flops: int) -> None:
    """Oracle: 2 M K N, written out. In inference mode too, where composite operators arrive whole."""
    assert counted(run) == flops
    with torch.inference_mode():
        assert counted(run) == flops


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_by_formula(backend: SDPBackend, is_causal: bool, kv_heads: int) -> None:
    """Oracle: 12 B H T T D of PaLM's appendix B, for the CPU's fused kernel, which FlopCounterMode does not count, too."""
    q, k, v = (torch.randn(2, heads, 48, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads))

    def step() -> None:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=kv_heads != 4
            )
        out.sum().backward()

    module = nn.Identity()
    full = count_matmuls(step, module)
    assert sum(row.flops for row in full.matmuls) == 12 * 2 * 4 * 48 * 48 * 16
    half = sum(row.flops for row in count_matmuls(step, module, causal="half").matmuls)
    fused = is_causal and backend is SDPBackend.FLASH_ATTENTION
    assert half == (0.5 if fused else 1) * 12 * 2 * 4 * 48 * 48 * 16


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])
@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_every_backend_of_a_linear(name: str, backend: str) -> None:
    """Oracle: 6 T K N, and the recipe: which GEMMs are FP8. An emulated one is "emulated", never FP8."""
    recipe = RECIPES[name].with_backend(backend)
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)), config=recipe
    )
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    count = count_matmuls(lambda: model(x).sum().backward(), model)
    one = 2 * TOKENS * WIDTH * 128
    assert by_owner(count) == {"0.weight": 3 * one, "1.weight": 3 * one}
    fp8 = RECIPES[name].fp8_gemms / 3
    assert count.fp8_share == pytest.approx(0 if backend == "reference" else fp8)
    if backend == "reference":
        assert count.by_dtype()["emulated"] == pytest.approx(6 * one * fp8)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "e4m3"), ("reference", "emulated"), (None, "float32")]
)
def test_grouped_products_count_real_rows(backend: str | None, dtype: str) -> None:
    """Oracle: 6 T K N of the 45 tokens, though each expert's are filled up to a multiple of 16; torch's own product, too."""
    x, weight = torch.randn(45, 32, requires_grad=True), nn.Parameter(torch.randn(3, 48, 32))
    ends = torch.tensor([20, 20, 45], dtype=torch.int32)

    def product() -> Tensor:
        if backend is None:
            return functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return grouped_mm(x, weight, ends, config=RECIPES["rowwise"].with_backend(backend))

    count = count_matmuls(lambda: product().square().sum().backward(), nn.ParameterDict({"w": weight}))
    assert by_owner(count) == {"w": 6 * 45 * 32 * 48}
    assert set(count.by_dtype()) == {dtype}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_recomputation_stands_apart(reentrant: bool, recipe: str | None) -> None:
    """Oracle: a checkpointed block runs its forward pass twice; shares and owners are those without checkpointing."""

    first, block = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH))
    model = nn.Sequential(first, block)
    if recipe is not None:
        convert_to_float8_training(model, config=recipe)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    count = count_matmuls(
        lambda: checkpoint(block, model[0](x), use_reentrant=reentrant).sum().backward(), model
    )
    once, one = 2 * TOKENS * WIDTH * WIDTH, 2 * TOKENS * WIDTH * 128
    assert by_owner(count, "forward") == {"0.weight": once, "1.0.weight": one, "1.1.weight": one}
    assert by_owner(count, "backward") == {name: 2 * f for name, f in by_owner(count, "forward").items()}
    recomputed = by_owner(count, "recompute")
    # Without FP8 the non-reentrant kind stops before the last product, which nothing in the backward pass needs
    assert recomputed["1.0.weight"] == one
    assert recomputed.get("1.1.weight", 0) in (0, one)
    assert count.flops == 3 * (once + 2 * one)


def test_what_is_outside_and_what_is_unknown() -> None:
    """Oracle: planted. An optimizer's product counts for no layer; operators without a formula are named."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    x = torch.randn(TOKENS, WIDTH)

    def with_muon() -> None:
        model(x).sum().backward()
        grad = model[0].weight.grad
        assert grad is not None
        _ = grad @ grad.t()

    count = count_matmuls(with_muon, model)
    assert by_owner(count, "outside") == {"product": 2 * WIDTH**3}
    assert count.flops == 4 * TOKENS * WIDTH**2

    @torch.library.custom_op("fp8core_tests::somebodys_attention", mutates_args=())
    def somebodys_attention(x: Tensor) -> Tensor:
        return x @ x.t() @ x

    convert_to_float8_training(model)
    count = count_matmuls(lambda: somebodys_attention(model(x.requires_grad_()).detach()), model)
    assert [(row.operator, row.calls) for row in count.uncounted] == [
        ("fp8core_tests.somebodys_attention", 1)
    ]
    assert "100.0 %" not in count.text


@pytest.mark.parametrize("plain", [False, True])
def test_gpt2_by_its_configuration(plain: bool) -> None:
    """Oracle: 6 N + 12 L H Q T a token, N being the weights of products: 12 L d^2 + V d. The promise is 1 %; it is exact.

    FP8 is what converts: the four Conv1D of a block.
    """
    width, layers, vocab, seq, batch = 64, 2, 256, 32, 2
    model = Gpt2(plain=plain)
    tokens = torch.randint(0, vocab, (batch, seq))
    blocks, head, attention = 12 * layers * width**2, vocab * width, 12 * layers * width * seq
    total = batch * seq * (6 * (blocks + head) + attention)
    assert count_matmuls(lambda: model(tokens).backward(), model).flops == total
    convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn != "lm_head")
    count = count_matmuls(lambda: model(tokens).backward(), model)
    assert count.flops == total
    assert count.fp8_share == pytest.approx(batch * seq * 6 * blocks / total, rel=1e-12)
    half = batch * seq * attention / 2 / total
    assert count.not_in_fp8 == pytest.approx(
        {
            "lm_head": batch * seq * 6 * head / total,
            "attention scores": half,
            "attention values": half,
        }
    )


def test_mixture_by_its_configuration() -> None:
    """Oracle: each token meets top_k experts: 6 T (E d + k 3 d f + d^2)."""
    model, tokens = Mixture(), 45
    x = torch.randn(tokens, 64, requires_grad=True)
    router, experts, out = 4 * 64, 2 * 3 * 64 * 32, 64 * 64
    total = 6 * tokens * (router + experts + out)
    plain = count_matmuls(lambda: model(x).sum().backward(), model)
    assert plain.flops == total
    convert_experts_to_float8(model)
    count = count_matmuls(lambda: model(x).sum().backward(), model)
    assert count.flops == total
    assert count.fp8_share == pytest.approx(6 * tokens * experts / total, rel=1e-12)
    assert {row.owner for row in count.matmuls if row.is_fp8} == {"experts.gate_up_proj", "experts.down_proj"}


def test_encoder_by_its_configuration() -> None:
    """Oracle: in_proj 3 d^2, out_proj d^2, two feed-forward weights d f each; attention 12 H Q T, without a mask."""
    width, ffn, seq, batch = 64, 128, 32, 2
    model = nn.TransformerEncoderLayer(width, 4, ffn, batch_first=True)
    x = torch.randn(batch, seq, width, requires_grad=True)
    total = batch * seq * (6 * (4 * width**2 + 2 * width * ffn) + 12 * width * seq)
    count = count_matmuls(lambda: model(x).sum().backward(), model)
    assert count.flops == total
    assert by_owner(count)["self_attn.in_proj_weight"] == batch * seq * 6 * 3 * width**2
    with FlopCounterMode(display=False) as torchs, sdpa_kernel(SDPBackend.MATH):
        model(x).sum().backward()
    assert torchs.get_total_flops() == total


def test_casts_made_before_the_step_and_compiled_layers() -> None:
    """Oracle: 6 T K N, whoever made the weight's codes; a compiled model is counted in eager mode."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    with microbatches(model):
        model(x).sum().backward()
        assert by_owner(count_matmuls(lambda: model(x).sum().backward(), model)) == {
            "0.weight": 6 * TOKENS * WIDTH**2
        }
    compiled = torch.compile(model, backend="eager")
    count = count_matmuls(lambda: compiled(x).sum().backward(), compiled)
    assert count.flops == 6 * TOKENS * WIDTH**2


def test_counting_changes_nothing() -> None:
    """Oracle: gradients and random numbers of the step without it, bit for bit; no hook stays."""
    model = Gpt2(plain=True)
    tokens = torch.randint(0, 256, (2, 32))

    def gradients(run: Callable[[Callable[[], object]], object]) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(3)
        run(lambda: model(tokens).backward())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None] + [torch.rand(1)]

    for want, got in zip(
        gradients(lambda step: step()), gradients(lambda step: count_matmuls(step, model)), strict=True
    ):
        assert torch.equal(want, got)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_percent() -> None:
    assert [percent(share) for share in (1, 1 - 1e-9, 0.5, 1e-9, 0)] == [
        "100.0 %",
        "99.9 %",
        "50.0 %",
        "below 0.1 %",
        "0.0 %",
    ]
