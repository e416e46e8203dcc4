"""Float8Conv1D: GPT-2's transposed Linear, `x @ weight + bias` with weight [in, out], in FP8.

The class of Hugging Face transformers is known by what it has (name, `nf`, a weight [in, nf], a bias), without an import.
Parameters, their layout and their names stay, so that checkpoints and optimizers do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.linear import Float8Linear

if TYPE_CHECKING:
    from fp8core.config import Float8LinearConfig
    from fp8core.recipe import Recipe


class Float8Conv1D(Float8Linear):
    """A Float8Linear whose parameter lies as [in_features, out_features].

    Attributes:
        nf: out_features, as the original names it.
        nx: in_features.
    """

    def __init__(
        self,
        nf: int,
        nx: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | Recipe | str | None = None,
    ) -> None:
        """Take the arguments of transformers' Conv1D, and Float8Linear's `config`."""
        super().__init__(nx, nf, True, device, dtype, config=config)
        self.weight = nn.Parameter(self.weight.detach().t().contiguous())
        self.nf, self.nx = nf, nx
        self.is_transposed = True

    @classmethod
    def from_float(
        cls, mod: nn.Module, config: Float8LinearConfig | Recipe | str | None = None
    ) -> Float8Conv1D:
        """A Float8Conv1D that shares the parameters of a Conv1D and takes its hooks.

        Raises:
            TypeError: mod is no Conv1D.
        """
        if not is_transposed_linear(mod):
            raise TypeError(f"from_float takes a Conv1D with weight [in, nf], got {type(mod).__name__}")
        plain: Any = mod
        nx, nf = plain.weight.shape
        return cls(nf, nx, device="meta", config=config)._taking(mod)

    def reset_parameters(self) -> None:
        """Draw as the original does: normal weights of 0.02, biases of 0."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether a module is a Conv1D of transformers, or one that is written alike; no subclass of it."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return (
        type(module).__name__ == "Conv1D"
        and isinstance(weight, torch.Tensor)
        and weight.dim() == 2
        and weight.shape[1] == getattr(module, "nf", None)
        and isinstance(bias, torch.Tensor)
        and tuple(bias.shape) == (weight.shape[1],)
        and not list(module.children())
    )


@torch.no_grad()
def own_forward(module: nn.Module) -> str:
    """Why a module that looks like a Conv1D is none: it computes something else; "" if it does what its name says.

    A row of ones is multiplied to find out, except on "meta".
    """
    layer: Any = module
    if "forward" in vars(module):
        return "its forward was replaced on the instance and would be lost; convert before that"
    if layer.weight.is_meta:
        return ""
    x = torch.ones(1, layer.weight.shape[0], dtype=layer.weight.dtype, device=layer.weight.device)
    with torch.autocast(x.device.type, enabled=False):
        got = type(module).forward(module, x)
        want = torch.addmm(layer.bias, x, layer.weight)
    same = isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want, 1e-2, 1e-2)
    return "" if same else "class Conv1D computes something else than x @ weight + bias, which would be lost"
