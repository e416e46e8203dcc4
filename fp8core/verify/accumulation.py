"""Gradients that add up over microbatches: each addition into `.grad` against the sum in float64.

An addition into a float32 gradient that is rounded to bfloat16 loses 50 dB a time and is seen by no comparison of
single products. Compared are a few random combinations of the columns (`products.Sketch`), before and after. Between
two additions a gradient may be zeroed or reduced over ranks; a change as small as a rounding is a fault there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fp8core.verify.operands import plain
from fp8core.verify.products import projected, signs

if TYPE_CHECKING:
    from fp8core.verify.records import LayerProof


ROUNDING = 2.0**-6  # of a gradient's size: bfloat16 changes it by 2**-10, a reduction over ranks by far more


class Accumulation:
    """Hooks on one weight, a leaf of autograd.

    Attributes:
        additions: gradients that were added to one that was there.
        dtype: of the gradient.
    """

    def __init__(self, weight: torch.Tensor, proof: LayerProof) -> None:
        self.weight, self.proof = weight, proof
        self.additions = 0
        self.dtype: torch.dtype | None = None
        self._expected: torch.Tensor | None = None
        self._allowed: torch.Tensor | None = None
        self._last: torch.Tensor | None = None  # what was there after the last addition
        self.handles: list[Any] = [
            weight.register_hook(self._arrives),
            weight.register_post_accumulate_grad_hook(self._added),
        ]

    def _directions(self, matrix: torch.Tensor) -> torch.Tensor:
        return signs(matrix.shape[1], matrix.device)

    def _arrives(self, grad: torch.Tensor) -> None:
        """Before the addition."""
        with torch.no_grad(), _disable_current_modes():
            self._expected = None
            if self.weight.grad is None:
                return
            part, there = plain(grad), plain(self.weight.grad)
            directions = self._directions(there)
            before, after = projected(there, directions), projected(part, directions)
            self._compare_kept(before[0])
            self._expected, self._allowed = before[0] + after[0], before[1] + after[1]

    def _added(self, weight: torch.Tensor) -> None:
        """After it."""
        if weight.grad is None:
            return
        with torch.no_grad(), _disable_current_modes():
            grad = plain(weight.grad)
            got, size = projected(grad, self._directions(grad))
            self._last = got
            if self._expected is None or self._allowed is None:
                return
            self.additions += 1
            self.dtype = grad.dtype
            unit = torch.finfo(grad.dtype).eps
            allowed = 8 * unit * (self._allowed + size).sqrt() + torch.finfo(grad.dtype).smallest_normal
            wrong = int((~((got - self._expected).abs() <= allowed) & self._expected.isfinite()).sum())
            if wrong:
                self.proof.fault(
                    f"gradients do not add up: {wrong} of {got.numel()} sums are further from the sum of what came than "
                    f"rounding to {str(grad.dtype).removeprefix('torch.')} explains"
                )
        self._expected = self._allowed = None

    def finish(self) -> None:
        """After the step, where its gradients are still there."""
        if self.weight.grad is not None:
            with torch.no_grad(), _disable_current_modes():
                grad = plain(self.weight.grad)
                self._compare_kept(projected(grad, self._directions(grad))[0])
        for handle in self.handles:
            handle.remove()

    def _compare_kept(self, now: torch.Tensor) -> None:
        if self._last is None or self._last.shape != now.shape:
            return
        size = float(self._last.norm())
        change = float((now - self._last).norm())
        if 1e-5 * size < change < ROUNDING * size:
            self.proof.fault(
                f"gradients do not add up: after the addition one changed by {change / size:.1e} of its size, as by rounding"
            )
