"""Adapters of libraries that no CPU has: stand-ins with their interfaces, Triton's interpreter, fp8core's own products.

What a stand-in proves is that the adapter hands over the right operands in the right layout; that the library takes
them so is only seen on its GPU, where the suites check every product.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_lm import tiny_lm, tokens
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from fp8core.recipe import RECIPES
from harness.__main__ import main
from harness.peers import PEERS, aiter, torchao, torchao_mx, transformer_engine
from harness.peers.peer import fp8_kernels
from harness.store.case import Case
from harness.suites import gemm
from harness.training.setup import Setup, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_torchao = pytest.mark.skipif(torchao.missing("cpu") is not None, reason=str(torchao.missing("cpu")))


def product_case(role: str = "output", M: int = 256, K: int = 256, N: int = 128) -> Case:
    axes = {"shape_set": "custom", "layer": "custom", "role": role, "data": "randn", "M": M, "K": K, "N": N}
    return Case.of("gemm", axes)


def put(monkeypatch: pytest.MonkeyPatch, **modules: types.SimpleNamespace) -> None:
    """Stand-ins for libraries; `__` in a name stands for a dot."""
    for name, content in modules.items():
        module = types.ModuleType(name.replace("__", "."))
        module.__dict__.update(content.__dict__)
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)


# Transformer Engine


@dataclass
class Seen:
    """What a stand-in for Transformer Engine was asked for: the recipe of each autocast, `is_first_microbatch` of each call."""

    recipes: list[str] = field(default_factory=list)
    firsts: list[bool | None] = field(default_factory=list)
    depth: int = 0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A stand-in whose Linear is PyTorch's."""
    seen = Seen()

    class Linear(nn.Linear):
        def __init__(
            self, inner: int, outer: int, bias: bool, params_dtype: torch.dtype, device: str
        ) -> None:
            super().__init__(inner, outer, bias=bias, dtype=params_dtype, device=device)

        def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
            assert seen.depth == 1
            seen.firsts.append(is_first_microbatch)
            return super().forward(input)

    @contextmanager
    def autocast(enabled: bool, recipe: Any) -> Iterator[None]:
        assert enabled
        seen.recipes.append(type(recipe).__name__)
        seen.depth += 1
        try:
            yield
        finally:
            seen.depth -= 1

    classes = {theirs: type(theirs, (), {}) for theirs, _ in transformer_engine._RECIPES.values()}
    recipes = types.SimpleNamespace(**classes)
    library = types.SimpleNamespace(
        Linear=Linear,
        autocast=autocast,
        is_fp8_available=lambda return_reason: (True, ""),
        is_fp8_block_scaling_available=lambda return_reason: (False, "needs CUDA 12.9"),
    )
    put(
        monkeypatch,
        transformer_engine=types.SimpleNamespace(common=None, pytorch=None),
        transformer_engine__common=types.SimpleNamespace(recipe=None),
        transformer_engine__common__recipe=recipes,
        transformer_engine__pytorch=library,
    )
    parent, common = sys.modules["transformer_engine"], sys.modules["transformer_engine.common"]
    monkeypatch.setattr(parent, "pytorch", sys.modules["transformer_engine.pytorch"])
    monkeypatch.setattr(parent, "common", common)
    monkeypatch.setattr(common, "recipe", sys.modules["transformer_engine.common.recipe"])
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    return seen


@pytest.mark.parametrize(("recipe", "theirs"), [(k, v[0]) for k, v in transformer_engine._RECIPES.items()])
@pytest.mark.parametrize("bias", [False, True])
def test_engines_layer_runs_in_its_recipe_and_shares_the_parameters(
    recipe: str, theirs: str, bias: bool, engine: Seen
) -> None:
    layer = nn.Linear(32, 48, bias=bias)
    new = transformer_engine.EngineLinear(layer, recipe)
    x = torch.randn(16, 32)
    assert torch.equal(new(x), layer(x))
    assert transformer_engine.unfit("tensorwise", "cuda") is None
    assert "needs CUDA 12.9" in str(transformer_engine.unfit("blockwise", "cuda"))
    assert engine == Seen([theirs], [None])
    assert new.weight is layer.weight
    assert {id(p) for p in new.parameters()} == {id(p) for p in layer.parameters()}


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_model_of_the_engine_has_one_autocast_a_forward_pass_and_casts_weights_once_a_step(
    microbatches: int, engine: Seen
) -> None:
    """Leaving an autocast updates the scales of all layers, and the first layer in it those of the backward pass."""
    config = Setup(
        "tiny", 4, 8, compute="fp32", recipe=RECIPES["delayed"], peer="transformer_engine", accumulation=microbatches
    )  # fmt: skip
    made = prepare(config, "cpu", tiny_lm())
    made_of = [m for m in made.model.modules() if isinstance(m, transformer_engine.EngineLinear)]
    layers, right = len(made_of), list[bool]()
    assert layers >= 2
    for layer in made_of:
        layer.register_forward_hook(
            lambda layer, x, y: right.append(torch.equal(y, nn.functional.linear(*x, *layer.parameters())))
        )
    for _ in range(2):
        made.step([tokens(i) for i in range(microbatches)])
    firsts: list[bool | None] = [None] if microbatches == 1 else [True, False, False]
    expected = [first for first in 2 * firsts for _ in range(layers)]
    assert engine == Seen(["DelayedScaling"] * 2 * microbatches, expected)
    with torch.no_grad():
        made.forward(tokens(0))  # as an evaluation does
    assert engine == Seen(["DelayedScaling"] * (2 * microbatches + 1), expected + [None] * layers)
    assert all(right)
    assert config.casts_kept is (microbatches > 1)
    assert not replace(config, recipe=RECIPES["tensorwise"], peer="torchao").casts_kept


def test_products_that_are_no_operators_are_counted_by_kernel_name() -> None:
    names = [
        "nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT",
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNN",
        "void cast_fp8()",
    ]
    events = [types.SimpleNamespace(name=n, device_type=DeviceType.CUDA) for n in names]
    events += [types.SimpleNamespace(name=names[0], device_type=DeviceType.CPU)]
    assert fp8_kernels(events) == 1
    assert [name for name, peer in PEERS.items() if not peer.operators] == ["transformer_engine"]


# DeepGEMM, aiter


def dequantised(codes: Tensor, scale_inv: Tensor) -> Tensor:
    """[rows, K] of codes with a scale for each block, by repeating the scales."""
    rows, columns = (-(-size // blocks) for size, blocks in zip(codes.shape, scale_inv.shape, strict=True))
    return codes.float() * scale_inv.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@pytest.mark.parametrize("name", ["fp8_gemm_nt", "gemm_fp8_fp8_bf16_nt"])
@pytest.mark.parametrize("role", ["output", "grad_input"])
def test_deepgemm_gets_blocks_as_its_readme_asks(
    role: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the suite's own check of the product, made of what the stand-in was handed, which no call copied."""

    def multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], out: Tensor) -> None:
        (left, left_scale), (right, right_scale) = a, b
        assert left.is_contiguous()
        assert right.is_contiguous()
        assert left_scale.shape == (256, 2)
        assert left_scale.stride() == (1, 256)
        assert right_scale.shape == (3, 2)
        assert right_scale.is_contiguous()
        assert right_scale._is_view()
        out.copy_(dequantised(left, left_scale) @ dequantised(right, right_scale).t())

    put(monkeypatch, deep_gemm=types.SimpleNamespace(**{name: multiply}))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1")
    work = gemm.build(product_case(role, N=384), "deepgemm_blockwise_eager", "cpu")
    numerics = work.check()
    assert numerics.ok, numerics.reason
    assert gemm.ARMS["deepgemm_blockwise_eager"].baseline == "blockwise_triton_eager"
    assert work.resolved["peer_version"] == "2.1"


def test_aiter_gets_rows_of_b_transposed_with_a_scale_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: None, dtype: torch.dtype
    ) -> Tensor:
        assert b.is_contiguous()
        assert (tuple(a_scale.shape), tuple(b_scale.shape)) == ((256, 1), (128, 1))
        return ((a.float() * a_scale) @ (b.float() * b_scale).t()).to(dtype)

    put(monkeypatch, aiter=types.SimpleNamespace(gemm_a8w8=multiply))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1")
    numerics = gemm.build(product_case(), "aiter_rowwise_eager", "cpu").check()
    assert numerics.ok, numerics.reason
    assert "there: pip install" in str(aiter.PEER.missing("cuda" if torch.version.hip is None else "cpu"))


# torchao's MXFP8


@needs_torchao
@pytest.mark.parametrize("bias", [False, True])
def test_torchaos_mx_layer_in_emulation_is_our_emulated_recipe(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Casts are bit for bit the same, so outputs differ by the rounding of a bfloat16 product alone."""
    pytest.importorskip(torchao_mx.MODULE)  # a prototype, which other releases keep elsewhere
    from fp8core.convert import convert_to_float8_training

    monkeypatch.setattr(torchao_mx.MXLinear, "emulated", True)
    layer = nn.Linear(64, 96, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    new = torchao_mx.linear(layer, "mxfp8")
    assert new.weight is layer.weight
    theirs = new(x)
    ours = convert_to_float8_training(layer, config=RECIPES["mxfp8"].emulated())(x)
    error = (theirs.double() - ours.double()).norm() / ours.double().norm()
    assert error < 2**-8  # half a unit in the last place of bfloat16, of one product or the other


# By name


def test_peers_are_chosen_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep=linear", "device=cpu", "peers=[nanochat_style]", "dry_run=true", "arms=[]"]) == 0
    out = capsys.readouterr().out
    assert "nanochat_tensorwise_eager" in out
    assert "torchao" not in out
    assert "te_" not in out
