"""A step's time. Oracles: the closed form 6 MNK / P + b (MK + KN + MN) / BW of a linear, and sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from advise_fixtures import model, round_h200

from harness.advise.casts import CastCost, RecipeCost
from harness.advise.model import split
from harness.advise.plan import Plan
from harness.advise.trace import trace
from harness.store.errors import UsageError
from harness.training.models import resolve

RATES = round_h200()


def flat(recipe: RecipeCost, b: float) -> RecipeCost:
    return replace(recipe, casts={t: CastCost(b, kernels=0) for t in recipe.casts})


RATES = round_h200()
ONE = replace(model(("x", 16384, 16384)), parameters=500_000_000, blocks=10)
PLAN = Plan(dp=8, update_bytes=0.0, copied=False)
HOPS = 8.4e-6 + 7 * 3.4e-6  # a ring of eight: its start and seven steps
GATHER = 1e9 * 7 / 8 / RATES["link"] + 11 * HOPS


def test_what_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"a layer 'blocks\.0\.router', whose split is not known"):
        split(model(("blocks.0.router", 64, 8)), 2)
    with pytest.raises(UsageError, match="tp=3 does not divide q, whose 64 features"):
        split(model(("q", 64, 64)), 3)
    with pytest.raises(UsageError, match="whose 50257 features"):
        split(trace(resolve("gpt2"), 1, 64), 2)
