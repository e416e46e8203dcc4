"""A step as it is traced. Oracles: `harness.training.models.flops`, hand counts of bytes, the sizes of published models."""

from __future__ import annotations

import pytest
import torch
from models_to_advise import Chooses, NoLoss, Peeks

from harness.advise.trace import trace_module
from harness.store.errors import UsageError
from harness.training.models import MODELS

SMALL = [name for name, spec in MODELS.items() if spec.width <= 800 and name != "llama_moe"]


def test_what_cannot_be_traced_names_the_layer() -> None:
    with torch.device("meta"):
        module, x = Peeks(), torch.zeros(2, 64, 16)
    with pytest.raises(UsageError, match=r"Peeks cannot be traced: blocks\.1 failed") as refused:
        trace_module(module, (x,), "Peeks")
    assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="Chooses failed"):
        trace_module(Chooses(), (x,), "itself")
    with pytest.raises(UsageError, match="returned no loss"):
        trace_module(NoLoss(), (x,), "no loss")
    with pytest.raises(UsageError, match="layer failed"):
        trace_module(NoLoss(), (x[..., :8],), "wrong width")
