"""What the casts cost in machine code for sm_90, read without a GPU, at 16384 x 4096 bfloat16 -> E4M3.

Oracle: an SM issues 4 warp instructions a cycle, so on an H200 (132 SMs, 1.755 GHz, 4.3 TB/s) a cast of 2 + 1 + 1 bytes
an element has 27 of them for each element, and half of that on the integer units: at most 12 with one scale and 24 with
two leave the memory the limit. About 40 KB an SM must be under way to keep it busy. `tight` is what was reached, plus at
most a tenth: it fails when a clamp, a second conversion or a division comes back. All figures are static, of the main loop
(`kernel_facts`).
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from kernel_facts import BF16, Facts, Launch, build, calls, facts, record

from fp8core.kernels import cast, encode, launch, quads

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="an interpreted kernel cannot be compiled")
LOADED = 64 * 1024


class Bar(NamedTuple):
    """Limits of one operator: instructions for each element (promised, reached) and scales in force at once."""

    promised: float
    tight: float
    scales: int = 1


BARS: dict[str, Bar] = {
    "cast": Bar(12, 4.1),
    "cast_both": Bar(12, 7.6),
    "cast_delayed": Bar(12, 6.1),
    "cast_delayed_both": Bar(12, 9.4),
    "cast_rowwise": Bar(12, 8.3),
    "cast_1x128": Bar(12, 8.5),
    "cast_128x128_both": Bar(12, 9.9),
    "cast_rowwise_both": Bar(24, 11.9, scales=2),
    "cast_1x128_both": Bar(24, 19.1, scales=2),
}
QUICK = ("cast_both", "cast_rowwise_both", "cast_1x128_both")


@cache
def read(name: str, dtype: torch.dtype = BF16) -> tuple[tuple[Launch, Facts], ...]:
    """Every candidate that the operator's launcher offers; of two kernels, the one that casts."""
    launches = record(name, calls(torch.empty(16384, 4096, dtype=dtype, device="meta"))[name])
    return tuple((each, facts(each)) for each in launches if "NATIVE" in dict(each.constants))


def float_choices(started: Launch) -> int:
    """Comparisons, minima, maxima and selections of floats: what a clamp consists of."""
    return len(re.findall(r"\bF(?:SETP|MNMX|SEL)\b", build(started).sass))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(n, dtype, marks=[] if n in QUICK and dtype == BF16 else pytest.mark.slow)
        for n in BARS
        for dtype in (BF16, torch.float32)
    ],
    ids=str,
)
def test_cast(name: str, dtype: torch.dtype) -> None:
    """All candidates: instructions, no spill, one conversion for each scale, enough under way. For float32 the same promises;
    there one candidate of `cast_delayed_both` spills 16 bytes a thread."""
    bar = BARS[name]
    for started, found in read(name, dtype):
        what = f"{name} {started} {found}"
        assert found.issued <= min(bar.promised, bar.tight), what
        assert found.stack <= 16 * (name == "cast_delayed_both" and dtype == torch.float32), what
        assert found.conversions == bar.scales, what
        assert found.ctas_per_sm >= 3 or found.loaded >= LOADED, what
        if dtype == BF16:
            assert found.ctas_per_sm >= 2, what
            elements_a_thread = math.prod(started.tile) / (32 * started.warps)
            assert float_choices(started) <= 8 + 0.1 * elements_a_thread, what


@triton.jit
def clamped(v, E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    v = tl.where(v > 448.0, 448.0, v)
    v = tl.where(v < -448.0, -448.0, v)
    return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@pytest.fixture
def with_clamp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The encoder as it was: a clamp before a conversion that saturates anyway."""
    modules = (encode, quads, cast)
    stale = [
        each for module in modules for each in vars(module).values() if isinstance(each, triton.JITFunction)
    ]
    monkeypatch.setattr(encode, "_encode_native", clamped)
    for function in stale:
        monkeypatch.setattr(function, "hash", None)  # Triton's digest of the source and of what it calls
    yield
    monkeypatch.undo()
    for function in stale:
        function.hash = None


@pytest.mark.usefixtures("with_clamp")
@pytest.mark.parametrize("name", ["cast", pytest.param("cast_both", marks=pytest.mark.slow)])
def test_a_clamp_fails_the_bar(name: str) -> None:
    """Control: what the test above must not let through."""
    x = torch.empty(16384, 4096, dtype=BF16, device="meta")
    started = record(name, calls(x)[name])[-1]
    build.cache_clear()
    assert facts(started).issued > BARS[name].tight
    assert float_choices(started) > 32
    build.cache_clear()
