"""Small models of three libraries, as they come: converted, one training step, and `verify`. Oracle: float64, inside of `verify`.

Models whose layers see other numbers of tokens than FP8 contracts get `ragged="bf16"` or "pad", as the error tells their users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("transformers", reason="pip install -e '.[clients]'")

import transformers

from fp8core import convert_to_float8_training, verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
Step = tuple["nn.Module", "Callable[[nn.Module], torch.Tensor]"]
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MASKED: dict[str, Any] = {"attn_implementation": "eager"}
TEXT: dict[str, dict[str, Any]] = {  # by the name of a configuration's model_type
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {}, "gemma2": {}, "phi3": {}, "gpt_neox": {}, "opt": {"ffn_dim": 128},
    "olmo2": {}, "granite": {}, "cohere": {}, "starcoder2": {}, "mixtral": {"num_local_experts": 4},
    "llama4_text": {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 128},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}  # fmt: skip


def text(kind: str) -> Step:
    config = transformers.AutoConfig.for_model(kind, **SMALL | TEXT[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, **MASKED)
    ids = torch.randint(3, 128, (2, 32), generator=torch.Generator().manual_seed(0))
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def seen(kind: str) -> Step:
    """A model of timm: 32 images of 64 x 64, so that a head has tokens enough, and a mixer features."""
    timm = pytest.importorskip("timm", reason="pip install timm")
    model = timm.create_model(kind, pretrained=False, num_classes=16, img_size=64)
    images = torch.randn(32, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return model, lambda m: (m(images) - 1).square().mean()  # a head begins at 0


def drawn(kind: str) -> Step:
    """A transformer of diffusers, batch 2: its embeddings of time see two tokens."""
    diffusers = pytest.importorskip("diffusers", reason="pip install diffusers")
    noise = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    times, words = torch.tensor([1, 2]), torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    heads = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
    if kind == "DiT":
        model = diffusers.DiTTransformer2DModel(
            **heads, in_channels=4, out_channels=4, sample_size=16, patch_size=2
        )
        return model, lambda m: m(noise, times, torch.tensor([3, 4])).sample.square().mean()
    if kind == "SD3":
        model = diffusers.SD3Transformer2DModel(
            **heads, sample_size=16, in_channels=4, out_channels=4, joint_attention_dim=64, caption_projection_dim=64,
            pooled_projection_dim=64, pos_embed_max_size=16,
        )  # fmt: skip
        return model, lambda m: m(noise, words, words[:, 0], times).sample.square().mean()
    model = diffusers.PixArtTransformer2DModel(
        **heads, sample_size=16, in_channels=4, out_channels=4, cross_attention_dim=64, caption_channels=64,
        use_additional_conditions=False,
    )  # fmt: skip
    given = {"resolution": None, "aspect_ratio": None}
    return model, lambda m: m(noise, words, times, given).sample.square().mean()


def heard(kind: str) -> Step:
    """Whisper, 2 sequences: 2 x 26 frames and 2 x 7 words are no multiples of 16."""
    config = transformers.WhisperConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=26, max_target_positions=32,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    sound, words = (
        torch.randn(2, 16, 52, generator=generator),
        torch.randint(3, 128, (2, 7), generator=generator),
    )
    return transformers.WhisperForConditionalGeneration(
        config
    ), lambda m: m(input_features=sound, labels=words).loss


MODELS: list[tuple[Callable[[str], Step], str]] = [
    *((text, kind) for kind in TEXT),
    *((seen, kind) for kind in ("vit_tiny_patch16_224", "mixer_s16_224")),
    *((drawn, kind) for kind in ("DiT", "SD3", "PixArt")),
    (heard, "whisper"),
]
RAGGED = {text: "refuse", heard: "pad"}  # of whisper no length is a multiple of 16


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(("make", "kind"), MODELS, ids=[kind for _, kind in MODELS])
def test_a_step_is_proven(make: Callable[[str], Step], kind: str, recipe: str) -> None:
    torch.manual_seed(0)
    model, loss = make(kind)
    loss(model).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # some weights begin at 0
    convert_to_float8_training(model, config=recipe, ragged=RAGGED.get(make, "bf16"))

    def step() -> None:
        model.zero_grad()
        loss(model).backward()

    proof = verify(step, model)
    print(kind, recipe, proof.line)
    assert proof.ok
    assert proof.counted == proof.predicted > 0
    # The words' queries of SD3's last block reach no output
    assert proof.unjudged == (("transformer_blocks.1.attn.add_q_proj",) if kind == "SD3" else ())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
