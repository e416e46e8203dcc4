"""Gradients that add up over microbatches: each addition into `.grad` against the sum in float64.

An addition into a float32 gradient that is rounded to bfloat16 loses 50 dB a time and is seen by no comparison of
single products. Compared are a few random combinations of the columns (`products.projected`), before and after. Between
two additions a gradient may be zeroed or reduced over ranks; a change as small as a rounding is a fault there too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from fp8core.proof.verify.operands import matrix, plain, quietly
from fp8core.proof.verify.oracle import tiles
from fp8core.proof.verify.products import projected, signs
from fp8core.recipe import GEMMS

if TYPE_CHECKING:
    from fp8core.proof.verify.records import LayerProof

ROUNDING = 2.0**-6  # of a gradient's size: bfloat16 changes it by 2**-10, a reduction over ranks by far more


class Sums:
    """Hooks on one weight, a leaf of autograd.

    Attributes:
        dtype: of the gradient, once one was added to one that was there.
    """

    def __init__(self, weight: torch.Tensor, proof: LayerProof) -> None:
        self.weight, self.proof = weight, proof
        self.dtype: torch.dtype | None = None
        self._expected: torch.Tensor | None = None
        self._last: torch.Tensor | None = None  # what was there after the last addition
        self._handles: list[Any] = [
            weight.register_hook(self._arrives),
            weight.register_post_accumulate_grad_hook(self._added),
        ]

    def _arrives(self, grad: torch.Tensor) -> None:
        """Before the addition."""
        self._expected = None
        with quietly():
            there = self._there()
            if there is not None:
                self._expected = there + _projected(grad)

    def _added(self, _: torch.Tensor) -> None:
        """After it."""
        grad = self.weight.grad
        if grad is None:
            return
        with quietly():
            got = _projected(grad)
            self._last = got[0]
            if self._expected is None:
                return
            (want, weight), limits = self._expected, torch.finfo(grad.dtype)
            self._expected, self.dtype = None, grad.dtype
            allowed = 8 * limits.eps * (weight + got[1]).sqrt() + limits.smallest_normal
            wrong = int((~((got[0] - want).abs() <= allowed) & want.isfinite()).sum())
            if wrong:
                self.proof.fault(
                    f"gradients do not add up: {wrong} of {want.numel()} sums are further from the sum of what came than "
                    f"rounding to {str(grad.dtype).removeprefix('torch.')} explains"
                )

    def _there(self) -> torch.Tensor | None:
        """The gradient as it is; nothing may have rounded it since the last addition."""
        if self.weight.grad is None:
            return None
        now, last = _projected(self.weight.grad), self._last
        if last is not None and last.shape == now[0].shape:
            size, change = float(last.norm()), float((now[0] - last).norm())
            if 1e-5 * size < change < ROUNDING * size:
                self.proof.fault(
                    f"gradients do not add up: after the addition one changed by {change / size:.1e} of its size, as by rounding"
                )
        return now

    def finish(self) -> None:
        """After the step, where its gradients are still there."""
        with quietly():
            self._there()
        for handle in self._handles:
            handle.remove()


class BiasSum:
    """The gradient of one bias, a leaf of autograd: in each backward pass the sum of grad_output over tokens, of all its calls."""

    def __init__(self, bias: torch.Tensor, proof: LayerProof) -> None:
        self.proof, self._leaf = proof, get_gradient_edge(bias).node
        self._got, self._want, self._allowed = (torch.zeros((), dtype=torch.float64) for _ in range(3))
        self._handle = bias.register_hook(self._arrives)

    def expect(self, grad: torch.Tensor) -> None:
        """A call's grad_output [M, N]; its backward pass runs."""
        if not torch._C._will_engine_execute_node(self._leaf):
            return  # `autograd.grad` of other tensors
        sums = torch.zeros(2, grad.shape[1], dtype=torch.float64, device=grad.device)
        for lines, along in tiles(*grad.shape):
            values = grad[lines, along].double()
            sums[0, along] += values.sum(0)
            sums[1, along] += values.abs().sum(0)
        # Two roundings to the gradient's dtype; and float32 sums
        allowed = 2 * torch.finfo(grad.dtype).eps * sums[0].abs() + 2.0**-18 * sums[1]
        self._want = self._want.to(grad.device) + sums[0]
        self._allowed = self._allowed.to(grad.device) + allowed

    def _arrives(self, grad: torch.Tensor) -> None:
        with quietly():
            self._got = self._got.to(grad.device) + plain(grad).double()

    def finish(self) -> None:
        """After the step."""
        self._handle.remove()
        if not self._want.dim():
            if self._got.dim() or any(self.proof.gemms[name].calls for name in GEMMS[1:]):
                self.proof.unchecked("grad_bias: none arrived in the backward pass of the layer's GEMMs")
            return
        self.proof.grad_bias = True
        wrong = int((~((self._got - self._want).abs() <= self._allowed) & self._want.isfinite()).sum())
        if wrong:
            self.proof.fault(f"grad_bias: {wrong} of {len(self._want)} sums of grad_output are other ones")


def _projected(grad: torch.Tensor) -> torch.Tensor:
    found = matrix(plain(grad))
    return projected(found, signs(found.shape[1], found.device))
