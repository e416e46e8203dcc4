"""Arguments that the public functions refuse, by the class of the error and the value or way out that it names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fp8core import (
    E4M3FN,
    E5M2,
    RECIPES,
    AmaxHistory,
    Cast,
    Float8Linear,
    Float8Tensor,
    Gemm,
    RMSNorm,
    SwiGLU,
    cast_input,
    count_matmuls,
    grouped_mm,
    quantize,
    scaled_mm,
    verify,
    watch,
)
from fp8core.cast import cast_saturating
from fp8core.config import CastConfig, Float8LinearConfig, ScalingType, as_recipe
from fp8core.formats import E8M0FNU, as_element_format
from fp8core.gemm.layout import Operand
from fp8core.kernels import ops
from fp8core.scaling import amax, compute_scale, mx_scale_code

Refused = tuple[type[Exception], str, Callable[[], object]]

X, ONE = torch.randn(16, 32), torch.ones(())
LAYER, ROW = Float8Linear(32, 48), Float8Linear(32, 48, config="rowwise")
NORM, ACT = RMSNorm(32), SwiGLU()
A, B = quantize(torch.randn(32, 64), E4M3FN), quantize(torch.randn(48, 64), E4M3FN).t()
BLOCKS = quantize(torch.randn(64, 256), E4M3FN, "1x128", dim=1)
SQUARES = quantize(torch.randn(48, 256), E4M3FN, "128x128").t()
NOT_CAST = CastConfig(ScalingType.DISABLED)
ROWWISE = RECIPES["rowwise"]
NEVER: Any = partial(pytest.fail, "it ran")


def grouped(**changed: object) -> Callable[[], object]:
    fine = {"x": torch.zeros(32, 32), "weight": torch.zeros(2, 16, 32), "offsets": int32(16, 32)}
    return lambda: grouped_mm(**fine | changed)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def watched(**changed: Any) -> Callable[[], object]:
    return lambda: watch(**{"model": LAYER} | changed)


REFUSED: list[Refused] = [
    # layers and shared inputs
    (ValueError, "shape", lambda: LAYER(torch.randn(16, 31))),
    (TypeError, "float64", lambda: LAYER(X.double())),
    (TypeError, "ReLU", lambda: Float8Linear.from_float(nn.ReLU())),
    (ValueError, "nearest: delayed", lambda: Float8Linear(32, 48, config="delay")),
    (ValueError, "e4m3_tensorwise", lambda: LAYER(quantize(X, E5M2))),
    (ValueError, "along the tokens", lambda: ROW(quantize(X, E4M3FN, "rowwise", dim=1))),
    (ValueError, "another recipe", lambda: ROW(cast_input(X, LAYER))),
    (ValueError, "differently", lambda: cast_input(X, LAYER, ROW)),
    (ValueError, "got none", lambda: cast_input(X)),
    (TypeError, "float64", lambda: cast_input(X.double(), LAYER)),
    (TypeError, "expected Tensor", lambda: cast_input(LAYER, X)),
    (TypeError, "expected Float8Linear", lambda: cast_input(X, nn.Linear(32, 48))),
    (ValueError, "shape", lambda: cast_input(torch.randn(8, 64), LAYER)),  # as many elements
    # producers
    *((ValueError, "dim", lambda dim=dim: RMSNorm(dim)) for dim in (0, -4)),
    (TypeError, "dim", lambda: RMSNorm((32, 32))),
    *((ValueError, "eps", lambda eps=eps: RMSNorm(32, eps)) for eps in (-1e-6, torch.nan, torch.inf)),
    (TypeError, "eps", lambda: RMSNorm(32, None)),
    (ValueError, "shape", lambda: NORM(torch.randn(4, 16))),
    (TypeError, "float64", lambda: NORM(X.double())),
    (ValueError, "differently", lambda: NORM(X, LAYER, ROW)),
    (ValueError, "shape", lambda: NORM(X, Float8Linear(64, 48))),
    (TypeError, "expected Tensor", lambda: NORM([1.0])),
    (ValueError, "delta", lambda: NORM.add(X, X[:, :16])),
    (ValueError, "gate is", lambda: ACT(X, X[:, :16])),
    (TypeError, "expected Float8Linear", lambda: ACT(X, X, [LAYER])),
    (TypeError, "expected Tensor", lambda: ACT(X, LAYER)),
    # casts, scales and formats
    *((TypeError, "expected float32", lambda d=d: cast_saturating(X.to(d), E4M3FN)) for d in (
        torch.float64, torch.int32, torch.float8_e4m3fn)),
    (TypeError, "expected float32", lambda: quantize(X.double(), E4M3FN)),
    (ValueError, "dim 2", lambda: amax(X, "rowwise", 2)),
    (ValueError, "e8m0fnu", lambda: compute_scale(ONE, "e8m0fnu")),
    (ValueError, "'round' is unknown", lambda: mx_scale_code(ONE, E4M3FN, "round")),
    (ValueError, "matrix", lambda: quantize(torch.randn(2, 3, 4), E4M3FN, "128x128")),
    (ValueError, "no FP8 format", lambda: as_element_format("e4m3")),
    (ValueError, "holds scales", lambda: as_element_format(E8M0FNU)),
    # FP8 tensors and their products
    (ValueError, "no FP8 format", lambda: Float8Tensor(X, ONE, torch.float32)),
    (TypeError, "scale_inv", lambda: Float8Tensor(A.qdata, ONE.double(), torch.float32)),
    (TypeError, "hp_dtype", lambda: Float8Tensor(A.qdata, ONE, torch.float64)),
    (TypeError, "float8_e8m0fnu", lambda: Float8Tensor(BLOCKS.qdata, BLOCKS.scale_inv, torch.float32, "1x32")),
    *((ValueError, "does not fit", lambda s=s: Float8Tensor(A.qdata, torch.ones(s), torch.float32)) for s in (
        (64,), (64, 1), (32, 2), (1, 32, 64))),
    (ValueError, "'cutlass' is unknown", lambda: scaled_mm(A, B, backend="cutlass")),
    (ValueError, "a's columns must equal b's rows", lambda: scaled_mm(A, B.t())),
    (ValueError, "expected a matrix", lambda: scaled_mm(A.view(2, 16, 64), B)),
    (TypeError, "b has dtype torch.float32", lambda: scaled_mm(A, Operand(torch.randn(64, 48), ONE))),
    (TypeError, "a.scale_inv has dtype", lambda: scaled_mm(Operand(A.qdata, ONE.double()), B)),
    (ValueError, "along", lambda: scaled_mm(quantize(torch.randn(32, 64), E4M3FN, "rowwise", dim=0), B)),
    (ValueError, "differently", lambda: scaled_mm(
        BLOCKS, quantize(torch.randn(256, 48), E4M3FN, "rowwise", dim=0), backend="reference")),
    (ValueError, "no kernel for 1x128", lambda: scaled_mm(BLOCKS, SQUARES)),
    (ValueError, "B must be column-major", lambda: scaled_mm(
        A, Operand(B.qdata.contiguous(), B.scale_inv), backend="triton")),
    (TypeError, "float64", lambda: ops.amax(X.double())),
    (ValueError, r"cast_both takes a matrix \[M, K\], got shape \[2, 3, 4\]", lambda: ops.cast_both(
        torch.ones(2, 3, 4), ONE, torch.float8_e4m3fn, False)),
    # grouped products
    (ValueError, "end at 31", grouped(offsets=int32(16, 31))),
    (ValueError, "lies before 0", grouped(offsets=int32(-16, 32))),
    (ValueError, "lies before 32", grouped(offsets=int32(32, 16))),
    (TypeError, "int64", grouped(offsets=torch.tensor([16, 32]))),
    (ValueError, r"\[E\]", grouped(offsets=int32(16, 32)[None])),
    (ValueError, r"\[1, N, 32\]", grouped(offsets=int32(32))),
    (ValueError, r"\[2, N, 48\]", grouped(x=torch.zeros(32, 48))),
    (ValueError, r"\[T, K\]", grouped(x=torch.zeros(2, 16, 32))),
    (TypeError, "x has dtype", grouped(x=torch.zeros(32, 32).double())),
    (ValueError, "weight has shape", grouped(weight=torch.zeros(16, 32))),
    (TypeError, "weight has dtype", grouped(weight=torch.zeros(2, 16, 32).double())),
    # recipes and configurations
    (ValueError, "nearest: triton", lambda: ROWWISE.with_backend("tritan")),
    (ValueError, "kernels 'on' is unknown", lambda: ROWWISE.with_kernels("on")),
    (ValueError, "GEMM 'dgrad' is unknown", lambda: ROWWISE.in_high_precision("dgrad")),
    (ValueError, "nearest: rowwise", lambda: Cast(E4M3FN, "row")),
    (ValueError, "both operands or neither", lambda: Gemm(Cast(E4M3FN), None)),
    (ValueError, "length 0 remembers nothing", lambda: AmaxHistory(length=0)),
    (ValueError, "nearest: max", lambda: AmaxHistory(algorithm="mex")),
    (ValueError, "nearest: rowwise", lambda: Float8LinearConfig.from_recipe_name("rowise")),
    (ValueError, "config='blockwise'", lambda: Float8LinearConfig.from_recipe_name("blockwise")),
    (ValueError, "is no FP8 format", lambda: CastConfig(target_dtype=torch.bfloat16)),
    (TypeError, "config is a dict", lambda: as_recipe({})),
    *((ValueError, f"GEMM {gemm}: .*cast both operands or neither", lambda f=f: Float8LinearConfig(**{f: NOT_CAST}))
      for f, gemm in (("cast_config_input", "output"), ("cast_config_weight_for_grad_input", "grad_input"),
                      ("cast_config_input_for_grad_weight", "grad_weight"))),
    # steps that are looked at; none begins
    (TypeError, "expected Module", lambda: verify(LAYER, NEVER)),
    (TypeError, "step_fn", lambda: verify(ONE, LAYER)),
    (TypeError, "config is a int", lambda: verify(NEVER, LAYER, recipe=3)),
    (TypeError, "is a Tensor", lambda: count_matmuls(ONE, LAYER)),
    (TypeError, "expected Module", lambda: count_matmuls(NEVER, 3)),
    (ValueError, "'third'", lambda: count_matmuls(NEVER, LAYER, causal="third")),
    (ValueError, "every", watched(every=0)),
    (TypeError, "every", watched(every=2.5)),
    (TypeError, "every", watched(every=True)),
    (ValueError, "samples", watched(samples=0)),
    (ValueError, "first_step", watched(first_step=-1)),
    (TypeError, "to", watched(to=3)),
    (OSError, "to", watched(to="/nowhere/casts.jsonl")),
    (TypeError, "model", watched(model=3)),
    (ValueError, "model", watched(model=nn.Linear(16, 16))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said", "attempt"), REFUSED)
def test_refused(error: type[Exception], said: str, attempt: Callable[[], object]) -> None:
    with pytest.raises(error, match=said):
        attempt()
