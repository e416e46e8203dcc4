"""Numbers and cases as text. Oracles: the value itself, and the defaults of the suites that train."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.store import text


@given(st.floats(min_value=1e-12, max_value=1e15), st.integers(min_value=1, max_value=6))
def test_numbers_keep_their_digits(value, digits):
    """Property: what is shown lies within half a unit of the last digit that was asked for."""
    shown = float(text.number(value, digits).replace(",", ""))
    assert abs(shown - value) <= 0.5 * 10.0 ** (np.floor(np.log10(value)) + 1 - digits) * (1 + 1e-9)


NANO = {
    "accumulation": 1, "batch": 8, "checkpointing": "none", "compute": "fp32", "data": "stdlib", "layers": 0, "model": "nano",
    "profile": True, "profile_end": 3, "profile_start": 2, "schedule": "", "seq": 64,
}  # fmt: skip
OWN = '{"_target_":"my.module.build","batch":"my.module.batch","width":512}'


@pytest.mark.parametrize(
    ("changes", "without", "label"),
    [
        ({}, (), "nano fp32 stdlib batch=8 profile=true seq=64"),
        ({"layers": 4, "checkpointing": "full"}, ("seq",), "nano fp32 stdlib batch=8 checkpointing=full layers=4 profile=true"),
        ({"lr": 1e-3}, set(NANO), "lr=0.001"),
        ({"schedule": "warmup_bf16:10"}, set(NANO) - {"schedule"}, "schedule=warmup_bf16:10"),
        ({"model": OWN}, set(NANO) - {"model"}, "my.module.build width=512"),
        ({"model": "{not json"}, set(NANO) - {"model"}, "{not json"),
    ],
)  # fmt: skip
def test_a_case_is_named_by_what_tells_it_apart(changes, without, label):
    assert text.case_label({**NANO, **changes}, without) == label


def test_what_goes_without_saying_is_what_the_suites_do_when_not_asked():
    from harness.suites import divergence, train

    assert set(text.USUAL) <= {*divergence.AXES, *train.AXES}
    for suite in (divergence, train):
        for name in set(text.USUAL) & set(suite.AXES):
            axis = suite.AXES[name]
            assert text.USUAL[name] == (axis.choices[0] if axis.choices else axis.default)
