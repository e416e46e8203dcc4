"""An optimizer that does not train the weights that a conversion made anew is named. Oracle: which parameters it holds."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fp8core import Float8LinearConfig, NotTrainedWarning, audit, convert_to_float8_training

GATHERED = Float8LinearConfig(enable_fsdp_float8_all_gather=True)


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    model(torch.randn(16, 32)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))


def test_an_optimizer_made_before_the_conversion_is_warned_of_at_its_first_step() -> None:
    """Weights stay what they were, and the warning says so, once."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model = convert_to_float8_training(model, config=GATHERED)
    before = model[0].weight.detach().hp.clone()
    with pytest.warns(NotTrainedWarning, match="weights of 2 FP8 layers"):
        step(model, optimizer)
    assert torch.equal(model[0].weight.detach().hp, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer)


@pytest.mark.parametrize("gathered", [False, True])
def test_an_optimizer_that_trains_them_is_not(gathered: bool) -> None:
    """Made after the conversion; or before one that leaves parameters as they are; or one of two."""
    model = model_of()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    model = convert_to_float8_training(model, config=GATHERED if gathered else None)
    some = torch.optim.SGD(model[0].parameters(), lr=1.0)
    rest = torch.optim.SGD([*model[1].parameters(), *model[2].parameters()], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, some, rest)
        if not gathered:
            step(model, early)


def test_audit_names_what_no_optimizer_holds() -> None:
    model = model_of()
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    model = convert_to_float8_training(model, config=GATHERED)
    report = audit(model, optimizer=early)
    assert report.not_trained == ("0.weight", "2.weight")
    assert "2 parameters of FP8 layers that no optimizer trains (0.weight, 2.weight)" in str(report)
    halves = [torch.optim.SGD(model[i].parameters(), lr=1.0) for i in (0, 2)]
    assert audit(model, optimizer=halves).not_trained == ()
    assert audit(model, optimizer=halves[0]).not_trained == ("2.weight", "2.bias")
    assert audit(model).not_trained is None
