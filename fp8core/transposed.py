"""Float8Conv1D: GPT-2's transposed Linear, `x @ weight + bias` with weight [in, out], in FP8.

The class of Hugging Face transformers is known by what it has (name, `nf`, a weight [in, nf], a bias), without an import.
Parameters, their layout and their names stay, so that checkpoints and optimizers do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.history import AmaxMemory
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
        """As transformers' Conv1D; `config` as of Float8Linear."""
        super().__init__(nx, nf, True, device, dtype, config=config)
        self.weight = nn.Parameter(self.weight.detach().t().contiguous())
        self.nf, self.nx = nf, nx
        self.is_transposed = True

    @classmethod
    def from_float(
        cls, mod: nn.Module, config: Float8LinearConfig | Recipe | str | None = None
    ) -> Float8Conv1D:
        """A Float8Conv1D that shares the parameters of a Conv1D.

        Raises:
            TypeError: mod is no Conv1D.
            ValueError: mod has hooks, which would be lost.
        """
        if not is_transposed_linear(mod):
            raise TypeError(f"from_float takes a Conv1D with weight [in, nf], got {type(mod).__name__}")
        hooks = [name for name in vars(mod) if name.endswith("_hooks") and getattr(mod, name)]
        if hooks:
            raise ValueError(
                f"{mod} has {', '.join(hooks)} that a new module would lose; register them after conversion"
            )
        weight: Any = mod.weight
        new = cls(weight.shape[1], weight.shape[0], device="meta", config=config)
        new.weight, new.bias = weight, mod.bias  # type: ignore[assignment]  # parameters, as checked
        if new.amaxes is not None:
            new.amaxes = AmaxMemory(new.recipe, weight.device)
        return new.train(mod.training)

    def reset_parameters(self) -> None:
        """As the original: normal weights of 0.02, biases of 0."""
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
