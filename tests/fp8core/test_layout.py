"""layout: our Python rules against torch's own checks, without a GPU and, where there is one, with it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core import E4M3FN, E4M3FNUZ, E5M2, scaled_mm
from fp8core.gemm import BACKENDS, layout
from fp8core.gemm.layout import Operand, shape_reason

SIZES = (0, 1, 15, 16, 48, 100)

TORCH = BACKENDS["torch"]


def matrix(rows: int, columns: int, order: str, padding: int = 0) -> torch.Tensor:
    """FP8 on a (fake) CUDA device, row- or column-major, optionally with a padded leading stride."""
    strides = (columns + padding, 1) if order == "row" else (1, rows + padding)
    return torch.empty_strided((rows, columns), strides, dtype=torch.float8_e4m3fn, device="cuda")


def meta_accepts(a: torch.Tensor, b: torch.Tensor, rowwise: bool) -> bool:
    """Oracle: the meta function of torch._scaled_mm, which fake CUDA tensors run."""
    shapes = ((a.shape[0], 1), (1, b.shape[1])) if rowwise else ((), ())
    scales = [torch.ones(shape, device="cuda") for shape in shapes]
    try:
        torch._scaled_mm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("rowwise", [False, True])
def test_shape_and_layout_rules_agree_with_torch_on_fake_cuda(rowwise: bool) -> None:
    """Oracle: torch's meta function; every size above, each orientation, with and without padded strides."""
    disagreements = []
    with FakeTensorMode():
        for M, K, N in itertools.product(SIZES, repeat=3):
            shape_only = shape_reason(M, K, N, E4M3FN, E4M3FN, "rowwise" if rowwise else "tensorwise")
            orders = itertools.product(("row", "column"), ("row", "column"), (0, 16))
            for order_a, order_b, padding in (
                orders if min(M, K, N) > 0 and max(M, K, N) < 50 else [("row", "column", 0)]
            ):
                a, b = matrix(M, K, order_a, padding), matrix(K, N, order_b, padding)
                ours = shape_only is None and layout.layout_reason(a, b) is None
                if ours != meta_accepts(a, b, rowwise):
                    disagreements.append((M, K, N, order_a, order_b, padding, ours))
    assert not disagreements


@pytest.mark.gpu
def test_shape_rules_agree_with_the_device() -> None:
    """Oracle: torch._scaled_mm on the device, which also knows what the meta function does not."""
    for M, K, N in itertools.product((1, 16, 17), (16, 24, 64), (16, 17, 48)):
        for a_fmt, b_fmt in itertools.product((E4M3FN, E5M2), repeat=2):
            a = torch.zeros(M, K, device="cuda").to(a_fmt.dtype)
            b = torch.zeros(N, K, device="cuda").to(b_fmt.dtype).t()
            one = torch.ones((), device="cuda")
            reason = TORCH.unsupported(M, K, N, a_fmt, b_fmt, device="cuda")
            try:
                torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
                ran = True
            except (RuntimeError, ValueError):
                ran = False
            assert ran == (reason is None), (M, K, N, a_fmt.name, b_fmt.name, reason)


RULES = [  # (arguments, a word of the refusal); what has no word runs
    ((16, 100, 16, E4M3FN, E4M3FN), "K=100"),
    ((16, 32, 10, E4M3FN, E4M3FN), "N=10"),
    ((16, 32, 16, E5M2, E5M2), "e5m2 @ e5m2"),
    ((-1, 32, 16, E4M3FN, E4M3FN), "M=-1"),
    ((16, 32, 16, E4M3FN, E4M3FN, "rowwise", torch.float32), "bfloat16 only"),
    ((16, 32, 16, E4M3FN, E5M2, "rowwise"), "right operand"),
    ((16, 32, 16, E4M3FN, E4M3FN, "tensorwise", torch.float8_e4m3fn), "out_dtype"),
    ((1, 16, 16, E4M3FN, E4M3FN), ""),
    ((17, 32, 48, E5M2, E4M3FN, "rowwise"), ""),
    ((0, 16, 16, torch.float8_e4m3fn, "e5m2"), ""),
    ((5, 64, 16, E4M3FN, E5M2, "tensorwise", torch.float32), ""),
]


@pytest.mark.parametrize(("arguments", "said"), RULES)
def test_rules(arguments: tuple[object, ...], said: str) -> None:
    """Oracle: cuBLASLt and the CUTLASS kernel's check_inputs, which meta functions don't know, written out."""
    reason = TORCH.unsupported(*arguments)
    assert (said in reason) if said else reason is None


def test_cpu_shows_the_errors_of_cuda() -> None:
    """torch._scaled_mm on CPU would compute each of these."""
    codes, one = torch.zeros(16, 32).to(torch.float8_e4m3fn), torch.ones(())
    assert scaled_mm(Operand(codes, one), Operand(codes.t(), one)).shape == (16, 16)
    e5m2 = codes.float().to(torch.float8_e5m2)
    for a, b, said in (
        (codes.t().contiguous().t(), codes.t(), "A must be row-major"),
        (codes, codes.t().contiguous(), "B must be column-major"),
        (codes[:, :24], codes.t()[:24], "K=24"),
        (e5m2, e5m2.t(), "e5m2 @ e5m2"),
    ):
        with pytest.raises(ValueError, match=said):
            scaled_mm(Operand(a, one), Operand(b, one))


@pytest.mark.parametrize(
    ("capability", "arch", "fmt", "said"),
    [
        ((8, 0), "", E4M3FN, "compute capability 8.0"),
        ((8, 6), "", E4M3FN, "compute capability 8.6"),
        *((capability, "", E4M3FN, "") for capability in ((8, 9), (9, 0), (10, 0), (12, 0))),
        ((9, 0), "", E4M3FNUZ, "AMD MI300's"),
        (None, "gfx90a", E4M3FN, "gfx90a has no FP8 matmul"),
        (None, "gfx942:sramecc+", E4M3FN, "gfx942 multiplies fnuz"),
        (None, "gfx942:sramecc+", E4M3FNUZ, ""),
        (None, "gfx942:sramecc+", E5M2, "gfx942 multiplies fnuz"),
        (None, "gfx950", E4M3FN, ""),
        (None, "gfx950", E4M3FNUZ, "gfx950 multiplies OCP"),
        (None, "gfx1201", E5M2, ""),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, arch: str, fmt: object, said: str
) -> None:
    """Oracle: ATen's `_scaled_mm_allowed_device`, its list of AMD architectures and its choice of fnuz, written out."""
    for name, value in {
        "is_available": True,
        "get_device_capability": capability or (9, 0),
        "get_device_name": "NVIDIA Fake",
        "get_device_properties": SimpleNamespace(gcnArchName=arch),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "hip", "6.4" if arch else None)
    reason = TORCH.unsupported(16, 16, 16, fmt, fmt, device="cuda:0")
    assert (said in reason) if said else reason is None


def test_scales_of_rows_need_a_newer_torch_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch 2.11, whose `_scaled_mm` asserts internally there; a GPU, and single scales, take it as before."""
    monkeypatch.setattr(layout, "CPU_TAKES_ONE_SCALE", True)
    reason = layout.granularity_reason("cpu", "rowwise")
    assert reason
    assert "emulated()" in reason
    assert layout.granularity_reason("cuda", "rowwise") is None
    assert layout.granularity_reason("cpu", "tensorwise") is None
