"""Turns the Linear layers of a model into Float8Linear, and says what was not turned and why.

`convert_to_float8_training` swaps modules in place; `audit` reads a model, converted or not, and lists every
Linear with its state, its share of the model's FLOPs and the FP8 GEMMs to expect of one forward and backward
pass. A layer is only counted as FP8 if its class, recipe and backend make it so: an emulated layer counts 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.tensor import DTensor

from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.distributed.fsdp import gather_in_fp8
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.distributed.gather_reasons import NOT_ASKED, NOT_CONVERTED, gathered_as
from fp8core.gemm import backend_named
from fp8core.linear import WHY_NOT, Float8Linear
from fp8core.moe import ExpertsAudit, audit_experts
from fp8core.operands import casts_route
from fp8core.replace import loss_reason
from fp8core.sharded import ORDER

if TYPE_CHECKING:
    from fp8core.recipe import Recipe

ModuleFilter = Callable[[nn.Module, str], bool]  # (module, fully qualified name) -> convert it?

_FILTERED = "left out by module_filter_fn"
_UNTOUCHED = "never offered to convert_to_float8_training"


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """One Linear of a model.

    Attributes:
        fqn: fully qualified name ("" for the model itself).
        kind: its class.
        in_features, out_features: K and N.
        converted: it is a Float8Linear.
        recipe: what it runs, as text; "" if not converted.
        reason: why it was not converted; "" if it was.
        gemms: GEMMs of one forward and backward pass, assuming that its input needs a gradient.
        fp8_gemms: how many of them reach FP8 matrix units (0 if emulated).
        all_gather: how FSDP2 gathers its weight where it shards it: "fp8", or "high precision: " and why.
        casts: "kernels", or "plain PyTorch: " and the reason, of eager mode where the weight lies; "" if not converted.
    """

    fqn: str
    kind: str
    in_features: int
    out_features: int
    converted: bool
    recipe: str
    reason: str
    gemms: int
    fp8_gemms: int
    casts: str
    all_gather: str = ""

    @property
    def flops_per_token(self) -> int:
        """FLOPs of one forward and backward pass, divided by tokens: 2 K N for each GEMM."""
        return 2 * self.in_features * self.out_features * self.gemms


@dataclass(frozen=True, slots=True)
class Audit:
    """Every Linear of a model, and the stacked weights of its experts; `str()` is a table."""

    layers: tuple[LayerAudit, ...]
    experts: tuple[ExpertsAudit, ...] = ()

    @property
    def converted(self) -> tuple[LayerAudit, ...]:
        """The layers that are Float8Linear."""
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def not_converted(self) -> tuple[LayerAudit, ...]:
        """The layers that are not, each with its reason."""
        return tuple(layer for layer in self.layers if not layer.converted)

    @property
    def fp8_gemms(self) -> int:
        """FP8 GEMMs (calls of `aten::_scaled_mm`, or `fp8core::matmul`) of the Linear layers in one forward and backward pass.

        Experts are not counted: how many calls they take can depend on where tokens go, see `GroupedMatmul.fp8_calls`. A layer whose input needs no gradient, such as the first one of a model on raw data, runs one fewer.
        """
        return sum(layer.fp8_gemms for layer in self.layers)

    @property
    def fp8_flop_share(self) -> float:
        """Share of the Linear layers' and experts' FLOPs that run in FP8, 0..1; 0 for a model that has neither."""
        total = sum(layer.flops_per_token for layer in self.layers)
        fp8 = sum(2 * layer.in_features * layer.out_features * layer.fp8_gemms for layer in self.layers)
        total += sum(found.flops_of_a_gemm * found.gemms for found in self.experts)
        fp8 += sum(found.flops_of_a_gemm * found.fp8_gemms for found in self.experts)
        return fp8 / total if total else 0.0

    def __str__(self) -> str:
        head = ("layer", "shape (K x N)", "FP8 GEMMs", "recipe, or why not")
        rows = [
            (
                layer.fqn or "(model)",
                f"{layer.in_features} x {layer.out_features}",
                f"{layer.fp8_gemms}/{layer.gemms}",
                (layer.recipe or layer.reason)
                + (
                    ""
                    if layer.all_gather in ("", NOT_ASKED, NOT_CONVERTED)
                    else f"; all-gather: {layer.all_gather}"
                ),
            )
            for layer in self.layers
        ]
        rows += [
            (
                found.fqn,
                f"{found.experts} x {found.sizes[0]} x {found.sizes[1]}",
                f"{found.fp8_gemms}/{found.gemms}",
                f"{found.recipe}, {found.route}" if found.converted else found.reason,
            )
            for found in self.experts
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
        lines = [
            "  ".join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]))
            for row in (head, *rows)
        ]
        experts = ""
        if self.experts:
            converted = sum(found.converted for found in self.experts)
            experts = f"{converted} of {len(self.experts)} stacks of experts converted; "
        lines.append(
            f"{len(self.converted)} of {len(self.layers)} Linear layers converted; {self.fp8_gemms} FP8 GEMMs a "
            f"forward and backward pass; {experts}{100 * self.fp8_flop_share:.1f} % of their FLOPs in FP8"
        )
        return "\n".join(lines)


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Recipe | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    allow_no_conversion: bool = False,
    convert_subclasses: Iterable[type[nn.Linear]] = (),
) -> nn.Module:
    """Replaces the nn.Linear layers of a model by Float8Linear ones that share their parameters.

    Converted is each nn.Linear, or subclass with nn.Linear's own forward, whose shape FP8 matmul takes and for which
    the filter answers True. A Float8Linear of the same recipe is left as it is. A module or a parameter used in several
    places stays shared. Hooks move to the new layer, and their handles still remove them. What is left alone
    remembers why, for `audit`. `convert_to_high_precision` is the way back.

    Args:
        module: the model; changed in place, except when it is itself an nn.Linear.
        config: a configuration, a Recipe or the name of one; default "tensorwise".
        module_filter_fn: called with (module, fully qualified name) of each Linear; False leaves it alone.
        allow_no_conversion: True: a model in which nothing can be converted is returned as it is.
        convert_subclasses: subclasses of nn.Linear with a forward of their own that computes what nn.Linear's does, such
            as `F.linear(x, self.weight.to(x.dtype))`: converted too, and their forward is replaced.

    Returns:
        The model; the new Float8Linear if `module` is an nn.Linear.

    Raises:
        ValueError: nothing was converted; a layer already has another recipe; a layer lies on a device
            without FP8 matmul; the model is an nn.Linear with children, which would be lost; `parallelize_module` or
            `fully_shard` was applied before.
        TypeError: config is of another type.
    """
    recipe = as_recipe(config)
    subclasses = tuple(convert_subclasses)
    chosen: list[nn.Linear] = []
    already_sharded = is_sharded_by_fsdp(module)
    for fqn, linear in _linears(module):
        wanted = module_filter_fn is None or module_filter_fn(linear, fqn)
        if isinstance(linear, Float8Linear):
            if wanted and linear.recipe != recipe:
                raise ValueError(
                    f"{fqn or 'the model'} already runs recipe {linear.recipe}, not {recipe}; convert the original "
                    "model, or leave the layer out by module_filter_fn"
                )
            continue
        if wanted and isinstance(linear.weight, DTensor) and not already_sharded:
            raise ValueError(
                f"{fqn or 'the model'}: parallelize_module came first, and a new layer would not have its hooks; {ORDER}"
            )
        if wanted and linear is module and linear._modules:
            raise ValueError(
                f"the model is a {type(linear).__name__} with the child {next(iter(linear._modules))!r}, which would be "
                "lost; attach it to a module that holds the layer"
            )
        reason = _reason_against(linear, recipe, subclasses) if wanted else _FILTERED
        if reason:
            setattr(linear, WHY_NOT, reason)
        elif already_sharded:
            raise ValueError(
                f"{fqn or 'the model'}: fully_shard came first, and FSDP2 would not know the new layer; convert, then "
                "fully_shard"
            )
        else:
            chosen.append(linear)
    result = _replace(module, {linear: Float8Linear.from_float(linear, recipe) for linear in chosen})
    gather_in_fp8(result)
    report = audit(result)
    if not report.converted and not allow_no_conversion:
        raise ValueError(
            f"no layer was converted to FP8; pass allow_no_conversion=True if that is intended\n{report}"
        )
    return result


def audit(model: nn.Module) -> Audit:
    """Lists every Linear layer and every stack of experts of a model: converted or not, and why; each shared one once.

    Args:
        model: any module, before or after conversion.

    Returns:
        Audit; print it for a table.
    """
    layers = tuple(_audit_layer(fqn, linear) for fqn, linear in _linears(model))
    return Audit(layers, audit_experts(model))


def _linears(module: nn.Module) -> list[tuple[str, nn.Linear]]:
    return [(fqn, m) for fqn, m in module.named_modules() if isinstance(m, nn.Linear)]


def _replace(module: nn.Module, swapped: dict[nn.Module, nn.Module]) -> nn.Module:
    """Puts every swapped module in its place, in each place."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child in swapped:
                setattr(parent, name, swapped[child])
    return swapped.get(module, module)


def _reason_against(
    linear: nn.Linear, recipe: Recipe, convert_subclasses: tuple[type[nn.Linear], ...]
) -> str:
    """Why this layer cannot run the recipe; "" if it can.

    Raises:
        ValueError: its device has no FP8 matmul, which is then true of all layers.
    """
    if lost := loss_reason(linear, convert_subclasses):
        return lost
    backend = backend_named(recipe.backend)
    K, N = linear.in_features, linear.out_features
    for gemm, (k, n) in ((recipe.output, (K, N)), (recipe.grad_input, (N, K))):
        if gemm.a is None or gemm.b is None:
            continue
        if linear.weight.device.type != "meta":
            device = linear.weight.device
            reason = backend.device_reason(device, gemm.a.format, gemm.b.format)
            reason = reason or backend.granularity_reason(device, gemm.granularity, recipe.nearest)
            if reason:
                raise ValueError(f"recipe {recipe}: {reason}")
        if not recipe.pad_inner_dim:
            reason = backend.shape_reason(0, k, n, gemm.a.format, gemm.b.format, gemm.granularity)
            if reason:
                return reason
    return ""


def _audit_layer(fqn: str, linear: nn.Linear) -> LayerAudit:
    converted = isinstance(linear, Float8Linear)
    names = ["output", "grad_input"] + (["grad_weight"] if linear.weight.requires_grad else [])
    fp8_gemms = 0
    if isinstance(linear, Float8Linear) and backend_named(linear.recipe.backend).is_fp8:
        fp8_gemms = sum(linear.recipe.gemms[name].is_fp8 for name in names)
    return LayerAudit(
        fqn=fqn,
        kind=type(linear).__name__,
        in_features=linear.in_features,
        out_features=linear.out_features,
        converted=converted,
        recipe=str(linear.recipe) if isinstance(linear, Float8Linear) else "",
        reason="" if converted else getattr(linear, WHY_NOT, _UNTOUCHED),
        gemms=len(names),
        fp8_gemms=fp8_gemms,
        casts=casts_route(linear.weight, linear.recipe) if isinstance(linear, Float8Linear) else "",
        all_gather=gathered_as(linear),
    )
