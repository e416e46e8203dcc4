"""Blocks: MX scales and codes."""

from __future__ import annotations

import os

import pytest
import torch

from fp8core import E4M3FN, E5M2
from fp8core.cast import scale_and_cast
from fp8core.formats import Format

os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_mx_cast_equals_torchao(fmt: Format, mode: str) -> None:
    """Oracle: torchao.prototype.mx_formats.to_mx: scales and codes, bitwise, on rows of every size."""
    to_mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = (torch.randn(64, 128) * torch.logspace(-6, 6, 64)[:, None]).bfloat16().float()
    their_mode = getattr(to_mx.ScaleCalculationMode, mode.upper())
    theirs_scale, theirs = to_mx.to_mx(x, fmt.dtype, 32, their_mode)
    codes, scale = scale_and_cast(x, fmt, "1x32", dim=1, mx_mode=mode)
    assert torch.equal(scale.view(torch.uint8), theirs_scale.view(torch.uint8).reshape(scale.shape))
    assert torch.equal(codes.view(torch.uint8), theirs.view(torch.uint8))
