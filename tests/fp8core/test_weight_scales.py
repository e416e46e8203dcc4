"""Scales of sharded weights: when they are found, by whom, and what is said of them; that they are right is in test_fsdp.py.

What each rank runs is in `scale_checks.py`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import scale_checks
from parallel_models import several
from torch import nn

from fp8core import (
    Float8LinearConfig,
    audit,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from harness.machine import ranks

TASKS: dict[int, dict[str, tuple[Any, tuple[Any, ...]]]] = {
    2: {
        "changes": (scale_checks.all_reduces_after_changes, ()),
        "odd orders": (scale_checks.odd_orders, ()),
        "nan": (scale_checks.nan_on_one_rank, (["tensorwise", "delayed"],)),
        "proofs": (scale_checks.proofs, ()),
    },
    4: {"replicas": (scale_checks.replicas_do_not_ask, ()), "refusals": (scale_checks.refusals, ())},
    8: {"changes": (scale_checks.all_reduces_after_changes, ())},
}


@cache
def ran(world: int) -> list[dict[str, Any]]:
    return ranks.run(several, world, TASKS[world])


def each(world: int, task: str) -> list[Any]:
    """What a task returned, by rank."""
    return [rank[task] for rank in ran(world)]


@pytest.mark.parametrize("world", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_scales_are_found_anew_after_each_change_and_only_then(world: int) -> None:
    """On all ranks at once, or this would hang; 8 ranks share 7 rows."""
    wanted = {name: (calls, True) for name, (_, calls) in scale_checks.CHANGES.items()}
    assert each(world, "changes") == [wanted] * world


def test_odd_orders() -> None:
    """Optimizers that step in the backward pass cost one all-reduce a step, as scales of other weights hold meanwhile.
    Evaluation in inference mode leaves no trace."""
    for found in each(2, "odd orders"):
        assert found == {
            "in the backward pass": ([0, 0, 0, 1, 1, 1], True),
            "inference mode": True,
        }


def test_nan_on_one_rank_is_nan_on_all() -> None:
    """Oracle: one process, where a weight with one NaN or Inf becomes NaN everywhere."""
    for found in each(2, "nan"):
        assert found == [True] * 12


def test_replicas_do_not_ask_each_other() -> None:
    """Two weights, four bytes each, among the two ranks of a shard."""
    assert each(4, "replicas") == [[1, 8]] * 4


def test_mistakes_are_named_with_the_way_out() -> None:
    for found in each(4, "refusals"):
        assert "reshard_after_forward=2" in found["part of the ranks"]
        assert "convert, then fully_shard" in found["order"]
        assert "PrecisionSchedule" in found["switched by hand"]


def test_verify_says_how_each_weight_is_gathered() -> None:
    for proofs in each(2, "proofs"):
        fp8, high = proofs["tensorwise"], proofs["rowwise"]
        assert fp8["ok"], fp8["line"]
        assert "2 weights gathered in FP8" in fp8["line"]
        assert (fp8["layers"], list(fp8["gathered"]), fp8["warnings"]) == (["fp8"] * 2, ["uint8"], ())
        assert not high["ok"]
        assert "the all-gather is not in FP8: layers.0, layers.1: high precision" in high["line"]
        assert high["warnings"]
        assert list(high["gathered"]) == ["float32"]


def test_audit_says_how_each_weight_is_gathered() -> None:
    """Without any process group: before anything is sharded."""
    model = nn.ModuleDict({"embed": nn.Embedding(32, 16), "head": nn.Linear(16, 32), "up": nn.Linear(16, 64)})
    model["head"].weight = model["embed"].weight
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    found = {layer.fqn: layer.all_gather for layer in audit(model).layers}
    assert found == {
        "head": "high precision: its weight is shared with embed, which can't read codes",
        "up": "fp8",
    }
    assert "; all-gather: fp8" in str(audit(model))
    assert model["head"].weight is model["embed"].weight
    precompute_float8_dynamic_scale_for_fsdp(model)  # nothing is sharded: nothing to do
