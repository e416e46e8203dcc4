"""From the fields of a `config.json` to a model's matrices, by `model_type`. Source of each: its modeling file in transformers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from harness.training.models.hugging_face import EXPERTS, ROUTER, Fields, HfModel, Part, total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# One block's feed-forward: its parts, and weights that are in no matrix (biases, a router's correction).
Ffn = tuple[list[Part], int]


@dataclass(frozen=True, slots=True)
class Decoder:
    """What tells the decoders of one shape apart; fields that a file may leave out have the defaults of transformers.

    Attributes:
        ffn: the feed-forward of block i.
        qkv_bias: None: as the field attention_bias says, for the output too; True: these three alone.
        attention_bias: default of that field.
        head_norms: queries and keys of each head are normed.
        norms: of a block.
        tied: default of tie_word_embeddings.
        head_dim: default; 0: hidden_size / heads; None: it has none, the file must say.
        defaults: of the attention's sizes and the vocabulary.
        sinks: a learned logit for each head.
    """

    ffn: Callable[[Fields, str, int], Ffn]
    qkv_bias: bool | None = None
    attention_bias: bool = False
    head_norms: bool = False
    norms: int = 2
    tied: bool = False
    head_dim: int | None = 0
    defaults: Mapping[str, int] | None = None
    sinks: bool = False


def _swiglu(at: str, hidden: int, ffn: int) -> list[Part]:
    return [
        Part(f"{at}.gate_proj", hidden, ffn),
        Part(f"{at}.up_proj", hidden, ffn),
        Part(f"{at}.down_proj", ffn, hidden),
    ]


def _experts(at: str, hidden: int, ffn: int, count: int) -> list[Part]:
    """The experts of a block as transformers 5 holds them: gate and up of one are one matrix."""
    names = (("gate_up_proj", hidden, 2 * ffn), ("down_proj", ffn, hidden))
    return [Part(f"{at}.experts.{name}", K, N, EXPERTS, count) for name, K, N in names]


def _dense(f: Fields, at: str, _: int) -> Ffn:
    hidden, ffn = f.size("hidden_size"), f.size("intermediate_size")
    biases = 2 * ffn + hidden if f.flag("mlp_bias", False) else 0
    return _swiglu(f"{at}.mlp", hidden, ffn), biases


def _mixtral(f: Fields, at: str, _: int) -> Ffn:
    hidden, experts = f.size("hidden_size"), f.size("num_local_experts")
    routed = _experts(f"{at}.mlp", hidden, f.size("intermediate_size"), experts)
    return [Part(f"{at}.mlp.gate", hidden, experts, ROUTER), *routed], 0


def _qwen_moe(f: Fields, at: str, block: int) -> Ffn:
    sparse = (block + 1) % f.size("decoder_sparse_step", 1) == 0 and block not in f.indices("mlp_only_layers")
    if not sparse:
        return _dense(f, at, block)
    hidden, experts = f.size("hidden_size"), f.size("num_experts")
    parts = [
        Part(f"{at}.mlp.gate", hidden, experts, ROUTER),
        *_experts(f"{at}.mlp", hidden, f.size("moe_intermediate_size"), experts),
    ]
    if f.model_type == "qwen2_moe":
        parts += _swiglu(f"{at}.mlp.shared_expert", hidden, f.size("shared_expert_intermediate_size"))
        parts.append(Part(f"{at}.mlp.shared_expert_gate", hidden, 1, ROUTER))
    return parts, 0


def _gpt_oss_ffn(f: Fields, at: str, _: int) -> Ffn:
    hidden, ffn, experts = f.size("hidden_size"), f.size("intermediate_size"), f.size("num_local_experts")
    parts = [
        Part(f"{at}.mlp.router", hidden, experts, ROUTER),
        *_experts(f"{at}.mlp", hidden, ffn, experts),
    ]
    return parts, experts * (1 + 2 * ffn + hidden)


def _decoder(kind: Decoder, f: Fields, name: str) -> HfModel:
    default = kind.defaults or {}

    def sized(key: str) -> int:
        return f.size(key, default.get(key))

    hidden, heads, blocks = f.size("hidden_size"), sized("num_attention_heads"), f.size("num_hidden_layers")
    kv_heads = f.size("num_key_value_heads", default.get("num_key_value_heads", heads))
    head_dim = f.size("head_dim", hidden // heads if kind.head_dim == 0 else kind.head_dim)
    queries, keys = heads * head_dim, kv_heads * head_dim
    biased = kind.qkv_bias or (kind.qkv_bias is None and f.flag("attention_bias", kind.attention_bias))
    biases = queries + 2 * keys + (hidden if kind.qkv_bias is None else 0) if biased else 0
    rest = kind.norms * hidden + biases + 2 * head_dim * kind.head_norms + heads * kind.sinks
    parts, others = [], blocks * rest
    for block in range(blocks):
        at = f"model.layers.{block}"
        parts += [
            Part(f"{at}.self_attn.q_proj", hidden, queries),
            Part(f"{at}.self_attn.k_proj", hidden, keys),
            Part(f"{at}.self_attn.v_proj", hidden, keys),
            Part(f"{at}.self_attn.o_proj", queries, hidden),
        ]
        ffn, more = kind.ffn(f, at, block)
        parts += ffn
        others += more
    return _with_head(f, name, parts, others + hidden, sized("vocab_size"), kind.tied)


def _with_head(f: Fields, name: str, parts: list[Part], others: int, vocab: int, tied: bool) -> HfModel:
    hidden, blocks = f.size("hidden_size"), f.size("num_hidden_layers")
    head = Part("lm_head", hidden, vocab)
    embedding = 0 if f.flag("tie_word_embeddings", tied) else head.elements
    whole = (*parts, head)
    longest = f.values.get("max_position_embeddings")
    return HfModel(
        name,
        whole,
        total(whole) + embedding + others,
        blocks,
        f.size("num_experts_per_tok") if any(part.kind == EXPERTS for part in parts) else 0,
        f.size("max_position_embeddings") if longest is not None else None,
    )


def _mla(f: Fields, at: str) -> Iterator[Part]:
    """Multi-head latent attention (arXiv:2405.04434): queries, keys and values by way of a narrow vector each."""
    hidden, heads = f.size("hidden_size"), f.size("num_attention_heads")
    nope, rope = f.size("qk_nope_head_dim"), f.size("qk_rope_head_dim")
    value, latent = f.size("v_head_dim"), f.size("kv_lora_rank")
    if rank := f.count("q_lora_rank", 0):
        yield Part(f"{at}.q_a_proj", hidden, rank)
        yield Part(f"{at}.q_b_proj", rank, heads * (nope + rope))
    else:
        yield Part(f"{at}.q_proj", hidden, heads * (nope + rope))
    yield Part(f"{at}.kv_a_proj_with_mqa", hidden, latent + rope)
    yield Part(f"{at}.kv_b_proj", latent, heads * (nope + value))
    yield Part(f"{at}.o_proj", heads * value, hidden)


def _deepseek(f: Fields, name: str) -> HfModel:
    """Without the blocks that predict more than the next token (num_nextn_predict_layers), as transformers builds it."""
    hidden, blocks = f.size("hidden_size"), f.size("num_hidden_layers")
    parts: list[Part] = []
    others = hidden + blocks * (2 * hidden + f.count("q_lora_rank", 0) + f.size("kv_lora_rank"))
    for block in range(blocks):
        at = f"model.layers.{block}"
        parts += _mla(f, f"{at}.self_attn")
        if block < f.count("first_k_dense_replace", 0) or block % f.size("moe_layer_freq", 1):
            parts += _swiglu(f"{at}.mlp", hidden, f.size("intermediate_size"))
            continue
        experts, ffn = f.size("n_routed_experts"), f.size("moe_intermediate_size")
        parts.append(Part(f"{at}.mlp.gate", hidden, experts, ROUTER))
        parts += _experts(f"{at}.mlp", hidden, ffn, experts)
        if shared := f.count("n_shared_experts", 0):
            parts += _swiglu(f"{at}.mlp.shared_experts", hidden, shared * ffn)
        others += experts * (f.model_type == "deepseek_v3")  # e_score_correction_bias
    return _with_head(f, name, parts, others, f.size("vocab_size"), tied=False)


def _gpt2(f: Fields, name: str) -> HfModel:
    """Its Conv1D is a Linear whose weight lies the other way round."""
    width, blocks, longest = f.size("n_embd"), f.size("n_layer"), f.size("n_positions")
    inner = f.size("n_inner", 4 * width)
    parts: list[Part] = []
    for block in range(blocks):
        at = f"transformer.h.{block}"
        parts += [
            Part(f"{at}.attn.c_attn", width, 3 * width),
            Part(f"{at}.attn.c_proj", width, width),
            Part(f"{at}.mlp.c_fc", width, inner),
            Part(f"{at}.mlp.c_proj", inner, width),
        ]
    head = Part("lm_head", width, f.size("vocab_size"))
    others = blocks * (4 * width + 3 * width + width + inner + width) + 2 * width + longest * width
    embedding = 0 if f.flag("tie_word_embeddings", True) else head.elements
    whole = (*parts, head)
    return HfModel(name, whole, total(whole) + embedding + others, blocks, max_seq=longest)


_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 262208,
}  # google/gemma-3-4b leaves them out
_DECODERS = {
    "llama": Decoder(_dense),
    "mistral": Decoder(_dense, qkv_bias=False),
    "mixtral": Decoder(_mixtral, qkv_bias=False),
    "qwen2": Decoder(_dense, qkv_bias=True),
    "qwen2_moe": Decoder(_qwen_moe, qkv_bias=True),
    "qwen3": Decoder(_dense, head_norms=True, head_dim=128),
    "qwen3_moe": Decoder(_qwen_moe, head_norms=True),
    "gemma": Decoder(_dense, tied=True, head_dim=None),
    "gemma2": Decoder(_dense, norms=4, tied=True, head_dim=None),
    "gemma3_text": Decoder(_dense, head_norms=True, norms=4, tied=True, head_dim=256, defaults=_GEMMA3),
    "gpt_oss": Decoder(_gpt_oss_ffn, attention_bias=True, head_dim=None, sinks=True),
}
TYPES: Mapping[str, Callable[[Fields, str], HfModel]] = {
    **{name: partial(_decoder, kind) for name, kind in _DECODERS.items()},
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
}
