"""What audit says of whole models. Oracles: the list of parameters, written out; counts by hand are in test_flops."""

from __future__ import annotations

import torch
from client_models import Conv1D, Mixture
from torch import nn

from fp8core import (
    audit,
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
