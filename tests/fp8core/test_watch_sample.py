"""What fp8core.watch samples. Oracle: counts of all elements, and of the rows, columns and blocks that a random sample reaches."""

from __future__ import annotations

import math

import pytest
import torch
from recipes import on_cpu
from torch import nn

import fp8core
from fp8core import convert_to_float8_training
from fp8core.cast_places import Places

CPU = torch.device("cpu")


def reached(cells: int, samples: int) -> float:
    """Cells of equal size that so many random places reach, on average, less what chance may take: 5 standard errors."""
    missed = math.exp(-samples / cells)
    return cells * (1 - missed) - 5 * math.sqrt(cells * missed) - 1


@pytest.mark.parametrize(
    ("shape", "samples"),
    [
        ((4096, 4096), 4096),
        ((1024, 1024), 1024),
        ((2048, 8192), 4096),
        ((8192, 2048), 4096),
        ((8, 512, 2048), 4096),
        ((64, 256, 512), 4096),
        ((1 << 16, 64), 4096),
        ((4095, 4097), 4096),
        ((1000, 777), 4096),
        ((3, 641, 1023), 4096),
        ((987 * 64, 512), 64 * 64),
        ((12345, 257), 100),
    ],
    ids=str,
)
def test_a_sample_reaches_rows_columns_and_blocks_as_a_random_one_does(
    shape: tuple[int, ...], samples: int
) -> None:
    places = Places(samples).of(torch.Size(shape), CPU)
    assert len(places) == samples
    assert len(places.unique()) == samples
    assert int(places.min()) >= 0
    assert int(places.max()) < math.prod(shape)
    *expert, row, column = torch.unravel_index(places, shape)
    first = expert[0] if expert else torch.zeros_like(row)
    experts = shape[0] if expert else 1
    rows, columns = shape[-2:]
    lines = first * rows + row
    assert len(lines.unique()) >= reached(experts * rows, samples)
    assert len(column.unique()) >= reached(columns, samples)
    for size in (128, 64, 32):
        down, across = -(-rows // size), -(-columns // size)
        if rows % size == columns % size == 0:
            blocks = (first * down + row // size) * across + column // size
            assert len(blocks.unique()) >= reached(experts * down * across, samples)
    for one in range(experts):  # each expert has its share of the columns, in each quarter
        mine = column[first == one]
        quarters = torch.bincount(mine * 4 // columns, minlength=4).double() / len(mine)
        assert float((quarters - 0.25).abs().max()) < 5 * math.sqrt(0.25 * 0.75 / len(mine))


def test_a_small_tensor_is_looked_at_as_a_whole() -> None:
    assert Places(64).of(torch.Size((8, 8)), CPU).tolist() == list(range(64))
    assert Places(100).of(torch.Size((8, 8)), CPU).tolist() == list(range(64))


def test_places_are_the_same_each_time_and_draw_no_random_number() -> None:
    before = torch.get_rng_state()
    first, second = (Places(512).of(torch.Size((300, 700)), CPU) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())


def test_a_diagonal_is_estimated_as_what_it_is() -> None:
    """An identity with noise that underflows: every sample of a fixed stride of 4097 lay on the diagonal."""
    size = 4096
    layer = nn.Linear(size, size, bias=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(size) + 1e-6 * torch.randn(size, size, generator=generator))
        scale = 448 / float(layer.weight.abs().max())
        codes = (layer.weight * scale).to(torch.float8_e4m3fn)
        exact = float(((codes.float() == 0) & (layer.weight != 0)).sum() / (layer.weight != 0).sum())
    model = convert_to_float8_training(nn.Sequential(layer), config=on_cpu("tensorwise"))
    with fp8core.watch(model, every=1) as watcher:
        model(torch.randn(16, size, generator=generator).requires_grad_()).sum().backward()
        watcher.step()
    record = next(r for r in watcher.latest if r.operand == "weight")
    assert record.underflow_share is not None
    assert 0.9 < exact < 1
    assert abs(record.underflow_share - exact) < 4 * math.sqrt(exact * (1 - exact) / record.sampled)
