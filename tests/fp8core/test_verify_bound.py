"""The bound of verify on FP8 units: no right product is accused, and wrong ones are seen, from the codes of each row.

Oracle: `unit_models`, units bit by bit in integers. A right product is what a unit with 13 or 14 bits (Hopper) or 25
(Blackwell) makes of the codes, scaled and rounded; the wrong ones differ from it in one thing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
import unit_models
from torch import nn

from fp8core import E4M3FN, E5M2, convert_to_float8_training, quantize, verify
from fp8core.gemm import BACKENDS
from fp8core.proof import adders
from fp8core.proof.adders import Register, registers_of
from fp8core.proof.verify import calls
from fp8core.proof.verify.oracle import TiledOperand
from fp8core.proof.verify.products import Difference, Sketch, difference
from fp8core.recipe import Cast

EVERY = slice(None)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A product: its sizes, casts, and how its unit adds up."""

    M: int
    K: int
    N: int
    granularity: str
    fast: bool
    bits: int
    gradient: bool = False  # a in e5m2
    out: torch.dtype = torch.bfloat16

    @property
    def registers(self) -> tuple[Register, ...]:
        bits = (25,) if self.bits == unit_models.BLACKWELL else (13, 14)
        return tuple(Register(count, 0 if self.fast else 128) for count in bits)


def cells() -> list[Cell]:
    sizes = ((16, 64, 16), (48, 256, 32), (32, 1024, 48), (24, 2048, 40), (16, 4096, 48), (16, 8192, 32))
    every = [
        Cell(*size, granularity, fast, bits, gradient, out)
        for bits in (unit_models.HOPPER, unit_models.HOPPER_WIDE, unit_models.BLACKWELL)
        for size in sizes
        for granularity in ("tensorwise", "rowwise", "pow2", "blockwise")
        for fast in (True, False)
        for gradient, out in ((False, torch.bfloat16), (True, torch.float32))
        if not (granularity == "blockwise" and fast)
    ]
    return every[:: max(1, len(every) // 200)][:200] if len(every) > 200 else every


def spread(kind: str, lines: int, K: int, like: torch.Tensor) -> torch.Tensor:
    """Operands whose sums add up in different ways; `like` [K] is a direction that both operands can share."""
    x = torch.randn(lines, K)
    if kind == "mean":
        return x + 1
    if kind == "positive":
        return x.abs()
    if kind == "outliers":
        return torch.where(torch.rand_like(x) < 0.002, 1000 * x, x)
    if kind == "shared direction":
        return x + 2 * torch.randn(lines, 1) * like
    if kind == "ones":
        return torch.ones(lines, K)
    if kind == "times 1.1":
        return torch.full((lines, K), 1.1)
    return x


KINDS = ("gaussian", "mean", "positive", "outliers", "shared direction", "ones", "times 1.1")
ONE_SIGN = ("mean", "positive", "ones", "times 1.1")


@lru_cache(maxsize=64)
def operands(cell: Cell, kind: str) -> tuple[TiledOperand, TiledOperand]:
    torch.manual_seed(cell.K + 7 * cell.M + KINDS.index(kind))
    like = torch.randn(cell.K)
    a, b = spread(kind, cell.M, cell.K, like), spread(kind, cell.N, cell.K, like)
    name = {"pow2": "rowwise", "blockwise": "1x128", "mx": "1x32"}.get(cell.granularity, cell.granularity)
    power = cell.granularity in ("pow2", "blockwise")
    other = "128x128" if cell.granularity == "blockwise" else name
    formats = (E5M2 if cell.gradient else E4M3FN, E4M3FN)
    casts = [Cast(fmt, g, power_of_two=power) for fmt, g in zip(formats, (name, other), strict=True)]
    return TiledOperand.of(a, casts[0]), TiledOperand.of(b, casts[1])


@lru_cache(maxsize=64)
def product(
    cell: Cell, a: TiledOperand, b: TiledOperand, *, fast: bool | None = None, without: int = 0
) -> torch.Tensor:
    """float64 [M, N] before rounding; `without` so many of the last elements of K."""
    codes = [side.codes(EVERY, EVERY).float().to(side.dtype) for side in (a, b)]
    if without:
        codes[0][:, -without:] = 0
    promote = 0 if (cell.fast if fast is None else fast) else 128
    size = 128 if cell.granularity == "blockwise" else cell.K
    total = torch.zeros(cell.M, cell.N, dtype=torch.float64)
    for start in range(0, cell.K, size):
        along = slice(start, start + size)
        part = unit_models.unit_sum(codes[0][:, along], codes[1][:, along], cell.bits, promote)
        scales = [side.spread(side.scale_inv, EVERY, slice(start, start + 1)) for side in (a, b)]
        total += part * scales[0].expand(cell.M, 1) * scales[1].expand(cell.N, 1).t()
    return total


def judged(
    cell: Cell, a: TiledOperand, b: TiledOperand, exact: torch.Tensor, *, sketched: bool = False
) -> Difference:
    other = Sketch.of_input(b) if sketched else b
    result = exact.float().to(cell.out)
    return difference(a, other, result, (cell.out,), registers=cell.registers)


def alarms(some: list[Cell], kinds: tuple[str, ...] = KINDS) -> list[str]:
    found = []
    for cell in some:
        for kind in kinds:
            a, b = operands(cell, kind)
            right = product(cell, a, b)
            for sketched in (False, True):
                verdict = judged(cell, a, b, right, sketched=sketched)
                if verdict.fault or verdict.inconclusive:
                    found.append(f"{cell} {kind} {sketched}: {verdict.fault or verdict.inconclusive}")
    return found


def test_no_right_product_is_accused() -> None:
    """Some of the cells; every unit, size and granularity is among them."""
    assert alarms(cells()[::17]) == []


@pytest.mark.parametrize("kind", ["gaussian", "outliers"])
@pytest.mark.parametrize("fast", [True, False])
def test_products_of_mx_blocks_are_judged_by_their_own_scales(fast: bool, kind: str) -> None:
    """Oracle: the codes and scales of `quantize`, block by block of 32, here of sizes that lie binades apart."""
    cell = Cell(48, 256, 32, "mx", fast, unit_models.HOPPER)
    sizes = torch.tensor([1.0, 2**9, 2**-7, 2**4, 2**-3, 2**6, 1.0, 2**-9]).repeat_interleave(32)
    hp = [side.x * sizes for side in operands(cell, kind)]
    a, b = (TiledOperand.of(x, Cast(E4M3FN, "1x32")) for x in hp)
    codes, other = (quantize(x, E4M3FN, "1x32") for x in hp)
    right = torch.zeros(cell.M, cell.N, dtype=torch.float64)
    for block in range(cell.K // 32):
        along = slice(32 * block, 32 * block + 32)
        part = unit_models.unit_sum(
            codes.qdata[:, along], other.qdata[:, along], cell.bits, 0 if fast else 128
        )
        scales = [side.scale_inv[:, block : block + 1].double() for side in (codes, other)]
        right += part * scales[0] * scales[1].t()
    for sketched in (False, True):
        verdict = judged(cell, a, b, right, sketched=sketched)
        assert verdict.fault == verdict.inconclusive == ""
    wrong = right * torch.where(torch.arange(cell.M) == 3, 1.1, 1.0)[:, None]
    assert judged(cell, a, b, wrong).beyond == 1


@pytest.mark.slow
def test_no_right_product_is_accused_in_200_cells() -> None:
    assert len(cells()) >= 200
    assert alarms(cells()) == []


@pytest.mark.parametrize("kind", ["ones", "times 1.1"])
def test_a_fast_product_of_ones_is_right(kind: str) -> None:
    """K = 8192, tensorwise: 17.8 dB are what 13 bits leave of it, whatever factor stands before the sum."""
    cell = Cell(16, 8192, 32, "tensorwise", True, unit_models.HOPPER)
    a, b = operands(cell, kind)
    found = judged(cell, a, b, product(cell, a, b))
    assert found.agreement_db == pytest.approx(17.8, abs=0.3)
    assert not found.fault
    assert not found.inconclusive


def test_the_published_agreement_at_4096_is_right() -> None:
    """53.47 dB of a fast product in bfloat16 was published of an H200 (torch 2.11); 13 bits give as much of noise."""
    cell = Cell(64, 4096, 64, "tensorwise", True, unit_models.HOPPER)
    a, b = operands(cell, "gaussian")
    found = judged(cell, a, b, product(cell, a, b))
    assert found.agreement_db == pytest.approx(53.47, abs=0.5)
    assert not found.fault
    assert not found.inconclusive


HOPPER = [
    Cell(24, K, 40, granularity, fast, unit_models.HOPPER)
    for K, granularity in ((1024, "tensorwise"), (4096, "pow2"), (8192, "tensorwise"))
    for fast in (False, True)
]


def one_row(x: torch.Tensor) -> torch.Tensor:
    wrong = x.clone()
    wrong[5] *= 1.1
    return wrong


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row 10 % too large": one_row,
    "2 % too large": lambda x: 1.02 * x,
    "negated": lambda x: -x,
    "1.3 times too large": lambda x: 1.3 * x,
    "a row in its neighbour's place": lambda x: x.roll(1, 0),
    "a column too large": lambda x: torch.cat((x[:, :1] * 1.5, x[:, 1:]), 1),
    "zeros": lambda x: 0 * x,
}


@pytest.mark.parametrize(
    ("kind", "sketched"),
    [
        pytest.param(
            kind, sketched, marks=[pytest.mark.slow] * (sketched and kind not in ("gaussian", "ones"))
        )
        for kind in ("gaussian", "mean", "positive", "shared direction", "ones")
        for sketched in (False, True)
    ],
)
def test_a_wrong_product_is_seen(kind: str, sketched: bool) -> None:
    """Never verified, whatever the data; rows that are all equal may stand in each other's place."""
    passed = []
    for cell in HOPPER:
        a, b = operands(cell, kind)
        right = product(cell, a, b)
        for name, wrong in WRONG.items():
            found = judged(cell, a, b, wrong(right), sketched=sketched)
            if not (found.fault or found.inconclusive):
                passed.append(f"{name}: {cell}")
    assert [name for name in passed if kind != "ones" or not name.startswith("a row in its")] == []


@pytest.mark.parametrize("sketched", [False, True])
def test_fast_accumulation_where_promotion_is_asked_for(sketched: bool) -> None:
    """Sums of one sign show it from K = 1024 on, noise from 4096; below, rounding to bfloat16 hides it."""
    for K, kinds in ((1024, ONE_SIGN[:2]), (4096, ("gaussian", *ONE_SIGN)), (8192, ("gaussian", *ONE_SIGN))):
        cell = Cell(32, K, 64, "tensorwise", False, unit_models.HOPPER)
        for kind in kinds:
            a, b = operands(cell, kind)
            found = judged(cell, a, b, product(cell, a, b, fast=True), sketched=sketched)
            assert found.fault, (K, kind)


@pytest.mark.parametrize("sketched", [False, True])
def test_16_of_k_that_are_missing(sketched: bool) -> None:
    """On data with a mean they are 16 / K of each sum; seen as long as that is more than rounding."""
    for K, kinds in ((1024, ("mean", "positive", "gaussian")), (4096, ("mean", "positive", "gaussian"))):
        for granularity in ("tensorwise", "pow2"):
            cell = Cell(32, K, 64, granularity, False, unit_models.HOPPER)
            for kind in kinds:
                a, b = operands(cell, kind)
                found = judged(cell, a, b, product(cell, a, b, without=16), sketched=sketched)
                assert found.fault, (cell, kind)


def test_a_device_that_adds_in_another_way_is_not_judged() -> None:
    """Sums of one sign whose register is emptied every 1024 elements: neither of the two that are known, and no fault."""
    cell = Cell(32, 8192, 48, "tensorwise", True, unit_models.HOPPER)
    a, b = operands(cell, "positive")
    codes = [side.codes(EVERY, EVERY).float().to(side.dtype) for side in (a, b)]
    scale = float(a.scale_inv) * float(b.scale_inv)
    found = judged(cell, a, b, unit_models.unit_sum(*codes, cell.bits, 1024) * scale)
    assert not found.fault
    assert found.unexplained


def as_hopper(monkeypatch: pytest.MonkeyPatch, fast: bool | None = None) -> None:
    """Backend "torch" adds as Hopper does, and verify takes the device for one; `fast` whatever was asked for."""
    backend = copy.copy(BACKENDS["torch"])
    right = backend.matmul

    def matmul(a: Any, b: Any, scale_a: Any, scale_b: Any, out: torch.dtype, use_fast_accum: bool) -> Any:
        result = right(a, b, scale_a, scale_b, out, use_fast_accum)
        finite = [
            torch.where(side.float().isfinite(), side.float(), 0.0).to(side.dtype) for side in (a, b.t())
        ]
        promote = 0 if (use_fast_accum if fast is None else fast) else 128
        summed = (
            unit_models.unit_sum(*finite, unit_models.HOPPER, promote) * scale_a.double() * scale_b.double()
        )
        if out == torch.float32 and scale_a.dim():
            summed = summed.float().bfloat16()
        return torch.where(result.isfinite(), summed.float().to(out), result)

    vars(backend)["matmul"] = matmul
    monkeypatch.setattr("fp8core.gemm.KNOWN", {**BACKENDS, "torch": backend})
    registers = lambda _, fast: tuple(Register(bits, 0 if fast else 128) for bits in (13, 14))  # noqa: E731
    monkeypatch.setattr(calls, "registers_of", registers)


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_a_step_on_such_units(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step, with the operands of verify's own test: right ones are verified, also where all data are positive;
    fast accumulation in all three products, which the recipe has in one, is not."""
    model = convert_to_float8_training(
        nn.Sequential(nn.Linear(256, 16, bias=False).bfloat16()), config=recipe
    )
    with torch.no_grad():
        model[0].weight.abs_()
    x = torch.rand(4096, 256).bfloat16().requires_grad_()

    def step() -> None:
        model(x[:32]).sum().backward()
        (model(x) * torch.rand(4096, 16)).sum().backward()

    as_hopper(monkeypatch)
    right = verify(step, model, announce=False)
    assert right.ok, right.line
    as_hopper(monkeypatch, fast=True)
    wrong = verify(step, model, announce=False)
    assert any(problem.startswith("0: grad_weight") for problem in wrong.problems), wrong.line


def test_registers_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, of compute capabilities; a CPU adds in float32."""
    assert registers_of(torch.device("cpu"), fast=True) == ()
    for capability, bits in (((8, 9), (13, 14)), ((9, 0), (13, 14)), ((10, 0), (25,)), ((12, 0), (25,))):
        monkeypatch.setattr(adders.torch.cuda, "get_device_capability", lambda _, c=capability: c)
        for fast in (False, True):
            want = tuple(Register(count, 0 if fast else 128) for count in bits)
            assert registers_of(torch.device("cuda"), fast) == want
