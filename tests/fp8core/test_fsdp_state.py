"""Checkpoints of models whose weights are gathered in FP8: plain tensors, for any number of ranks and any precision.

Other systems failed to resume because their checkpoints held a tensor subclass that `weights_only=True` refuses
(pytorch/torchtitan, pull request 1414). What each rank runs is in `state_checks.py`.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import on_ranks
import pytest
import state_checks
import torch
from torch import nn


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Folder of a checkpoint of two ranks, and how their run went on."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    first, second = on_ranks.run(state_checks.save, 2, folder)
    assert first == second
    return folder, first


def test_states_pickles_and_optimizer_states_are_plain(saved: tuple[str, dict[str, Any]]) -> None:
    _, run = saved
    assert run["kinds"] == run["pickled"] == run["moments"] == ["Tensor"]


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_run_resumes_on_any_number_of_ranks(saved: tuple[str, dict[str, Any]], world: int) -> None:
    """Oracle: the run that went on; bitwise, with and without FP8 all-gather."""
    folder, run = saved
    for fp8 in (True, False):
        for found in on_ranks.run(state_checks.resume, world, folder, fp8):
            assert {key: run[key] for key in found} == found


def test_the_whole_state_loads_into_an_unconverted_bfloat16_model(saved: tuple[str, dict[str, Any]]) -> None:
    folder, run = saved
    state = torch.load(Path(folder) / "full.pt", weights_only=True)
    sizes = state_checks.SETTING.sizes
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))}).to(
        torch.bfloat16
    )
    model.load_state_dict(state)
    for p, weight in zip(model.parameters(), run["weights"], strict=True):
        assert torch.equal(p, torch.tensor(weight).bfloat16())
