"""What only a device can show: its casts, its FP8 matmul and a whole layer, against the checked CPU path.

Needs torch alone: the CPU casts that serve as golden values are checked against ml_dtypes and gfloat in
test_cast.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hard_inputs import hard_inputs, mismatches
from recipes import ON_CPU
from torch import nn

from fp8core import (
    E4M3FN,
    RECIPES,
    Float8Linear,
    audit,
    convert_to_float8_training,
    update_scales,
    verify,
)
from fp8core.cast import cast_saturating
from fp8core.formats import ELEMENT_FORMATS
from fp8core.gemm import backend_named, layout
from fp8core.inputs import operands
from fp8core.recipe import Cast, Kernels

Measure = Callable[[torch.Tensor, torch.Tensor], float]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_fp8() -> None:
    reason = layout.device_reason("cuda", *(RECIPES["tensorwise"].output.a.format,) * 2)
    if reason:
        pytest.skip(reason)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, from inductor
@pytest.mark.parametrize("compiled", [False, True])
def test_device_casts_are_bit_equal_to_the_golden_ones(compiled: bool) -> None:
    """Oracle: the CPU cast. Compiled only formats of this hardware: Triton has no fnuz on NVIDIA."""
    inputs = hard_inputs()
    formats = [f for f in ELEMENT_FORMATS if not compiled or layout.device_reason("cuda", f, f) is None]

    def everything(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [cast_saturating(x, fmt) for x in xs for fmt in formats]

    torch._dynamo.reset()
    run = torch.compile(everything, fullgraph=True, dynamic=False) if compiled else everything
    got, want = run(*(x.cuda() for x in inputs.values())), everything(*inputs.values())
    for fmt, g, w in zip(formats * len(inputs), got, want, strict=True):
        assert mismatches(g, w, fmt) == 0, fmt.name


def passes(
    run: Callable[[torch.Tensor], torch.Tensor], parameters: list[nn.Parameter], x: torch.Tensor
) -> list[torch.Tensor]:
    """Output and gradients, the output's own gradient being the same in every run."""
    x = x.detach().requires_grad_()
    y = run(x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [t.detach().cpu() for t in (y, *torch.autograd.grad(y, [x, *parameters], g))]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_device_layer_agrees_with_the_cpu(dtype: torch.dtype, name: str, sqnr_db: Measure) -> None:
    """Oracle: the same layer emulated on CPU. Codes are equal, so only accumulation and bfloat16 results differ."""
    recipe = RECIPES[name]
    missing = (
        backend_named(recipe.backend).granularity_reason("cuda", g.granularity) for g in recipe.gemms.values()
    )
    recipe = recipe.emulated() if any(missing) else recipe
    layer, x = (
        Float8Linear(256, 128, dtype=dtype, config=recipe.emulated()),
        torch.randn(4, 64, 256, dtype=dtype),
    )
    there = Float8Linear(256, 128, dtype=dtype, config=recipe, device="cuda")
    there.load_state_dict(layer.state_dict())
    want, got = passes(layer, [layer.weight], x), passes(there, [there.weight], x.cuda())
    for one, other in zip(want, got, strict=True):
        assert sqnr_db(one, other) > 45


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's own, from inductor
@pytest.mark.parametrize("kernels", ["auto", "always"])
@pytest.mark.parametrize("name", ON_CPU)
def test_compiled_layer_on_the_device(name: str, kernels: Kernels, sqnr_db: Measure) -> None:
    """Oracle: eager on the device; fullgraph, so no break can hide. Plain casts, and the operators."""
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).bfloat16().cuda()
    convert_to_float8_training(model, config=RECIPES[name].with_kernels(kernels))
    x, parameters = torch.randn(128, 256, dtype=torch.bfloat16, device="cuda"), list(model.parameters())
    torch._dynamo.reset()
    compiled = passes(torch.compile(model, fullgraph=True, dynamic=False), parameters, x)
    for want, got in zip(passes(model, parameters, x), compiled, strict=True):
        assert sqnr_db(want, got) > 25


@pytest.mark.parametrize("name", ON_CPU)
def test_a_layer_trains_alike_with_and_without_kernels(name: str) -> None:
    """Oracle: plain casts on the device, bitwise: the same codes enter the same GEMMs."""
    results = []
    for kernels in ("never", "auto"):
        torch.manual_seed(0)
        layer = Float8Linear(256, 384, bias=False, dtype=torch.bfloat16, device="cuda",
                             config=RECIPES[name].with_kernels(kernels))  # fmt: skip
        assert audit(layer).layers[0].casts.startswith("kernels" if kernels == "auto" else "plain")
        found = []
        for _ in range(2):
            x = torch.randn(272, 256, dtype=torch.bfloat16, device="cuda")
            found += passes(layer, [layer.weight], x)
            update_scales(layer)
        results.append(found)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_verify_on_the_device(name: str) -> None:
    """Oracle: the profiler's kernels by name; blockwise runs fp8core's own."""
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16().cuda()
    convert_to_float8_training(model, config=name)
    x = torch.randn(128, 256, dtype=torch.bfloat16, device="cuda")
    proof = verify(lambda: model(x).float().square().mean().backward(), model, announce=False)
    assert proof.ok, proof.problems
    assert proof.fp8_kernel_share == 1.0


def test_more_elements_than_an_int32_counts() -> None:
    """Oracle: by hand. The last elements of 2**31 + 2**20 are found, cast, and transposed to their places."""
    rows, columns = 2**20 + 512, 2048
    if torch.cuda.mem_get_info()[0] < 12 * rows * columns:
        pytest.skip("needs 26 GB of free device memory")
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    x[-1, -1], x[-1, 0] = 7.0, -3.5
    for name in ("tensorwise", "rowwise", "1x128"):
        for q in operands.cast_both(x, Cast(E4M3FN, name), Cast(E4M3FN, name)):
            first, last = q.qdata.view(torch.uint8)[-1, [0, -1]].view(torch.float8_e4m3fn).float().tolist()
            assert first < 0 < last
            assert max(-first, last) == 448
