"""Oracles: fp8core's bit-exact layer and casts, the suites' own checks; an absent or broken package is simulated."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8core.convert import convert_to_float8_training
from fp8core.tensor import quantize
from harness import store
from harness.__main__ import main
from harness.peers import PEERS, nanochat_style, scaled_mm, torchao, torchao_nocompile
from harness.peers.peer import PeerImportError, imported
from harness.store.case import Case
from harness.store.errors import Cause
from harness.suites import cast, gemm, linear

LINEAR = Case.of("linear", {"shape_set": "custom", "layer": "custom", "M": 48, "K": 64, "N": 80})
GEMM = Case.of(
    "gemm",
    {
        "shape_set": "custom", "layer": "custom", "role": "output", "data": "randn", "M": 33, "K": 64, "N": 48,
    },
)  # fmt: skip
CAST = Case.of("cast", {"dtype": "e4m3fn", "granularity": "rowwise", "src": "bf16", "M": 33, "K": 48})
needs_torchao = pytest.mark.skipif(torchao.missing("cpu") is not None, reason=str(torchao.missing("cpu")))


def step(layer: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    output = layer(x)
    return output.detach(), *torch.autograd.grad(output, [x, layer.weight], grad)


# The table


# Absent


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))


def test_an_absent_peer_is_skipped_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torchao")
    for suite, case in ((linear, LINEAR), (cast, CAST)):
        for arm in suite.ARMS:
            why = suite.unsupported(case, arm, "cpu")
            if arm.startswith(("torchao_", "torchaomx_")):
                assert why is not None
                assert why.kind == "device"
                assert why.reason == "torchao is not installed: pip install 'torchao>=0.18'"
            else:
                assert why is None or "torchao is not installed" not in why.reason


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_a_peer_made_for_another_torch_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[Exception]
) -> None:
    name = f"stale_peer_{error.__name__.lower()}"
    (tmp_path / f"{name}.py").write_text(f"raise {error.__name__}('no such\\n operator')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PeerImportError) as refused:
        imported(name, "stale>=2")
    assert refused.value.cause is Cause.MISSING
    reason = str(refused.value)
    for part in (torch.__version__, f"{error.__name__}: no such operator", "pip install 'stale>=2'"):
        assert part in reason


@pytest.mark.parametrize("part", ["linear", "unfit"])
def test_a_peer_that_is_installed_and_cannot_be_imported_is_a_skipped_row(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its layer, which the plan does not make, or where the plan asks it. Oracle: the module that is not there."""
    monkeypatch.chdir(tmp_path)
    stale: Any = {part: lambda *_: imported("no_such_module", "it>=2")}
    adapter = dataclasses.replace(PEERS["torchao"], missing=lambda device: None, **stale)
    monkeypatch.setitem(PEERS, "torchao", adapter)
    words = "sweep=linear arms=[bf16_eager,torchao_rowwise_eager] isolate=false report=false control=false"
    words += " axes.M=16 axes.K=32 axes.N=16 run_id=r rounds=3 timing.min_seconds=0"
    assert main(words.split()) == 0
    frame = store.read(tmp_path / "results/linear/r")
    rows = frame.query("metric == 'time_ms' or status != 'ok'").set_index("arm")
    assert (rows["status"] + rows["cause"]).to_dict() == {
        "bf16_eager": "ok",
        "torchao_rowwise_eager": "skippedmissing",
    }
    assert "pip install 'it>=2'" in rows["reason"]["torchao_rowwise_eager"]


def test_nocompile_needs_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for suite_reason in (
        torchao_nocompile.missing("cpu"),
        getattr(linear.unsupported(LINEAR, "nocompile_tensorwise_eager", "cpu"), "reason", ""),
    ):
        assert suite_reason is not None
        assert "Triton kernels, which cpu can't run" in suite_reason
    without(monkeypatch, "triton")
    assert torchao_nocompile.missing("cuda") == "triton is not installed: pip install 'triton'"


@needs_torchao
@pytest.mark.parametrize("name", ["torchao_mx", "torchao_nocompile"])
def test_a_peer_of_one_recipe_refuses_another(name: str) -> None:
    with pytest.raises(ValueError, match="rowwise"):
        PEERS[name].linear(torch.nn.Linear(16, 16), "rowwise")


def test_mx_needs_a_gpu_with_products_of_its_blocks() -> None:
    """Oracle: NVIDIA's table, block-scaled products since compute capability 10.0."""
    assert "compute capability 10.0, not this cpu" in str(PEERS["torchao_mx"].missing("cpu"))


# Right


@pytest.mark.parametrize("size", [(16, 32, 48), (80, 64, 16), (16, 16, 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_hand_written_layer_equals_fp8core_bit_for_bit(
    size: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the peer's own code. Without oneDNN, which on a CPU with AMX sums its products, and not ours, in another order."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    M, K, N = size
    layer = nn.Linear(K, N, bias=False, dtype=dtype)
    x, grad = torch.randn(M, K, dtype=dtype), torch.randn(M, N, dtype=dtype) * 2.0**-14
    theirs = nanochat_style.linear(layer, "tensorwise")
    assert theirs.weight is layer.weight
    results = step(theirs, x, grad)
    ours = step(convert_to_float8_training(layer, config="tensorwise"), x, grad)
    assert all(torch.equal(a, b) for a, b in zip(results, ours, strict=True))
    theirs.weight.requires_grad_(False)
    (alone,) = torch.autograd.grad(theirs(x.requires_grad_()), x, grad)
    assert torch.equal(alone, results[1]), "of a frozen weight too"


@needs_torchao
@pytest.mark.parametrize("recipe", torchao.PEER.recipes)
def test_torchaos_layer_shares_the_weight_and_leaves_inductor_alone(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    """`convert_to_float8_training` would rewrite Inductor's minimum and maximum for our compiled arms too."""
    patch = importlib.import_module("torchao.float8._inductor_patch")
    monkeypatch.setattr(patch, "_PATCHED", False)
    layer = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    new = torchao.linear(layer, recipe)
    assert type(new).__module__ == "torchao.float8.float8_linear"
    assert new.weight is layer.weight
    assert patch._PATCHED is False


@needs_torchao
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_torchaos_cast_against_ours(dtype: torch.dtype, granularity: Any, source: torch.dtype) -> None:
    x = torch.randn(17, 33, dtype=source)
    codes, scale_inv = torchao.cast(x, dtype, granularity)
    ours = quantize(x, dtype, granularity)
    assert torch.equal(codes.view(torch.uint8), ours.qdata.view(torch.uint8))
    assert torch.equal(scale_inv, ours.scale_inv)


@pytest.mark.parametrize(
    ("suite", "case", "arm"),
    [
        (linear, LINEAR, "nanochat_tensorwise_eager"),
        (gemm, GEMM, "scaled_mm_rowwise_eager"),
        pytest.param(cast, CAST, "torchao_eager", marks=needs_torchao),
        pytest.param(linear, LINEAR, "torchao_rowwise_with_gw_hp_eager", marks=needs_torchao),
    ],
)
def test_a_peers_row_names_it_and_its_version(suite: Any, case: Case, arm: str) -> None:
    workload = suite.build(case, arm, "cpu")
    peer = next(p for p in PEERS.values() if arm.startswith(p.arm))
    assert workload.check().ok
    assert workload.resolved["peer"] == peer.arm
    assert workload.resolved["peer_version"] == peer.version()
    assert peer.doc in str(workload.resolved["backend"])


# Wrong


def replace_peer(monkeypatch: pytest.MonkeyPatch, name: str, **changed: Any) -> None:
    peers = {**PEERS, name: dataclasses.replace(PEERS[name], **changed)}
    monkeypatch.setattr("harness.peers.PEERS", peers)


def test_a_wrong_peer_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product 2 % too large, codes truncated, a layer that stayed in bf16."""
    replace_peer(monkeypatch, "scaled_mm", gemm=lambda *operands: scaled_mm.gemm(*operands) * 1.02)
    numerics = gemm.build(GEMM, "scaled_mm_tensorwise_eager", "cpu").check()
    assert not numerics.ok
    assert "dB expected" in numerics.reason

    def unscaled(x: Tensor, dtype: torch.dtype, granularity: str) -> tuple[Tensor, Tensor]:
        return x.to(dtype), torch.ones(x.shape[0], 1)

    stand_in: dict[str, Any] = {"missing": lambda device: None, "version": lambda: "0"}
    replace_peer(monkeypatch, "torchao", cast=unscaled, **stand_in)
    numerics = cast.build(CAST, "torchao_eager", "cpu").check()
    assert not numerics.ok
    assert "differ from the reference cast" in numerics.reason

    replace_peer(monkeypatch, "torchao", linear=lambda layer, recipe: layer, **stand_in)
    numerics = linear.build(LINEAR, "torchao_tensorwise_eager", "cpu").check()
    assert not numerics.ok
    assert "0 FP8 GEMMs ran where 3 were due" in numerics.reason
