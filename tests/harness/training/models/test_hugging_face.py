"""Models of a `config.json`. Oracles: published numbers of parameters, our own models, transformers where it is installed."""

from __future__ import annotations

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from configs_for_tests import PUBLISHED, written
from torch import nn

from harness.store.errors import UsageError
from harness.training.models import build, hugging_face_meta
from harness.training.models.hugging_face import EXPERTS, LINEAR, ROUTER, HfModel, is_config, read
from harness.training.models.hugging_face_types import TYPES

OURS = {
    "llama3_8b": "meta-llama/Meta-Llama-3-8B",
    "llama2_7b": "meta-llama/Llama-2-7b-hf",
    "llama3_1b": "meta-llama/Llama-3.2-1B",
}
_NAMES = {"attention": "self_attn", "ffn": "mlp", **{f"{name}": f"{name}_proj" for name in "qkvo"}}
_NAMES |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: False)


def described(folder: Path, repository: str, **changes: Any) -> HfModel:
    fields = {key: v for key, v in (PUBLISHED[repository][0] | changes).items() if v != "left out"}
    return read(str(written(folder, fields)))


def shapes(model: HfModel) -> Counter[tuple[int, int, str, int]]:
    return Counter((part.K, part.N, part.kind, part.count) for part in model.parts)


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("repository", PUBLISHED)
def test_parameters_are_those_that_are_published(repository: str, tmp_path: Path) -> None:
    """To the last one: a bias, a norm or a head too many would show. Every known type has a published model."""
    assert described(tmp_path, repository).parameters == PUBLISHED[repository][1]
    assert {fields["model_type"] for fields, _ in PUBLISHED.values()} == set(TYPES)


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize("name", OURS)
def test_layers_are_those_of_our_own_model(name: str, tmp_path: Path) -> None:
    found = described(tmp_path, OURS[name])
    own = [
        (fqn, module.in_features, module.out_features)
        for fqn, module in build(name, device="meta").named_modules()
        if isinstance(module, nn.Linear)
    ]
    expected = {
        ("lm_head" if fqn == "head" else "model." + ".".join(_NAMES.get(w, w) for w in fqn.split(".")), K, N)
        for fqn, K, N in own
    }
    assert {(part.name, part.K, part.N) for part in found.parts} == expected
    assert len(found.parts) == len(own)
    assert {part.kind for part in found.parts} == {LINEAR}


@pytest.mark.usefixtures("without_transformers")
def test_deepseek_by_hand(tmp_path: Path) -> None:
    """arXiv:2412.19437, section 4.2: three dense blocks, then 1 shared and 256 routed experts of which 8; MLA by ranks."""
    found = described(tmp_path, "deepseek-ai/DeepSeek-V3")
    by_name = {part.name.removeprefix("model.layers."): part for part in found.parts}
    sizes = {name: (part.K, part.N) for name, part in by_name.items()}
    assert sizes["0.self_attn.q_a_proj"] == (7168, 1536)
    assert sizes["0.self_attn.q_b_proj"] == (1536, 128 * (128 + 64))
    assert sizes["0.self_attn.kv_a_proj_with_mqa"] == (7168, 512 + 64)
    assert sizes["0.self_attn.kv_b_proj"] == (512, 128 * (128 + 128))
    assert sizes["0.self_attn.o_proj"] == (128 * 128, 7168)
    assert sizes["2.mlp.up_proj"] == (7168, 18432)
    assert sizes["3.mlp.shared_experts.up_proj"] == (7168, 2048)
    assert (sizes["3.mlp.gate"], by_name["3.mlp.gate"].kind) == ((7168, 256), ROUTER)
    experts = by_name["3.mlp.experts.gate_up_proj"]
    assert (experts.K, experts.N, experts.count, experts.kind) == (7168, 4096, 256, EXPERTS)
    assert "3.mlp.up_proj" not in by_name
    assert (found.top_k, found.blocks) == (8, 61)
    active = sum(
        p.elements * found.top_k // p.count if p.kind == EXPERTS else p.elements for p in found.parts
    )
    assert active + 129280 * 7168 == pytest.approx(37e9, rel=0.02), "37B activated, says the model card"


@pytest.mark.usefixtures("without_transformers")
def test_layers_that_read_one_tensor_are_known(tmp_path: Path) -> None:
    parts = {part.name: part.reads for part in described(tmp_path, "meta-llama/Meta-Llama-3-8B").parts}
    first = "model.layers.0."
    assert len({parts[f"{first}self_attn.{n}_proj"] for n in "qkv"}) == 1
    assert parts[f"{first}mlp.gate_proj"] == parts[f"{first}mlp.up_proj"]
    assert len(set(parts.values())) == 32 * 4 + 1


@pytest.mark.usefixtures("without_transformers")
def test_a_model_with_pictures_is_its_text(tmp_path: Path) -> None:
    """google/gemma-3-4b's file leaves heads and vocabulary to the defaults of transformers, which has 64 rows to spare."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "model_type": "gemma3_text",
    }
    found = read(str(written(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {}})))
    sizes = {part.name: (part.K, part.N) for part in found.parts}
    assert sizes["model.layers.33.self_attn.q_proj"] == (2560, 8 * 256)
    assert sizes["model.layers.33.self_attn.k_proj"] == (2560, 4 * 256)
    assert found.parameters == 3_880_099_328 + 64 * 2560


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "llamma"}, "nearest: llama"),
        ({"model_type": "left out"}, "model_type"),
        ({"hidden_size": "left out"}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"model_type": "gemma", "head_dim": "left out"}, "head_dim"),
        ({"model_type": "mixtral"}, "num_local_experts"),
        ({"model_type": "deepseek_v2"}, "kv_lora_rank"),
        ({"model_type": "qwen3_moe", "num_experts": 8, "mlp_only_layers": 3}, "mlp_only_layers"),
    ],
)
def test_what_is_missing_or_unknown_is_named_in_one_line(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        described(tmp_path, "meta-llama/Meta-Llama-3-8B", **changes)
    assert named in str(refused.value)
    assert "config.json" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_file_that_is_no_config(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read(str(tmp_path))
    with pytest.raises(UsageError, match="cannot read"):
        read(str(tmp_path / "elsewhere" / "config.json"))


def test_what_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "mine", {})
    monkeypatch.chdir(tmp_path)
    assert [is_config(text) for text in ("mine", "mine/config.json", "./mine", "x.json")] == [True] * 4
    assert [is_config(text) for text in ("gpt2", "", '{"_target_": "a/b.json"}')] == [False] * 3


# Through transformers


class Conv1D(nn.Module):
    """The layer of transformers.pytorch_utils: its weight is [inputs, outputs]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))


class Grouped(nn.Module):
    """Experts of one tensor, as transformers 5 has them; GPT-OSS's lie the other way round."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 64, 96) if turned else torch.empty(4, 96, 64))
        self.down_proj = nn.Parameter(torch.empty(4, 48, 64) if turned else torch.empty(4, 64, 48))
        self.down_proj_bias = nn.Parameter(torch.empty(4, 64))


class Described(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.c_attn = Conv1D(192, 64)
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = experts
        self.lm_head = nn.Linear(64, 100)


def one_by_one() -> nn.Module:
    def expert() -> nn.Module:
        parts = {"gate_up_proj": nn.Linear(64, 96, bias=False), "down_proj": nn.Linear(48, 64, bias=False)}
        return nn.ModuleDict(parts)

    return nn.ModuleList(expert() for _ in range(4))


@pytest.mark.parametrize("layout", ["turned", "straight", "one by one"])
def test_a_module_of_transformers_is_read_off(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with all that transformers builds: Linear, Conv1D, a router, experts stacked or one by one."""
    seen: dict[str, Any] = {}

    def for_model(model_type: str, **fields: Any) -> types.SimpleNamespace:
        seen.update(fields, model_type=model_type)
        return types.SimpleNamespace(**fields)

    def from_config(_: object) -> nn.Module:
        assert torch.empty(0).device.type == "meta", "no weight is allocated"
        return Described(one_by_one() if layout == "one by one" else Grouped(turned=layout == "turned"))

    stand_in = types.ModuleType("transformers")
    vars(stand_in).update(
        AutoConfig=types.SimpleNamespace(for_model=for_model),
        AutoModelForCausalLM=types.SimpleNamespace(from_config=from_config),
    )
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: True)
    fields = {"model_type": "new", "hidden_size": 64, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    found = read(str(written(tmp_path, fields | {"quantization_config": {}, "torch_dtype": "bfloat16"})))
    assert seen == fields, "how weights are stored is no part of the model"
    assert [(part.name, part.K, part.N, part.kind, part.count) for part in found.parts] == [
        ("c_attn", 64, 192, LINEAR, 1),
        ("gate", 64, 4, ROUTER, 1),
        ("experts.gate_up_proj", 64, 96, EXPERTS, 4),
        ("experts.down_proj", 48, 64, EXPERTS, 4),
        ("lm_head", 64, 100, LINEAR, 1),
    ]
    assert found.top_k == 2


def test_what_transformers_cannot_build_is_read_from_its_fields_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> HfModel:
        raise ValueError("no such\nthing")

    monkeypatch.setattr(hugging_face_meta, "installed", lambda: True)
    monkeypatch.setattr(hugging_face_meta, "parts_of", fails)
    assert described(tmp_path, "openai-community/gpt2").parameters == 124_439_808
    with pytest.raises(UsageError, match="transformers cannot build it: ValueError: no such thing"):
        described(tmp_path, "openai-community/gpt2", model_type="mamba")


@pytest.mark.skipif(not hugging_face_meta.installed(), reason="transformers is not installed")
@pytest.mark.parametrize("repository", PUBLISHED)
def test_the_fields_say_what_transformers_builds(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = described(tmp_path, repository)
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: False)
    own = described(tmp_path, repository)
    assert shapes(built) == shapes(own)
    assert {part.name for part in built.parts} == {part.name for part in own.parts}
    correction = 58 * 256 if repository.endswith("V3") else 0  # a buffer there
    assert built.parameters + correction == own.parameters
