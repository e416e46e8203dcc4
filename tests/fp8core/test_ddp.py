"""FP8 under DDP, and torchao's FSDP2 beside fp8core's. What each rank runs is in `ddp_checks.py`."""

from __future__ import annotations

from typing import Any

import ddp_checks
import pytest
import torch
from sharding import Setting
from torch import nn

from fp8core import convert_to_float8_training, convert_to_high_precision
from harness.machine import ranks


def test_ddp_equals_one_process_that_averages() -> None:
    """Bitwise on two ranks, where a sum has no order. Delayed scaling: the same amaxes on both ranks, those of all data."""
    settings = [
        Setting(recipe, sizes=(32, 64, 32), bias=True) for recipe in ("tensorwise", "rowwise", "delayed")
    ]
    for rank, results in enumerate(ranks.run(ddp_checks.ddp, 2, settings)):
        for setting, found in zip(settings, results, strict=True):
            oracle = ddp_checks.one_process(setting, 2)
            assert found["losses"] == oracle["losses"][rank], setting
            assert found["gradients"] == oracle["gradients"], setting
            assert found["amaxes"] == oracle["amaxes"], setting
            assert bool(found["amaxes"]) == (setting.recipe == "delayed")


def test_amaxes_of_all_microbatches_survive_the_broadcast_of_buffers() -> None:
    """Oracle: the largest input, by hand; where DDP broadcasts `pending`, the last rank's first microbatch is lost."""
    for found in ranks.run(ddp_checks.accumulated_both, 2):
        in_use, largest = found[True]
        assert in_use == largest
        in_use, largest = found[False]
        assert in_use < largest / 8


def test_conversion_keeps_what_ddp_was_told_to_ignore() -> None:
    """The amaxes' names follow the module that is wrapped, and go with the way back."""
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model._ddp_params_and_buffers_to_ignore = ["1.weight"]
    convert_to_float8_training(model, config="delayed")
    names = {name for name, _ in (*model.named_buffers(), *model.named_parameters())}
    assert set(model._ddp_params_and_buffers_to_ignore) & names == {
        "0.amaxes.pending",
        "1.amaxes.pending",
        "1.weight",
    }
    convert_to_high_precision(model)
    assert model._ddp_params_and_buffers_to_ignore == ["1.weight"]
    plain = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config="rowwise")
    assert not hasattr(plain, "_ddp_params_and_buffers_to_ignore")


def _whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def _block(model: Any) -> Any:
    model[0] = torch.compile(model[0], backend="eager")
    return model


def _layer(model: Any) -> Any:
    model[0][1] = torch.compile(model[0][1], backend="eager")
    return model


def _both(model: Any) -> Any:
    return _whole(_block(model))


@pytest.mark.parametrize("is_compiled_first", [True, False], ids=["compiled first", "converted first"])
@pytest.mark.parametrize("compiled", [_whole, _block, _layer, _both])
def test_ddp_ignores_pending_amaxes_of_compiled_modules(compiled: Any, is_compiled_first: bool) -> None:
    """Oracle: the names that DDP compares with its list, `named_buffers()` of the module that it is given."""
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    if is_compiled_first:
        model = compiled(model)
    convert_to_float8_training(model, config="delayed")
    if not is_compiled_first:
        model = compiled(model)
    buffers = [name for name, _ in model.named_buffers() if name.endswith("pending")]
    assert len(buffers) == 2
    assert set(buffers) <= set(model._ddp_params_and_buffers_to_ignore)


@pytest.mark.slow
def test_torchao_beside_fp8core() -> None:
    """The same losses and bytes. torchao makes an all-reduce for each weight and gather (2 x 2), or one if it is told to, after
    a first step that makes both; fp8core one in any case."""
    pytest.importorskip("torchao")
    found = ranks.run(ddp_checks.with_both, 2, (64, 128, 64), ("torchao", "fp8core"))[0]
    first = found["fp8core", False]
    for key, each in found.items():
        torch.testing.assert_close(
            torch.tensor(each["losses"]), torch.tensor(first["losses"]), rtol=1e-5, atol=0
        )
        assert each["gathered"] == first["gathered"], key
    assert first["gathered"] == [{"uint8": 2 * (64 * 128 * 2 // 2 + (128 + 64) // 2 * 4)}] * 3
    counts = {key: each["all_reduces"] for key, each in found.items()}
    assert counts["torchao", False] == [4, 4, 4]
    assert counts["torchao", True] == [5, 1, 1]
    assert counts["fp8core", False] == [1, 1, 1]
    assert counts["fp8core", True] == [2, 1, 1]  # the first step, and for the second one


@pytest.mark.slow
def test_torchao_fails_on_uneven_shards() -> None:
    """48 x 50 x 7 x 33 over two ranks, where fp8core is tested to change no bit (`test_fsdp.py`)."""
    pytest.importorskip("torchao")
    uneven = (48, 50, 7, 33)
    own = ranks.run(ddp_checks.with_both, 2, uneven, ("fp8core",))[0]
    assert len(set(own["fp8core", False]["losses"])) == 3
    with pytest.raises(ranks.RanksError, match=r"rank \d"):
        ranks.run(ddp_checks.with_both, 2, uneven, ("torchao",), timeout_s=30)
