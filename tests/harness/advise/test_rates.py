"""What a machine is expected to reach. Oracles: the peak table, invented ceilings, arithmetic."""

from __future__ import annotations

import pytest

from harness.advise.rates import (
    FIGURES,
    LARGE,
    MEASURED,
    PUBLISHED,
    TYPICAL,
    rates_of,
    typical_ratio,
    typical_share,
)
from harness.machine.ceilings import Ceilings, Product
from harness.machine.hardware import DEVICES, named


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.key)
def test_every_gpu_has_every_figure_with_a_source(device: object) -> None:
    rates = rates_of(device)
    expected = set(FIGURES) - (set() if "fp8" in device.tflops else {"fp8"})
    assert set(rates.figures) == expected
    assert rates.has_fp8 == ("fp8" in expected)
    for figure in rates.figures.values():
        assert figure.value > 0
        assert 0 < figure.spread < 0.5
        assert figure.source
        assert figure.kind in (MEASURED, PUBLISHED, TYPICAL)


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


def test_a_product_of_a_relative_is_not_the_gpu_s_own() -> None:
    """Nobody published a bf16 product of the H200: the H100's stands in, wider, and counts once among GPUs."""
    h100, h200 = (rates_of(named(name)) for name in ("h100", "h200"))
    assert h200.figures["bf16"].kind == TYPICAL
    assert "H100" in h200.figures["bf16"].source
    assert h200["bf16"] == h100["bf16"], "one silicon, one correction"
    assert h200.figures["bf16"].spread > h100.figures["bf16"].spread
    own = [r for device in DEVICES for r in device.reached if r.rate == "bf16" and not r.of]
    assert f"median of {len(own)} " in typical_share("bf16").source
    assert all(any(d.key == r.of for d in DEVICES) for d in DEVICES for r in d.reached if r.of)


def test_measured_before_all() -> None:
    products = (
        Product("bf16_eager", "output", 8192, 8192, 8192, 2 * 8192**3 / 700e12, "r1"),
        Product("tensorwise_eager", "output", 8192, 8192, 8192, 2 * 8192**3 / 1200e12, "r1"),
    )
    moves = {"copy": ((2.0**20, 1e12), (LARGE, 4.1e12)), "transpose": ((LARGE, 2.05e12),)}
    rates = rates_of(named("h200"), Ceilings(products, moves, 3e-6))
    assert rates["bandwidth"] == pytest.approx(4.1e12)
    assert rates["transposed"] == pytest.approx(0.5)
    assert rates["launch"] == pytest.approx(3e-6)
    assert 700e12 < rates["bf16"] < 730e12, "the result's write is taken out"
    assert {rates.figures[n].kind for n in ("bf16", "fp8", "bandwidth", "transposed", "launch")} == {MEASURED}
    alone = rates_of(named("h200")).figures["strided"]
    assert rates["strided"] == alone.value, "an operator alone says nothing of what a compiler fuses"
    assert rates.figures["strided"].spread > alone.spread
    assert rates.products == products
    assert rates.figures["fp8"].spread < rates_of(named("h200")).figures["fp8"].spread
