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
    "meta-llama/Llama-2-7b-hf": (_llama(4096, 11008, 32, 32, 32, 32000), 6_738_415_616),
    "meta-llama/Meta-Llama-3-8B": (_llama(4096, 14336, 32, 32, 8, 128256), 8_030_261_248),
    "meta-llama/Llama-3.2-1B": (
        _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "mistralai/Mistral-7B-v0.1": (_llama(4096, 14336, 32, 32, 8, 32000, model_type="mistral"), 7_241_732_096),
    "Qwen/Qwen2.5-0.5B": (
        _llama(896, 4864, 24, 14, 2, 151936, model_type="qwen2", tie_word_embeddings=True),
        494_032_768,
    ),
    "Qwen/Qwen2.5-7B": (_llama(3584, 18944, 28, 28, 4, 152064, model_type="qwen2"), 7_615_616_512),
    "Qwen/Qwen3-8B": (
        _llama(4096, 12288, 36, 32, 8, 151936, model_type="qwen3", head_dim=128),
        8_190_735_360,
    ),
    "Qwen/Qwen3-0.6B": (
        _llama(1024, 3072, 28, 16, 8, 151936, model_type="qwen3", head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen/Qwen3-30B-A3B": (
        _llama(
            2048,
            6144,
            48,
            32,
            4,
            151936,
            model_type="qwen3_moe",
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        30_532_122_624,
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
    "google/gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        2_506_172_416,
    ),
    "google/gemma-2-2b": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
        },
        2_614_341_888,
    ),
    "google/gemma-3-1b-pt": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "max_position_embeddings": 32768,
        },
        999_885_952,
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
    "deepseek-ai/DeepSeek-V2-Lite": (
        {
            "model_type": "deepseek_v2",
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_shared_experts": 2,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 102400,
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
        },
        15_706_484_224,
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
