"""Every function of this package as an operator `fp8core::<name>`, with a shape-only twin for tracing.

Operators and not bare launches, so that `torch.compile` traces past them without a graph break, and FSDP,
autograd Functions and activation checkpointing see ordinary operators. They are `torch.library.custom_op`, not
`triton_op`: the latter lets the compiler look inside, but Inductor fuses nothing into a hand-written kernel, and
its launchers must be traceable, which tuning and host-made descriptors are not. They have no derivative:
`fp8core.linear` calls them inside one `autograd.Function`.

Which code runs:

    NVIDIA GPU, E4M3FN or E5M2         the Triton kernel
    TRITON_INTERPRET=1, any device     the same kernel in Triton's interpreter (slow; for tests)
    CPU, ROCm, fnuz formats, empty x   `fp8core.kernels.reference`, plain PyTorch, the same bytes

Arguments, shapes and formulas are those of `reference`. High-precision inputs are float32, bfloat16 or float16
in any layout (copied if not row-major); `amax`, `cast`, `cast_delayed` and the SwiGLU functions take any shape,
all others matrices [M, K]; bad ones raise as `fp8core.scaling.check_hp` or a ValueError that names the shape.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.library import custom_op

from fp8core.arguments import PLAIN_TENSORS
from fp8core.formats import E4M3FN, E5M2, as_element_format
from fp8core.kernels import reference
from fp8core.kernels.reference import BLOCK, MX_BLOCK
from fp8core.scaling import HP_DTYPES, check_hp

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch._library.custom_ops import CustomOpDef

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ANY_SHAPE = frozenset(
    {"amax", "cast", "cast_delayed", "swiglu", "swiglu_amax", "swiglu_backward", "swiglu_backward_amax"}
)
_KERNEL_FORMATS = (E4M3FN, E5M2)
_KERNEL_DTYPES = tuple(fmt.dtype for fmt in _KERNEL_FORMATS)

_modes, _transforms, _profiled = (  # how many, the innermost, whether
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._autograd._profiler_enabled,
)

OPERATORS: dict[str, CustomOpDef] = {}


def kernel_missing(x: torch.Tensor, *dtypes: torch.dtype) -> str | None:
    """Why no Triton kernel runs on tensors like x with these FP8 dtypes; None where one does."""
    if not INTERPRETED and (not x.is_cuda or torch.version.hip is not None):
        return f"the kernels run on NVIDIA GPUs, not on {'ROCm' if x.is_cuda else x.device.type}"
    return not_taken(x, *dtypes)


def not_taken(x: torch.Tensor, *dtypes: torch.dtype) -> str | None:
    """Why the kernels take no tensors like x with these FP8 dtypes, where they run; None if they do."""
    for dtype in dtypes:
        if dtype not in _KERNEL_DTYPES:
            fnuz = [as_element_format(each).name for each in dtypes if each not in _KERNEL_DTYPES]
            return f"the kernels encode {' and '.join(fmt.name for fmt in _KERNEL_FORMATS)}, not {', '.join(fnuz)}"
    return None if x.numel() else "the tensor is empty"


def implementation(name: str, x: torch.Tensor, *dtypes: torch.dtype) -> Callable[..., Any]:
    """The function that computes `name` for an input like x and these FP8 dtypes."""
    if kernel_missing(x, *dtypes) is not None:
        found: Callable[..., Any] = getattr(reference, name)
        return found
    from fp8core.kernels import launchers  # needs triton, which not every platform has

    return launchers.LAUNCHERS[name]


def _register(name: str, schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Defines `fp8core::name`; the first argument decides device and code."""

    takes_matrix = name not in _ANY_SHAPE
    kinds = [argument.split()[0] for argument in schema[1 : schema.index(")")].split(", ")[1:]]
    tensors = tuple(place for place, kind in enumerate(kinds) if kind == "Tensor")
    dtype = kinds.index("ScalarType") if "ScalarType" in kinds else len(kinds)
    dtypes = slice(dtype, dtype + 1)  # the one of the codes, or none

    def run(x: torch.Tensor, *args: Any) -> Any:
        if type(x) not in PLAIN_TENSORS or x.dtype not in HP_DTYPES:
            check_hp(x)
        if takes_matrix and x.dim() != 2:
            raise ValueError(
                f"{name} takes a matrix [M, K], got shape {list(x.shape)}; flatten leading dimensions"
            )
        found = implementation(name, x, *args[dtypes])
        if tensors:
            same = list(args)
            for place in tensors:
                same[place] = args[place].contiguous()
            args = tuple(same)
        if not x.is_cuda:
            return found(x.contiguous(), *args)
        with on_device_of(x):
            return found(x.contiguous(), *args)

    return _define(name, schema, run, fake)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Tuning measures on the current device, which need not be x's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Defines the operator; returns what calls it, or calls `run` itself where nobody can tell.

    That is: no compiler, mode, functional transform, profiler or autograd looks on. The dispatcher's way to a Python
    function and back costs ten times what the function itself does on the host.
    """
    op = custom_op(f"fp8core::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    OPERATORS[name] = op

    def call(x: torch.Tensor, *args: Any) -> Any:
        if (
            type(x) in PLAIN_TENSORS
            and not torch.compiler.is_compiling()
            and _modes() == 0
            and _transforms() is None
            and not _profiled()
            and not (x.requires_grad and torch.is_grad_enabled())
        ):
            return run(x, *args)
        return op(x, *args)

    return call


def _f32(x: torch.Tensor, *shape: Any) -> torch.Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _codes(x: torch.Tensor, dtype: torch.dtype, shape: tuple[Any, Any] | None = None) -> torch.Tensor:
    return x.new_empty(x.shape if shape is None else shape, dtype=dtype)


def _like(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _both(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return _codes(x, dtype), _codes(x, dtype, (x.shape[1], x.shape[0]))


def _up(size: Any, group: int) -> Any:
    return (size + group - 1) // group


def _per_row(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return _f32(x, codes.shape[0], 1)


def _per_1x128(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return _f32(x, _up(codes.shape[1], BLOCK), codes.shape[0]).t()


def _per_1x32(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return x.new_empty((codes.shape[0], _up(codes.shape[1], MX_BLOCK)), dtype=torch.float8_e8m0fnu)


def _grouped(scales: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], both: bool) -> Callable[..., Any]:
    """The shape-only twin of a cast with a scale for each group of a row: codes and scales, once or both ways."""

    def fake(x: torch.Tensor, dtype: torch.dtype, _: object) -> tuple[torch.Tensor, ...]:
        codes = _both(x, dtype) if both else (_codes(x, dtype),)
        return tuple(t for each in codes for t in (each, scales(x, each)))

    return fake


amax = _register("amax", "(Tensor x) -> Tensor", lambda x: _f32(x))
amax_rows_cols = _register(
    "amax_rows_cols",
    "(Tensor x) -> (Tensor, Tensor)",
    lambda x: (_f32(x, x.shape[0], 1), _f32(x, 1, x.shape[1])),
)
cast = _register(
    "cast",
    "(Tensor x, Tensor amax, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor)",
    lambda x, amax, dtype, power_of_two: (_codes(x, dtype), _f32(x)),
)
cast_both = _register(
    "cast_both",
    "(Tensor x, Tensor amax, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor, Tensor)",
    lambda x, amax, dtype, power_of_two: (*_both(x, dtype), _f32(x)),
)
cast_delayed = _register(
    "cast_delayed",
    "(Tensor x, Tensor amax, ScalarType dtype, bool power_of_two, int margin) -> (Tensor, Tensor, Tensor)",
    lambda x, amax, dtype, *_: (_codes(x, dtype), _f32(x), _f32(x)),
)
cast_delayed_both = _register(
    "cast_delayed_both",
    "(Tensor x, Tensor amax, ScalarType dtype, bool power_of_two, int margin)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, amax, dtype, *_: (*_both(x, dtype), _f32(x), _f32(x)),
)
_GROUPED = "(Tensor x, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor)"
_GROUPED_BOTH = "(Tensor x, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor, Tensor, Tensor)"
cast_rowwise = _register("cast_rowwise", _GROUPED, _grouped(_per_row, both=False))
cast_rowwise_both = _register("cast_rowwise_both", _GROUPED_BOTH, _grouped(_per_row, both=True))
cast_1x128 = _register("cast_1x128", _GROUPED, _grouped(_per_1x128, both=False))
cast_1x128_both = _register("cast_1x128_both", _GROUPED_BOTH, _grouped(_per_1x128, both=True))
cast_128x128_both = _register(
    "cast_128x128_both",
    "(Tensor x, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor, Tensor)",
    lambda x, dtype, power_of_two: (
        *_both(x, dtype),
        _f32(x, _up(x.shape[0], BLOCK), _up(x.shape[1], BLOCK)),
    ),
)
_MX, _MX_BOTH = (schema.replace("bool power_of_two", "str mode") for schema in (_GROUPED, _GROUPED_BOTH))
cast_mx = _register("cast_mx", _MX, _grouped(_per_1x32, both=False))
cast_mx_both = _register("cast_mx_both", _MX_BOTH, _grouped(_per_1x32, both=True))
rms_norm = _register(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    lambda x, weight, eps: (_like(x), _f32(x, x.shape[0], 1)),
)
rms_norm_amax = _register(
    "rms_norm_amax",
    "(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, eps: (_like(x), _f32(x, x.shape[0], 1), _f32(x)),
)
rms_norm_cast_delayed = _register(
    "rms_norm_cast_delayed",
    "(Tensor x, Tensor weight, float eps, Tensor amax, ScalarType dtype, bool power_of_two, int margin)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, weight, eps, amax, dtype, *_: (_codes(x, dtype), _f32(x, x.shape[0], 1), _f32(x), _f32(x)),
)
rms_norm_cast_rowwise = _register(
    "rms_norm_cast_rowwise",
    "(Tensor x, Tensor weight, float eps, ScalarType dtype, bool power_of_two) -> (Tensor, Tensor, Tensor)",
    lambda x, weight, eps, dtype, power_of_two: (
        _codes(x, dtype),
        _f32(x, x.shape[0], 1),
        _f32(x, x.shape[0], 1),
    ),
)
rms_norm_backward = _register(
    "rms_norm_backward",
    "(Tensor grad_y, Tensor x, Tensor weight, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    lambda grad_y, x, weight, rstd: (_like(x), _like(weight), _f32(x)),
)
add_rms_norm = _register(
    "add_rms_norm",
    "(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    lambda x, delta, weight, eps: (_like(x), _like(x), _f32(x, x.shape[0], 1)),
)
add_rms_norm_amax = _register(
    "add_rms_norm_amax",
    "(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda x, delta, weight, eps: (_like(x), _like(x), _f32(x, x.shape[0], 1), _f32(x)),
)
_DELAYED = "Tensor weight, float eps, Tensor amax, ScalarType dtype, bool power_of_two, int margin"
rms_norm_cast_delayed_both = _register(
    "rms_norm_cast_delayed_both",
    f"(Tensor x, {_DELAYED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda x, weight, eps, amax, dtype, *_: (*_both(x, dtype), _f32(x, x.shape[0], 1), _f32(x), _f32(x)),
)
add_rms_norm_cast_delayed_both = _register(
    "add_rms_norm_cast_delayed_both",
    f"(Tensor x, Tensor delta, {_DELAYED}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda x, delta, weight, eps, amax, dtype, *_: (
        _like(x),
        *_both(x, dtype),
        _f32(x, x.shape[0], 1),
        _f32(x),
        _f32(x),
    ),
)
add_rms_norm_backward = _register(
    "add_rms_norm_backward",
    "(Tensor grad_y, Tensor grad_sum, Tensor sum, Tensor weight, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    lambda grad_y, grad_sum, total, weight, rstd: (_like(total), _like(weight), _f32(total)),
)
swiglu = _register("swiglu", "(Tensor gate, Tensor up) -> Tensor", lambda gate, up: _like(gate))
swiglu_amax = _register(
    "swiglu_amax", "(Tensor gate, Tensor up) -> (Tensor, Tensor)", lambda gate, up: (_like(gate), _f32(gate))
)
swiglu_cast_delayed_both = _register(
    "swiglu_cast_delayed_both",
    "(Tensor gate, Tensor up, Tensor amax, ScalarType dtype, bool power_of_two, int margin)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda gate, up, amax, dtype, *_: (*_both(gate, dtype), _f32(gate), _f32(gate)),
)
swiglu_backward = _register(
    "swiglu_backward",
    "(Tensor grad_h, Tensor gate, Tensor up) -> (Tensor, Tensor)",
    lambda grad_h, gate, up: (_like(gate), _like(up)),
)
swiglu_backward_amax = _register(
    "swiglu_backward_amax",
    "(Tensor grad_h, Tensor gate, Tensor up) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda grad_h, gate, up: (_like(gate), _like(up), _f32(gate), _f32(gate)),
)


def _matmul(
    a: torch.Tensor,
    b_t: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    out_dtype: torch.dtype,
    promote_every: int,
) -> torch.Tensor:
    if a.dim() != 2 or b_t.dim() != 2 or a.shape[1] != b_t.shape[1]:
        raise ValueError(f"matmul takes A [M, K] and B_T [N, K], got {list(a.shape)} and {list(b_t.shape)}")
    run = implementation("matmul", a if b_t.numel() else b_t, a.dtype, b_t.dtype)
    with on_device_of(a):
        result: torch.Tensor = run(
            a.contiguous(), b_t.contiguous(), scale_inv_a, scale_inv_b, out_dtype, promote_every
        )
    return result


matmul = _define(
    "matmul",
    "(Tensor a, Tensor b_t, Tensor scale_inv_a, Tensor scale_inv_b, ScalarType out_dtype, int promote_every) "
    "-> Tensor",
    _matmul,
    lambda a, b_t, scale_inv_a, scale_inv_b, out_dtype, promote_every: a.new_empty(
        (a.shape[0], b_t.shape[0]), dtype=out_dtype
    ),
)
