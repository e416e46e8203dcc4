"""Every specialisation of fp8core's kernels that training uses at the shapes of Llama-3-8B and GPT-2.

None of it is a list made by hand: a block of each model takes training steps on tensors without memory, for each
recipe, with bfloat16 and with float32 tensors. What operators it calls is recorded, and then what their launchers start.
Operators that no such step calls are called on the largest activation.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.history import ROLES, AmaxMemory
from fp8core.kernels import ops
from fp8core.recipe import RECIPES
from harness.training.meta_estimate import skeleton
from harness.training.setup import Setup
from metered.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from harness.advise.meter.launches import Launch

TOKENS = 16384
MODELS = {"llama3_8b": 8192, "gpt2": 1024}  # name -> tokens of a sequence
VOCABULARY = {"gpt2": 50304}  # padded as nanoGPT does it: FP8 products take multiples of 16
_E4M3, _BF16 = torch.float8_e4m3fn, torch.bfloat16


@dataclass(frozen=True)
class Call:
    """An operator of fp8core with its arguments; tensors are on "meta"."""

    operator: str
    args: tuple[Any, ...]

    def key(self) -> tuple[Any, ...]:
        """What tells apart two calls: everything but the identity of tensors."""
        return (
            self.operator,
            *((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in self.args),
        )


def launches(capability: int = 90, models: Sequence[str] = tuple(MODELS)) -> list[Launch]:
    """One launch for each specialisation, the largest activation or weight of a block, for the compute capability."""
    from fp8core.kernels.launchers import LAUNCHERS

    largest: dict[tuple[str, str], Launch] = {}
    for call in _all_calls(models):
        for launch in record(partial(LAUNCHERS[call.operator], *call.args), capability):
            named = replace(launch, operator=call.operator, shape=_shape(call))
            key = (call.operator, _compiled_as(named))
            if key not in largest or _weight(named) > _weight(largest[key]):
                largest[key] = replace(
                    named, default=named.default or (key in largest and largest[key].default)
                )
    return sorted(
        largest.values(), key=lambda one: (one.operator, one.kernel, str(one.signature), not one.default)
    )


def _weight(launch: Launch) -> tuple[bool, int]:
    """Which launch stands for its specialisation: the largest, but not one of the head, whose sides are a vocabulary."""
    return launch.elements <= TOKENS * 14336, launch.elements


def _all_calls(models: Sequence[str]) -> Iterator[Call]:
    seen: set[tuple[Any, ...]] = set()
    operators: set[str] = set()
    for model in models:
        for compute in ("bf16", "fp32"):
            for recipe in RECIPES:
                for call in step_calls(model, compute, recipe):
                    operators.add(call.operator)
                    if call.key() not in seen:
                        seen.add(call.key())
                        yield call
    yield from (call for call in _uncalled() if call.operator not in operators)


def step_calls(model: str, compute: str, recipe: str) -> list[Call]:
    """What two optimizer steps of one block call: the second one has the history that delayed scaling needs.

    Args:
        model: a key of `MODELS`.
        compute: "bf16" or "fp32".
        recipe: a key of `fp8core.RECIPES`; multiplied by fp8core's own kernel where it has one.
    """
    own = RECIPES[recipe]
    chosen = own.emulated() if recipe.startswith("mx") else own.with_backend("triton")
    seq = MODELS[model]
    setup = Setup(
        model=model,
        batch=TOKENS // seq,
        seq=seq,
        compute=compute,
        recipe=chosen,
        layers=1,
        vocab_size=VOCABULARY.get(model),
        fused_modules=model.startswith("llama"),
    )
    tokens = torch.zeros(setup.batch, seq, dtype=torch.long, device="meta")
    recorder = _Recorder()
    with _kernels_on_meta():
        built = skeleton(setup)
        for _ in range(2):
            with recorder:
                built(tokens, tokens).backward()
            _remember_amaxes(built)
    return recorder.calls


def _remember_amaxes(model: torch.nn.Module) -> None:
    """What `fp8core.history.update_scales` does after a step whose amaxes are all positive; here they have no values."""
    for module in model.modules():
        if isinstance(module, AmaxMemory):
            module.ready = frozenset(ROLES)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fp8core":
            self.calls.append(Call(func._schema.name.removeprefix("fp8core::"), tuple(args)))
        return func(*args, **(kwargs or {}))


@contextmanager
def _kernels_on_meta() -> Iterator[None]:
    """Tensors without memory take the way of those on a GPU."""
    kept = ops.kernel_missing
    try:
        ops.kernel_missing = lambda x, *dtypes: None
        yield
    finally:
        ops.kernel_missing = kept


def _uncalled() -> Iterator[Call]:
    with torch.device("meta"):
        one = torch.empty(())
        for dtype in (_BF16, torch.float32):
            x, weight = torch.empty(TOKENS, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
            wide = torch.empty(TOKENS, 14336, dtype=dtype)
            yield Call("cast", (x, one, _E4M3, False))
            yield Call("cast_delayed", (x, one, _E4M3, False, 0))
            yield Call("cast_delayed_both", (x, one, _E4M3, False, 0))
            yield Call("cast_rowwise", (x, _E4M3, True))
            yield Call("cast_1x128", (x, _E4M3, False))
            yield Call("cast_mx", (x, _E4M3, "rceil"))
            yield Call("rms_norm", (x, weight, 1e-5))
            yield Call("rms_norm_cast_delayed", (x, weight, 1e-5, one, _E4M3, False, 0))
            yield Call("rms_norm_cast_rowwise", (x, weight, 1e-5, _E4M3, True))
            yield Call("swiglu", (wide, wide))
            yield Call("swiglu_cast_delayed_both", (wide, wide, one, _E4M3, False, 0))
            yield Call("swiglu_backward", (wide, wide, wide))
            yield Call("swiglu_backward_amax", (wide, wide, wide))
            yield Call("amax_rows_cols", (x,))


def _shape(call: Call) -> str:
    tensors = [a for a in call.args if isinstance(a, torch.Tensor)]
    if call.operator == "matmul":
        (m, k), n = tensors[0].shape, tensors[1].shape[0]
        return f"{m} x {n} x {k}"
    return " x ".join(map(str, tensors[0].shape))


def _compiled_as(launch: Launch) -> str:
    """What decides the machine code, besides the kernel's source and Triton."""
    fields = launch.module, launch.kernel, launch.signature, launch.constants, launch.aligned, launch.options
    return json.dumps(fields, sort_keys=True, default=str)
