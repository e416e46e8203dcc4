"""Puts fp8core's fused RMSNorm and SwiGLU into a Llama, for arms that run eager code as fast as it gets.

With them a norm leaves the amax, or the codes, of its result to the Float8Linear layers that read it, and the one behind
attention adds to the residual stream as well, forward and backward; a model without
FP8 runs the same kernels, which makes it the fair control of the one with FP8. Parameters and their names stay.
"""

from __future__ import annotations

from torch import nn

from fp8core.producers import RMSNorm, SwiGLU
from harness.training.models.llama import SwiGlu


def fuse(model: nn.Module) -> nn.Module:
    """Replaces each nn.RMSNorm and the activation of each SwiGlu, in place.

    Args:
        model: a Llama of `harness.training.models`, converted or not; dense or with experts (whose activation stays).

    Raises:
        ValueError: there is nothing to replace.
    """
    found = False
    for parent in list(model.modules()):
        if isinstance(parent, SwiGlu):
            parent.fused, found = SwiGLU(), True
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.RMSNorm) and child.eps is not None:
                fused, found = RMSNorm(child.normalized_shape[0], child.eps, device="meta"), True
                fused.weight = child.weight
                setattr(parent, name, fused)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no RMSNorm and no SwiGLU that fp8core's could replace; take a Llama"
        )
    return model
