"""The command and models of the user or of Hugging Face. Oracles: rows counted by hand; our own model of the same shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from advice_asked import plain, refused, said
from configs_for_tests import PUBLISHED, written

from harness.advise.decide import HEAD

OWN = "model._target_=models_to_advise."


def test_a_module_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    words = (OWN + "mlp", "model.batch=models_to_advise.mlp_batch", "model.width=4096", "gpu=h200")
    found = plain(capsys, *words, "batch=16")
    assert found["tokens"] == 16 * 512, "the rows of its layers, whatever its batch is made of"
    assert {layer["fqn"]: layer["tokens"] for layer in found["layers"]} == dict.fromkeys(
        ("gate", "up", "down"), 16 * 512
    )
    assert found["decision"] == "on"
    alone = plain(capsys, OWN + "mlp", "model.width=4096", "gpu=h200", "tokens=8192")
    assert "left out" in alone["not_measured"]
    assert {layer["tokens"] for layer in alone["layers"]} == {8192}


@pytest.mark.parametrize(
    ("build", "batch"), [("pooled", "patches"), ("from_pixels", "pixels")], ids=["floats", "whole numbers"]
)
def test_tokens_are_rows_of_the_layers_and_each_layer_keeps_its_share(
    build: str, batch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 patches a picture: 16384 tokens are 256 pictures, of which the pooled head sees one row each."""
    words = (OWN + build, f"model.batch=models_to_advise.{batch}", "gpu=h200", "recipe=tensorwise")
    found = plain(capsys, *words, "tokens=16384")
    rows = {layer["fqn"]: layer["tokens"] for layer in found["layers"]}
    assert found["tokens"] == 16384
    assert rows == {"body": 16384, "back": 16384, "head": 256}
    assert "no multiple of 64" in refused(capsys, *words, "tokens=16400")


@pytest.mark.usefixtures("hugging_face")
@pytest.mark.parametrize("as_folder", [True, False])
def test_a_config_of_hugging_face(
    as_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its layers under their names there; they gain what those of our own model gain, shape by shape."""
    path = written(tmp_path / "a model", PUBLISHED["meta-llama/Meta-Llama-3-8B"][0])
    words = ("gpu=h200", "recipe=tensorwise", "tokens=16384")
    found = plain(capsys, f"model={path.parent if as_folder else path}", *words)
    own = plain(capsys, "model=llama3_8b", *words)
    assert found["tokens"] == 16384
    assert found["decision"] == "on"
    assert len(found["layers"]) == len(own["layers"]) == 32 * 7 + 1
    gains = {(la["K"], la["N"]): la["speedup"]["value"] for la in own["layers"] if la["fqn"] != "head"}
    assert [layer["fqn"] for layer in found["layers"] if layer["reason"] == HEAD] == ["lm_head"]
    for layer in found["layers"]:
        assert layer["tokens"] == 16384
        assert layer["speedup"]["value"] == pytest.approx(
            gains.get((layer["K"], layer["N"]), 0), rel=0.1
        ) or (layer["fqn"] == "lm_head")
    assert "left out" not in found["not_measured"]
    assert "tp=8" in said(capsys, f"model={path}", "gpu=h200", "tp=8", "dp=8", "recipe=tensorwise")


@pytest.mark.usefixtures("hugging_face")
def test_experts_of_a_config_stay_in_bf16_and_routers_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mixtral: 2 of 8 experts a token; 6 T K N of them in bf16 with FP8 and without."""
    path = written(tmp_path, PUBLISHED["mistralai/Mixtral-8x7B-v0.1"][0])
    found = plain(capsys, f"model={path}", "gpu=h200", "recipe=tensorwise", "tokens=16384")
    rate = found["rates"]["bf16"]["value"]
    expected = 6 * 16384 * 2 * 3 * 4096 * 14336 * 32 / rate * 1e3
    for part in found["step_ms"].values():
        assert any(value == pytest.approx(expected, rel=0.01) for value in part.values())
    routers = [layer for layer in found["layers"] if layer["fqn"].endswith("mlp.gate")]
    assert len(routers) == 32
    assert not any(layer["converted"] for layer in routers)
    assert all("router" in layer["reason"] for layer in routers)
    assert "experts" in refused(capsys, f"model={path}", "gpu=h200", "tp=8")


@pytest.mark.usefixtures("hugging_face")
def test_a_config_that_is_not_understood_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, {"model_type": "mamba"})
    assert "mamba" in refused(capsys, f"model={path}", "gpu=h200")
    assert "cannot read" in refused(capsys, f"model={tmp_path / 'nowhere' / 'config.json'}", "gpu=h200")
    longest = written(tmp_path, PUBLISHED["openai-community/gpt2"][0])
    assert "at most 1024" in refused(capsys, f"model={longest}", "gpu=h200", "seq=2048")


def test_rows_that_do_not_grow_with_the_batch_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = (OWN + "pairs", "model.batch=models_to_advise.patches", "gpu=h200")
    message = refused(capsys, *words, "tokens=256")
    assert "65536" in message
    assert "batch=" in message
    assert plain(capsys, *words, "batch=16")["tokens"] == 256


def test_hostile_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        OWN + "named",
        "model.batch=models_to_advise.named_batch",
        "gpu=h200",
        "batch=16",
        "recipe=tensorwise",
    )
    text = said(capsys, *words, "--full")
    assert "[red]a[/red]" in text
    assert "</script>" in text


@pytest.mark.parametrize("size", ["tokens=16", "batch=16"])
def test_a_model_without_linear_layers_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (OWN + "no_linear", "model.batch=models_to_advise.patches", "gpu=h200")
    assert "calls no nn.Linear" in refused(capsys, *words, size)
