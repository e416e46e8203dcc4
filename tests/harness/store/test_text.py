"""Numbers and cases as text. Oracles: the value itself, and the defaults of the suites that train."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from harness.store import text


@given(st.floats(min_value=1e-12, max_value=1e15), st.integers(min_value=1, max_value=6))
def test_numbers_keep_their_digits(value, digits):
    """Property: what is shown lies within half a unit of the last digit that was asked for."""
    shown = float(text.number(value, digits).replace(",", ""))
    assert abs(shown - value) <= 0.5 * 10.0 ** (np.floor(np.log10(value)) + 1 - digits) * (1 + 1e-9)


OWN = '{"_target_":"my.module.build","batch":"my.module.batch","width":512}'
