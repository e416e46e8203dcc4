"""What a block of compiled code keeps for its backward pass, in bytes of a token: closed forms, held against the compiler.

AOTAutograd's min-cut partitioner (torch 2.13) chooses what a compiled block keeps. On a Llama block it keeps

    bf16    block's input, norm, q, k, v, attention's result, o's result, norm, gate, up, silu(gate) * up
    FP8     the same without both norms and silu(gate) * up: they are made and cast again; attention's codes besides

and no FP8 weights: they are cast again, from weights that are there anyway. fp8core's tensorwise and rowwise, and
torchao's, come out alike; `blockwise` keeps codes of inputs and weights. `tests/studies/compiled_memory.py` counts.

Under checkpointing less is kept: "full" the block's input; "selective" the results of products too; "by_op" every
second of those, as torchtitan counts them (`_apply_ac_to_transformer_block`, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

BF16, CODE, FP32 = 2, 1, 4
BY_OP = "by_op"
CODED = ("blockwise",)  # recipes whose codes of inputs and weights are kept


@dataclass(frozen=True, slots=True)
class Block:
    """Sizes of a block, in elements of a token.

    Attributes:
        width: of the residual stream.
        q, kv: queries; keys, which are as many as values.
        up: results of the feed-forward's first products, all of them.
        ffn: input of its last product.
        heads: of attention, whose logsumexp is kept in float32.
    """

    width: int
    q: int
    kv: int
    up: int
    ffn: int
    heads: int

    @classmethod
    def of(cls, config: Any) -> Block:
        """The block of a dense Llama or GPT configuration of `harness.training.models`."""
        width, heads = config.width, config.heads
        kv = width // heads * getattr(config, "kv_heads", heads)
        ffn = getattr(config, "ffn", 4 * width)
        gated = hasattr(config, "ffn")  # SwiGLU; GPT's feed-forward has one product first
        return cls(width, width, kv, (2 if gated else 1) * ffn, ffn, heads)

    @property
    def products(self) -> tuple[int, ...]:
        """Results of its products in the order of use, and attention's after the values'."""
        parts = (self.up // 2,) * 2 if self.up > self.ffn else (self.up,)
        return (self.q, self.kv, self.kv, self.width, *parts, self.width)


def kept(block: Block, checkpointing: str, recipe: str, compiled: bool = True) -> int:
    """Bytes of a token and block that wait for the backward pass.

    Args:
        block: its sizes.
        checkpointing: "none", "selective", "full" or "by_op".
        recipe: of its layers; "" for bf16.
        compiled: by torch.compile; eager code is predicted for "full" and "by_op" alone.
    """
    if checkpointing == "full":
        return BF16 * block.width
    attention = BF16 * block.q + FP32 * block.heads
    if checkpointing == BY_OP:
        results = _every_second(block.products, compiled)
        return BF16 * (block.width + results) + attention
    # o's result stands for the sum behind it; the last product's is only added, and nobody needs it
    results = sum(block.products[:-1])
    total = BF16 * (block.width + results) + attention + 2 * FP32  # two norms' rows
    if checkpointing == "selective":
        return total
    if not recipe:
        return total + BF16 * (2 * block.width + block.ffn)
    codes = CODE * block.q
    return total + codes + (CODE * block.ffn if recipe in CODED else 0)


def kept_weights(elements: int, checkpointing: str, recipe: str) -> int:
    """Bytes of FP8 weights of a block that wait for the backward pass; `elements` of the converted layers' weights."""
    return CODE * elements if recipe in CODED and checkpointing == "none" else 0


def at_work(block: Block, checkpointing: str, recipe: str) -> int:
    """Bytes of a token that one block takes at once in its backward pass, beyond what is kept.

    Everything that was not kept is there again; besides the gradients of the block's result, of the feed-forward's first
    products and of its last input; in FP8 the codes of that input and of the result's gradient, along both axes.
    """
    again = kept(block, "none", recipe) - kept(block, checkpointing, recipe)
    gradients = BF16 * (2 * block.width + block.up + block.ffn)
    codes = 2 * CODE * (block.width + block.ffn) if recipe else 0
    return max(0, again) + gradients + codes


def _every_second(results: Iterable[int], compiled: bool) -> int:
    """The first, third ... product; compiled code drops the last, whose result is only added."""
    saved = list(results)[::2]
    return sum(saved[:-1] if compiled else saved)
