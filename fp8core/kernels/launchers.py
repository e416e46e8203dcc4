"""The launcher of each operator; importing this imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8core.kernels import amax, blockwise, cast, fused, matmul, mx, rowwise

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHERS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        amax.amax,
        amax.amax_rows_cols,
        cast.cast,
        cast.cast_both,
        cast.cast_delayed,
        cast.cast_delayed_both,
        rowwise.cast_rowwise,
        rowwise.cast_rowwise_both,
        blockwise.cast_1x128,
        blockwise.cast_1x128_both,
        blockwise.cast_128x128_both,
        mx.cast_mx,
        mx.cast_mx_both,
        fused.rms_norm,
        fused.rms_norm_amax,
        fused.rms_norm_cast_delayed,
        fused.rms_norm_cast_rowwise,
        fused.rms_norm_backward,
        fused.swiglu,
        fused.swiglu_amax,
        fused.swiglu_cast_delayed_both,
        fused.swiglu_backward,
        fused.swiglu_backward_amax,
        matmul.matmul,
    )
}
