"""What the casts cost in machine code for sm_90, read without a GPU, at 16384 x 4096 bfloat16 -> E4M3.

Oracle: an SM issues 4 warp instructions a cycle, so on an H200 (132 SMs, 1.755 GHz, 4.3 TB/s) a cast of 2 + 1 + 1 bytes
an element has 27 of them for each element, and half of that on the integer units: at most 12 with one scale and 24 with
two leave the memory the limit. About 40 KB an SM must be under way to keep it busy. `tight` is what was reached, plus
a tenth: it fails when a clamp, a second conversion or a division comes back.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from metered.record import record

from fp8core.kernels import cast, encode, launch, launchers
from harness.advise.meter.build import Built, build
from harness.advise.meter.facts import Facts, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.advise.meter.launches import Launch

pytestmark = pytest.mark.skipif(launch.INTERPRETED, reason="an interpreted kernel cannot be compiled")
M, K = 16384, 4096
E4M3, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
IN_FLIGHT = 64 * 1024


class Bar(NamedTuple):
    """Limits of one operator: instructions for each element (promised, reached) and scales in force at once."""

    promised: float
    tight: float
    scales: int = 1


BARS: dict[str, Bar] = {
    "cast": Bar(12, 4.3),
    "cast_both": Bar(12, 7.6),
    "cast_delayed": Bar(12, 6.5),
    "cast_delayed_both": Bar(12, 9.5),
    "cast_rowwise": Bar(12, 8.3),
    "cast_1x128": Bar(12, 8.5),
    "cast_128x128_both": Bar(12, 10.0),
    "cast_rowwise_both": Bar(24, 11.9, scales=2),
    "cast_1x128_both": Bar(24, 19.1, scales=2),
}
# Producers that write codes both ways. They compute more for each byte, so their bar is what was reached and what a second
# conversion, a spill or Triton's own sigmoid would break; `in_flight` of RMSNorm is short of the casts' 64 KB.
FUSED: dict[str, tuple[float, int]] = {
    "rms_norm_cast_delayed_both": (21.0, 32 * 1024),
    "add_rms_norm_cast_delayed_both": (27.0, IN_FLIGHT),
    "swiglu_cast_delayed_both": (22.5, IN_FLIGHT),
}
FAST = ("cast_both", "cast_rowwise_both", "cast_1x128_both")


def arguments(name: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Arguments of the operator; grouped casts scale by powers of two, as in the recipes."""
    x = torch.empty(M, K, dtype=dtype, device="meta")
    if name in FUSED:
        inputs = (x, x) if "swiglu" in name or "add" in name else (x,)
        weight = () if "swiglu" in name else (x[0], 1e-5)
        return *inputs, *weight, torch.ones(()), E4M3, False, 0
    if name.startswith("cast_delayed"):
        return x, torch.ones(()), E4M3, False, 0
    return (x, torch.ones(()), E4M3, False) if name in ("cast", "cast_both") else (x, E4M3, True)


@cache
def metered(name: str, dtype: torch.dtype = BF16) -> tuple[tuple[Launch, Built, Facts], ...]:
    """Every candidate that the operator's launcher offers; of two kernels, the one that casts."""
    launches = record(lambda: launchers.LAUNCHERS[name](*arguments(name, dtype)))
    return tuple(meter(each) for each in launches if "NATIVE" in each.constants)


def meter(started: Launch) -> tuple[Launch, Built, Facts]:
    sized = replace(started, elements=M * K)
    built = build(sized.load(), sized.signature, sized.constants, sized.aligned, sized.options, 90)
    return sized, built, read(built, sized)


def float_choices(built: Built) -> int:
    """Comparisons, minima, maxima and selections of floats: what a clamp consists of."""
    return len(re.findall(r"\bF(?:SETP|MNMX|SEL)\b", built.sass))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in BARS])
def test_cast(name: str) -> None:
    """All candidates: instructions, no spill, one conversion for each scale, enough under way; nothing in doubt."""
    bar = BARS[name]
    for started, built, facts in metered(name):
        what = f"{name} {started.constants} {started.options}"
        assert not facts.doubts, what
        assert facts.per_element <= min(bar.promised, bar.tight), f"{what}: {facts.per_element:.2f}"
        assert facts.stack == 0, what
        assert facts.conversions == pytest.approx(bar.scales, rel=0.02), (
            what
        )  # the last program has less to do
        assert facts.ctas_per_sm >= 3 or facts.in_flight >= IN_FLIGHT, f"{what}: {facts.in_flight}"
        elements_a_thread = M * K / (facts.programs * 32 * started.options["num_warps"])
        assert float_choices(built) <= 8 + 0.1 * elements_a_thread or float_choices(built) <= 8, what


@pytest.mark.slow
@pytest.mark.parametrize("name", BARS)
def test_cast_of_float32(name: str) -> None:
    """The same promises for float32: nothing spills, and the integer units have no more to do."""
    for started, _, facts in metered(name, FP32):
        what = f"{name} {started.constants} {started.options}"
        assert facts.per_element <= BARS[name].promised, f"{what}: {facts.per_element:.2f}"
        assert facts.stack == 0, what
        assert facts.ctas_per_sm >= 3 or facts.in_flight >= IN_FLIGHT, f"{what}: {facts.in_flight}"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n.startswith("swiglu") else pytest.mark.slow) for n in FUSED]
)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP32, marks=pytest.mark.slow)], ids=str)
def test_producer(name: str, dtype: torch.dtype) -> None:
    """One conversion an element, no spill, two programs an SM at least, and no more instructions than were reached."""
    instructions, in_flight = FUSED[name]
    for started, _, facts in metered(name, dtype):
        what = f"{name} {started.constants} {started.options}"
        assert not facts.doubts, what
        assert facts.per_element <= instructions, f"{what}: {facts.per_element:.2f}"
        assert facts.stack == 0, what
        assert 0.95 <= facts.conversions <= 1.02, f"{what}: {facts.conversions:.2f}"
        assert facts.ctas_per_sm >= 2, what
        assert facts.in_flight >= in_flight, f"{what}: {facts.in_flight}"


@triton.jit
def clamped(v, E5M2: tl.constexpr):  # type: ignore[no-untyped-def]
    v = tl.where(v > 448.0, 448.0, v)
    v = tl.where(v < -448.0, -448.0, v)
    return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@pytest.fixture
def with_clamp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The encoder as it was: a clamp before a conversion that saturates anyway."""
    stale = (encode.encode, cast._cast_kernel, cast._cast_both_kernel)
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
    started = record(lambda: launchers.LAUNCHERS[name](*arguments(name, BF16)))[0]
    _, built, facts = meter(started)
    assert facts.per_element > BARS[name].tight
    assert float_choices(built) > 32
