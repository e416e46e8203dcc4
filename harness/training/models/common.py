"""What the reference models share: causal attention, the loss, one cast for several layers, checkpointing, weights.

Every model here is made on "meta", without memory, and then gets its weights (`materialise`): each parameter is
drawn on the CPU from a stream of its own, keyed by the seed and the parameter's name. So the weights don't depend on
device, dtype, number of threads or on which other layers there are, and a model cut to its first blocks keeps theirs.
"""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8core.kernels.ops  # noqa: F401  # defines torch.ops.fp8core
from fp8core import CastInput, Float8Linear, Float8Tensor, RMSNorm, cast_input
from fp8core.inputs.two_casts import TwoCasts
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WeightsFrom = Literal["host", "device", "none"]  # where initial weights are drawn, if they are

INIT_STD = 0.02  # of every weight matrix; GPT-2's, also Llama's in its published configuration
LOSS_CHUNK = 1024  # tokens whose logits are held in float32 at once

aten = torch.ops.aten
FP8_PRODUCTS = (
    aten._scaled_mm,
    torch.ops.fp8core.matmul,
    torch.ops.fp8core.scaled_grouped_mm,
    torch.ops.fp8core.four_bit_mm,
)


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim), causal) v by scaled_dot_product_attention; no parameters.

    In float32 on a GPU with fewer key than query heads PyTorch holds the whole T x T matrix; bfloat16 does not.

    Attributes:
        heads: of the queries; a multiple of those of keys and values.
        head_dim: elements of a head.
    """

    def __init__(self, heads: int, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, T, heads, head_dim], k and v [B, T, kv heads, head_dim] -> [B, T, heads * head_dim]."""
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=k.shape[2] != self.heads,
        )
        return mixed.transpose(1, 2).flatten(2)


def share(x: Tensor | CastInput, *layers: nn.Module) -> Tensor | CastInput:
    """x for several layers that read it: cast once if all are Float8Linear of one recipe, else x itself.

    What a fused norm or `PrepareFloat8ModuleInput` has cast already stays as it is.
    """
    if isinstance(x, CastInput):
        return x
    if isinstance(x.to_local() if hasattr(x, "to_local") else x, Float8Tensor | TwoCasts):
        return x
    fp8 = _of_one_recipe(layers)
    return cast_input(x, *fp8) if fp8 else x


def normed(norm: nn.Module, x: Tensor, *layers: nn.Module) -> Tensor | CastInput:
    """norm(x) for the layers that read it; fp8core's norm casts it for them in the same kernel where it can."""
    fp8 = _of_one_recipe(layers) if isinstance(norm, RMSNorm) else []
    return norm(x, *(fp8 if any(layer.recipe.fp8_gemms for layer in fp8) else ()))


def added_and_normed(
    norm: nn.Module, x: Tensor, delta: Tensor, *layers: nn.Module
) -> tuple[Tensor, Tensor | CastInput]:
    """(x + delta, `normed` of it); fp8core's norm adds in the same kernel."""
    if not isinstance(norm, RMSNorm):
        total = x + delta
        return total, normed(norm, total, *layers)
    fp8 = _of_one_recipe(layers)
    return norm.add(x, delta, *(fp8 if any(layer.recipe.fp8_gemms for layer in fp8) else ()))


def _of_one_recipe(layers: Sequence[nn.Module]) -> list[Float8Linear]:
    """The layers, if all are Float8Linear that cast alike; else none."""
    fp8 = [layer for layer in layers if isinstance(layer, Float8Linear)]
    return fp8 if len(fp8) == len(layers) and all(f.recipe == fp8[0].recipe for f in fp8[1:]) else []


def mean_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-mean log softmax(logits)[target] in float32, for logits of any dtype.

    Peak memory beyond the logits: their gradient in their own dtype, and 1024 rows in float32 two or three times. A
    plain float32 cross-entropy would hold the whole logits in float32 two to three times instead. Compiled, rows are
    not chunked, since the code generator fuses the float32 values away.

    Args:
        logits: [..., V].
        targets: int64, [...]; 0..V-1.

    Returns:
        float32, 0-dimensional.
    """
    return _CrossEntropy.apply(logits.flatten(0, -2), targets.flatten())


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are and one float32 a row; the backward pass recomputes the softmax from them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logsumexps, picked = [], []
        for rows, wanted in zip(_chunks(logits), _chunks(targets), strict=True):
            values = rows.float()
            logsumexps.append(values.logsumexp(1))
            picked.append(values.gather(1, wanted[:, None])[:, 0])
        logsumexp = torch.cat(logsumexps)
        ctx.save_for_backward(logits, targets, logsumexp)
        return (logsumexp - torch.cat(picked)).mean()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None]:
        logits, targets, logsumexp = ctx.saved_tensors
        scale = grad_loss / len(targets)
        classes = torch.arange(logits.shape[1], device=logits.device)
        parts = zip(_chunks(logits), _chunks(targets), _chunks(logsumexp), strict=True)
        if torch.compiler.is_compiling():
            return torch.cat([_logits_grad(*part, classes, scale) for part in parts]), None
        grad = torch.empty_like(logits)
        for into, part in zip(_chunks(grad), parts, strict=True):
            into.copy_(_logits_grad(*part, classes, scale))
        return grad, None


def _logits_grad(rows: Tensor, wanted: Tensor, logsumexp: Tensor, classes: Tensor, scale: Tensor) -> Tensor:
    """(softmax - onehot) * scale of some rows [n, V], in the dtype of `rows`."""
    probability = (rows.float() - logsumexp[:, None]).exp_()
    return probability.sub_((classes == wanted[:, None]).float()).mul_(scale).to(rows.dtype)


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    return (x,) if torch.compiler.is_compiling() else x.split(LOSS_CHUNK)


def run_block(mode: str, block: nn.Module, *args: Tensor) -> Tensor:
    """One block of a model under activation checkpointing.

    Args:
        mode: "none" keeps every activation for the backward pass. "full" keeps the block's inputs only and runs it
            again. "selective" also keeps the results of every matrix product, attention included, so that what runs
            again is norms, activations, casts and additions.
        block: whose forward takes `args`.
        args: its inputs.
    """
    if mode == "none" or not torch.is_grad_enabled():
        return block(*args)
    if mode == "full":
        return checkpoint(block, *args, use_reentrant=False)
    return checkpoint(block, *args, use_reentrant=False, context_fn=_keep_products)


_PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    *(product.default for product in FP8_PRODUCTS),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def keep_products_of(op: Any) -> None:
    """Adds an operator to those whose results "selective" checkpointing keeps."""
    _PRODUCTS.add(op)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


_keep_products = partial(create_selective_checkpoint_contexts, _policy)


def materialise(
    model: nn.Module,
    device: torch.device | str,
    seed: int,
    std: Callable[[str], float],
    weights: WeightsFrom = "host",
) -> None:
    """Gives a model on "meta" its weights, in place; parameters used in several places stay shared.

    Matrices are N(0, std(name)^2), vectors named "bias" 0, other vectors (gains of norms) 1. Large matrices are drawn
    in threads, one a parameter, at some 15 ns an element of one core.

    Args:
        model: of any dtype, without buffers.
        device: where the weights go.
        seed: fixes every one of them.
        std: standard deviation of the matrix of that fully qualified name.
        weights: "device" draws the matrices there, from a stream of their own each; "none" leaves them undefined.

    Raises:
        UsageError: the device has too little memory.
    """
    assert next(model.buffers(), None) is None, "a buffer would keep no value on meta"
    names = {parameter: name for name, parameter in model.named_parameters()}

    def values(parameter: nn.Parameter) -> nn.Parameter:
        name = names[parameter]
        if parameter.dim() < 2:
            full = torch.zeros if name.endswith("bias") else torch.ones
            return nn.Parameter(full(parameter.shape, dtype=parameter.dtype, device=device))
        if weights != "host":
            made = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if weights == "device":
                stream = torch.Generator(device).manual_seed(_key(seed, name) >> 65)  # of 63 bits
                made.normal_(std=std(name), generator=stream)
            return nn.Parameter(made)
        drawn = _normal(tuple(parameter.shape), seed, name).mul_(std(name))
        return nn.Parameter(drawn.to(device=device, dtype=parameter.dtype))

    try:
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            made = dict(zip(names, pool.map(values, names), strict=True))
    except (torch.OutOfMemoryError, MemoryError) as error:
        count = sum(parameter.numel() for parameter in names)
        raise UsageError(
            f"{count:,} weights do not fit on {device}: {str(error).splitlines()[0]}; take fewer layers or bfloat16"
        ) from error
    replace_parameters(model, made)


def replace_parameters(model: nn.Module, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Puts each new parameter in every place of the old one."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = made[parameter]


def _normal(shape: tuple[int, ...], seed: int, name: str) -> Tensor:
    """Standard normal float32 values of numpy's Philox stream with the key sha256("seed/name")[:16]."""
    stream = np.random.Generator(np.random.Philox(key=_key(seed, name)))
    return torch.from_numpy(stream.standard_normal(shape, dtype=np.float32))


def _key(seed: int, name: str) -> int:
    """128 bits that tell a parameter from all others."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")


def residual_std(name: str, projections: tuple[str, ...], layers: int) -> float:
    """`INIT_STD`, over sqrt(2 layers) for the matrices that write into the residual stream (GPT-2 paper, 2.3)."""
    return INIT_STD / math.sqrt(2 * layers) if name.endswith(projections) else INIT_STD
