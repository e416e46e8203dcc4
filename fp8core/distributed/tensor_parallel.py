"""Tensor and sequence parallelism for Float8Linear: the styles of `torch.distributed.tensor.parallel`, in FP8.

    model = convert_to_float8_training(model)
    plan = {
        "norm": SequenceParallel(),
        "mlp": PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.up": Float8ColwiseParallel(),
        "mlp.down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    check_plan(model, mesh["tp"], plan)
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])

Names, arguments and meaning are those of `torchao.float8` 0.18; torch's own ColwiseParallel and RowwiseParallel work on
a Float8Linear as well. What these add: all-gathers of activations and of gradients in FP8 (see
`fp8core.distributed.sequence_parallel`), delayed scaling, and an error where torch would continue. `fp8core.inputs.sharded`
says which scales ranks share.

Async tensor parallelism (`torch._inductor.config._micro_pipeline_tp`) overlaps the very collectives that torch's styles
issue with their GEMMs; it needs symmetric memory between NVIDIA GPUs, see `async_tp_reason`.
"""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from fp8core.distributed.fsdp import wrapped_again
from fp8core.distributed.sequence_parallel import (
    gather_input,
    gather_module_input,
    gather_reason,
    scatter_output,
)
from fp8core.distributed.waited import lost_gradient, waited
from fp8core.distributed.weight_scales import known_of
from fp8core.distributed.weight_shard import WeightShard
from fp8core.inputs.operands import serves_both
from fp8core.inputs.sharded import ORDER, TPLayout
from fp8core.inputs.shared_input import CastInput, after_autocast, input_casts
from fp8core.layer_rules import weight_reason
from fp8core.linear import Float8Linear
from fp8core.replace import WHY_NOT
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement
    from torch.distributed.tensor.parallel import ParallelStyle

Layouts = tuple["Placement", ...]


class Float8ColwiseParallel(ColwiseParallel):
    """`ColwiseParallel` of a Float8Linear; an input of which each rank holds some tokens is gathered in FP8.

    Args:
        input_layouts: of the input; default `Replicate()`. `Shard(1)` of [batch, tokens, features]: sequence
            parallelism, all-gather in FP8 forward and reduce-scatter in high precision backward.
        output_layouts: default `Shard(-1)`.
        use_local_output: give back a plain tensor; default True.

    Raises (when the plan is applied):
        ValueError: a module that is no Float8Linear or belongs to FSDP already; out_features that the ranks can't
            share; a recipe whose input can't be gathered in FP8.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        assert isinstance(mod, Float8Linear)
        x = inputs[0]
        if isinstance(x, CastInput):
            if isinstance(x.hp, DTensor):
                return inputs
            # Each rank's gradient of a whole input is a part of it: as a DTensor it is summed over ranks
            return (
                x._replace(hp=DTensor.from_local(x.hp, device_mesh, desired_input_layouts, run_check=False)),
            )
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
        if x.placements == desired_input_layouts:
            return (x,)
        if not mod.recipe.fp8_gemms:  # held back by a schedule
            return (x.redistribute(placements=desired_input_layouts),)
        return (gather_input(_tokens_cut(x, str(mod)), mod),)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _checked(module, TPLayout(device_mesh, 0), type(self).__name__)
        if self.input_layouts != self.desired_input_layouts:
            reason = gather_reason(layer.recipe)
            if reason is not None:
                raise ValueError(f"Float8ColwiseParallel(input_layouts={self.input_layouts[0]}): {reason}")
        amaxes = _taken_out(layer)
        super()._apply(layer, device_mesh)
        return _put_back(layer, amaxes)


class Float8RowwiseParallel(RowwiseParallel):
    """`RowwiseParallel` of a Float8Linear; where it scatters its output, gradients are gathered in FP8.

    They are if the recipe casts grad_output once for both GEMMs (tensorwise, delayed, static). The bias is then added to
    the rank's own tokens. An input in another layout than `Shard(-1)` is redistributed in high precision.

    Args:
        input_layouts: of the input; default `Shard(-1)`.
        output_layouts: default `Replicate()`; `Shard(1)`: sequence parallelism.
        use_local_output: give back a plain tensor; default True.

    Raises (when the plan is applied):
        ValueError: as Float8ColwiseParallel, of in_features.
    """

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        mod: nn.Module,
        inputs: tuple[Any, ...],
        device_mesh: DeviceMesh,
    ) -> tuple[Any, ...]:
        x = inputs[0]
        if isinstance(x, CastInput):
            return inputs
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, device_mesh, input_layouts, run_check=False)
        if input_layouts != desired_input_layouts:
            x = x.redistribute(placements=desired_input_layouts)
        return (x,)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Layouts,
        use_local_output: bool,
        mod: nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> torch.Tensor:
        assert isinstance(mod, Float8Linear)
        target = output_layouts[0]
        gradient = mod.recipe.grad_input.a
        if (
            isinstance(target, Shard)
            and gradient is not None
            and (not mod.weight.requires_grad or serves_both(gradient, mod.recipe.grad_weight.a))
            and gradient.granularity == "tensorwise"
        ):
            outputs = scatter_output(outputs, Shard(target.dim % outputs.dim()), mod)
        else:
            outputs = outputs.redistribute(placements=output_layouts)
        if mod.bias_deferred and isinstance(mod.bias, DTensor):
            # Nothing moves forward; backward its gradient is summed over the ranks' tokens
            bias = mod.bias.redistribute(placements=(Replicate(),))
            total = outputs + bias.to(outputs.dtype)
            assert isinstance(total, DTensor)
            outputs = total
        return waited(outputs.to_local()) if use_local_output else outputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _checked(module, TPLayout(device_mesh, 1), type(self).__name__)
        amaxes = _taken_out(layer)
        super()._apply(layer, device_mesh)
        layer.bias_deferred = layer.bias is not None
        return _put_back(layer, amaxes)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """`PrepareModuleInput` that casts before it gathers: layers that share the module's input share one FP8 all-gather.

    The module receives a DTensor (with use_local_output its local tensor) of a Float8Tensor, for rowwise recipes of
    `fp8core.inputs.two_casts.TwoCasts`, which only Float8Linear can read, and views; it is for modules such as attention or an
    MLP that give their input to linear layers alone.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts, use_local_output: as
            PrepareModuleInput. Cast is what goes from `Shard` to `Replicate`; the rest stays in high precision.
        float8_dtype: what it is cast to; must be the layers' own.
        fwd_config_submodule_fqn: the Float8Linear whose recipe counts; None: that of all, which must cast their
            input alike.

    Raises (when the plan is applied):
        ValueError: no Float8Linear in the module, recipes that differ, another float8_dtype, or a recipe whose input
            can't be gathered as one FP8 tensor.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype = torch.float8_e4m3fn,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self.reader: Float8Linear | None = None

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        assert self.reader is not None
        gathers = isinstance(input_layout, Shard) and desired_layout == Replicate()
        if input_layout is None or not gathers or not self.reader.recipe.fp8_gemms:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if not isinstance(input, DTensor):
            input = DTensor.from_local(input, mesh, (input_layout,), run_check=False)
        if input.placements == (Replicate(),):
            return input.to_local() if self.use_local_output else input
        x = gather_module_input(_tokens_cut(input, "the module"), self.reader)
        return x.to_local() if self.use_local_output else x

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.reader = self._reader(module)
        reason = gather_reason(self.reader.recipe)
        if reason is None and self.reader.amaxes is not None:
            reason = (
                f"recipe {self.reader.recipe} remembers amaxes by layer, and a module's input has none; give each layer "
                "Float8ColwiseParallel with these input_layouts instead"
            )
        if reason is not None:
            raise ValueError(f"PrepareFloat8ModuleInput: {reason}")
        super()._apply(module, device_mesh)
        return module

    def _reader(self, module: nn.Module) -> Float8Linear:
        """A layer that stands for all that read the input."""
        name = self.fwd_config_submodule_fqn
        layers = list(module.modules()) if name is None else [module.get_submodule(name)]
        readers = [layer for layer in layers if isinstance(layer, Float8Linear)]
        where = type(module).__name__ if name is None else name
        if not readers:
            raise ValueError(f"PrepareFloat8ModuleInput: {where} holds no Float8Linear; {ORDER}")
        casts = {input_casts(layer.recipe) for layer in readers}
        if len(casts) > 1:
            recipes = ", ".join(sorted({str(layer.recipe) for layer in readers}))
            raise ValueError(
                f"PrepareFloat8ModuleInput: layers of {where} cast their inputs differently ({recipes}); name the one "
                "that counts by fwd_config_submodule_fqn"
            )
        cast = input_casts(readers[0].recipe)[0]
        if cast is not None and cast.format.dtype != self.float8_dtype:
            raise ValueError(
                f"PrepareFloat8ModuleInput: float8_dtype is {self.float8_dtype}, the layers of {where} read "
                f"{cast.format.dtype}; pass float8_dtype={cast.format.dtype}"
            )
        return readers[0]


def check_plan(model: nn.Module, device_mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Refuses a plan that would fail later, or do nothing to what it names; call it before `parallelize_module`.

    Args:
        model: to be parallelised.
        device_mesh: the tensor-parallel one, of one dimension.
        plan: as for `parallelize_module`.

    Raises:
        ValueError: a name that fits no module; FSDP before tensor parallelism; a Float8 style for a layer that is not
            converted; features that the ranks can't share; delayed scaling under a style of torch, which would make
            DTensors of its amaxes; torch's RowwiseParallel before compiled modules. Each names the module.
    """
    if device_mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism takes a mesh of one dimension, got {device_mesh.ndim}; pass mesh['tp']"
        )
    wrapped = next((name for name, m in model.named_modules() if isinstance(m, FSDPModule)), None)
    if wrapped is not None:
        raise ValueError(f"{wrapped or 'the model'} is sharded by FSDP already; {ORDER}")
    for pattern, style in plan.items():
        found = [(name, m) for name, m in model.named_modules() if _fits(name, pattern)]
        if not found:
            raise ValueError(f"plan: no module is named like {pattern!r}; see model.named_modules()")
        if reason := lost_gradient(model, ((name, style) for name, _ in found)):
            raise ValueError(reason)
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        ours = isinstance(style, Float8ColwiseParallel | Float8RowwiseParallel)
        tp = TPLayout(device_mesh, 0 if isinstance(style, ColwiseParallel) else 1)
        for name, module in found:
            if ours or isinstance(module, Float8Linear):
                layer = _checked(module, tp, f"{name}: {type(style).__name__}")
                if not ours and layer.amaxes is not None:
                    raise ValueError(
                        f"{name}: {type(style).__name__} would make DTensors of the amaxes of recipe {layer.recipe}; take "
                        f"Float8{type(style).__name__}"
                    )


def async_tp_reason(device: torch.device | str) -> str | None:
    """Why tensor parallelism can't overlap its collectives with GEMMs on this device; None where it can.

    Where it can: `torch._inductor.config._micro_pipeline_tp = True`, `enable_symm_mem_for_group` for the group, and
    compile the model. It rewrites collectives of torch's styles beside their GEMMs in high precision; rowwise FP8
    GEMMs that follow a gather in bfloat16 are rewritten too (pytorch `micro_pipeline_tp.py`, read 2026-11-21).
    """
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip is not None:
        return f"async tensor parallelism is unsupported here: it needs NVIDIA GPUs, not {device.type}"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return "async tensor parallelism is unsupported here: symmetric memory needs compute capability 9.0"
    return None


def _checked(module: nn.Module, tp: TPLayout, what: str) -> Float8Linear:
    """The module as a layer that can be cut this way.

    Raises:
        ValueError: why not, and the way out.
    """
    if not isinstance(module, Float8Linear):
        note = getattr(module, WHY_NOT, "")
        raise ValueError(
            f"{what}: {type(module).__name__} is no Float8Linear"
            + (f" ({note})" if note else "")
            + f"; {ORDER}. A layer that stays in high precision takes torch's own style"
        )
    if module.is_transposed:
        raise ValueError(
            f"{what}: the weight of {type(module).__name__} lies as [in, out], which the styles don't cut; leave the layer "
            "whole, or write it as nn.Linear"
        )
    if isinstance(module.weight, DTensor):
        raise ValueError(f"{what}: the weight is a DTensor already, on {module.weight.device_mesh}; {ORDER}")
    tp.check(module.in_features, module.out_features, module.recipe)
    if reason := weight_reason(module.recipe, *tp.local_features(module.in_features, module.out_features)):
        raise ValueError(f"{what}, cut {tp} over {tp.size} ranks: {reason}")
    return module


def _taken_out(layer: Float8Linear) -> nn.Module | None:
    """The layer's amaxes, which torch would distribute as if they were parameters; each rank keeps its own.

    A weight that FSDP2 is to gather in FP8 is distributed as the plain tensor that it is otherwise.
    """
    if isinstance(layer.weight, WeightShard):
        layer.weight = nn.Parameter(layer.weight.hp.detach(), requires_grad=layer.weight.requires_grad)
    return layer._modules.pop("amaxes", None)


def _put_back(layer: Float8Linear, amaxes: nn.Module | None) -> Float8Linear:
    if amaxes is not None:
        layer._modules["amaxes"] = amaxes
    if known_of(layer) is not None:
        wrapped_again(layer)
    return layer


def _tokens_cut(x: DTensor, what: str) -> DTensor:
    """x after autocast, if each rank holds whole tokens.

    Raises:
        ValueError: another layout.
    """
    (placement,) = x.placements
    if not isinstance(placement, Shard) or placement.dim == x.dim() - 1:
        raise ValueError(
            f"input of {what} has layout {x.placements}; an FP8 all-gather takes whole tokens, such as Shard(1) of "
            "[batch, tokens, features]"
        )
    if isinstance(x.to_local(), Float8Tensor):
        raise ValueError(
            f"input of {what} is FP8 already and still cut by tokens; gather it once, as a module's input"
        )
    local = after_autocast(x)
    assert isinstance(local, DTensor)
    return local


def _fits(name: str, pattern: str) -> bool:
    """Whether a module's name is what `parallelize_module` finds by this one: token by token."""
    names, tokens = name.split("."), pattern.split(".")
    return len(names) == len(tokens) and all(fnmatch(n, t) for n, t in zip(names, tokens, strict=True))
