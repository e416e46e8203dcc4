"""TwoCasts: a tensor that consists of its two casts, for recipes that cast an input anew for each GEMM that reads it.

What a module receives where its input was gathered in FP8 and one Float8Tensor can't serve both GEMMs: rowwise
scales. It advertises shape and dtype of the tensor that it stands for; Float8Linear reads its codes, as it reads a
`fp8core.CastInput`. Views that keep the last dimension are defined on it, everything else raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fp8core.inputs.shared_input import CastInput, Casts
from fp8core.tensor import decomposed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8core.tensor import Float8Tensor

aten = torch.ops.aten


class TwoCasts(torch.Tensor):
    """Codes for the output GEMM and for grad_weight.

    Attributes:
        for_output: [M, K], M counting all leading dimensions.
        for_grad_weight: [M, K]; None where nothing trains.
        casts: what they were cast with.
    """

    for_output: Float8Tensor
    for_grad_weight: Float8Tensor | None
    casts: Casts
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own idiom

    @staticmethod
    def __new__(
        cls: type,
        shape: Sequence[int],
        for_output: Float8Tensor,
        for_grad_weight: Float8Tensor | None,
        casts: Casts,
    ) -> TwoCasts:
        """Wraps codes [M, K] as a tensor of `shape` [..., K]; nothing is copied."""
        self: TwoCasts = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=for_output.dtype, device=for_output.device
        )
        self.for_output = for_output
        self.for_grad_weight = for_grad_weight
        self.casts = casts
        return self

    def as_cast_input(self) -> CastInput:
        """What Float8Linear reads; gradients flow to this tensor."""
        return CastInput(self, self.for_output, self.for_grad_weight, self.casts, codes_only=True)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents to print
        return f"TwoCasts(shape={list(self.shape)}, for_output={self.for_output}, for_grad_weight={self.for_grad_weight})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operator
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        x = args[0]
        shape: Sequence[int] | None = None
        if op in (aten.detach.default, aten.alias.default):
            shape = x.shape
        elif op in (aten.view.default, aten._unsafe_view.default):
            shape = torch.empty(x.shape, device="meta").view(args[1]).shape
            if shape[-1] != x.shape[-1]:
                shape = None
        if shape is None:
            composed = decomposed(op, args, kwargs)
            if composed is not NotImplemented:
                return composed
            raise NotImplementedError(
                f"{op} of an input that consists of FP8 codes for Float8Linear alone: of them only views that keep the last "
                "dimension are defined. Let torch's PrepareModuleInput gather in high precision for a module that does "
                "more with its input"
            )
        return TwoCasts(shape, x.for_output, x.for_grad_weight, x.casts)
