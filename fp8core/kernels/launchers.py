"""The launcher of each operator; importing this imports triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8core.kernels import amax, blockwise, cast, matmul, mx, norm, rowwise, swiglu

if TYPE_CHECKING:
    from collections.abc import Callable

LAUNCHERS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        amax.amax,
        amax.amax_rows_cols,
        cast.cast,
        cast.cast_both,
        rowwise.cast_rowwise,
        rowwise.cast_rowwise_both,
        blockwise.cast_1x128,
        blockwise.cast_1x128_both,
        blockwise.cast_128x128_both,
        mx.cast_mx,
        mx.cast_mx_both,
        norm.rms_norm,
        norm.rms_norm_amax,
        norm.rms_norm_backward,
        norm.add_rms_norm,
        norm.add_rms_norm_amax,
        norm.add_rms_norm_backward,
        swiglu.swiglu,
        swiglu.swiglu_amax,
        swiglu.swiglu_backward,
        matmul.matmul,
    )
} | {"cast_delayed": cast.cast, "cast_delayed_both": cast.cast_both}
