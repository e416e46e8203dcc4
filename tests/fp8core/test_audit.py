"""What audit says of whole models. Oracles: the list of parameters, written out; counts by hand are in test_flops."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from client_models import Conv1D, Experts, Gpt2, Mixture
from torch import Tensor, nn
from torch.nn import functional

from fp8core import (
    RECIPES,
    audit,
    convert_experts_to_float8,
    convert_to_float8_training,
    dense_layers_only,
)
from fp8core.other_weights import products_are_known


def encoder() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 1)


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
    assert "100.0 %" not in str(report)
    assert "not known without a step" in str(report)
    tokens = torch.randint(0, 256, (2, 32))
    stepped = audit(model, step=lambda: model(tokens).backward())
    assert stepped.fp8_flop_share == pytest.approx(6 * head / (6 * (head + blocks) + 24 * 64 * 32))
    assert stepped.share_of("h.0.c_fc.weight") == pytest.approx(
        6 * 4 * 64**2 / (6 * (head + blocks) + 24 * 64 * 32)
    )
    assert "13.3 % of the step's matmul FLOPs in FP8" in str(stepped)
    assert "attention scores" in str(stepped)


def test_every_owner_of_a_weight_has_a_row() -> None:
    """Oracle: the parameters of each kind of module, by name, and a word of the reason."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.stacked = nn.Parameter(torch.randn(4, 64, 64))
            self.gain = nn.Parameter(torch.randn(1, 1, 64))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x * self.gain[0, 0], self.weight)

    model = nn.ModuleDict(
        {
            "encoder": encoder(),
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
    expected = {
        "encoder.layers.0.self_attn.in_proj_weight": "nn.MultiheadAttention multiplies it by itself",
        "mixture.gate.weight": "a router",
        "mixture.experts.gate_up_proj": "unless convert_experts_to_float8 is called",
        "mixture.experts.down_proj": "unless convert_experts_to_float8 is called",
        "conv.weight": "a convolution",
        "lstm.weight_ih_l0": "LSTM multiplies it in a kernel",
        "lstm.weight_hh_l0": "LSTM multiplies it in a kernel",
        "own.weight": "class Own uses it by itself; if it multiplies, make it an nn.Linear",
        "own.stacked": "call fp8core.GroupedMatmul in its forward",
        "c.weight": "never offered to convert_to_float8_training",
    }
    assert rows.keys() == expected.keys()
    for name, part in expected.items():
        assert part in rows[name], name
    assert "10 other weights in FP8" in str(audit(model))
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
    lines = str(report).splitlines()
    assert next(line for line in lines if line.startswith("unused")).endswith(
        "tensorwise; no product of the step"
    )
    assert next(line for line in lines if line.startswith("scale")).endswith("; no product of the step")
    assert report.fp8_flop_share == 1


def test_an_emulated_layer_counts_nothing() -> None:
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64)), config=RECIPES["rowwise"].emulated())
    report = audit(model, step=lambda: model(torch.randn(16, 64)).sum().backward())
    assert report.fp8_flop_share == 0
    assert "0.0 % of the step's matmul FLOPs in FP8; not in FP8: 0 (emulated) 100.0 %" in str(report)


def test_encoder_in_text() -> None:
    """Oracle: the table, written out: what converts, what nn.MultiheadAttention keeps, and attention itself."""
    model = convert_to_float8_training(encoder(), config="rowwise")
    report = audit(model, step=lambda: model(torch.randn(2, 32, 64, requires_grad=True)).sum().backward())
    assert [row.fqn for row in report.converted] == ["layers.0.linear1", "layers.0.linear2"]
    assert report.fp8_flop_share == pytest.approx(
        6 * 2 * 64 * 128 / (6 * (4 * 64**2 + 2 * 64 * 128) + 12 * 64 * 32)
    )
    assert (
        "44.4 % of the step's matmul FLOPs in FP8; not in FP8: self_attn.in_proj_weight 33.3 %, self_attn.out_proj 11.1 %, "
        "attention scores 5.6 %, attention values 5.6 %"
    ) in str(report)
    assert "self_attn.out_proj" in {row.fqn.removeprefix("layers.0.") for row in report.not_converted}


def test_products_are_known_of_plain_modules_alone() -> None:
    class Block(nn.Module):
        pass

    assert products_are_known(
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(), nn.Flatten(), nn.ReLU())
    )
    assert not products_are_known(Block())
    assert not products_are_known(nn.MultiheadAttention(16, 2))
    assert not products_are_known(nn.Sequential(Experts(16, 16, 2, 1)))


def test_bad_step() -> None:
    with pytest.raises(TypeError, match="step_fn is a int"):
        audit(nn.Linear(16, 16), step=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="causal convention"):
        audit(nn.Linear(16, 16), step=lambda: None, causal="none")  # type: ignore[arg-type]


def test_experts_before_and_after() -> None:
    model = convert_to_float8_training(Mixture(), module_filter_fn=dense_layers_only)
    assert "0 of 3 other weights in FP8" in str(audit(model))
    convert_experts_to_float8(model)
    report = audit(model)
    assert [(row.fqn, row.experts_per_token) for row in report.experts] == [
        ("experts.gate_up_proj", 2),
        ("experts.down_proj", 2),
    ]
    assert [row.fqn for row in report.weights] == ["gate.weight"]


def test_the_page_prints_what_audit_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: docs/audit.md: each block of code, then the block of output that follows it."""
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert [kind for kind, _ in blocks] == ["python", "", "python", ""]
    names: dict[str, object] = {}
    for (_, code), (_, want) in (blocks[:2], blocks[2:]):
        exec(compile(code, "audit.md", "exec"), names)
        assert capsys.readouterr().out == want
