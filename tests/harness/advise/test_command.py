"""The command. Oracles: the contract of exit codes; what it prints must agree with what it writes as JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from configs_for_tests import PUBLISHED, written
from report_fixtures import H200, cpu_run, gpu_run, write_run

from fp8core import audit
from harness.__main__ import main
from harness.advise.command import Question, parse, sizes
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.training.models import hugging_face_meta, resolve

OWN = "model._target_=models_to_advise."


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["advise", *words]) == 0
    return capsys.readouterr().out


def plain(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    found = json.loads(said(capsys, *words, "json=true"))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["advise", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "\x1b" not in lines[0]
    return lines[0]


def test_what_it_says_fits_a_hundred_columns_and_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "model=llama3_3b", "gpu=h200", "recipe=tensorwise")
    assert max(map(len, text.splitlines())) <= 100
    for part in (
        "FP8: ",
        "GPU generation",
        "eval loss",
        "attention.q",
        "grad_weight",
        "ridge bf16",
        "where the step goes",
        "FlashAttention-2",
        "pays from",
        "Gathering weights (FSDP)",
        "as code",
        "convert_to_float8_training(",
        "train.mixed_precision=fp8",
        "not measured here",
    ):
        assert part in text, part


def test_the_same_as_plain_values_and_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plain(capsys, "model=llama3_1b", "gpu=h200")
    assert found["decision"] in ("on", "only these layers")
    assert found["step_speedup"]["low"] < found["step_speedup"]["value"] < found["step_speedup"]["high"]
    bf16, fp8 = found["step_ms"]["bf16"], found["step_ms"]["fp8"]
    assert bf16["total"] / fp8["total"] == pytest.approx(found["step_speedup"]["value"])
    assert sum(v for k, v in bf16.items() if k != "total") == pytest.approx(bf16["total"])
    assert {layer["fqn"] for layer in found["layers"]} >= {"layers.0.attention.q", "head"}
    assert [reason["question"] for reason in found["reasons"]] == [
        "GPU generation",
        "dim",
        "dense or MoE",
        "TP",
        "communication",
        "eval loss",
    ]
    target = tmp_path / "advice.json"
    said(capsys, "model=llama3_1b", "gpu=h200", f"json={target}")
    assert json.loads(target.read_text()) == found


def test_the_filter_that_is_printed_converts_the_layers_that_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("gpu=h100", "tp=8", "dp=8", "tokens=65536", "recipe=tensorwise", "fp8_all_gather=false")
    found = plain(capsys, "model=llama3_8b", *words)
    assert found["decision"] == "only these layers"
    module = resolve("llama3_8b").build(device="meta", dtype=torch.bfloat16)
    exec(found["filter"]["code"], {"model": module})
    chosen = {layer["fqn"] for layer in found["layers"] if layer["converted"]}
    assert {layer.fqn for layer in audit(module).converted} == chosen
    assert "layers.0.attention.o" not in chosen
    odd = plain(capsys, "model=gpt2", "gpu=rtx_4090", "recipe=tensorwise", "mode=eager")
    reasons = {layer["fqn"]: layer["reason"] for layer in odd["layers"]}
    assert "not a multiple of 16" in reasons["head"]
    assert odd["filter"]["code"] is None, "1.1x that may be 0.96x: nobody can tell"


def test_a_gain_that_the_rates_leave_in_doubt_asks_for_measured_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """llama_125m, 4096 tokens, on an H200 by published rates, 1.03x (0.93-1.14): nobody can tell, and it is not "off" either."""
    words = ("model=llama_125m", "gpu=h200", "recipe=tensorwise", "tokens=4096")
    text = said(capsys, *words)
    assert "FP8: can't tell; 1.03x (0.93-1.14) contains 1; measure: sweep=ceilings, then runs=RUN" in text
    assert "nobody can tell: measure the H200 SXM by `python -m harness sweep=ceilings`" in " ".join(
        text.split()
    )
    assert "as code" not in text
    run = gpu_run(tmp_path / "results" / "gemm" / "a-run")
    assert "FP8: off\n" in said(capsys, *words, f"runs={run}")


def test_an_old_gpu_and_a_small_model_are_off_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    old = plain(capsys, "model=llama3_1b", "gpu=a100")
    assert old["decision"] == "off"
    assert old["filter"]["code"] is None
    assert old["reasons"][0]["speaks_for"] == "off"
    assert "no FP8 matrix units" in old["reasons"][0]["finding"]
    small = plain(capsys, "model=nano", "gpu=h200")
    assert small["decision"] == "off"
    assert small["pays_from_tokens"] is None
    assert "FP8: off" in said(capsys, "model=nano", "gpu=h200")


def test_experts_tensor_parallelism_and_loss_are_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    moe = plain(capsys, "model=llama_moe", "gpu=h200")
    assert "MoE" in moe["reasons"][2]["finding"]
    split = plain(capsys, "model=llama3_8b", "gpu=h100", "tp=8", "dp=8", "tokens=65536", "recipe=rowwise")
    assert (
        "tp=8 leaves layers as narrow as layers.0.attention.o, 512 to 4096" in split["reasons"][3]["finding"]
    )
    assert split["reasons"][3]["speaks_for"] == "off"
    careful = plain(capsys, "model=llama3_8b", "gpu=h200", "priority=loss")
    assert careful["recipe"] not in ("tensorwise", "delayed")
    assert "cooldown_bf16" in careful["reasons"][5]["finding"]


def test_a_measured_throughput_dilutes_the_gain(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model=llama3_8b", "gpu=h200", "recipe=tensorwise")
    free = plain(capsys, *words)
    per_s = 16384 / (2 * free["step_ms"]["bf16"]["total"] * 1e-3)
    anchored = plain(capsys, *words, f"bf16_tokens_per_s={per_s:.3f}")
    assert anchored["step_ms"]["bf16"]["unexplained"] == pytest.approx(
        free["step_ms"]["bf16"]["total"], rel=1e-3
    )
    assert 1 < anchored["step_speedup"]["value"] < free["step_speedup"]["value"]


def test_stored_runs_replace_what_is_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run of an H200: its rates stand in the table as measured, and its layers beside their predictions."""
    run = gpu_run(tmp_path / "results" / "gemm" / "a-run")
    found = plain(capsys, "model=llama3_8b", f"runs={run}", "recipe=tensorwise")
    assert found["gpu"] == "H200 SXM"
    assert found["rates"]["bf16"]["kind"] == found["rates"]["bandwidth"]["kind"] == "measured"
    assert {check["what"] for check in found["checks"]} >= {"product", "layer"}
    assert all(check["measured"] > 0 for check in found["checks"])
    text = said(capsys, "model=llama3_8b", f"runs={run}", "recipe=tensorwise")
    assert "predicted and measured, worst first" in text
    other = refused(capsys, "model=llama3_8b", f"runs={run}", "gpu=h100")
    assert "no row is of the H100 SXM (found: NVIDIA H200)" in other, "they say nothing about this one"


def test_stored_training_steps_stand_beside_their_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut to two blocks and another vocabulary, as the row says; a model that is gone, or of the user, is left out."""

    def case(model: str) -> list[Measurement]:
        made = Case.of(
            "train", {"model": model, "batch": 4, "seq": 1024, "layers": 2, "checkpointing": "none"}
        )

        def step(arm: str, ms: float, baseline: str, dtype: str) -> Measurement:
            samples = tuple(ms * (1 + 0.001 * i) for i in range(6))
            return Measurement(
                "train",
                made.case_id,
                arm,
                made.axes_json,
                "time_ms",
                "ok",
                baseline=baseline,
                regime="isolated",
                samples=samples,
                rounds=tuple(range(6)),
                flops={dtype: 1e12},
                resolved={"vocab_size": 512},
            )

        return [
            step("bf16_compile", 12.0, "", "bf16"),
            step("tensorwise_compile", 10.0, "bf16_compile", "e4m3"),
        ]

    cases = [case(name) for name in ("llama3_8b", "llama9", '{"_target_": "a.b", "batch": "a.c"}')]
    run = write_run(tmp_path / "run", cases, env=H200)
    found = plain(capsys, "model=gpt2", f"runs={run}", "recipe=tensorwise")
    (check,) = found["checks"]
    assert (check["what"], check["case"], check["arm"]) == ("step", "llama3_8b", "tensorwise_compile")
    assert check["measured"] == pytest.approx(1.2)
    assert 1.2 < check["predicted"] < 1.6


def test_a_module_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    words = (OWN + "mlp", "model.batch=models_to_advise.mlp_batch", "model.width=4096", "gpu=h200")
    found = plain(capsys, *words, "batch=16")
    assert found["tokens"] == 16 * 512, "the rows of its layers, whatever its batch is made of"
    assert {layer["fqn"]: layer["tokens"] for layer in found["layers"]} == dict.fromkeys(
        ("gate", "up", "down"), 16 * 512
    )
    assert found["decision"] == "on"
    alone = plain(capsys, OWN + "mlp", "model.width=4096", "gpu=h200", "tokens=8192")
    assert any("everything else are left out" in warning for warning in alone["warnings"])
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


def test_the_model_of_the_tutorial_has_the_tokens_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tutorial-measure-my-model.md").read_text()
    source = page.split("```python file=my_model.py\n")[1].split("```")[0]
    (tmp_path / "model_of_the_tutorial.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    own = ("model._target_=model_of_the_tutorial.build", "model.batch=model_of_the_tutorial.batch")
    found = plain(capsys, *own, "gpu=h200", "tokens=16384")
    assert {layer["tokens"] for layer in found["layers"]} == {found["tokens"]} == {16384}


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_config_of_hugging_face(
    as_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers under their names there; they gain what those of our own model gain, shape by shape."""
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: False)
    path = written(tmp_path / "a model", PUBLISHED["meta-llama/Meta-Llama-3-8B"][0])
    words = ("gpu=h200", "recipe=tensorwise", "tokens=16384")
    found = plain(capsys, f"model={path.parent if as_folder else path}", *words)
    own = plain(capsys, "model=llama3_8b", *words)
    assert found["tokens"] == 16384
    assert found["decision"] == "on"
    assert len(found["layers"]) == len(own["layers"]) == 32 * 7 + 1
    gains = {(la["K"], la["N"]): la["speedup"]["value"] for la in own["layers"] if la["fqn"] != "head"}
    for layer in found["layers"]:
        assert layer["tokens"] == 16384
        assert layer["speedup"]["value"] == pytest.approx(
            gains.get((layer["K"], layer["N"]), 0), rel=0.1
        ) or (layer["fqn"] == "lm_head")
    assert any("everything else are left out" in warning for warning in found["warnings"])
    assert "tp=8" in said(capsys, f"model={path}", "gpu=h200", "tp=8", "dp=8", "recipe=tensorwise")


def test_experts_of_a_config_stay_in_bf16_and_routers_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral: 2 of 8 experts a token; 6 T K N of them in bf16 with FP8 and without."""
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: False)
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


def test_a_config_that_is_not_understood_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face_meta, "installed", lambda: False)
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


@pytest.mark.parametrize("size", ["tokens=16", "batch=16"])
def test_a_model_without_linear_layers_is_refused(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (OWN + "no_linear", "model.batch=models_to_advise.patches", "gpu=h200")
    assert "calls no nn.Linear" in refused(capsys, *words, size)


def test_what_cannot_be_traced_names_the_layer(capsys: pytest.CaptureFixture[str]) -> None:
    small = "model.batch=models_to_advise.small_batch"
    assert "blocks.1 failed" in refused(capsys, OWN + "peeks", small, "gpu=h200")
    assert "returned no loss" in refused(capsys, OWN + "no_loss", small, "gpu=h200")
    assert "expected an nn.Module" in refused(capsys, OWN + "not_a_module", small, "gpu=h200")
    assert "expected an nn.Module" in refused(capsys, OWN + "not_a_module", "gpu=h200")
    assert "cannot be imported" in refused(capsys, OWN + "missing", small, "gpu=h200")
    assert "dotted name" in refused(capsys, "model._target_=3", "gpu=h200")
    assert "failed: TypeError" in refused(capsys, OWN + "mlp", "model.depth=3", "gpu=h200")


def test_hostile_names_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        OWN + "named",
        "model.batch=models_to_advise.named_batch",
        "gpu=h200",
        "batch=16",
        "recipe=tensorwise",
    )
    text = said(capsys, *words)
    assert "[red]a[/red]" in text
    assert "</script>" in text
    assert "take the code" in text, "no schedule can say x*y,z"
    found = plain(capsys, *words)
    module = torch.nn.Module()
    for layer in found["layers"]:
        module.add_module(layer["fqn"], torch.nn.Linear(layer["K"], layer["N"], bias=False, device="meta"))
    exec(found["filter"]["code"], {"model": module})
    assert {layer.fqn for layer in audit(module).converted} == {"[red]a[/red]", "b'c", "</script>", "x*y,z"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ([], "which model?"),
        (["model=llama3_9b", "gpu=h200"], "nearest: llama3_8b"),
        (["model=gpt2", "gpu=h2000"], "nearest: h200"),
        (["model=gpt2", "gpu=<b>\x1b[2J"], "unknown gpu"),
        (["model=gpt2"], "no GPU here"),
        (["model=gpt2", "gpu=h200", "token=16"], "nearest: tokens"),
        (["model=gpt2", "gpu=h200", "\x1b[2J=1"], "unknown key"),
        (["model=gpt2", "gpu=h200", "fast"], "not key=value"),
        (["model=gpt2", "gpu=h200", "tokens=1000"], "no multiple of seq=1000"),
        (["model=gpt2", "gpu=h200", "tokens=1000", "seq=512"], "the nearest is 1024"),
        (["model=gpt2", "gpu=h200", "tokens=24", "seq=8"], "a multiple of 16"),
        (["model=gpt2", "gpu=h200", "seq=4096"], "at most 1024"),
        (["model=gpt2", "gpu=h200", "tokens=16384", "seq=1024", "batch=3"], "leave one of them out"),
        (["model=gpt2", "gpu=h200", "tokens=-5"], "whole number from 1"),
        (["model=gpt2", "gpu=h200", "tokens=9e99"], "whole number from 1"),
        (["model=gpt2", "gpu=h200", "dp=1000000000"], "whole number from 1"),
        (["model=gpt2", "gpu=h200", "tp=5"], "does not divide"),
        (["model=gpt2", "gpu=h200", "mode=fast"], "known: compile, eager"),
        (["model=gpt2", "gpu=h200", "recipe=tensorwize"], "nearest: tensorwise"),
        (["model=gpt2", "gpu=h200", "bf16_tokens_per_s=nan"], "above 0"),
        (["model=gpt2", "gpu=h200", "network_gb_s=0"], "above 0"),
        (["model=gpt2", "gpu=h200", "runs=nowhere"], "no run 'nowhere'"),
        (["model=gpt2", "gpu=h200", "json=/nowhere/x.json"], "cannot write"),
        (["model=gpt2", "model.width=3", "gpu=h200"], "name one model"),
        (["model={bad", "gpu=h200"], "no JSON mapping"),
        (["model={}", "gpu=h200"], "dotted name"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_2(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if "tokens=1000" in words and "seq=512" not in words:
        words, hint = [*words, "batch=1"], "multiple of 16"
    assert hint in refused(capsys, *words)


def test_a_run_of_a_gpu_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cpu_run(tmp_path / "results" / "gemm" / "a-run")
    assert "no row is of a GPU in the peak table" in refused(capsys, "model=gpt2", f"runs={run}")
    assert "no row is of the H200 SXM (found: cpu)" in refused(
        capsys, "model=gpt2", f"runs={run}", "gpu=h200"
    )


def test_a_run_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the file; no warning of Python's, which the test run would turn into an error."""
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "results.parquet").write_bytes(b"PAR1 is no table")
    for words in (("gpu=h200",), ()):
        assert "results.parquet" in refused(capsys, "model=gpt2", f"runs={bad}", *words)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "found: no row" in refused(capsys, "model=gpt2", "gpu=h200", f"runs={empty}")


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_every_key(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, word)
    assert all(f"{field.name}=" in text for field in fields(Question))
    assert max(map(len, text.splitlines())) <= 100


def test_sizes_of_a_pass() -> None:
    def of(*words: str, most: int = 8192) -> tuple[int, int]:
        return sizes(parse(["model=x", *words]), most)

    assert of() == (4, 4096)
    assert of(most=256) == (64, 256)
    assert of("seq=1024") == (16, 1024)
    assert of("batch=2") == (2, 4096)
    assert of("tokens=1024") == (1, 1024)
    assert of("tokens=32768", "seq=8192") == (4, 8192)
    with pytest.raises(UsageError):
        of("seq=8", "batch=1")
