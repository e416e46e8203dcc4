"""RMSNorm and SwiGLU that know who reads their result: they leave an amax behind.

    norm, act = RMSNorm(dim), SwiGLU()
    h = norm(x)                        high precision: what a bfloat16 model calls
    h = norm(x, q, k, v)               a CastInput for the Float8Linear layers q, k and v, cast once
    y = down(act(gate, up, down))

In eager mode both forms run the same fused kernels (`fp8core.kernels.norm`, `.swiglu`), so that a bfloat16 model
that uses them is a fair baseline. With layers, the result is cast by their recipe, and a pass over it is saved:

    tensorwise   the amax comes with the result; the cast reads it once instead of twice
    others       cast as any input

    x, h = norm.add(x, delta, q, k, v)     x + delta, and its norm: one kernel, forward and backward

Codes are those of the result rounded to the input's dtype: the layers compute what they would on `norm(x)`, bit for
bit. Under `torch.compile` both are plain formulas, which it fuses itself. Sums and exponentials are float32; against
`torch.nn.RMSNorm` and `silu(gate) * up` results differ by one rounding of the output dtype.

Sources: Zhang and Sennrich 2019, arXiv 1910.07467; Shazeer 2020, arXiv 2002.05202.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from fp8core.arguments import check_type
from fp8core.inputs.shared_input import (
    CastInput,
    after_autocast,
    cast_input,
    cast_known,
    shared_casts,
)
from fp8core.kernels import ops, reference
from fp8core.scaling import check_hp

if TYPE_CHECKING:
    from fp8core.inputs.shared_input import Casts
    from fp8core.linear import Float8Linear


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x**2) + eps) * weight, over the last dimension.

    Attributes:
        weight: [dim].
        eps: added to the mean of squares.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """A norm with weights of 1.

        Raises:
            ValueError: dim is not above 0, or eps no finite number of at least 0.
            TypeError: dim is no int, or eps no number.
        """
        super().__init__()
        check_type("dim", dim, int)
        check_type("eps", eps, numbers.Real, "the None of torch.nn.RMSNorm stands for torch.finfo(dtype).eps")
        if dim < 1:
            raise ValueError(
                f"dim={dim}: a norm is over at least one feature; expected the size of x's last dimension"
            )
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"eps={eps}: expected a finite number of at least 0, such as 1e-6")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    @overload
    def forward(self, x: torch.Tensor) -> torch.Tensor: ...
    @overload
    def forward(self, x: torch.Tensor, *layers: Float8Linear) -> CastInput: ...
    def forward(self, x: torch.Tensor, *layers: Float8Linear) -> torch.Tensor | CastInput:
        """The norm of x, or with layers its casts for them.

        Args:
            x: float32, bfloat16 or float16, [..., dim]; any layout, copied if not contiguous.
            layers: that will read it; their recipes must cast the input alike.

        Returns:
            x's shape and dtype (with layers, after autocast).

        Raises:
            ValueError: the last dimension is not dim; layers that cast their input differently.
            TypeError: dtype.
        """
        check_hp(x)
        if x.dim() == 0 or x.shape[-1] != self.weight.shape[0]:
            raise ValueError(f"x has shape {list(x.shape)}; expected [..., {self.weight.shape[0]}]")
        if not _runs_fused(x):
            y = reference.rms_norm(x.reshape(-1, x.shape[-1]), self.weight, self.eps)[0].view(x.shape)
            return cast_input(y, *layers) if layers else y
        result: torch.Tensor | CastInput = self._fused(x, layers=layers)[-1]
        return result

    @overload
    def add(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def add(
        self, x: torch.Tensor, delta: torch.Tensor, *layers: Float8Linear
    ) -> tuple[torch.Tensor, CastInput]: ...
    def add(
        self, x: torch.Tensor, delta: torch.Tensor, *layers: Float8Linear
    ) -> tuple[torch.Tensor, torch.Tensor | CastInput]:
        """x + delta, and what `forward` makes of it: in eager mode one kernel, which reads each once.

        Results are those of `total = x + delta` and `forward(total, *layers)`, bit for bit. The gradient of total and that
        of the norm are added in float32 and rounded once, where autograd rounds each and their sum.

        Args:
            x: float32, bfloat16 or float16, [..., dim]: the residual stream.
            delta: of x's shape and dtype.
            layers: as in `forward`.

        Returns:
            (x + delta, the norm or its casts).

        Raises:
            ValueError, TypeError: as `forward`; shapes or dtypes differ.
        """
        check_hp(x)
        check_type("delta", delta, torch.Tensor, "RMSNorm.add takes (x, delta, *layers)")
        if (x.shape, x.dtype) != (delta.shape, delta.dtype):
            raise ValueError(
                f"x is {list(x.shape)} {x.dtype} and delta {list(delta.shape)} {delta.dtype}; expected the same"
            )
        matches = x.dim() > 0 and x.shape[-1] == self.weight.shape[0]
        if not matches or not _runs_fused(x):
            total = x + delta
            return total, self(total, *layers)
        total, y = self._fused(x, delta, layers=layers)
        return total, y

    def _fused(self, *given: torch.Tensor, layers: tuple[Float8Linear, ...]) -> tuple[Any, ...]:
        """By kernels: the norm of x, or of x + delta and that sum before it; with layers the norm's casts."""
        casts = shared_casts(*layers) if layers else (None, None)
        run = getattr(ops, "add_" * (len(given) - 1) + "rms_norm" + "_amax" * bool(layers))
        made = list(
            run(*(t.detach().reshape(-1, t.shape[-1]) for t in given), self.weight.detach(), self.eps)
        )
        seen = made.pop() if layers else None
        rstd = made.pop()
        *total, y = _RMSNorm.apply(self.weight, rstd, *given, *(t.view(given[0].shape) for t in made))
        return *total, y if seen is None else _cast(y, seen, casts, *layers)

    def extra_repr(self) -> str:
        """Size and eps."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class SwiGLU(nn.Module):
    """h = silu(gate) * up, elementwise."""

    @overload
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor: ...
    @overload
    def forward(self, gate: torch.Tensor, up: torch.Tensor, *layers: Float8Linear) -> CastInput: ...
    def forward(
        self, gate: torch.Tensor, up: torch.Tensor, *layers: Float8Linear
    ) -> torch.Tensor | CastInput:
        """The product, or with layers its casts for them.

        Args:
            gate: float32, bfloat16 or float16, [..., features].
            up: of gate's shape and dtype. Halves of one tensor are copied first: use two projections.
            layers: that will read the result; their recipes must cast the input alike.

        Returns:
            gate's shape and dtype (with layers, after autocast).

        Raises:
            ValueError: shapes or dtypes differ; layers that cast their input differently.
            TypeError: dtype.
        """
        check_hp(gate, "gate")
        check_type("up", up, torch.Tensor, "SwiGLU takes (gate, up, *layers)")
        if (gate.shape, gate.dtype) != (up.shape, up.dtype):
            raise ValueError(
                f"gate is {list(gate.shape)} {gate.dtype} and up {list(up.shape)} {up.dtype}; expected the same"
            )
        if not _runs_fused(gate):
            h = reference.swiglu(gate, up)
            return cast_input(h, *layers) if layers else h
        left, right = gate.detach(), up.detach()
        if not layers:
            return _SwiGLU.apply(gate, up, ops.swiglu(left, right))
        casts = shared_casts(*layers)
        h, seen = ops.swiglu_amax(left, right)
        return _cast(_SwiGLU.apply(gate, up, h), seen, casts, *layers)


class _RMSNorm(torch.autograd.Function):
    """Gives y, or x + delta and y, which are computed already, their places in the graph; x and delta get one gradient."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rstd: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        count = len(tensors) // 2  # of what was given; then as many that were made, the last one y
        ctx.save_for_backward(tensors[count if count > 1 else 0], weight, rstd)
        # An input returned as it is would be a view, which no one may change in place
        return tuple(t.detach() for t in tensors[count:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight, rstd = ctx.saved_tensors
        run = ops.add_rms_norm_backward if len(grads) > 1 else ops.rms_norm_backward
        grad, grad_weight = run(
            *(t.reshape(-1, total.shape[-1]) for t in (*grads[::-1], total)), weight, rstd
        )
        return grad_weight, None, *(grad.view(total.shape),) * len(grads), *(None,) * len(grads)


class _SwiGLU(torch.autograd.Function):
    """Gives h, which is computed already, its place in the graph."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return h.detach()  # as in _RMSNorm

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return *ops.swiglu_backward(grad_h, *ctx.saved_tensors), None


def _runs_fused(x: torch.Tensor) -> bool:
    """In eager mode; torch.compile fuses the formulas itself, and other kinds of tensors know no operators of ours."""
    return not torch.compiler.is_compiling() and type(x) in (torch.Tensor, nn.Parameter)


def _cast(y: torch.Tensor, seen: torch.Tensor, casts: Casts, *layers: Float8Linear) -> CastInput:
    """The result's casts by its amax, unless autocast rounds it first."""
    converted = after_autocast(y)
    return cast_known(converted, seen if converted is y else None, casts, *layers)
