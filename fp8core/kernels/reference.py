"""The kernels' functions in plain PyTorch: same names, arguments and bytes. The oracle, and the CPU's way.

Matrices are [M, K] row-major; "both" means the codes once as they are and once transposed, [K, M] row-major,
each scaled along its own last dimension, so that both are left operands of a matmul without a copy. Ragged
edges are as if x were filled up with zeros, which change no amax.

Casts are bit for bit what the kernels give. Norm and activation are not: their exponential and reciprocal
square root are a device's own, so those agree within one rounding of the output dtype.
"""

from __future__ import annotations

import torch

from fp8core.cast import cast_saturating, cast_with_amax, scaled_f32
from fp8core.formats import as_element_format
from fp8core.scaling import amax as compute_amax
from fp8core.scaling import compute_scale

BLOCK = 128  # of the blockwise recipe
MX_BLOCK = 32  # of OCP Microscaling Formats (MX) 1.0, section 5.1
MX_MODES: tuple[str, ...] = ("floor", "ceil", "rceil", "even")

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
    scale, scale_inv = compute_scale(amax, dtype, power_of_two)
    return _times(x, scale, dtype), scale_inv


def cast_both(x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Triple:
    """(codes [M, K], codes_t [K, M], scale_inv)."""
    codes, scale_inv = cast(x, amax, dtype, power_of_two)
    return codes, _transposed(codes), scale_inv


def cast_delayed(
    x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool, margin: int
) -> Triple:
    """(codes, scale_inv, amax of x) by an earlier step's amax, see `fp8core.cast.cast_with_amax`."""
    codes, scale_inv, seen = cast_with_amax(x, dtype, amax, margin=margin, power_of_two=power_of_two)
    return _row_major(codes), scale_inv, seen


def cast_delayed_both(
    x: torch.Tensor, amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool, margin: int
) -> Four:
    """(codes [M, K], codes_t [K, M], scale_inv, amax of x)."""
    codes, scale_inv, seen = cast_delayed(x, amax, dtype, power_of_two, margin)
    return codes, _transposed(codes), scale_inv, seen


def cast_rowwise(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Pair:
    """(codes [M, K], scale_inv [M, 1])."""
    scale, scale_inv = compute_scale(compute_amax(x, "rowwise", 1), dtype, power_of_two)
    return _times(x, scale, dtype), scale_inv


def cast_rowwise_both(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Four:
    """(codes [M, K], scale_inv [M, 1], codes_t [K, M], scale_inv_t [K, 1])."""
    return cast_rowwise(x, dtype, power_of_two) + cast_rowwise(x.t(), dtype, power_of_two)


def cast_1x128(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Pair:
    """(codes [M, K], scale_inv [M, ceil(K / 128)] with strides (1, M), as cuBLAS wants it)."""
    scale, scale_inv = compute_scale(_group_amax(x, BLOCK), dtype, power_of_two)
    codes = _times(x, scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]], dtype)
    return codes, _row_major(scale_inv.t()).t()


def cast_1x128_both(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Four:
    """`cast_1x128` of x, then of its transpose."""
    return cast_1x128(x, dtype, power_of_two) + cast_1x128(x.t(), dtype, power_of_two)


def cast_128x128_both(x: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> Triple:
    """(codes [M, K], codes_t [K, M], scale_inv [ceil(M / 128), ceil(K / 128)])."""
    amax = _group_amax(_group_amax(x, BLOCK).t(), BLOCK).t()
    scale, scale_inv = compute_scale(amax, dtype, power_of_two)
    scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    codes = _times(x, scale[: x.shape[0], : x.shape[1]], dtype)
    return codes, _transposed(codes), _row_major(scale_inv)


def cast_mx(x: torch.Tensor, dtype: torch.dtype, mode: str) -> Pair:
    """(codes [M, K], scale_inv e8m0 [M, ceil(K / 32)]); see `fp8core.kernels.mx` for the modes.

    Exponents are taken from float64 by `frexp` here and from the bits of float32 in the kernel.
    """
    fmt = as_element_format(dtype)
    amax = _group_amax(x, MX_BLOCK)
    mantissa, exponent = torch.frexp(amax.double())  # amax = mantissa * 2**exponent, mantissa in [0.5, 1)
    if mode == "floor":
        exponent = exponent - 1
    elif mode == "ceil":
        exponent = exponent - (mantissa == 0.5).int()
    elif mode == "rceil":
        exponent = exponent - (mantissa <= fmt.max / 2.0 ** (fmt.emax + 1)).int()
    elif mode == "even":
        exponent = exponent - (mantissa < 1 - fmt.eps / 4).int()
    else:
        raise ValueError(f"MX scale mode {mode!r} is unknown; expected one of {', '.join(MX_MODES)}")
    code = (exponent - fmt.emax + 127).clamp(0, 254)
    code = torch.where(amax == 0, 0, torch.where(amax.isfinite(), code, 255)).to(torch.uint8)
    scale = torch.ldexp(torch.ones_like(amax), 127 - code.int())
    scale = torch.where(code == 255, torch.nan, scale)
    codes = _times(x, scale.repeat_interleave(MX_BLOCK, 1)[:, : x.shape[1]], dtype)
    return codes, code.view(torch.float8_e8m0fnu)


def cast_mx_both(x: torch.Tensor, dtype: torch.dtype, mode: str) -> Four:
    """`cast_mx` of x, then of its transpose."""
    return cast_mx(x, dtype, mode) + cast_mx(x.t(), dtype, mode)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Pair:
    """(y = x * rstd * weight in x's dtype, rstd float32 [M, 1] = 1 / sqrt(mean(x**2) + eps))."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * rstd * weight.float()).to(x.dtype), rstd


def rms_norm_amax(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Triple:
    """(y, rstd, amax of y)."""
    y, rstd = rms_norm(x, weight, eps)
    return y, rstd, amax(y)


def rms_norm_cast_delayed(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> Four:
    """(codes of y, rstd, scale_inv, amax of y) by an earlier step's amax."""
    y, rstd = rms_norm(x, weight, eps)
    codes, scale_inv, seen = cast_delayed(y, amax, dtype, power_of_two, margin)
    return codes, rstd, scale_inv, seen


def rms_norm_cast_rowwise(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype, power_of_two: bool
) -> Triple:
    """(codes of y, rstd, scale_inv [M, 1])."""
    y, rstd = rms_norm(x, weight, eps)
    codes, scale_inv = cast_rowwise(y, dtype, power_of_two)
    return codes, rstd, scale_inv


def rms_norm_backward(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> Triple:
    """(grad_x, grad_weight, amax of grad_x); with g = grad_y * weight and n = x * rstd,

    grad_x = rstd * (g - n * mean(g * n))    grad_weight = sum over rows of grad_y * n
    """
    exact, grad_weight = _rms_norm_gradients(grad_y, x, weight, rstd)
    grad_x = exact.to(x.dtype)
    return grad_x, grad_weight, amax(grad_x)


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> Triple:
    """(sum = x + delta in x's dtype, y of the rounded sum, rstd)."""
    total = x + delta
    return total, *rms_norm(total, weight, eps)


def add_rms_norm_amax(x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float) -> Four:
    """(sum, y, rstd, amax of y)."""
    total, y, rstd = add_rms_norm(x, delta, weight, eps)
    return total, y, rstd, amax(y)


def rms_norm_cast_delayed_both(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, ...]:
    """(codes of y [M, K], codes_t [K, M], rstd, scale_inv, amax of y) by an earlier step's amax."""
    y, rstd = rms_norm(x, weight, eps)
    codes, codes_t, scale_inv, seen = cast_delayed_both(y, amax, dtype, power_of_two, margin)
    return codes, codes_t, rstd, scale_inv, seen


def add_rms_norm_cast_delayed_both(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> tuple[torch.Tensor, ...]:
    """(sum = x + delta in x's dtype, then as `rms_norm_cast_delayed_both` of the rounded sum)."""
    total = x + delta
    return total, *rms_norm_cast_delayed_both(total, weight, eps, amax, dtype, power_of_two, margin)


def add_rms_norm_backward(
    grad_y: torch.Tensor,
    grad_sum: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
) -> Triple:
    """(grad of x and of delta, grad_weight, amax of the first): grad_sum + the norm's gradient, rounded once."""
    exact, grad_weight = _rms_norm_gradients(grad_y, total, weight, rstd)
    grad = (exact + grad_sum.float()).to(total.dtype)
    return grad, grad_weight, amax(grad)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, formed in float32."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_amax(gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """(h = silu(gate) * up, amax of h)."""
    h = swiglu(gate, up)
    return h, amax(h)


def swiglu_cast_delayed_both(
    gate: torch.Tensor,
    up: torch.Tensor,
    amax: torch.Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    margin: int,
) -> Four:
    """(codes of h [M, K], codes_t [K, M], scale_inv, amax of h) by an earlier step's amax."""
    return cast_delayed_both(swiglu(gate, up), amax, dtype, power_of_two, margin)


def swiglu_backward(grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """(grad_gate, grad_up); with s = sigmoid(gate),

    grad_gate = grad_h * up * s * (1 + gate * (1 - s))    grad_up = grad_h * gate * s
    """
    g, u, h = gate.float(), up.float(), grad_h.float()
    s = torch.sigmoid(g)
    return (h * u * s * (1 + g * (1 - s))).to(gate.dtype), (h * (g * s)).to(up.dtype)


def swiglu_backward_amax(grad_h: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Four:
    """(grad_gate, grad_up, amax of grad_gate, amax of grad_up)."""
    grad_gate, grad_up = swiglu_backward(grad_h, gate, up)
    return grad_gate, grad_up, amax(grad_gate), amax(grad_up)


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
    return torch.mm(left * _spread(scale_inv_a, a), (right * _spread(scale_inv_b, b_t)).t()).to(out_dtype)


def _rms_norm_gradients(
    grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> Pair:
    """(float32 grad_x, grad_weight in weight's dtype)."""
    g, n = grad_y.float() * weight.float(), x.float() * rstd
    grad_x = rstd * (g - n * (g * n).mean(1, keepdim=True))
    return grad_x, (grad_y.float() * n).sum(0).to(weight.dtype)


def _spread(scale_inv: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Block scales repeated to the shape of the codes."""
    rows, columns = codes.shape
    if scale_inv.shape[0] != rows:
        scale_inv = scale_inv.repeat_interleave(BLOCK, 0)[:rows]
    if scale_inv.shape[1] == 1:
        return scale_inv
    return scale_inv.repeat_interleave(BLOCK, 1)[:, :columns]


def _times(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of x * scale, row-major."""
    return _row_major(cast_saturating(scaled_f32(x, scale), dtype, overwrite=True))


def _transposed(codes: torch.Tensor) -> torch.Tensor:
    return codes.t().clone(memory_format=torch.contiguous_format)


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """x with the strides of the kernels' outputs; `contiguous` would leave any stride to a size of 1."""
    if x.stride() == torch.empty(x.shape, device="meta").stride():
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _group_amax(x: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [rows, ceil(columns / group)]."""
    rows, columns = x.shape
    filled = torch.nn.functional.pad(x.abs(), (0, -columns % group))
    if filled.numel() == 0:
        return x.new_zeros((rows, filled.shape[1] // group), dtype=torch.float32)
    return filled.view(rows, -1, group).amax(2).float()
