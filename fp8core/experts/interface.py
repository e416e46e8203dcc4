"""Experts of Hugging Face transformers (5 and later), multiplied by a `GroupedMatmul`.

There, a module of experts has stacked parameters, says how they lie, and is called with the tokens and the router's
choice; `transformers.integrations.moe` holds the implementations among which a configuration chooses. This one is the
same computation as its "grouped_mm" with FP8 products. Known by what the module has, without an import:

    gate_up_proj   [E, 2 I, H], or up_proj [E, I, H] without a gate; [E, H, 2 I] where `is_transposed`
    down_proj      [E, H, I], or [E, I, H]
    has_gate, has_bias, is_transposed, num_experts, config; _apply_gate, or act_fn without a gate
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

PRODUCT = "fp8core_multiply"  # name of the child that multiplies
_TOP_K = ("num_experts_per_tok", "experts_per_token", "top_k", "num_experts_per_token", "moe_top_k")
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}  # a class of experts -> its subclass here
_SAYS_HOW = ("has_gate", "has_bias", "is_transposed", "num_experts", "config")


def is_experts_interface(module: nn.Module) -> bool:
    """Whether a module has the parameters and attributes of the module docstring."""
    if _has_equal_groups(type(module)):
        return True
    activation = "_apply_gate" if getattr(module, "has_gate", True) else "act_fn"
    return all(hasattr(module, name) for name in (*_SAYS_HOW, activation)) and all(
        isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in _weights(module)
    )


def let_multiply(module: nn.Module, multiply: nn.Module) -> None:
    """Gives such a module a child that multiplies, and a forward pass that calls it, in place.

    Its class becomes a subclass of its own, so that hooks, parameters, names and `isinstance` stay.

    Args:
        module: for which `is_experts_interface` is true.
        multiply: a `fp8core.GroupedMatmul`.
    """
    module.add_module(PRODUCT, multiply)
    module.__class__ = _with_products(type(module))


def take_back(module: nn.Module) -> None:
    """Undoes `let_multiply`."""
    if isinstance(module, _MultipliedExperts):
        module.__class__ = type(module).__bases__[1]
        del module._modules[PRODUCT]


def experts_per_token(module: nn.Module, most: int) -> int | None:
    """Experts that a token goes to, as the module or its configuration says; None where neither does.

    Args:
        module: of experts.
        most: how many there are.
    """
    if _has_equal_groups(type(module)):
        return most
    for holder in (module, getattr(module, "config", None)):
        for name in _TOP_K:
            value = getattr(holder, name, None)
            if isinstance(value, int) and 0 < value <= most:
                return value
    return None


def _has_equal_groups(kind: type[nn.Module]) -> bool:
    """Llama 4's: known by its name; called with as many rows for each expert, in the order of experts."""
    return any(base.__name__ == "Llama4TextExperts" for base in kind.__mro__)


def _weights(module: nn.Module) -> tuple[Any, Any]:
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    return getattr(module, first, None), getattr(module, "down_proj", None)


def _with_products(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        base = _EqualGroups if _has_equal_groups(kind) else _MultipliedExperts
        _CLASSES[kind] = type(f"Float8{kind.__name__}", (base, kind), {})
    return _CLASSES[kind]


def _blank(kind: type[nn.Module]) -> nn.Module:
    """For copies and pickles, which don't find a class that was made here by its name."""
    made = _with_products(kind)
    return made.__new__(made)


class _MultipliedExperts(nn.Module):
    """The forward pass; mixed into a class of experts."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__bases__[1],), self.__dict__

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [T, H], top_k_index int64 [T, k], top_k_weights [T, k] -> [T, H].

        Raises:
            ValueError: transformers' own expert parallelism runs, whose tokens of other ranks have no group here.
        """
        experts: Any = self
        if getattr(experts, "_is_expert_parallel", False):
            raise ValueError(
                "experts run under transformers' expert parallelism, which FP8 products don't know; load the model without "
                "it, or leave the experts in high precision"
            )
        k = top_k_index.shape[-1]
        chosen, order = top_k_index.reshape(-1).sort(stable=True)
        numbers = torch.arange(experts.num_experts, device=chosen.device)
        ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
        multiply = getattr(experts, PRODUCT)
        rows = multiply.pad(hidden_states[order // k], ends)
        first, down = _weights(experts)

        def product(x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
            y: torch.Tensor = multiply(
                x, weight.transpose(1, 2) if experts.is_transposed else weight, rows.offsets
            )
            if not experts.has_bias:
                return y
            bias = getattr(experts, name)[chosen].to(y.dtype)
            # Rows of padding stay zero, as the next product wants them
            return y + (bias if rows.places is None else torch.zeros_like(y).index_copy(0, rows.places, bias))

        up = "gate_up_proj_bias" if experts.has_gate else "up_proj_bias"
        hidden = product(rows.x, first, up)
        hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
        result = rows.restore(product(hidden, down, "down_proj_bias"))
        if getattr(experts, "has_post_expert_norm", False):
            result = experts.post_expert_norm(result)
        result = result * top_k_weights.reshape(-1)[order][:, None]
        mixed = torch.empty_like(result).index_copy(0, order, result)
        return mixed.view(-1, k, mixed.shape[-1]).sum(1).to(hidden_states.dtype)


class _EqualGroups(_MultipliedExperts):
    """Llama 4's forward pass: every expert is given every token, those that were not sent to it as zeros."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # another interface
        """[E T, H], the rows of expert 0 first -> the same."""
        experts: Any = self
        x = hidden_states.reshape(-1, experts.hidden_size)
        each = x.shape[0] // experts.num_experts
        ends = torch.arange(1, experts.num_experts + 1, device=x.device, dtype=torch.int32) * each
        multiply = getattr(experts, PRODUCT)
        rows = multiply.pad(x, ends)
        gate, up = multiply(rows.x, experts.gate_up_proj.transpose(1, 2), rows.offsets).chunk(2, -1)
        down = multiply(up * experts.act_fn(gate), experts.down_proj.transpose(1, 2), rows.offsets)
        restored: torch.Tensor = rows.restore(down)
        return restored
