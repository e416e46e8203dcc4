"""verify on producers of codes. Oracles: fp64; planted wrong codes, transposes and sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from producer_block import DTYPES, Block

from fp8core import (
    producers,
    update_scales,
    verify,
)


class Codes(Block):
    """A sum, its norm, two projections, activation, projection: both producers hand codes only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total, h = self.norm.add(x, x * 0.5, self.gate, self.up)
        return total + self.down(self.act(self.gate(h), self.up(h), self.down))


def verdict_on_codes(dtype: torch.dtype, kernels: str = "always") -> Any:
    model = Codes("delayed", True, kernels, dtype)
    x = torch.randn(64, 32).to(dtype).requires_grad_()

    def step() -> None:
        model(x).float().square().mean().backward()
        update_scales(model)

    step()
    proof = verify(step, model, announce=False)
    assert "add" not in vars(model.norm)
    return proof


@DTYPES
@pytest.mark.parametrize("kernels", ["never", "always"])
def test_verify_compares_codes_of_producers(dtype: torch.dtype, kernels: str) -> None:
    """Oracle: the formulas in float64, by `fp8core.verify`; an honest producer is not accused."""
    proof = verdict_on_codes(dtype, kernels)
    assert proof.ok, proof.line


def _off_by_one(codes: torch.Tensor, codes_t: torch.Tensor) -> None:
    raw = codes.view(torch.uint8)
    raw.view(-1)[::100] ^= 1
    codes_t.view(torch.uint8).copy_(raw.t())


def _too_large(codes: torch.Tensor, codes_t: torch.Tensor) -> None:
    codes.copy_((codes.float() * 1.3).clamp(-448, 448).to(codes.dtype))
    codes_t.view(torch.uint8).copy_(codes.view(torch.uint8).t())


def _transposed_alone(_: torch.Tensor, codes_t: torch.Tensor) -> None:
    codes_t.view(torch.uint8).view(-1)[::100] ^= 1


@DTYPES
@pytest.mark.parametrize("fault", [_off_by_one, _too_large, _transposed_alone])
@pytest.mark.parametrize(
    ("operator", "first", "named"),
    [
        ("add_rms_norm_cast_delayed_both", 1, "gate: codes of RMSNorm"),
        ("swiglu_cast_delayed_both", 0, "down: codes of SwiGLU"),
    ],
)
def test_verify_catches_wrong_codes_of_a_producer(
    dtype: torch.dtype, fault: Any, operator: str, first: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: planted; the test above is the same without."""
    right = getattr(producers.ops, operator)

    def wrong(*args: Any) -> Any:
        results = right(*args)
        fault(*results[first : first + 2])
        return results

    monkeypatch.setattr(producers.ops, operator, wrong)
    proof = verdict_on_codes(dtype)
    assert not proof.ok
    assert any(problem.startswith(named) for problem in proof.problems), proof.line


def test_verify_catches_a_wrong_sum_before_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: planted; one element of the sum is off."""
    right = producers.ops.add_rms_norm_cast_delayed_both

    def wrong(*args: Any) -> Any:
        total, *rest = right(*args)
        total[3, 5] += 0.01
        return total, *rest

    monkeypatch.setattr(producers.ops, "add_rms_norm_cast_delayed_both", wrong)
    assert "gate: sum of RMSNorm.add: it is not x + delta" in verdict_on_codes(torch.float32).problems
