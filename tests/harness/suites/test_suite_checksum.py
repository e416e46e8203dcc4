"""Oracle: exact integer products in int64, IEEE rounding by torch on values that fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8core.formats import native_pair
from harness.store.case import Case
from harness.suites.checksum import ARMS, LARGEST, build, digest, operands

E4M3 = native_pair()[0].dtype


def case(data: str, cube: int = 48, seed: int = 0) -> Case:
    return Case.of("checksum", {"cube": cube, "data": data}, seed)


@pytest.mark.parametrize("data", ["integers", "codes"])
@pytest.mark.parametrize("arm", ARMS)
def test_a_sound_device_repeats_its_bits(data: str, arm: str) -> None:
    work = build(case(data), arm, "cpu")
    numerics = work.check()
    assert numerics.ok, numerics.reason
    assert numerics.values == {"mismatches": 0.0}
    result = work.run()
    assert isinstance(result, Tensor)
    assert work.resolved["checksum"] == digest(result)
    assert digest() == "e3b0c44298fc1c14", "of no byte, as FIPS 180-4 has it"


def test_operands_are_the_same_everywhere() -> None:
    """Oracle: splitmix64 in Python's own integers."""
    mask = 2**64 - 1

    def drawn(place: int, stream: int) -> int:
        z = (place + ((stream + 1) << 40)) * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return (z ^ z >> 31) >> 32

    a, b = operands(case("integers", 16, seed=3))
    for stream, found in ((6, a), (7, b)):
        expected = [float(drawn(i, stream) % (2 * LARGEST + 1) - LARGEST) for i in range(256)]
        assert found.float().flatten().tolist() == expected
    codes, _ = operands(case("codes", 16))
    raw = torch.tensor([drawn(i, 0) % 256 for i in range(256)], dtype=torch.uint8)
    finite = raw.view(E4M3).float().isfinite()
    assert torch.equal(codes.view(torch.uint8).flatten()[finite], raw[finite])
    assert (codes.view(torch.uint8).flatten()[~finite] == 0).all()
