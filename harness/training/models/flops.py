"""FLOPs of one training step by formula, from the modules that a model really has, split by the dtype of each GEMM.

Counted are matrix products, 2 M K N each: output, grad_input and grad_weight of every nn.Linear and of every expert
that a token goes to, head and router included, and the two products of attention forward and the four backward. Not
counted: embeddings, norms, softmax, rotations, activations, casts, biases, the loss, the optimizer, recomputation.

    palm      the whole T x T of attention: 12 heads head_dim T a token and layer. 6 N + 12 L H Q T of PaLM, appendix
              B (arXiv:2204.02311), N being the weights of matrix products that a token meets.
    causal    half of that, since the upper triangle is masked (as Megatron and MaxText count).

A GEMM counts for the dtype that it runs in: "e5m2" if an operand is e5m2, else "e4m3"; a GEMM that its recipe leaves
alone, attention, unconverted layers and experts for the high precision of the step; the GEMMs of an emulated layer as
"fp32". Rows of zeros that fill up an expert's tokens don't count. `recomputed` is what activation checkpointing runs
again: hardware utilisation counts it, MFU does not.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core import Float8Linear
from fp8core.gemm import backend_named
from fp8core.proof.flops import FP8_DTYPES, count_matmuls
from fp8core.proof.formulas import CAUSAL_SHARE, attention_flops, register_with_torch
from harness.training.models.common import CausalAttention
from harness.training.models.llama_moe import Moe, Router

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from fp8core.recipe import Recipe

# Share of attention's T x T that counts
FORMULAS: Mapping[str, float] = {"palm": CAUSAL_SHARE["full"], "causal": CAUSAL_SHARE["half"]}

Flops = dict[str, float]


def step_flops(
    model: nn.Module, batch_size: int, seq: int, *, formula: str = "palm", high_precision: str = "bf16"
) -> Flops:
    """FLOPs of one forward and backward pass of a model of ours.

    Args:
        model: converted or not; on any device, "meta" too.
        batch_size: sequences.
        seq: tokens in each.
        formula: a key of `FORMULAS`.
        high_precision: "bf16" or "fp32", in which runs what is not FP8.

    Returns:
        dtype -> FLOPs, only dtypes that occur.
    """
    return _some(_passes(model, batch_size, seq, formula, high_precision, 3))


def recomputed(
    model: nn.Module, batch_size: int, seq: int, *, formula: str = "palm", high_precision: str = "bf16"
) -> Flops:
    """FLOPs that activation checkpointing adds to `step_flops`: those of the blocks' forward pass if it is "full".

    The last product of a dense block is left out where it is nn.Linear's: PyTorch stops once it has every activation
    again. A Float8Linear's runs to its end, and that of experts is an activation itself. "selective" keeps the results
    of products, so it adds none.
    """
    if getattr(model, "checkpointing", "none") != "full":
        return {}
    blocks: Any = model.layers
    counts = _passes(blocks, batch_size, seq, formula, high_precision, 1)
    for block in blocks:
        last = [m for m in block.modules() if isinstance(m, nn.Linear)][-1]
        if not isinstance(last, (Float8Linear, Router)):
            counts[high_precision] -= 2.0 * batch_size * seq * last.in_features * last.out_features
    return _some(counts)


def gemm_dtypes(recipe: Recipe | None, high_precision: str) -> list[str]:
    """What output, grad_input and grad_weight of a layer run in: "e4m3", "e5m2" (if an operand is), `high_precision`, "fp32".

    Args:
        recipe: of the layer; None: it is not converted.
        high_precision: the name for what is not FP8. The GEMMs of an emulated recipe are "fp32".
    """
    if recipe is None:
        return [high_precision] * 3
    dtypes = []
    for gemm in recipe.gemms.values():
        if gemm.a is None or gemm.b is None:
            dtypes.append(high_precision)
        elif not backend_named(recipe.backend).is_fp8:
            dtypes.append("fp32")
        else:
            formats = {gemm.a.format.short, gemm.b.format.short}
            dtypes.append("e5m2" if "e5m2" in formats else "e4m3")
    return dtypes


def register_flop_formulas() -> None:
    """Teaches FlopCounterMode and `fp8core.proof.flops` our grouped GEMMs, and FlopCounterMode those of `fp8core`; may be called again."""
    register_with_torch(
        {
            torch.ops.harness.grouped_mm: lambda x, weight, ends, **_: 2 * x[0] * x[1] * weight[2],
            torch.ops.harness.grouped_mm_weight_grad: lambda x, grad, ends, **_: 2 * x[0] * x[1] * grad[1],
        }
    )


def counted_flops(model: nn.Module, batch: tuple[Tensor, ...], *, high_precision: str = "bf16") -> Flops:
    """FLOPs of one forward and backward pass as `fp8core.proof.flops` counts them while it runs.

    For models and layers that are not ours (`flops_formula_id` "counted"). Runs the model once without adding to any
    `.grad`. Recomputation is counted too; an operator without a formula counts nothing.
    """
    register_flop_formulas()

    def step() -> None:
        loss = model(*batch)
        torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)

    flops: defaultdict[str, float] = defaultdict(float)
    counted = count_matmuls(step, model).by_dtype(("forward", "backward", "recompute"))
    for dtype, amount in counted.items():
        flops[dtype if dtype in FP8_DTYPES else high_precision] += amount
    return dict(flops)


def _some(counts: Flops) -> Flops:
    return {dtype: amount for dtype, amount in counts.items() if amount}


def _passes(
    model: nn.Module, batch_size: int, seq: int, formula: str, high_precision: str, passes: int
) -> defaultdict[str, float]:
    """Count the forward pass alone, or all 3: a backward pass is two."""
    tokens = batch_size * seq
    counts: defaultdict[str, float] = defaultdict(float)
    for module in model.modules():
        recipe, gemm = None, 0.0
        if isinstance(module, nn.Linear):
            recipe = module.recipe if isinstance(module, Float8Linear) else None
            gemm = 2.0 * tokens * module.in_features * module.out_features
        elif isinstance(module, Moe):
            recipe = module.experts.multiply.recipe
            weights = sum(weight[0].numel() for weight in module.experts.parameters())
            gemm = 2.0 * tokens * module.top_k * weights
        elif isinstance(module, CausalAttention):
            both = sum(attention_flops(batch_size, module.heads, seq, seq, module.head_dim))
            counts[high_precision] += both * FORMULAS[formula] * passes
        for dtype in gemm_dtypes(recipe, high_precision)[:passes] if gemm else ():
            counts[dtype] += gemm
    return counts
