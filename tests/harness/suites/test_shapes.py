"""Oracles: parameter counts that the models' publishers state, and the matrix calculus of a linear layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8core import convert_to_float8_training
from fp8core.proof.recorder import Recorder, layer_shapes
from harness.store.errors import UsageError
from harness.suites.shapes import SHAPES, gemm_points, linear_points


def linear_parameters(name: str) -> int:
    return sum(layer.in_features * layer.out_features * layer.count for layer in SHAPES[name].layers)


@pytest.mark.parametrize(
    ("name", "hidden", "blocks", "vocab", "total"),
    # Totals as the safetensors index of each model states them: 8.03 and 70.55 billion.
    [("llama3_8b", 4096, 32, 128256, 8_030_261_248), ("llama3_70b", 8192, 80, 128256, 70_553_706_496)],
)
def test_llama_parameter_count(name: str, hidden: int, blocks: int, vocab: int, total: int) -> None:
    """All parameters but the linear layers' are one embedding and 2 norms a block and a last one."""
    assert linear_parameters(name) + vocab * hidden + (2 * blocks + 1) * hidden == total


def test_shapes_that_a_job_ran(tmp_path: Path) -> None:
    """Oracle: the sizes of the layers by hand; two alike are one point, attention without a Linear is none."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64), torch.nn.Linear(64, 96))
    model = convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn == "0")
    with Recorder(model) as recorder:
        model(torch.randn(4, 8, 64)).sum().backward()
    file = tmp_path / "job.json"
    file.write_text(json.dumps(layer_shapes(recorder.rows)))
    job = {"shape_set": "job", "M": 32}
    assert linear_points([str(file)], {}) == [
        {**job, "layer": "0+2", "K": 64, "N": 96},
        {**job, "layer": "1", "K": 96, "N": 64},
    ]
    points = gemm_points([str(file)], {"role": ["grad_weight"]})
    assert [tuple(point[name] for name in "MKN") for point in points] == [(96, 32, 64), (64, 32, 96)]


@pytest.mark.parametrize(
    "text",
    [None, "{", "[1]", '[["a", 1, 2]]', '[["a", 1, 2, "x"]]', '[["a", 1.5, 2, 3]]', '[["a", 0, 2, 3]]'],
)
def test_a_file_without_shapes_is_refused(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=r"job\.json: .*; expected JSON"):
        linear_points([str(file)], {})
