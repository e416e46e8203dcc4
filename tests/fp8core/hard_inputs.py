"""Inputs on which a wrong cast shows, and how codes are compared."""

from __future__ import annotations

import torch

from fp8core.formats import ELEMENT_FORMATS, Format


def values(fmt: Format) -> torch.Tensor:
    """float64, of all 256 codes: torch's, which `test_formats.py` holds to ml_dtypes'."""
    return torch.arange(256, dtype=torch.uint8).view(fmt.dtype).double()


def hard_inputs() -> dict[str, torch.Tensor]:
    """All bfloat16 and float16 patterns. In float32 for each format: every finite value, every midpoint of neighbours (ties)
    and the overflow threshold, each with both neighbours and both signs; besides, random bit patterns and special values.

    Every subnormal is among them, where pytorch#177870 found wrong bits on sm_100.
    """
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    points = [torch.tensor([0.0, 1e-45, 1e9, 3.4e38, torch.inf, torch.nan], dtype=torch.float64)]
    for fmt in ELEMENT_FORMATS:
        finite = values(fmt)[values(fmt).isfinite()].unique()
        points += [finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([fmt.overflow_threshold])]
    exact = torch.cat(points).float()
    exact, infinity = torch.cat([exact, -exact]), torch.tensor(torch.inf)
    random = torch.randint(-(2**31), 2**31, (2**17,), generator=torch.Generator().manual_seed(0))
    return {
        "bf16": patterns.view(torch.bfloat16),
        "fp16": patterns.view(torch.float16),
        "fp32": torch.cat(
            [
                exact,
                exact.nextafter(infinity),
                exact.nextafter(-infinity),
                random.to(torch.int32).view(torch.float32),
            ]
        ),
    }


def mismatches(got: torch.Tensor, want: torch.Tensor, fmt: Format) -> int:
    """Codes that differ, NaN compared as a class (its sign and payload are unspecified everywhere)."""
    nan = values(fmt).isnan()
    got, want = got.cpu().view(torch.uint8).long(), want.view(torch.uint8).long()
    return int(((got != want) & ~(nan[got] & nan[want])).sum())
