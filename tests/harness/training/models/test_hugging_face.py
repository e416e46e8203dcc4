"""Models of a `config.json`. Oracles: our own model, matrices written down by hand; tests/clients has published numbers."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from configs_for_tests import PUBLISHED, written
from torch import nn

from harness import store
from harness.__main__ import main
from harness.store.errors import UsageError
from harness.store.text import axes_of
from harness.suites import common
from harness.training.models import build
from harness.training.models.hugging_face import EXPERTS, LINEAR, ROUTER, as_values, read

STAND_IN = Path(__file__).parents[2] / "stand_ins" / "transformers.py"
LLAMA = "meta-llama/Meta-Llama-3-8B"
_NAMES = {"attention": "self_attn", "ffn": "mlp", "head": "lm_head", **{n: f"{n}_proj" for n in "qkvo"}}
_NAMES |= {name: f"{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.usefixtures("hugging_face")
def test_layers_are_those_of_our_own_model(tmp_path: Path) -> None:
    found = read(str(written(tmp_path, PUBLISHED[LLAMA][0])))
    expected = {
        (".".join(_NAMES.get(word, word) for word in fqn.split(".")), module.in_features, module.out_features)
        for fqn, module in build("llama3_8b", device="meta").named_modules()
        if isinstance(module, nn.Linear)
    }
    assert {(part.name.removeprefix("model."), part.K, part.N) for part in found.parts} == expected
    assert {part.kind for part in found.parts} == {LINEAR}
    assert (found.blocks, found.top_k, found.max_seq) == (32, 0, 8192)
    reads = {part.name: part.reads for part in found.parts}
    first = "model.layers.0."
    assert len({reads[f"{first}self_attn.{n}_proj"] for n in "qkv"}) == 1
    assert reads[f"{first}mlp.gate_proj"] == reads[f"{first}mlp.up_proj"]
    assert len(set(reads.values())) == 32 * 4 + 1


@pytest.mark.usefixtures("hugging_face")
def test_layers_of_a_config_are_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mixtral's: 32 blocks, and 8 experts in each; GPT-2's by the command."""
    path = written(tmp_path, PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0])
    found = {
        layer.name: (layer.in_features, layer.out_features, layer.count)
        for layer in common.model_layers(["from_model"], as_values(str(path)))
    }
    assert found == {
        "model.layers.*.self_attn.q_proj": (4096, 4096, 32),
        "model.layers.*.self_attn.k_proj": (4096, 1024, 32),
        "model.layers.*.self_attn.v_proj": (4096, 1024, 32),
        "model.layers.*.self_attn.o_proj": (4096, 4096, 32),
        "model.layers.*.mlp.gate": (4096, 8, 32),
        "model.layers.*.mlp.experts.gate_up_proj": (4096, 28672, 32 * 8),
        "model.layers.*.mlp.experts.down_proj": (14336, 4096, 32 * 8),
        "lm_head": (4096, 32000, 1),
    }
    path = written(tmp_path / "a [model], so", PUBLISHED["openai-community/gpt2"][0])
    words = ["sweep=gemm", "device=cpu", "axes.tokens=[32]", "dry_run=true", f"model={path}"]
    assert main([*words, "shapes=from_model"]) == 0
    assert "transformer.h.*.mlp.c_fc" in capsys.readouterr().out
    assert main([*words, "shapes=tiny"]) == 2


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_file_that_is_no_config(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read(str(tmp_path))
    with pytest.raises(UsageError, match="cannot read"):
        read(str(tmp_path / "elsewhere" / "config.json"))


class Described(nn.Module):
    """All that transformers builds: Conv1D, a router, a Linear, experts stacked either way round or one by one."""

    def __init__(self, layout: str, library: Any) -> None:
        super().__init__()
        self.c_attn = library.Conv1D(192, 64)
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = {
            "turned": lambda: library.Experts(4, 64, 48, turned=True),
            "straight": lambda: library.Experts(4, 64, 48),
            "one by one": lambda: nn.ModuleList(
                nn.ModuleDict({"gate_up_proj": nn.Linear(64, 96), "down_proj": nn.Linear(48, 64)})
                for _ in range(4)
            ),
        }[layout]()
        self.lm_head = nn.Linear(64, 100)
        self.config: Any = None


@pytest.mark.parametrize("layout", ["turned", "straight", "one by one"])
def test_a_module_of_transformers_is_read_off(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = types.ModuleType("stand_in")
    exec(compile(STAND_IN.read_text(), STAND_IN, "exec"), vars(library))
    monkeypatch.setitem(sys.modules, "transformers", library)
    seen: dict[str, Any] = {}

    def for_model(model_type: str, **fields: Any) -> types.SimpleNamespace:
        seen.update(fields, model_type=model_type)
        return types.SimpleNamespace(**fields)

    def from_config(config: object) -> nn.Module:
        assert torch.empty(0).device.type == "meta", "no weight is allocated"
        described = Described(layout, library)
        described.config = config
        return described

    monkeypatch.setattr(library.AutoConfig, "for_model", for_model)
    monkeypatch.setattr(library.AutoModelForCausalLM, "from_config", from_config)
    own = {"hidden_size": 64, "num_hidden_layers": 1, "num_experts_per_tok": 2}
    stored = {"quantization_config": {}, "torch_dtype": "bfloat16"}
    # a model with pictures is its text
    fields = {
        "model_type": "new",
        "tie_word_embeddings": True,
        "vision_config": {},
        "text_config": own | stored,
    }
    found = read(str(written(tmp_path, fields)))
    assert seen == own | {"model_type": "new_text", "tie_word_embeddings": True}
    assert [(part.name, part.K, part.N, part.kind, part.count) for part in found.parts] == [
        ("c_attn", 64, 192, LINEAR, 1),
        ("gate", 64, 4, ROUTER, 1),
        ("experts.gate_up_proj", 64, 96, EXPERTS, 4),
        ("experts.down_proj", 48, 64, EXPERTS, 4),
        ("lm_head", 64, 100, LINEAR, 1),
    ]
    assert (found.top_k, found.max_seq) == (2, None)


@pytest.mark.usefixtures("hugging_face")
def test_what_transformers_cannot_build_is_refused_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, PUBLISHED[LLAMA][0] | {"model_type": "llamma"})
    with pytest.raises(UsageError, match="llamma") as refused:
        read(str(path))
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_transformers_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, PUBLISHED[LLAMA][0])
    monkeypatch.setitem(sys.modules, "transformers", None)
    for words in (
        ["advise", f"model={path}", "gpu=h200"],
        ["sweep=gemm", "device=cpu", "shapes=from_model", f"model={path}", "dry_run=true"],
    ):
        assert main(words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert ".[hf]" in line


@pytest.mark.usefixtures("hugging_face")
def test_a_config_is_trained_and_its_rows_hold_sizes_and_no_path(tmp_path: Path) -> None:
    folder = written(
        tmp_path / "private", {"model_type": "tiny", "vocab_size": 64, "_name_or_path": "/home/me"}
    )
    words = [
        "sweep=train",
        "device=cpu",
        f"model={folder}",
        "axes.batch=2",
        "axes.seq=16",
        "arms=[bf16_eager]",
        "rounds=2",
    ]
    results = tmp_path / "results"
    quick = [
        "timing.min_samples=2",
        "timing.min_seconds=0.01",
        "timing.max_seconds=0.2",
        "timing.warmup_max_seconds=0.1",
        "report=false",
        "quiet=true",
    ]
    assert main([*words, *quick, "isolate=false", f"results_dir={results}"]) == 0
    rows = store.read(next(results.glob("*/*")))
    assert set(rows[rows["status"] != "skipped"]["status"]) == {"ok"}
    (model,) = {axes_of(axes)["model"] for axes in rows["axes"]}
    assert json.loads(str(model)) == {
        "_target_": "harness.training.models.hugging_face.build",
        "model_type": "tiny",
        "vocab_size": 64,
    }
