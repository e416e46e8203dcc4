"""Parameters that take part in matrix products and belong to no nn.Linear and to no converted experts: why none is FP8.

Found by shape and owner, since a module's forward cannot be read: each parameter with two sizes above 1, except what is
only looked up (embeddings) or multiplied element by element (gains of norms). A step that is counted tells which of
them really multiply, see `fp8core.audit`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fp8core.experts.interface import experts_per_token, is_experts_interface
from fp8core.experts.moe import EXPERTS_BY_DEFAULT, GroupedMatmul
from fp8core.proof.flops.count import name_in_layer
from fp8core.replace import NEVER_OFFERED, WHY_NOT
from fp8core.transposed import is_transposed_linear

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_ELEMENTWISE = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.PReLU, _NormBase)
_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)
_ROUTERS = ("router", "gate")


@dataclass(frozen=True, slots=True)
class WeightAudit:
    """One parameter that multiplies, or may, outside of nn.Linear and `GroupedMatmul`. None of them is in FP8.

    Attributes:
        fqn: fully qualified name of the parameter.
        kind: class of the module that owns it.
        shape: as it lies.
        reason: why it is not FP8, and what to do.
        gemms: of one forward and backward pass; 0 where nothing tells that it multiplies.
        flops_of_a_gemm: FLOPs of one of them divided by tokens: two for each element that a token meets once.
    """

    fqn: str
    kind: str
    shape: tuple[int, ...]
    reason: str
    gemms: int
    flops_of_a_gemm: int
    fp8_gemms = 0

    @property
    def size(self) -> tuple[int, ...]:
        """The weight as it lies."""
        return self.shape

    @property
    def words(self) -> str:
        """Why it is not FP8."""
        return self.reason


def audit_weights(model: nn.Module, seen_in_step: Collection[str] | None = None) -> Iterator[WeightAudit]:
    """Each such parameter of a model, shared ones once; nn.Linear layers and experts with a `GroupedMatmul` have rows of their own.

    Args:
        model: any module.
        seen_in_step: names of the parameters that a step multiplied, None if none was run. Of classes that are not known here only
            these have GEMMs; the others may be added or looked up, as a positional embedding is, and a step drops them.
    """
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    named = ((name_in_layer(n), p) for n, p in model.named_parameters(remove_duplicate=False))
    in_step = {id(p): n for n, p in named if n in (seen_in_step or ())}  # by the name that the step used
    seen: set[int] = set()
    for fqn, holder in model.named_modules():
        fqn_of_layer = name_in_layer(f"{fqn}.original").rpartition(".")[0]
        module = model.get_submodule(fqn_of_layer)
        if isinstance(module, (nn.Linear, *_ELEMENTWISE, *_LOOKED_UP)):
            continue
        stacked = any(isinstance(child, GroupedMatmul) for child in module.children())
        for own_name, parameter in holder.named_parameters(recurse=False):
            name = name_in_layer(f"{fqn}.{own_name}".lstrip("."))
            shape = tuple(parameter.shape)
            has_row = id(parameter) in linear or (stacked and len(shape) == 3)
            if has_row or id(parameter) in seen or sum(size > 1 for size in shape) < 2:
                continue
            if "bias" in name.rpartition(".")[2]:
                continue
            seen.add(id(parameter))
            reason, is_known = _reason(module, fqn_of_layer, shape)
            multiplies = is_known or id(parameter) in in_step
            if seen_in_step is not None and not multiplies:
                continue
            experts = shape[0] if len(shape) == 3 and not isinstance(module, _ConvNd) else 1
            yield WeightAudit(
                fqn=in_step.get(id(parameter), name),
                kind=type(module).__name__,
                shape=shape,
                reason=reason,
                gemms=2 + parameter.requires_grad if multiplies else 0,
                flops_of_a_gemm=2
                * parameter.numel()
                // experts
                * (experts_per_token(module, experts) or experts),
            )


def _reason(module: nn.Module, fqn: str, shape: tuple[int, ...]) -> tuple[str, bool]:
    """Why it is not FP8, and whether its class is known to multiply it."""
    kind = type(module).__name__
    noted = getattr(module, WHY_NOT, "")
    if noted:
        return str(noted), True
    if is_transposed_linear(module):
        return NEVER_OFFERED, True
    if isinstance(module, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention multiplies it by itself, without a Linear; write q, k and v as nn.Linear and call "
            "scaled_dot_product_attention",
            True,
        )
    if isinstance(module, _ConvNd):
        return "a convolution, for which there are no FP8 GEMMs here", True
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return f"{kind} multiplies it in a kernel of PyTorch's, which has no FP8", True
    if len(shape) == 3:
        if is_experts_interface(module):
            return EXPERTS_BY_DEFAULT, True
        return (
            f"class {kind} uses it by itself; if it multiplies, call fp8core.GroupedMatmul in its forward, then "
            "convert_experts_to_float8",
            False,
        )
    if len(shape) == 2 and any(part in (kind + fqn.rpartition(".")[2]).lower() for part in _ROUTERS):
        return "a router, whose small differences choose the experts: high precision is meant", True
    return f"class {kind} uses it by itself; if it multiplies, make it an nn.Linear to convert it", False
