"""Small mixtures of experts for the tests of `fp8core.experts.moe` and of expert parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fp8core import Float8Linear, GroupedMatmul, Recipe


class Experts(nn.Module):
    """SwiGLU experts; gate and up [E, F, K], down [E, K, F]."""

    def __init__(self, experts: int, width: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, ffn, width) / width**0.5)
        self.up = nn.Parameter(torch.randn(experts, ffn, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, ffn) / ffn**0.5)
        self.multiply = GroupedMatmul(experts_per_token=2)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        rows = self.multiply.pad(x, offsets)
        gate, up = (self.multiply(rows.x, weight, rows.offsets) for weight in (self.gate, self.up))
        return rows.restore(self.multiply(functional.silu(gate) * up, self.down, rows.offsets))


class Router(nn.Linear):
    """Probabilities, formed in float64 so that they don't depend on how many tokens are routed at once."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input.double(), self.weight.double()).softmax(1).to(input.dtype)


class Mixture(nn.Module):
    """x + the two experts that the router chooses, and a dense layer after them."""

    def __init__(self, experts: int = 4, width: int = 32, ffn: int = 48) -> None:
        super().__init__()
        self.router = Router(width, experts, bias=False)
        self.experts = Experts(experts, width, ffn)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).topk(2, dim=1)
        order = chosen.flatten().argsort(stable=True)
        numbers = torch.arange(self.router.out_features)
        offsets = (chosen.flatten()[:, None] == numbers).sum(0).cumsum(0).to(torch.int32)
        repeated = x[:, None].expand(-1, 2, -1).flatten(0, 1)
        results = self.experts(repeated.index_select(0, order), offsets).index_select(0, order.argsort())
        return self.head(x + (results.unflatten(0, (-1, 2)) * weights[..., None]).sum(1))


def ends(*sizes: int) -> Tensor:
    """Offsets of groups of these sizes."""
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def by_expert(
    x: Tensor, weight: Tensor, offsets: Tensor, grad: Tensor, recipe: Recipe, multiple: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, grad of x, grad of weight) by a Float8Linear for each expert, its rows filled up with zeros."""
    results = []
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    for rows, g, own in zip(x.detach().split(sizes), grad.split(sizes), weight, strict=True):
        layer = Float8Linear(weight.shape[2], weight.shape[1], bias=False, dtype=weight.dtype, config=recipe)
        layer.weight = nn.Parameter(own.detach().clone())
        mine, g = (functional.pad(t, (0, 0, 0, -len(t) % multiple)) for t in (rows, g))
        output = layer(mine.requires_grad_())
        grad_x, grad_weight = torch.autograd.grad(output, [mine, layer.weight], g)
        results.append((output.detach()[: len(rows)], grad_x[: len(rows)], grad_weight))
    outputs, grads, weight_grads = zip(*results, strict=True)
    return torch.cat(outputs), torch.cat(grads), torch.stack(weight_grads)


def operands(sizes: tuple[int, ...], N: int = 128, K: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, K] with outlier tokens, weight [E, N, K], gradient [T, N]."""
    x = torch.randn(sum(sizes), K) * torch.logspace(-2, 2, sum(sizes))[:, None]
    return x.requires_grad_(), torch.randn(len(sizes), N, K, requires_grad=True), torch.randn(sum(sizes), N)
