"""Study `codes`. Oracle: ml_dtypes of the clipped input."""

from __future__ import annotations

from typing import Any

import codes
import ml_dtypes
import numpy as np
import pytest
import torch

from fp8core.cast import cast_saturating
from fp8core.formats import E4M3FN, E5M2
from harness.store.case import Case

FORMATS = {"e4m3fn": E4M3FN, "e5m2": E5M2}
THEIRS: dict[str, Any] = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def case(source: str = "bf16", dtype: str = "e4m3fn", inputs: str = "normal") -> Case:
    return Case.of("codes", {"source": source, "dtype": dtype, "inputs": inputs})


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", ["bf16", "fp16"])
def test_the_kinds_hold_every_pattern_once(source: str, dtype: str) -> None:
    kinds = [codes.patterns(source, FORMATS[dtype], kind) for kind in codes.INPUTS]
    bits = torch.cat(kinds).view(torch.int16).tolist()
    assert sorted(bits) == list(range(-(2**15), 2**15))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("source", codes.SOURCES)
@pytest.mark.parametrize("kind", ["normal", "subnormal", "overflow", "infinity"])
def test_the_reference_is_ml_dtypes_of_the_clipped_input(source: str, dtype: str, kind: str) -> None:
    """By way of the arm `saturating`, which is equal to the reference on each of them."""
    fmt = FORMATS[dtype]
    x = codes.patterns(source, fmt, kind)
    assert len(x)
    clipped = np.clip(x.double().numpy(), -fmt.max, fmt.max).astype(np.float32)
    wanted = clipped.astype(THEIRS[dtype]).view(np.uint8)
    np.testing.assert_array_equal(cast_saturating(x, fmt).view(torch.uint8).numpy(), wanted)
    numerics = codes.build(case(source, dtype, kind), "saturating", "cpu").check()
    assert numerics.ok
    assert numerics.values == {"mismatches": 0.0}


def test_what_torch_does_is_recorded_and_not_judged() -> None:
    """e5m2 overflows to Inf in a plain cast (docs/numerics.md, section 2), where the format's rule is to saturate."""
    numerics = codes.build(case(dtype="e5m2", inputs="overflow"), "plain", "cpu").check()
    assert numerics.ok
    assert numerics.values["mismatches"] == len(codes.patterns("bf16", E5M2, "overflow"))
