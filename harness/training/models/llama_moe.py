"""Llama whose feed-forward is a mixture of SwiGLU experts, each token going to `top_k` of them; none is dropped.

    p = softmax(router(x))                                                float32
    y = sum over the top_k experts e of x:  p_e / (sum of the chosen p) * expert_e(x)

Tokens are sorted by expert, so that each of the three products of all experts is one grouped GEMM over the expert
weights [experts, in, out]. These are no nn.Linear, so a conversion to FP8 leaves them; `convert_experts_to_float8` turns
them. The router's class has a forward of its own, so it stays in high precision whatever its size. No load-balancing
loss.

Sources: arXiv:2401.04088 (Mixtral: softmax over the chosen experts, SwiGLU); `torch.nn.functional.grouped_mm`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn import functional

from fp8core import GroupedMatmul
from fp8core.arguments import autocast_enabled
from harness.training.models.common import keep_products_of
from harness.training.models.llama import Llama, LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Sizes of a Llama with experts; `ffn` is that of one expert."""

    experts: int
    top_k: int


class LlamaMoe(Llama):
    """Llama with `Moe` in place of SwiGLU; same arguments."""

    config: MoeConfig

    def make_ffn(self, config: LlamaConfig) -> nn.Module:
        """The second half of a block."""
        assert isinstance(config, MoeConfig)
        return Moe(config)


class Router(nn.Linear):
    """Probabilities of the experts, float32 [tokens, experts], whatever the dtype of tokens or weight."""

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.float(), self.weight.float()).softmax(1)


class Experts(nn.Module):
    """SwiGLU experts, run on tokens that are sorted by expert.

    Attributes:
        gate, up: [experts, width, ffn].
        down: [experts, ffn, width].
        multiply: its recipe says whether they multiply in FP8.
    """

    def __init__(self, experts: int, width: int, ffn: int, experts_per_token: int = 1) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, width, ffn))
        self.up = nn.Parameter(torch.empty(experts, width, ffn))
        self.down = nn.Parameter(torch.empty(experts, ffn, width))
        self.multiply = GroupedMatmul(experts_per_token)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [M, width], the rows of expert e being ends[e-1] to ends[e] - 1; ends int32 [experts]. -> [M, width]."""
        if self.multiply.recipe is not None:
            return self._in_fp8(x, ends)
        gate, up, down = (_compute_dtype(weight) for weight in (self.gate, self.up, self.down))
        x = x.to(gate.dtype)
        hidden = functional.silu(grouped_mm(x, gate, ends)) * grouped_mm(x, up, ends)
        return grouped_mm(hidden, down, ends)

    def _in_fp8(self, x: Tensor, ends: Tensor) -> Tensor:
        """The experts' products in FP8; weights are cast as they are, not through autocast's dtype."""
        gate, up, down = (weight.transpose(1, 2) for weight in (self.gate, self.up, self.down))
        rows = self.multiply.pad(_compute_dtype(x), ends)
        hidden = functional.silu(self.multiply(rows.x, gate, rows.offsets))
        hidden = hidden * self.multiply(rows.x, up, rows.offsets)
        return rows.restore(self.multiply(hidden, down, rows.offsets))


class Moe(nn.Module):
    """Router and experts in the place of one feed-forward.

    Attributes:
        top_k: experts a token goes to.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = Router(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.ffn, config.top_k)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> the same."""
        tokens = x.flatten(0, -2)  # [N, width]
        weights, chosen = self.router(tokens).topk(self.top_k, dim=1)  # [N, top_k]
        weights = weights / weights.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)  # places of [N, top_k], by expert
        numbers = torch.arange(self.router.out_features, device=x.device)
        ends = (chosen.flatten()[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
        # Each token is repeated first and then permuted: then every gradient has one place, and no order of addition.
        repeated = tokens[:, None].expand(-1, self.top_k, -1).flatten(0, 1)
        results = self.experts(repeated[order], ends)[order.argsort()]
        mixed = (results.unflatten(0, (-1, self.top_k)) * weights[..., None]).sum(1)
        return mixed.to(x.dtype).view_as(x)


def _compute_dtype(x: Tensor) -> Tensor:
    """In autocast's dtype where it is on: it does not know our operators."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if autocast_enabled(x) else x


@custom_op("harness::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[rows of e] @ weight[e] for each expert e.

    An operator of our own, because PyTorch's traces bfloat16 only (2.13); bfloat16 runs through PyTorch's.

    Args:
        x: [M, K], sorted by expert.
        weight: [E, K, N], of the same dtype.
        ends: int32 [E], where each expert's rows end; the last is M.

    Returns:
        [M, N] in x's dtype.
    """
    if x.dtype == torch.bfloat16:
        return functional.grouped_mm(x, weight, offs=ends)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for expert, rows in enumerate(_rows(ends)):
        torch.mm(x[rows], weight[expert], out=y[rows])
    return y


@custom_op("harness::grouped_mm_weight_grad", mutates_args=())
def grouped_mm_weight_grad(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """x[rows of e].T @ grad[rows of e] for each expert e: [E, K, N] from x [M, K] and grad [M, N]."""
    if x.dtype == torch.bfloat16:
        return functional.grouped_mm(x.t(), grad, offs=ends)
    y = x.new_empty(len(ends), x.shape[1], grad.shape[1])
    for expert, rows in enumerate(_rows(ends)):
        torch.mm(x[rows].t(), grad[rows], out=y[expert])
    return y


def _rows(ends: Tensor) -> list[slice]:
    bounds = [0, *ends.tolist()]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@grouped_mm_weight_grad.register_fake
def _(x: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], grad.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return grouped_mm(grad, weight.transpose(1, 2), ends), grouped_mm_weight_grad(x, grad, ends), None


grouped_mm.register_autograd(_backward, setup_context=_keep)
keep_products_of(torch.ops.harness.grouped_mm.default)
