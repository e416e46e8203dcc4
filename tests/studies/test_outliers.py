"""Oracle: a table measured with numpy for the design of this project; the bounds are the noise of both sides.

It holds SQNR of the whole and of the bulk (dB) and underflow (%) of e4m3 x e4m3, M = N = 256, K = 4096, outliers in A
one element in a thousand. It names no number of seeds and is taken as one draw: a mean of 3 seeds here lies within
3 * sd * sqrt(1/3 + 1) of it, or within the 0.2 dB to which recipes are told apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import outliers
import pytest
import torch

from fp8core.formats import E4M3FN
from fp8core.recipe import RECIPES, Cast, Gemm
from harness.store.case import Case

AXES: dict[str, Any] = {"data": "randn", "role": "output", "M": 128, "K": 1024, "N": 64}
SEEDS = range(3)


def figures(recipe: str, seed: int = 0, **axes: Any) -> dict[str, float]:
    case = Case.of("outliers", AXES | axes, seed)
    assert outliers.unsupported(case, recipe, "cpu") is None
    numerics = outliers.build(case, recipe, "cpu").check()
    assert numerics.ok, numerics.reason
    return dict(numerics.values)


def with_casts(monkeypatch: pytest.MonkeyPatch, a: Cast, b: Cast) -> str:
    """A recipe of these casts, in the table."""
    recipe = replace(RECIPES["tensorwise"], name="own", output=Gemm(a, b))
    monkeypatch.setitem(RECIPES, "own", recipe)
    return "own"


# Granularity of A and data -> (whole, bulk, underflow) of the table, and their sd over six seeds, measured here. With one
# scale for all of A, everything hangs on its single largest value. Block scales have no underflow at 1e2 in the table.
TABLE = {
    ("tensorwise", "outliers_1e2"): ((28.46, 28.51, 0.06), (0.04, 0.04, 0.006)),
    ("tensorwise", "outliers_1e4"): ((28.50, 25.93, 5.8), (0.09, 0.56, 0.65)),
    ("tensorwise", "outliers_1e5"): ((28.52, 7.65, 52.6), (0.07, 0.95, 5.0)),
    ("rowwise", "outliers_1e2"): ((29.93, 28.51, None), (0.09, 0.03, 0.0)),
    ("rowwise", "outliers_1e4"): ((30.10, 28.03, 2.5), (0.09, 0.05, 0.06)),
    ("rowwise", "outliers_1e5"): ((30.09, 14.08, 24.2), (0.06, 0.20, 0.55)),
    ("1x128", "outliers_1e2"): ((31.12, 28.61, None), (0.04, 0.05, 0.0)),
    ("1x128", "outliers_1e4"): ((31.47, 28.57, 0.17), (0.06, 0.05, 0.008)),
    ("1x128", "outliers_1e5"): ((31.46, 24.79, 1.7), (0.06, 0.15, 0.06)),
    ("1x32", "outliers_1e2"): ((28.52, 28.44, None), (0.14, 0.05, 0.0)),
    ("1x32", "outliers_1e4"): ((28.54, 28.42, 0.06), (0.09, 0.05, 0.003)),
    ("1x32", "outliers_1e5"): ((28.55, 26.06, 0.6), (0.08, 0.13, 0.02)),
}
OTHER = {"1x128": "128x128"}  # the granularity of B where it isn't A's


@pytest.mark.parametrize(
    ("granularity", "data"),
    [pytest.param(*each, marks=[pytest.mark.slow] * (each[1] != "outliers_1e4")) for each in TABLE],
)
def test_the_table_of_outliers(monkeypatch: pytest.MonkeyPatch, granularity: Any, data: str) -> None:
    (whole, bulk, underflow), sd = TABLE[granularity, data]
    other: Any = OTHER.get(granularity, granularity)
    recipe = with_casts(monkeypatch, Cast(E4M3FN, granularity), Cast(E4M3FN, other))
    found = [figures(recipe, seed, data=data, M=256, K=4096, N=128) for seed in SEEDS]
    mean = {name: sum(f[name] for f in found) / len(found) for name in found[0]}
    noise = 3 * math.sqrt(1 / 3 + 1)
    assert abs(mean["sqnr_db"] - whole) <= max(0.2, noise * sd[0])
    assert abs(mean["bulk_sqnr_db"] - bulk) <= max(0.2, noise * sd[1])
    if underflow is not None:
        printed = 0.5 * 10 ** -len(str(underflow).partition(".")[2])  # the table's own rounding
        assert abs(100 * mean["underflow_frac"] - underflow) <= printed + noise * sd[2]
    assert mean["saturated_frac"] == 0


def test_operands_have_the_outliers_they_say() -> None:
    a, b, bulk = outliers.operands(Case.of("outliers", AXES | {"data": "outliers_1e3"}), "cpu")
    plain, same_b, everything = outliers.operands(Case.of("outliers", AXES), "cpu")
    assert torch.equal(b, same_b)
    assert bool(everything.all())
    assert torch.equal(a[bulk], plain[bulk])
    assert torch.equal(a[~bulk], (plain * 1e3)[~bulk])
    assert 80 < int((~bulk).sum()) < 190  # binomial: 131 expected, sd 11.4
