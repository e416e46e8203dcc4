"""The fields of published `config.json` files that decide a model's shape, with its published number of parameters.

Each is from the config.json of that repository on huggingface.co; parameters are those that its model card counts in the
safetensors files, without copies of tied heads, or those of the paper that is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _llama(
    hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **other: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    } | other


PUBLISHED: Mapping[str, tuple[dict[str, Any], int]] = {
    "meta-llama/Meta-Llama-3-8B": (_llama(4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "meta-llama/Llama-3.2-1B": (
        _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        _llama(
            2048,
            5632,
            24,
            16,
            16,
            151936,
            model_type="qwen2_moe",
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            decoder_sparse_step=1,
        ),
        14_315_784_192,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        _llama(
            4096,
            14336,
            32,
            32,
            8,
            32000,
            model_type="mixtral",
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        46_702_792_704,
    ),
    "deepseek-ai/DeepSeek-V3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        },
        671_026_419_200,
    ),
    "openai-community/gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "n_ctx": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "openai/gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "attention_bias": True,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
        20_914_757_184,
    ),
}


def written(folder: Path, fields: object) -> Path:
    """A `config.json` in a folder; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(fields))
    return path
