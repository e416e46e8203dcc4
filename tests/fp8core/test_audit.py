"""What audit says of whole models. Oracles: the list of parameters, written out; counts by hand are in test_flops."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from client_models import Conv1D, Gpt2, Mixture
from torch import Tensor, nn

from fp8core import (
    audit,
    convert_to_float8_training,
)


def test_one_converted_layer_is_not_the_whole_model() -> None:
    """Oracle: GPT-2 with its head alone in FP8: 6 V d of 6 (12 L d^2 + V d) + 12 L d T a token, 13.3 % of a step."""
    model = convert_to_float8_training(Gpt2(), module_filter_fn=lambda module, fqn: fqn == "lm_head")
    report = audit(model)
    assert len(report.converted) == len(report.layers) == 1
    assert {row.fqn for row in report.weights} == {
        f"h.{i}.{name}.weight" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "c_fc", "c_proj")
    }
    assert {row.reason for row in report.weights} == {"left out by module_filter_fn"}
    head, blocks = 256 * 64, 24 * 64**2
    assert report.fp8_flop_share == pytest.approx(head / (head + blocks))
    tokens = torch.randint(0, 256, (2, 32))
    stepped = audit(model, step=lambda: model(tokens).backward())
    assert stepped.fp8_flop_share == pytest.approx(6 * head / (6 * (head + blocks) + 24 * 64 * 32))
    assert stepped.share_of("h.0.c_fc.weight") == pytest.approx(
        6 * 4 * 64**2 / (6 * (head + blocks) + 24 * 64 * 32)
    )


def test_every_owner_of_a_weight_has_a_row() -> None:
    """Oracle: the parameters of each kind of module, by name, and a word of the reason."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.stacked = nn.Parameter(torch.randn(4, 64, 64))
            self.gain = nn.Parameter(torch.randn(1, 1, 64))

    model = nn.ModuleDict(
        {
            "encoder": nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
            "mixture": Mixture(),
            "conv": nn.Conv1d(4, 8, 3),
            "lstm": nn.LSTM(16, 16),
            "own": Own(),
            "table": nn.Embedding(16, 16),
            "norm": nn.LayerNorm([4, 4]),
            "c": Conv1D(16, 32),
        }
    )
    rows = {row.fqn: row.reason for row in audit(model).weights}
    words = {
        "encoder.self_attn.in_proj_weight": "MultiheadAttention",
        "mixture.gate.weight": "router",
        "mixture.experts.gate_up_proj": "convert_experts",
        "mixture.experts.down_proj": "convert_experts",
        "conv.weight": "convolution",
        "lstm.weight_ih_l0": "LSTM",
        "lstm.weight_hh_l0": "LSTM",
        "own.weight": "class Own",
        "own.stacked": "GroupedMatmul",
        "c.weight": "never offered",
    }
    assert {name: words[name] in reason for name, reason in rows.items()} == dict.fromkeys(words, True)
    by_size = {row.fqn: row.flops_of_a_gemm for row in audit(model).weights}
    assert by_size["mixture.experts.down_proj"] == 2 * 2 * 64 * 32  # two of four experts
    assert by_size["own.stacked"] == 2 * 4 * 64 * 64  # nobody says how many, so all
    out_proj = next(row for row in audit(model).layers if row.fqn.endswith("out_proj"))
    assert out_proj.gemms == 3


def test_a_step_tells_what_takes_no_part() -> None:
    """Oracle: a layer that the step does not call, and a weight that it only looks at."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
            self.scale = nn.Parameter(torch.randn(16, 64))

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x * self.scale)

    model = convert_to_float8_training(Model())
    report = audit(model, step=lambda: model(torch.randn(16, 64)).sum().backward())
    assert [report.share_of(name) for name in ("used.weight", "unused.weight", "scale")] == [1, 0, 0]
    assert report.fp8_flop_share == 1
    assert {row.fqn: (row.gemms, row.fp8_gemms) for row in report.layers} == {
        "used": (3, 3),
        "unused": (0, 0),
    }
    assert report.fp8_gemms == 3
    twice = audit(
        model, step=lambda: (model(torch.randn(16, 64)) + model(torch.randn(16, 64))).sum().backward()
    )
    assert twice.layers[0].fp8_gemms == 6


def test_the_page_prints_what_audit_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: docs/audit.md: each block of code, then the block of output that follows it."""
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "", "python", ""]
    names: dict[str, object] = {}
    for (_, code), (_, want) in (blocks[:2], blocks[2:]):
        exec(compile(code, "audit.md", "exec"), names)
        assert capsys.readouterr().out == want
