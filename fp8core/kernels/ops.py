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
from fp8core.formats import E4M3FN, E5M2, E8M0FNU, as_element_format
from fp8core.kernels import reference
from fp8core.scaling import BLOCK, HP_DTYPES, MX_BLOCK, check_hp

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch._library.custom_ops import CustomOpDef

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ANY_SHAPE = frozenset({"amax", "cast", "cast_delayed", "swiglu", "swiglu_amax", "swiglu_backward"})
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


def _register(name: str, takes: str, gives: str) -> Callable[..., Any]:
    """Defines `fp8core::name`; the first argument decides device and code.

    Args:
        name: of the function in `reference` and in the launchers.
        takes: arguments, as a schema has them.
        gives: results, as names of `_RESULTS`; "_t" after one: of the first argument transposed.
    """
    _, *others = (argument.split() for argument in takes.split(", "))
    kinds, names = [kind for kind, _ in others], [called for _, called in others]
    tensors = tuple(place for place, kind in enumerate(kinds) if kind == "Tensor")
    dtype = kinds.index("ScalarType") if "ScalarType" in kinds else len(kinds)
    dtypes = slice(dtype, dtype + 1)  # the one of the codes, or none
    results = gives.split()
    takes_matrix = name not in _ANY_SHAPE

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

    def fake(*args: Any) -> Any:
        x, given = args[0], dict(zip(names, args[1:], strict=True))
        made = tuple(
            _RESULTS[result.removesuffix("_t")](x.t() if result.endswith("_t") else x, given)
            for result in results
        )
        return made if len(made) > 1 else made[0]

    returned = ", ".join(["Tensor"] * len(results))
    schema = f"({takes}) -> " + (f"({returned})" if len(results) > 1 else returned)
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
            and not torch.compiler.is_dynamo_compiling()  # every other tracer runs in a mode
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


def _up(size: Any, group: int) -> Any:
    return (size + group - 1) // group


# What operators return, of a first argument x (a matrix [M, K] where rows are meant) and of the other arguments by name
_RESULTS: dict[str, Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]] = {
    "like": lambda x, _: x.new_empty(x.shape),
    "weight": lambda _, given: given["weight"].new_empty(given["weight"].shape),
    "number": lambda x, _: _f32(x),
    "rows": lambda x, _: _f32(x, x.shape[0], 1),
    "columns": lambda x, _: _f32(x, 1, x.shape[1]),
    "codes": lambda x, given: x.new_empty(x.shape, dtype=given["dtype"]),
    "1x128": lambda x, _: _f32(x, _up(x.shape[1], BLOCK), x.shape[0]).t(),
    "128x128": lambda x, _: _f32(x, _up(x.shape[0], BLOCK), _up(x.shape[1], BLOCK)),
    "1x32": lambda x, _: x.new_empty((x.shape[0], _up(x.shape[1], MX_BLOCK)), dtype=E8M0FNU.dtype),
}
_CAST = "Tensor amax, ScalarType dtype, bool power_of_two"
_DELAYED = _CAST + ", int margin"
_GROUPED = "Tensor x, ScalarType dtype, bool power_of_two"
_MX = "Tensor x, ScalarType dtype, str mode"
_NORM = "Tensor weight, float eps"

amax = _register("amax", "Tensor x", "number")
amax_rows_cols = _register("amax_rows_cols", "Tensor x", "rows columns")
cast = _register("cast", "Tensor x, " + _CAST, "codes number")
cast_both = _register("cast_both", "Tensor x, " + _CAST, "codes codes_t number")
cast_delayed = _register("cast_delayed", "Tensor x, " + _DELAYED, "codes number number")
cast_delayed_both = _register("cast_delayed_both", "Tensor x, " + _DELAYED, "codes codes_t number number")
cast_rowwise = _register("cast_rowwise", _GROUPED, "codes rows")
cast_rowwise_both = _register("cast_rowwise_both", _GROUPED, "codes rows codes_t rows_t")
cast_1x128 = _register("cast_1x128", _GROUPED, "codes 1x128")
cast_1x128_both = _register("cast_1x128_both", _GROUPED, "codes 1x128 codes_t 1x128_t")
cast_128x128_both = _register("cast_128x128_both", _GROUPED, "codes codes_t 128x128")
cast_mx = _register("cast_mx", _MX, "codes 1x32")
cast_mx_both = _register("cast_mx_both", _MX, "codes 1x32 codes_t 1x32_t")
rms_norm = _register("rms_norm", "Tensor x, " + _NORM, "like rows")
rms_norm_amax = _register("rms_norm_amax", "Tensor x, " + _NORM, "like rows number")
rms_norm_backward = _register(
    "rms_norm_backward", "Tensor grad_y, Tensor x, Tensor weight, Tensor rstd", "like weight"
)
add_rms_norm = _register("add_rms_norm", "Tensor x, Tensor delta, " + _NORM, "like like rows")
add_rms_norm_amax = _register(
    "add_rms_norm_amax", "Tensor x, Tensor delta, " + _NORM, "like like rows number"
)
add_rms_norm_backward = _register(
    "add_rms_norm_backward",
    "Tensor grad_y, Tensor grad_sum, Tensor sum, Tensor weight, Tensor rstd",
    "like weight",
)
swiglu = _register("swiglu", "Tensor gate, Tensor up", "like")
swiglu_amax = _register("swiglu_amax", "Tensor gate, Tensor up", "like number")
swiglu_backward = _register("swiglu_backward", "Tensor grad_h, Tensor gate, Tensor up", "like like")


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
