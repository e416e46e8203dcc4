"""philox: Random123's published vectors; addresses that share no draw."""

from __future__ import annotations

import pytest
import torch

from fp8core import philox


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_published_words(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]) -> None:
    """Oracle: Random123's `kat_vectors`, its three lines of philox4x32 10."""
    a, b, c, d = map(torch.tensor, counter)
    first, second = map(torch.tensor, key)
    assert tuple(int(word) for word in philox.words((a, b, c, d), (first, second))) == want


def test_a_draw_is_the_upper_bits_of_the_word_at_its_address() -> None:
    """Oracle: Random123's first vector (all zero), word by word; the layout of the docstring, which stored runs repeat by."""
    words = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], dtype=torch.float64)
    want = ((words / 2**11).floor() + 0.5) / 2**21
    assert torch.equal(philox.uniform((2, 2), (0, 0, 0, 0)).double().flatten(), want)
    more = philox.uniform((3, 4), (0, 0, 0, 0)).flatten()
    assert torch.equal(more[::3].double(), want)  # block 0 of 3
    assert philox.uniform((0, 3), (1, 2, 3, 4)).shape == (0, 3)
    block, step, layer, role, low, high = map(torch.tensor, (0, 9, 8, 7, 6, 5))
    address = philox.words((block, step, layer, role), (low, high))
    draws = philox.uniform((4,), (5 * 2**32 + 6, 8, 9, 7))
    assert torch.equal(torch.stack(address) >> 11, (draws * 2**21).long())


def test_numbers_and_tensors_of_a_key_draw_alike_and_each_part_counts() -> None:
    """Oracle: 2**21 values; two addresses that share a stream would agree everywhere, independent ones nearly nowhere."""
    base = (5, 6, 7, 8)
    draws = philox.uniform((64, 64), base)
    assert torch.equal(draws, philox.uniform((64, 64), torch.tensor(base)))
    others = [(5 + 2**32, 6, 7, 8), (-5, 6, 7, 8)]
    others += [tuple(value + (place == part) for place, value in enumerate(base)) for part in range(4)]
    others += [(5, 7, 6, 8), (5, 6, 8, 7)]
    for other in others:
        assert (philox.uniform((64, 64), other) == draws).float().mean() < 0.01
    with pytest.raises(ValueError, match="seed, layer, step, role"):
        philox.uniform((4,), (1, 2, 3))


def test_the_draws_are_uniform() -> None:
    """Oracle: the uniform distribution. Power: 2**22 draws in 64 equal bins; chi-square with 63 degrees of freedom exceeds 150 by
    chance in less than 1e-8, and reaches it in nearly every run where a share of 0.5 % of the draws went to a wrong bin."""
    draws = philox.uniform((2**22,), (1, 2, 3, 4))
    count = torch.histc(draws, 64, 0, 1)
    expected = 2**22 / 64
    assert ((count - expected).square() / expected).sum() < 150
    assert draws.min() > 0
    assert draws.max() < 1
    pairs = (draws[: 2**21] - 0.5) * (draws[2**21 :] - 0.5)  # words 0 with 2, and 1 with 3, of a block
    assert abs(pairs.double().mean()) < 5 / 12 / 2**10.5
