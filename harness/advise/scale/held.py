"""Bytes that one rank holds at the most in a step, by part: what the caching allocator has to reserve.

FSDP2 works in streams of its own (`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`, 2.13): what is gathered is
allocated in the stream of copies, shards of gradients in that of reductions. The allocator lends no block from one stream
to another, so that each stream's maximum adds to the others', also where they are not needed at the same time.

Compiled blocks keep what `harness.advise.scale.held` says. Eager ones are run on fake tensors
(`harness.training.models.memory`), one block and two; each further block adds the difference. Not in it: fragments of
blocks, the libraries' workspaces, the CUDA context. docs/advise-accuracy.md compares it with publications.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from fp8core import audit, convert_to_float8_training
from fp8core.distributed.weight_gather import recipe_reason
from harness.advise.model import COLUMNS, ROWS
from harness.store.errors import UsageError
from harness.training import meta_estimate
from harness.training.models import MODELS
from harness.training.step import BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fp8core.recipe import Recipe
    from harness.training.setup import Setup


_BLOCKS = "layers."
BF16, FP32, CODE = BYTES["bf16"], BYTES["fp32"], 1


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter as one rank of tensor parallelism has it; `fp8`: FSDP sends its FP8 codes."""

    shape: tuple[int, ...]
    fp8: bool = False

    def padded(self, shards: int) -> int:
        """Elements, the first dimension filled up to a multiple of the shards."""
        first, *rest = self.shape or (1,)
        return math.ceil(first / shards) * shards * math.prod(rest)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The parameters of a model: those of one block, how many blocks there are, and those outside of blocks."""

    block: tuple[Weight, ...]
    blocks: int
    rest: tuple[Weight, ...]


def gathered_bytes(weights: Sequence[Weight], job: Setup) -> int:
    """Bytes of a group of parameters that FSDP gathers, each padded along its first dimension."""
    return sum(w.padded(job.shards) * (CODE if w.fp8 and job.gather_fp8 else BF16) for w in weights)


def reduced_bytes(weights: Sequence[Weight], job: Setup) -> int:
    """Bytes of a group of gradients that FSDP reduces, padded likewise."""
    return sum(w.padded(job.shards) for w in weights) * job.gradient_bytes


@functools.cache
def weights_of(model: str, recipe: Recipe | None, tp: int, left_out: tuple[str, ...] = ()) -> ModelWeights:
    """The parameters of each block and of the rest; a tied one counts once.

    FSDP can send a recipe's weights in FP8 where one cast serves both GEMMs that read them.

    Args:
        model: a name of `harness.training.models.MODELS`.
        recipe: of the Linear layers; None for bf16.
        tp: GPUs that split each layer: a row-wise parallel one along its input, every other along its output.
        left_out: names of layers that stay in bf16; those of the first block stand for all blocks'.
    """
    spec = MODELS[model]
    one = spec.build(device="meta", layers=1)
    coded: set[str] = set()
    if recipe is not None and not recipe_reason(recipe):
        changed = convert_to_float8_training(one, config=recipe, allow_no_conversion=True)
        coded = {layer.fqn for layer in audit(changed).converted}
    found: tuple[list[Weight], list[Weight]] = ([], [])
    for name, parameter in one.named_parameters():
        layer, _, kind = name.rpartition(".")
        word, shape = layer.rsplit(".", 1)[-1], list(parameter.shape)
        embeds = isinstance(one.get_submodule(layer), nn.Embedding)
        if kind == "weight" and (embeds or word in COLUMNS | ROWS):
            shape[int(word in ROWS and not embeds)] //= tp
        weight = Weight(tuple(shape), kind == "weight" and layer in coded and layer not in left_out)
        found[name.startswith(_BLOCKS)].append(weight)
    return ModelWeights(tuple(found[True]), spec.layers, tuple(found[False]))


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


MEMORY = ("weights", "gradients", "optimizer", "gathered", "reduced", "activations", "logits", "workspace")
_FILLED = 2  # blocks whose weights and gradients are whole at once: the one at work and the one under way
_ADAMW_STATES = 2
# Copies of the logits in bf16 that the loss takes at once, the logits themselves not counted. "fused": their gradient (a
# compiled loss, or this project's in chunks). "native": F.cross_entropy on bf16: log softmax, its gradient, the logits'.
# "float32": F.cross_entropy on logits.float(), three times four bytes; the float32 logits are gone by then.
LOSS_COPIES: Mapping[str, int] = {"fused": 1, "native": 3, "float32": 6}


def memory(job: Setup) -> dict[str, int]:
    """Bytes of one rank by `MEMORY`; their sum is the most that it holds.

    Whole are the weights outside of blocks and those of two blocks, and two blocks' gradients on their way to be
    reduced; all gradients where they wait for the last microbatch. Of activations, tensor parallelism with sequence
    parallelism splits everything but the inputs that it gathers.

    Raises:
        UsageError: a pipeline, whose stages hold microbatches on their way; that is not modelled.
    """
    if job.pp > 1:
        raise UsageError(f"pp={job.pp}: the memory of a pipeline's stages is not predicted; leave pp out")
    weights = weights_of(job.model, job.recipe, job.tp, job.left_out)
    rest = _unsplit(weights.rest, job)
    mine = _local(weights.block, job) * weights.blocks + _local(rest, job)
    master = BYTES[job.weights]
    gradients, gathered, reduced = mine * master, 0, 0
    if job.shards > 1:
        block, root = gathered_bytes(weights.block, job), gathered_bytes(rest, job)
        gathered = _FILLED * block + root  # as parameters
        gathered += (
            max(block, root) + block
        )  # as they arrive, in a stream of their own: one group and the next
        waits = job.accumulation > 1 and not job.reduce_each
        if waits:  # shards are made as the whole ones go
            whole = weights.blocks * reduced_bytes(weights.block, job) + reduced_bytes(rest, job)
            reduced = max(0, whole - gradients)
    elif job.weights == "fp32":
        gathered = BF16 * (mine if job.checkpointing == "none" else _local(rest, job))
    held = _activations(replace(job, dp=1, replicas=1, accumulation=1))
    # Gradients are reduced when the activations of the loss and of most blocks are gone: the larger of the two counts
    if job.shards > 1 and not reduced:
        on_the_way = min(_FILLED, weights.blocks) * reduced_bytes(weights.block, job) + reduced_bytes(
            rest, job
        )
        reduced = max(0, on_the_way - sum(held.values()))
    return {
        "weights": mine * master,
        "gradients": gradients,
        "optimizer": mine * master * _ADAMW_STATES,
        "gathered": gathered,
        "reduced": reduced,
        **held,
    }


@functools.lru_cache(maxsize=256)
def _activations(job: Setup) -> dict[str, int]:
    """What a forward and backward pass keeps and works in: the same for every number of GPUs.

    Compiled blocks by closed forms; eager ones from one block and two that ran on fake tensors.
    """
    spec, tokens, recipe = MODELS[job.model], job.batch * job.seq, job.recipe.name if job.recipe else ""
    logits = BF16 * tokens * spec.vocab_size // (1 if job.unsplit_vocabulary else job.tp)
    if job.compiled or job.checkpointing == BY_OP:
        block, weights = Block.of(spec.config), weights_of(job.model, job.recipe, 1).block
        elements = sum(w.padded(1) for w in weights)
        waiting = spec.layers * (
            kept(block, job.checkpointing, recipe, job.compiled) * tokens
            + kept_weights(elements, job.checkpointing, recipe)
        )
        # Besides, gradients of the block's weights; in FP8 codes of the largest along both axes
        work = at_work(block, job.checkpointing, recipe) * tokens + BF16 * elements
        work += 2 * max(w.padded(1) for w in weights) if recipe else 0
    else:
        # Products run in bf16, whatever the masters are
        parts = (replace(job, compute="bf16", layers=layers) for layers in (1, 2))
        one, two = (meta_estimate.memory(part, "cpu") for part in parts)
        kept_by = [
            one[part] + (spec.layers - 1) * (two[part] - one[part]) for part in ("activations", "fp8_weights")
        ]
        waiting, work = sum(kept_by), max(one["workspace"], two["workspace"])
    waiting, work = waiting // job.tp, max(work // job.tp, LOSS_COPIES[job.loss] * logits)
    # Both inputs of a block that tensor parallelism gathered
    whole = 2 * BF16 * tokens * spec.width * (job.tp - 1) // job.tp
    waiting += whole * spec.layers if job.checkpointing != "full" else 0
    return {"activations": waiting, "logits": logits, "workspace": work + whole}


def _unsplit(rest: Sequence[Weight], job: Setup) -> tuple[Weight, ...]:
    """What is outside of blocks, with an embedding that tensor parallelism does not split."""
    vocabulary = MODELS[job.model].vocab_size
    first = next((i for i, w in enumerate(rest) if w.shape[0] * job.tp == vocabulary), None)
    if first is None or not job.unsplit_vocabulary:
        return tuple(rest)
    whole = replace(rest[first], shape=(vocabulary, *rest[first].shape[1:]))
    return (*rest[:first], whole, *rest[first + 1 :])


def _local(weights: Sequence[Weight], job: Setup) -> int:
    """Elements of a rank's shards, that of the first rank, which has the most."""
    return sum(w.padded(job.shards) for w in weights) // job.shards
