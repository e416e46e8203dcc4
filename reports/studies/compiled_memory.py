"""What AOTAutograd's partitioner keeps of a compiled Llama block, tensor by tensor: the oracle of `harness.advise.scale.held`.

No GPU: the partitioner works on shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from fp8core import convert_to_float8_training
from harness.advise.scale.held import Block
from harness.training.models import MODELS

if TYPE_CHECKING:
    from torch.fx import Node

BATCH, SEQ = 2, 96
_LLAMA = MODELS["llama_tiny"]
CONFIG: Any = replace(_LLAMA.config, width=128, heads=4, kv_heads=2, ffn=320)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that waits: its shape, dtype, and whether it came into the block."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    given: bool

    @property
    def bytes(self) -> int:
        """All of it."""
        return math.prod(self.shape) * self.dtype.itemsize


def kept_by_the_partitioner(recipe: str) -> list[Kept]:
    """Tensors with a row for each token that one compiled block keeps; the same storage counts once."""
    torch._dynamo.reset()
    found: list[Kept] = []

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **rest: Any) -> Any:
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest
        )
        (output,) = (node for node in forward.graph.nodes if node.op == "output")
        roots: set[Node] = set()
        for node in output.args[0][num_fwd_outputs:]:
            value = node.meta.get("val")
            root = _root(node)
            if isinstance(value, torch.Tensor) and root not in roots and _of_tokens(value):
                roots.add(root)
                found.append(Kept(tuple(value.shape), value.dtype, node.op == "placeholder"))
        return forward, backward

    def boxed(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph)

    spec = replace(_LLAMA, config=CONFIG)
    model = spec.build(device="cpu", dtype=torch.bfloat16, layers=1)
    if recipe:
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda _, fqn: "head" not in fqn)
    backend = aot_autograd(
        fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition, decompositions=select_decomp_table()
    )
    model.layers[0].compile(backend=backend)  # type: ignore[index,union-attr,operator]
    tokens = torch.randint(0, 200, (BATCH, SEQ))
    model(tokens, tokens).backward()
    return found


def bytes_of_a_token(kept: list[Kept]) -> float:
    """Sum over all of them."""
    return sum(one.bytes for one in kept) / (BATCH * SEQ)


def block() -> Block:
    """Sizes of the block that is compiled."""
    return Block.of(CONFIG)


def _of_tokens(value: torch.Tensor) -> bool:
    """It grows with the batch. Weights and their codes do not, nor rotary angles, which all blocks share."""
    return value.dim() > 1 and (value.shape[0] == BATCH or BATCH * SEQ in value.shape)


def _root(node: Node) -> Node:
    """What a view is a view of."""
    views = ("view", "permute", "alias", "transpose", "reshape")
    while node.op == "call_function" and any(name in str(node.target) for name in views):
        (node, *_) = node.all_input_nodes
    return node
