"""Oracles: parameter counts that the models' publishers state, and the matrix calculus of a linear layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8core import convert_to_float8_training
from fp8core.proof.recorder import Recorder, layer_shapes
from harness.store.errors import UsageError
from harness.suites.shapes import CUSTOM, FROM_MODEL, ROLES, SHAPES, Layer, gemm_points, linear_points, merge


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


def test_roles_are_the_gemms_of_a_linear_layer() -> None:
    """Oracle: autograd of `x @ w.T`; every role's product has its own shape and the value that autograd finds."""
    tokens, layer = 3, Layer("l", in_features=5, out_features=7)
    x = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    y = x @ w.T
    g = torch.randn_like(y)
    gx, gw = torch.autograd.grad(y, (x, w), g)
    operands = {"output": (x, w.T, y), "grad_input": (g, w, gx), "grad_weight": (g.T, x, gw)}
    found = {}
    for point in gemm_points([FROM_MODEL], {"tokens": [tokens]}, [layer]):
        a, b, product = operands[str(point["role"])]
        assert (point["M"], point["K"], point["N"]) == (*a.shape, b.shape[1])
        assert torch.allclose(a @ b, product)
        found[point["role"]] = point["layer"]
    assert tuple(found) == ROLES


def test_merge_keeps_every_name_and_the_count() -> None:
    before, merged = SHAPES["llama3_8b"].layers, merge(SHAPES["llama3_8b"].layers)
    counts = {layer.name: layer.count for layer in merged}
    assert counts == {"q+o": 64, "k+v": 64, "gate+up": 64, "down": 32, "head": 1}
    first, second = (sum(x.in_features * x.out_features * x.count for x in of) for of in (before, merged))
    assert first == second


def test_sizes_by_number_replace_named_sets() -> None:
    axes = {"M": [16, 32], "K": [64], "N": [48], "tokens": [4096]}
    named = {"shape_set": CUSTOM, "layer": CUSTOM, "K": 64, "N": 48}
    assert linear_points(["llama3_8b"], axes) == [{**named, "M": 16}, {**named, "M": 32}]
    for roles in (["output"], ["output", "grad_weight"]):
        of_roles = gemm_points([], {**axes, "role": roles} if len(roles) > 1 else axes)
        assert of_roles == [{**named, "M": M, "role": role} for M in (16, 32) for role in roles]


def test_cubes_are_plain_gemms_whatever_the_tokens() -> None:
    points = gemm_points(["pow2"], {"tokens": [64]})
    assert [p["M"] for p in points] == [512, 1024, 2048, 4096, 8192, 16384]
    assert all(p["M"] == p["K"] == p["N"] and p["role"] == "output" for p in points)


def test_a_layer_that_happens_to_be_a_cube_keeps_its_roles() -> None:
    square = [p for p in gemm_points(["llama3_8b"], {"tokens": [4096]}) if p["layer"] == "q+o"]
    assert [p["role"] for p in square] == list(ROLES)


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
