"""operands: casts by the fused operators give the bytes of the plain ones, lie as the GEMMs want them, and say so."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from recipes import FP8, on_cpu
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import (
    E4M3FNUZ,
    E5M2,
    RECIPES,
    Cast,
    Float8Linear,
    Float8Tensor,
    Recipe,
    audit,
    cast_input,
    convert_to_float8_training,
    microbatches,
    update_scales,
)
from fp8core.history import AmaxMemory
from fp8core.inputs import operands
from fp8core.recipe import MX_MODES

CASTS = {
    "tensorwise": Cast(E5M2),
    "tensorwise pow2": Cast(RECIPES["tensorwise"].output.b.format, power_of_two=True),
    "rowwise": RECIPES["rowwise"].output.a,
    "1x128": RECIPES["blockwise"].output.a,
    "128x128": RECIPES["blockwise"].output.b,
    "fnuz": Cast(E4M3FNUZ, "rowwise"),  # no kernel encodes it: the operators' plain twins
    **{mode: Cast(E5M2, "1x32", mx_mode=mode) for mode in MX_MODES},
}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.int32)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert isinstance(got, Float8Tensor)
    assert isinstance(want, Float8Tensor)
    assert (got.dtype, got.granularity, got.shape) == (want.dtype, want.granularity, want.shape)
    assert torch.equal(bits(got.qdata), bits(want.qdata))
    assert torch.equal(bits(got.scale_inv), bits(want.scale_inv))


@pytest.mark.parametrize("shape", [(48, 160), (17, 63), (1, 130), (130, 1), (0, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASTS)
def test_both_routes_give_the_same_operands(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Oracle: the plain route, bit for bit; codes of the kernels' route lie along the contracted dimension."""
    x, cast = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype), CASTS[name]
    plain = operands.cast_both(x, cast, cast, kernels="never")
    fused = operands.cast_both(x, cast, cast, kernels="always")
    for dim, got, want in zip((1, 0), fused, plain, strict=True):
        same(got, want)
        same(operands.cast_one(x, cast, dim, kernels="always"), want)
        assert got.qdata.t().is_contiguous() if dim == 0 else got.qdata.is_contiguous()
    same(operands.cast_both(x.t().contiguous().t(), cast, cast, kernels="always")[0], plain[0])


def trained(recipe: Recipe, steps: int = 3, shared: bool = False, cached: bool = False) -> list[torch.Tensor]:
    """Outputs, gradients and amaxes of a small model over some steps, the third of which saturates delayed scales."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 160), nn.Linear(160, 48, bias=False))
    model = convert_to_float8_training(model, config=recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[torch.Tensor] = []
    for index in range(steps):
        x = (torch.randn(144, 32) * (1 + index)).requires_grad_()
        with microbatches(model) if cached else torch.enable_grad():
            for _ in range(2):
                y = model(cast_input(x, model[0])) if shared else model(x)
                (y.square().mean() * 1e-3).backward()
                seen.append(y.detach())
        assert x.grad is not None
        seen += [x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
        seen += [b.clone() for m in model.modules() if isinstance(m, AmaxMemory) for b in m.buffers()]
    return seen


@pytest.mark.parametrize("name", FP8)
def test_a_layer_trains_alike_on_both_routes(name: str) -> None:
    """Oracle: the plain route, bitwise: outputs, gradients and amaxes of three steps, shared and kept casts too."""
    recipe = on_cpu(name)
    want = trained(recipe.with_kernels("never"))
    for shared in (False, True):
        for cached in (False, True):
            got = trained(recipe.with_kernels("always"), shared=shared, cached=cached)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (shared, cached)


@pytest.mark.parametrize("fmt", ["output", "grad_input", "grad_weight"])
def test_recipes_that_mix_casts_train_alike(fmt: str) -> None:
    """Oracle: the plain route. Operands of different casts for two GEMMs, and GEMMs left in high precision."""
    mixed = RECIPES["rowwise_with_gw_hp"].in_high_precision(fmt)
    want, got = (trained(mixed.with_kernels(kernels)) for kernels in ("never", "always"))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class Ops(TorchDispatchMode):
    """Counts operators; what an operator of ours does inside of itself is its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.copied = 0  # elements, of codes and matrices alike

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(op).removesuffix(".default")
        self.seen[name] += 1
        if name in ("aten.clone", "aten.copy_", "aten._to_copy", "aten.contiguous"):
            self.copied += args[0].numel()
        return op(*args, **(kwargs or {}))


EXPECTED = {
    "tensorwise": {"fp8core.amax": 3, "fp8core.cast_both": 3},
    "delayed": {"fp8core.cast_delayed_both": 3},
    "static": {"fp8core.cast_delayed_both": 3},
    "rowwise": {"fp8core.cast_rowwise_both": 3},
    # the weight rowwise for one GEMM, tensorwise for the other
    "rowwise_with_gw_hp": {"fp8core.cast_rowwise": 3, "fp8core.amax": 1, "fp8core.cast_both": 1},
    "blockwise": {"fp8core.cast_1x128_both": 2, "fp8core.cast_128x128_both": 1},
    "mxfp8": {"fp8core.cast_mx_both": 3},
}


@pytest.mark.parametrize("name", FP8)
def test_transposed_operands_reach_the_gemm_without_a_copy(name: str) -> None:
    """Oracle: the count by hand of one layer's operators: fused casts, GEMMs, and no copy of codes."""
    recipe = RECIPES[name] if name != "mxfp8" else on_cpu(name)
    layer = Float8Linear(128, 256, bias=False, dtype=torch.bfloat16, config=recipe.with_kernels("always"))
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(64, 256, dtype=torch.bfloat16)
    torch.autograd.grad(layer(x), (x, layer.weight), g)
    update_scales(layer)
    with Ops() as ops:
        torch.autograd.grad(layer(x), (x, layer.weight), g)
    ours = {op: count for op, count in ops.seen.items() if op.startswith("fp8core.") and "matmul" not in op}
    assert ours == EXPECTED[name]
    gemms = ops.seen["aten._scaled_mm"] + ops.seen["fp8core.matmul"]
    assert gemms == (0 if name == "mxfp8" else recipe.fp8_gemms)
    if name != "mxfp8":  # emulation widens codes
        assert ops.copied == {"delayed": 3, "static": 3, "rowwise_with_gw_hp": 128}.get(
            name, 0
        )  # amaxes; a scale


def test_the_route_has_one_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand, the question that every cast asks, and what the audit says of a layer."""
    x, cast, recipe = torch.randn(4, 4), CASTS["tensorwise"], RECIPES["rowwise"]
    assert "not on cpu" in str(operands.why_unfused(x, "auto", cast))
    monkeypatch.setattr("fp8core.kernels.ops.INTERPRETED", True)
    for tensor, kernels, casts, said in (
        (x, "auto", (cast,), None),
        (x, "never", (cast,), "kernels='never'"),
        (x, "always", (cast,), None),
        (x[:0], "auto", (cast,), "empty"),
        (x, "auto", (cast, CASTS["fnuz"]), "not e4m3fnuz"),
    ):
        reason = operands.why_unfused(tensor, kernels, *casts)
        assert reason is None if said is None else said in reason
    for kernels in ("auto", "never"):
        model = convert_to_float8_training(
            nn.Sequential(nn.Linear(32, 32)), config=recipe.with_kernels(kernels)
        )
        (layer,) = audit(model).layers
        assert layer.recipe.startswith("rowwise")
        assert (layer.casts == "kernels") == (kernels == "auto")
    assert "recipe=rowwise, kernels=never" in repr(model)


def test_a_shared_input_is_cast_once() -> None:
    """Oracle: operators counted: one cast of the input, and one of each layer's weight."""
    layers = [Float8Linear(32, 48, config=RECIPES["rowwise"].with_kernels("always")) for _ in range(3)]
    with Ops() as ops:
        x = cast_input(torch.randn(16, 32, requires_grad=True), *layers)
        for layer in layers:
            layer(x)
    assert ops.seen["fp8core.cast_rowwise_both"] == 1 + 3


def test_inference_casts_one_direction_only() -> None:
    """Oracle: operators counted: without gradients no transposed copy is made."""
    layer = Float8Linear(32, 48, config=RECIPES["rowwise"].with_kernels("always"))
    with torch.no_grad(), Ops() as ops:
        layer(torch.randn(16, 32))
    assert {op: n for op, n in ops.seen.items() if op.startswith("fp8core")} == {"fp8core.cast_rowwise": 2}


@pytest.mark.parametrize(("version", "hip", "garbled"), [
    ("2.11.0", None, False), ("2.13.0+cu130", None, False), ("2.14.0.dev20260601+cu126", None, False),
    ("2.14.0.dev20260729+cu126", None, True),
    ("2.14.0", None, True), ("2.14.0", "7.1", False),
])  # fmt: skip
def test_versions_whose_compiled_casts_triton_garbles(version: str, hip: str | None, garbled: bool) -> None:
    """Oracle: torchao's pull requests 4652 and 4657, which name the change of Inductor and the versions that have it."""
    assert operands.inductor_garbles_casts(version, hip) is garbled


def test_inductor_of_this_torch_writes_what_its_version_promises() -> None:
    """Oracle: the code that Inductor writes for a maximum on a GPU: NaN-propagating only where we say so."""
    from torch._inductor.codegen.triton import TritonOverrides
    from torch._inductor.runtime import triton_helpers

    written = str(TritonOverrides.maximum("a", "b"))
    helper = inspect.getsource(triton_helpers.maximum.fn)
    assert ("PropagateNan" in written + helper) is operands.INDUCTOR_GARBLES_CASTS


@pytest.mark.parametrize(
    ("wrapped", "of_lines", "more"),
    [
        (operands.cast_one, operands.cast_operand, set()),
        (operands.cast_both, operands.cast_operand_pair, {"once"}),
    ],
)
def test_casts_of_tensors_name_the_arguments_of_casts_of_lines(
    wrapped: Any, of_lines: Any, more: set[str]
) -> None:
    """Oracle: the signature of the function that does the work, names, kinds and defaults alike."""
    want = inspect.signature(of_lines).parameters
    assert inspect.signature(wrapped).parameters == {
        name: parameter for name, parameter in want.items() if name not in more
    }
