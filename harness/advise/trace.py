"""From a module to `harness.advise.model.Model`: one forward and backward pass on fake tensors, without memory.

Shapes are real, values are not: the module is made on "meta" and each operator reports what it would read and write.
Reads and writes between two matrix products are also counted as if they were one kernel, which is what a compiler can
reach at best: every tensor that comes from outside once, every tensor that is used later once.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from fp8core import audit, convert_to_float8_training
from fp8core.recipe import RECIPES
from harness.advise.model import Linear, Model, Outside, Traffic
from harness.advise.recorder import Recorder, Watch
from harness.store.errors import UsageError
from harness.training.models import ModelSpec, UserModel
from harness.training.models.common import replace_parameters
from harness.training.models.flops import register_flop_formulas
from harness.training.models.tokens import common_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCKS = "layers"  # the list of blocks in the models of this project


def trace(spec: ModelSpec | UserModel, batch: int, seq: int) -> Model:
    """One pass of a named model, or of a user's with its own batch function.

    A named model is traced with one block and with two; the difference stands for each of its blocks.

    Args:
        spec: as `harness.training.models.resolve` gives it.
        batch: sequences of a forward pass.
        seq: tokens of each; of no meaning for a user's model, whose batches have their own.

    Raises:
        UsageError: the model cannot be run on fake tensors; the layer that failed is named.
    """
    if isinstance(spec, UserModel):
        module = spec.build(device="meta", dtype=torch.bfloat16)
        inputs = tuple(part.to("meta") for part in spec.batch(0, 0, batch, "cpu"))
        return trace_module(module, inputs, spec.target)
    return _named(spec, batch, seq)


@functools.lru_cache(maxsize=16)  # many GPUs are asked about one model; neither a spec nor a Model can change
def _named(spec: ModelSpec, batch: int, seq: int) -> Model:
    """One pass of a named model."""
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    parts = []
    for layers in (1, 2)[: spec.layers]:
        module = spec.build(device="meta", dtype=torch.bfloat16, layers=layers)
        module.eval()  # without dropout, whose random numbers would keep attention from its fused form
        parts.append(trace_module(module, (tokens, tokens), spec.name))
    return parts[0] if len(parts) == 1 else _repeated(parts[0], parts[1], spec.layers)


def trace_module(module: nn.Module, inputs: Sequence[Tensor], name: str) -> Model:
    """One forward and backward pass of a module on "meta" whose `module(*inputs)` is the loss.

    Raises:
        UsageError: it cannot be run so; the layer that failed is named, with its own words.
    """
    register_flop_formulas()
    barred = barred_layers(module)
    module = copy.deepcopy(module)
    with FakeTensorMode():
        replace_parameters(module, {p: nn.Parameter(_blank(p), p.requires_grad) for p in module.parameters()})
        for part in module.modules():
            for key, buffer in part._buffers.items():
                part._buffers[key] = None if buffer is None else _blank(buffer)
            if isinstance(part, nn.RMSNorm):
                part.forward = functools.partial(_one_kernel_norm, part)  # type: ignore[method-assign]  # of this copy alone
        seen = Watch(module, barred)
        recorder = Recorder(seen)
        try:
            with recorder:
                loss = module(*(_blank(part) for part in inputs))
                seen.close()
                recorder.turn()
                if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                    raise UsageError(
                        f"{name}: model(*batch) returned no loss; expected one number, a 0-dimensional tensor that "
                        "depends on the weights"
                    )
                loss.backward()
        except UsageError:
            raise
        except Exception as error:  # the user's code may raise anything
            where = seen.innermost or type(module).__name__
            first = next(iter(str(error).strip().splitlines()), "")[:200]
            raise UsageError(
                f"{name} cannot be traced: {where} failed on tensors without values: {type(error).__name__}: {first}; "
                "a step that looks at values (.item(), a branch on data) has no place in a forward pass that is traced"
            ) from error
    trained = [p for p in module.parameters() if p.grad is not None]
    forward, backward = recorder.finish(p.grad for p in trained if p.grad is not None)
    return Model(
        name=name,
        layers=tuple(seen.layers),
        tokens=common_rows((layer.tokens, layer.K * layer.N) for layer in seen.layers),
        attention=recorder.attention,
        other=recorder.other,
        forward=forward,
        backward=backward,
        parameters=sum(p.numel() for p in module.parameters()),
        in_linears=sum(
            {id(m.weight): m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)}.values()
        ),
        blocks=_blocks(module),
        experts=recorder.grouped,
    )


def layers_alone(module: nn.Module, tokens: int, name: str) -> Model:
    """Facts of a module without `model.batch`, which cannot be called: its Linear layers, each on all tokens."""
    barred = barred_layers(module)
    linears = [(fqn, m) for fqn, m in module.named_modules() if isinstance(m, nn.Linear)]
    nothing = Traffic(0.0, 0.0, 0, 0)
    return Model(
        name=name,
        layers=tuple(
            Linear(fqn, m.in_features, m.out_features, tokens, i, barred.get(fqn, {}))
            for i, (fqn, m) in enumerate(linears)
        ),
        tokens=tokens,
        attention=0.0,
        other=0.0,
        forward=nothing,
        backward=nothing,
        parameters=sum(p.numel() for p in module.parameters()),
        in_linears=sum({id(m.weight): m.weight.numel() for _, m in linears}.values()),
        blocks=_blocks(module),
        whole=False,
    )


def barred_layers(module: nn.Module) -> dict[str, dict[str, str]]:
    """For each Linear, the recipes that it cannot run and why."""
    found: dict[str, dict[str, str]] = {}
    shapes = copy.deepcopy(module).to(
        "meta"
    )  # what only the device at hand lacks is no property of the layer
    for name, recipe in RECIPES.own.items():
        converted = convert_to_float8_training(copy.deepcopy(shapes), config=recipe, allow_no_conversion=True)
        for layer in audit(converted).not_converted:
            found.setdefault(layer.fqn, {})[name] = layer.reason
    return found


def _repeated(one: Model, two: Model, blocks: int) -> Model:
    """A model of that many blocks, of which `two` has one more than `one`."""
    more = blocks - 1

    def grown(a: float, b: float) -> Any:
        return a + more * (b - a)

    def traffic(a: Traffic, b: Traffic) -> Traffic:
        return Traffic(*(grown(getattr(a, f), getattr(b, f)) for f in Traffic.__dataclass_fields__))

    def traffic_outside(a: Traffic, b: Traffic) -> Traffic:
        return Traffic(*(2 * getattr(a, f) - getattr(b, f) for f in Traffic.__dataclass_fields__))

    prefix = f"{_BLOCKS}.0."
    block = [layer for layer in one.layers if layer.fqn.startswith(prefix)]
    rest = [layer for layer in one.layers if not layer.fqn.startswith(prefix)]
    stride = 1 + max((layer.input_id for layer in one.layers), default=0)
    layers = [
        replace(
            layer,
            fqn=f"{_BLOCKS}.{i}.{layer.fqn.removeprefix(prefix)}",
            input_id=layer.input_id + (i + 1) * stride,
        )
        for i in range(blocks)
        for layer in block
    ]
    outside = Outside(
        parameters=2 * one.parameters - two.parameters,
        forward=traffic_outside(one.forward, two.forward),
        backward=traffic_outside(one.backward, two.backward),
        attention=2 * one.attention - two.attention,
        other=2 * one.other - two.other,
    )
    sums = {
        f: grown(getattr(one, f), getattr(two, f)) for f in ("attention", "other", "parameters", "in_linears")
    }
    return replace(
        one,
        layers=(*layers, *rest),
        forward=traffic(one.forward, two.forward),
        backward=traffic(one.backward, two.backward),
        blocks=blocks,
        outside=outside,
        **sums,
    )


def _blocks(module: nn.Module) -> int:
    return max((len(part) for part in module.modules() if isinstance(part, nn.ModuleList)), default=0)


def _one_kernel_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """A norm of the same reads and writes that is one operator on a CPU too, as RMSNorm is on a GPU."""
    return functional.layer_norm(x, norm.normalized_shape, norm.weight, None, norm.eps or 1e-5)


def _blank(tensor: Tensor) -> Tensor:
    """Fake CPU tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
