"""The kernels' functions in plain PyTorch: same names, arguments and bytes. The oracle, and the CPU's way.

Matrices are [M, K] row-major; "both" means the codes once as they are and once transposed, [K, M] row-major,
each scaled along its own last dimension, so that both are left operands of a matmul without a copy. Ragged
edges are as if x were filled up with zeros, which change no amax. `*how`, `*delayed` and `*norm` are the further arguments of
the cast in one layout, of `cast_delayed` and of the norm, as the schemas in `ops` name them.

Casts are bit for bit what the kernels give. Norm and activation are not: their exponential and reciprocal
square root are a device's own, so those agree within one rounding of the output dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp8core.cast import cast_with_amax, scale_and_cast
from fp8core.scaling import amax as compute_amax
from fp8core.scaling import broadcast_block_scales

if TYPE_CHECKING:
    from fp8core.scaling import Granularity, MxMode

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def amax(x: torch.Tensor) -> torch.Tensor:
    """max |x|, float32, 0-dimensional; NaN where x has one; 0 of an empty tensor."""
    return compute_amax(x)


def amax_rows_cols(x: torch.Tensor) -> Pair:
    """(of each row [M, 1], of each column [1, K])."""
    return compute_amax(x, "rowwise", 1), compute_amax(x, "rowwise", 0)


def cast(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Pair:
    """(codes, scale_inv) with the scale that `amax` (float32, 0-dimensional) asks for."""
    codes, scale_inv = scale_and_cast(x, dtype, power_of_two=power_of_two, known_amax=amax)
    return _row_major(codes), scale_inv


def cast_both(x: torch.Tensor, *how: Any) -> Triple:
    """(codes [M, K], codes_t [K, M], scale_inv)."""
    codes, scale_inv = cast(x, *how)
    return codes, _transposed(codes), scale_inv


def cast_delayed(
    x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool, margin: int
) -> Triple:
    """(codes, scale_inv, amax of x) by an earlier step's amax, see `fp8core.cast.cast_with_amax`."""
    codes, scale_inv, seen = cast_with_amax(x, dtype, amax, margin=margin, power_of_two=power_of_two)
    return _row_major(codes), scale_inv, seen


def cast_delayed_both(x: torch.Tensor, *delayed: Any) -> Four:
    """(codes [M, K], codes_t [K, M], scale_inv, amax of x)."""
    codes, scale_inv, seen = cast_delayed(x, *delayed)
    return codes, _transposed(codes), scale_inv, seen


def cast_rowwise(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Pair:
    """(codes [M, K], scale_inv [M, 1])."""
    return _grouped(x, dtype, "rowwise", power_of_two=power_of_two)


def cast_rowwise_both(x: torch.Tensor, *how: Any) -> Four:
    """(codes [M, K], scale_inv [M, 1], codes_t [K, M], scale_inv_t [K, 1])."""
    return cast_rowwise(x, *how) + cast_rowwise(x.t(), *how)


def cast_1x128(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Pair:
    """(codes [M, K], scale_inv [M, ceil(K / 128)] with strides (1, M), as cuBLAS wants it)."""
    codes, scale_inv = _grouped(x, dtype, "1x128", power_of_two=power_of_two)
    return codes, _row_major(scale_inv.t()).t()


def cast_1x128_both(x: torch.Tensor, *how: Any) -> Four:
    """`cast_1x128` of x, then of its transpose."""
    return cast_1x128(x, *how) + cast_1x128(x.t(), *how)


def cast_128x128_both(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Triple:
    """(codes [M, K], codes_t [K, M], scale_inv [ceil(M / 128), ceil(K / 128)])."""
    codes, scale_inv = _grouped(x, dtype, "128x128", power_of_two=power_of_two)
    return codes, _transposed(codes), scale_inv


def cast_mx(x: torch.Tensor, dtype: torch.dtype, mode: MxMode) -> Pair:
    """(codes [M, K], scale_inv e8m0 [M, ceil(K / 32)]); see `fp8core.scaling.mx_scale_code` for the modes."""
    return _grouped(x, dtype, "1x32", mx_mode=mode)


def cast_mx_both(x: torch.Tensor, *how: Any) -> Four:
    """`cast_mx` of x, then of its transpose."""
    return cast_mx(x, *how) + cast_mx(x.t(), *how)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """(y = x * rstd * weight in x's dtype, rstd float32 [M, 1] = 1 / sqrt(mean(x**2) + eps))."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * rstd * weight.float()).to(x.dtype), rstd


def rms_norm_amax(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Triple:
    """(y, rstd, amax of y)."""
    y, rstd = rms_norm(x, weight, eps)
    return y, rstd, amax(y)


def rms_norm_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> Pair:
    """(grad_x, grad_weight); with g = grad_y * weight and n = x * rstd,

    grad_x = rstd * (g - n * mean(g * n))    grad_weight = sum over rows of grad_y * n
    """
    grad_x, grad_weight = _rms_norm_gradients(grad_y, x, weight, rstd)
    return grad_x.to(x.dtype), grad_weight


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, ...]:
    """(sum = x + delta in x's dtype, then as `rms_norm` of the rounded sum)."""
    total = x + delta
    return total, *rms_norm(total, *norm)


def add_rms_norm_amax(x: torch.Tensor, delta: torch.Tensor, *norm: Any) -> tuple[torch.Tensor, ...]:
    """(sum, then as `rms_norm_amax` of it)."""
    total = x + delta
    return total, *rms_norm_amax(total, *norm)


def add_rms_norm_backward(
    grad_y: torch.Tensor,
    grad_sum: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> Pair:
    """(grad of x and of delta, grad_weight): grad_sum + the norm's gradient, rounded once."""
    exact, grad_weight = _rms_norm_gradients(grad_y, total, weight, rstd)
    return (exact + grad_sum.float()).to(total.dtype), grad_weight


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, formed in float32."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_amax(gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """(h = silu(gate) * up, amax of h)."""
    h = swiglu(gate, up)
    return h, amax(h)


def swiglu_backward(grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """(grad_gate, grad_up); with s = sigmoid(gate),

    grad_gate = grad_h * up * s * (1 + gate * (1 - s))    grad_up = grad_h * gate * s
    """
    g, u, h = gate.float(), up.float(), grad_h.float()
    s = torch.sigmoid(g)
    return (h * u * s * (1 + g * (1 - s))).to(gate.dtype), (h * (g * s)).to(up.dtype)


def matmul(
    a: torch.Tensor,
    b_t: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    promote_every: int,
) -> torch.Tensor:
    """A [M, K] @ B_T [N, K].T in float32; `promote_every` has no meaning here, the sum is exact enough.

    Scales one of: both 0-dimensional; [M, 1] and [N, 1]; [M, K / 128] and [N / 128, K / 128] or [N, K / 128].
    """
    left, right = a.float(), b_t.float()
    if scale_inv_a.dim() == 0:
        return (torch.mm(left, right.t()) * scale_inv_a * scale_inv_b).to(out_dtype)
    if scale_inv_a.shape[1] == 1 and scale_inv_b.shape[0] == b_t.shape[0]:
        return (torch.mm(left, right.t()) * scale_inv_a * scale_inv_b.t()).to(out_dtype)
    left = left * broadcast_block_scales(scale_inv_a, a.shape)
    return torch.mm(left, (right * broadcast_block_scales(scale_inv_b, b_t.shape)).t()).to(out_dtype)


def _rms_norm_gradients(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> Pair:
    """(float32 grad_x, grad_weight in weight's dtype)."""
    g, n = grad_y.float() * weight.float(), x.float() * rstd
    grad_x = rstd * (g - n * (g * n).mean(1, keepdim=True))
    return grad_x, (grad_y.float() * n).sum(0).to(weight.dtype)


def _grouped(x: torch.Tensor, dtype: torch.dtype, granularity: Granularity, **how: Any) -> Pair:
    """Codes and scales along each row, row-major."""
    codes, scale_inv = scale_and_cast(x, dtype, granularity, dim=1, **how)
    return _row_major(codes), _row_major(scale_inv)


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    return codes.t().clone(memory_format=torch.contiguous_format)


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """x with the strides of the kernels' outputs; `contiguous` would leave any stride to a size of 1."""
    if x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)
