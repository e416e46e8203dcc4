"""What a machine is expected to reach. Oracle: the peak table."""

from __future__ import annotations

import pytest

from harness.advise.rates import (
    PUBLISHED,
    TYPICAL,
    rates_of,
    typical_ratio,
    typical_share,
)
from harness.machine.hardware import named


def test_published_before_typical() -> None:
    h200, l40s, mi300x, a100 = (rates_of(named(name)) for name in ("h200", "l40s", "mi300x", "a100"))
    assert h200.figures["fp8"].kind == PUBLISHED
    assert h200["fp8"] == pytest.approx(1453.4e12, rel=0.05)
    assert l40s.figures["fp8"].kind == TYPICAL
    assert l40s["bf16"] == pytest.approx(typical_share("bf16").value * 362.05e12)
    assert mi300x["fp8"] == pytest.approx(668.4e12 * typical_ratio().value), "one rate tells of the other"
    assert not a100.has_fp8
    network = rates_of(named("h200"), network_gb_s=40.0).figures["network"]
    assert (network.value, network.kind) == (40e9, PUBLISHED)
    assert network.spread < h200.figures["link"].spread, (
        "a rate that was named is surer than a share of the peak"
    )
