"""The grouped kernel's arguments and meaning, against torch's own checks and the loop over experts."""

from __future__ import annotations

import itertools

import pytest
import torch
from mixtures import ends, operands
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core import (
    BACKENDS,
    RECIPES,
    grouped_mm,
)
from fp8core.gemm.grouped import (
    Operand,
)
from fp8core.gemm.torch_mm import Torch, arguments_of_one_call


def test_one_call_takes_these_arguments() -> None:
    """Oracle: torch's own checks of `_scaled_grouped_mm`, run on fake CUDA tensors, for all three GEMMs of "rowwise".

    They refuse the arguments if a layout, a dtype or a scale is not arranged.
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
    real = Torch.grouped_reason

    def as_on_a_gpu(self: Torch, device: torch.device, granularity: str, *dtypes: torch.dtype) -> str | None:
        e4m3 = dtypes == (torch.float8_e4m3fn, torch.float8_e4m3fn)
        return None if e4m3 else real(self, device, granularity, *dtypes)

    monkeypatch.setattr(Torch, "grouped_reason", as_on_a_gpu)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    got = grouped_mm(x, weight, ends(*sizes), config=recipe)
    got = (got, *torch.autograd.grad(got, [x, weight], grad))
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() < 2**-8 * other.norm()


def test_when_one_call_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: ATen's conditions, as the module lists them, with a device that pretends to be a GPU."""
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    gpu, capability = torch.device("cuda"), [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    for backend, device, granularity, a, part in (
        ("torch", gpu, "rowwise", e4m3, "None"),
        ("torch", gpu, "tensorwise", e4m3, "None"),
        ("triton", gpu, "rowwise", e4m3, "backend"),
        ("torch", gpu, "128x128", e4m3, "a scale for each row"),
        ("torch", gpu, "tensorwise", e5m2, "e5m2"),
        ("torch", torch.device("cpu"), "rowwise", e4m3, "cpu"),
    ):
        assert part in str(BACKENDS[backend].grouped_reason(device, granularity, a, e4m3))
    capability[0] = 10
    assert "10.0" in str(BACKENDS["torch"].grouped_reason(gpu, "rowwise", e4m3, e4m3))


@pytest.mark.gpu
def test_one_call_equals_the_loop() -> None:
    """Oracle: backend "reference_bf16" on the same codes; bfloat16 results of sums in another order."""
    sizes = (32, 0, 96)
    x, weight, grad = (t.detach().bfloat16().cuda().requires_grad_() for t in operands(sizes))
    results = []
    for recipe in (RECIPES["rowwise"], RECIPES["rowwise"].with_backend("reference_bf16")):
        output = grouped_mm(x, weight, ends(*sizes).cuda(), config=recipe)
        results.append((output, *torch.autograd.grad(output, [x, weight], grad)))
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() < 2**-8 * other.float().norm()
