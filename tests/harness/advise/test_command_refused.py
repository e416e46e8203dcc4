"""What the command refuses, and its help. Oracle: the contract of exit codes: one line, exit 2, nothing on standard output."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from advice_asked import refused, said
from report_cases import cpu_run

from harness.advise.asked_model import sizes
from harness.advise.command import Question, parse
from harness.store.errors import UsageError


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("", "which model?"),
        ("model=llama3_9b gpu=h200", "nearest: llama3_8b"),
        ("model=gpt2 gpu=h2000", "nearest: h200"),
        ("model=gpt2 gpu=<b>\x1b[2J", "unknown gpu"),
        ("model=gpt2", "no GPU here"),
        ("model=gpt2 gpu=h200 token=16", "nearest: tokens"),
        ("model=gpt2 gpu=h200 \x1b[2J=1", "unknown word"),
        ("model=gpt2 gpu=h200 fast", "unknown word"),
        ("model=gpt2 gpu=h200 tokens=1000 batch=1", "multiple of 16"),
        ("model=gpt2 gpu=h200 tokens=1000 seq=512", "the nearest is 1024"),
        ("model=gpt2 gpu=h200 tokens=24 seq=8", "a multiple of 16"),
        ("model=gpt2 gpu=h200 seq=4096", "at most 1024"),
        ("model=gpt2 gpu=h200 tokens=16384 seq=1024 batch=3", "leave one of them out"),
        ("model=gpt2 gpu=h200 tokens=-5", "whole number from 1"),
        ("model=gpt2 gpu=h200 tokens=9e99", "whole number from 1"),
        ("model=gpt2 gpu=h200 dp=1000000000", "whole number from 1"),
        ("model=gpt2 gpu=h200 tp=5", "does not divide"),
        ("model=gpt2 gpu=h200 mode=fast", "known: compile, eager"),
        ("model=gpt2 gpu=h200 recipe=tensorwize", "nearest: tensorwise"),
        ("model=gpt2 gpu=h200 bf16_tokens_per_s=nan", "above 0"),
        ("model=gpt2 gpu=h200 network_gb_s=0", "above 0"),
        ("model=gpt2 gpu=h200 runs=nowhere", "no run 'nowhere'"),
        ("model=gpt2 gpu=h200 json=/nowhere/x.json", "cannot write"),
        ("model=gpt2 model.width=3 gpu=h200", "name one model"),
        ("model={bad gpu=h200", "no JSON mapping"),
        ("model={} gpu=h200", "dotted name"),
        ("model=llama3_1b gpu=h100 fp8_all_gather=yes", "unknown fp8_all_gather"),
        ("model=llama3_1b gpu=h100 fp8_all_gather=true", "one GPU gathers nothing"),
        ("model=llama3_1b gpu=h100 fp8_all_gather=true dp=8 recipe=rowwise", "rowwise casts"),
        ("model=llama3_1b gpu=h100 gpus=8 dp=3", "gpus=8 is not what"),
        ("model=llama3_1b gpu=h100 gpus=8 tp=16", "gpus=8 is not what"),
        ("model=llama3_1b gpu=h100 gpus=4 dp=8", "dp=8, tp=1, pp=1 multiply to"),
        ("model=llama3_1b gpu=h100 dp=8 pp=64", "has 16 blocks"),
        ("model=llama3_1b gpu=h100 schedule=interleaved dp=8", "pp="),
        ("model=llama3_1b gpu=h100 dp=8 replicas=3", "dp=8 is no multiple of replicas=3"),
        ("model=llama3_1b gpu=h100 dp=65536 tp=8", "world=524288: expected at most 65536"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_2(
    words: str, hint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hint in refused(capsys, *words.split())


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
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_of_a_gpu_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = cpu_run(tmp_path / "results" / "gemm" / "a-run")
    assert "no row is of a GPU in the peak table" in refused(capsys, "model=gpt2", f"runs={run}")
    assert "no row is of the H200 SXM (found: cpu)" in refused(
        capsys, "model=gpt2", f"runs={run}", "gpu=h200"
    )


def test_sizes_of_a_pass() -> None:
    def of(*words: str, most: int = 8192) -> tuple[int, int]:
        asked = parse(["model=x", *words])
        return sizes("x", most, asked.tokens, asked.batch, asked.seq)

    assert of() == (4, 4096)
    assert of(most=256) == (64, 256)
    assert of("seq=1024") == (16, 1024)
    assert of("batch=2") == (2, 4096)
    assert of("tokens=1024") == (1, 1024)
    assert of("tokens=32768", "seq=8192") == (4, 8192)
    with pytest.raises(UsageError):
        of("seq=8", "batch=1")
