"""audit: every weight of a model that multiplies, whether it does in FP8, and why not.

Without a step, FLOPs follow from sizes: each weight meets each token once, an expert's as often as tokens choose it.
Products without a weight, such as attention's scores, are then unknown, and the text says so. With a step that is run
once, each share is that of what really ran (`fp8core.proof.flops`): attention and operators without a formula have their rows.
A layer is only counted as FP8 if its class, recipe and backend make it so: an emulated layer counts 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from fp8core.distributed.weight_gather import NOT_ASKED, NOT_CONVERTED, weight_gather_precision
from fp8core.experts.moe import GroupedMatmul
from fp8core.inputs.operands import casts_route
from fp8core.linear import Float8Linear
from fp8core.proof.expert_rows import ExpertsAudit, audit_experts, gemms_of
from fp8core.proof.flops import Causal, Matmul, MatmulCount, count_matmuls, percent
from fp8core.proof.other_weights import WeightAudit, audit_weights
from fp8core.replace import NEVER_OFFERED, WHY_NOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_UNKNOWN = "other products are not known without a step: audit(model, step=...)"
_ROLES = {
    "attention scores": "no weight: queries by keys; attention stays in high precision",
    "attention values": "no weight: probabilities by values; attention stays in high precision",
}


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
        gemms: GEMMs of one forward and backward pass, assuming that its input needs a gradient; where a step was run, those
            that ran.
        fp8_gemms: how many of them reach FP8 matrix units (0 if emulated), or did.
        four_bit_gemms: how many take four bits, and are emulated.
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
    four_bit_gemms: int = 0

    @property
    def owner(self) -> str:
        """Name of the layer's weight, as `fp8core.proof.flops` names it."""
        return f"{self.fqn}.weight" if self.fqn else "weight"

    @property
    def flops_of_a_gemm(self) -> int:
        """FLOPs of one of the GEMMs, divided by tokens."""
        return 2 * self.in_features * self.out_features

    @property
    def size(self) -> tuple[int, ...]:
        """K and N."""
        return self.in_features, self.out_features

    @property
    def words(self) -> str:
        """The recipe, or why it has none; and how its weight is gathered where that was asked for."""
        asked = self.all_gather not in ("", NOT_ASKED, NOT_CONVERTED)
        text = (self.recipe or self.reason) + (f"; all-gather: {self.all_gather}" if asked else "")
        four = self.four_bit_gemms
        return text + (f"; {four} GEMMs of four bits, emulated" if four else "")


@dataclass(frozen=True, slots=True)
class Audit:
    """Every weight of a model that multiplies; `str()` is a table.

    Attributes:
        layers: each nn.Linear, Float8Linear included.
        experts: the stacked weights of modules with a `GroupedMatmul`.
        weights: every other parameter that multiplies, or may; none of them is in FP8.
        count: the matrix products of a step; None if none was run.
        not_trained: parameters of FP8 layers that no optimizer holds; None if none was given.
    """

    layers: tuple[LayerAudit, ...]
    experts: tuple[ExpertsAudit, ...] = ()
    weights: tuple[WeightAudit, ...] = ()
    count: MatmulCount | None = None
    not_trained: tuple[str, ...] | None = None

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
        """FP8 GEMMs (calls of `aten::_scaled_mm`, or `fp8core::matmul`) of the Linear layers in one forward and backward pass;
        where a step was run, those that it ran.

        Experts are not counted: how many calls they take can depend on where tokens go, see `GroupedMatmul.fp8_calls`. A layer whose input needs no gradient, such as the first one of a model on raw data, runs one fewer.
        """
        return sum(layer.fp8_gemms for layer in self.layers)

    @property
    def fp8_flop_share(self) -> float:
        """Share of the model's matmul FLOPs that run in FP8, 0..1; 0 for a model without any.

        Where a step was run, its share of all products that were counted; else of those with a weight, by size.
        """
        if self.count is not None:
            return self.count.fp8_share
        total = sum(row.flops_of_a_gemm * row.gemms for row in self._rows)
        return sum(row.flops_of_a_gemm * row.fp8_gemms for row in self._rows) / total if total else 0.0

    @property
    def _rows(self) -> tuple[LayerAudit | ExpertsAudit | WeightAudit, ...]:
        return *self.layers, *self.experts, *self.weights

    def share_of(self, owner: str) -> float | None:
        """Share of a step's matmul FLOPs that a parameter takes part in, 0..1; None if no step was run."""
        if self.count is None or not self.count.flops:
            return None
        return sum(row.flops for row in self.count.of_model if row.owner == owner) / self.count.flops

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "shape (K x N)", "FLOPs", "FP8 GEMMs", "recipe, or why not")]
        rows += [
            (
                row.fqn or "(model)",
                " x ".join(map(str, row.size)),
                self._share_text(owner),
                f"{row.fp8_gemms}/{row.gemms}",
                row.words + self._unused(owner),
            )
            for row in self._rows
            for owner in [row.owner if isinstance(row, LayerAudit) else row.fqn]
        ]
        if self.count is not None:
            rows += _rows_without_weight(self.count)
        shown = [(*row[:2], *row[2 + (self.count is None) :]) for row in rows]
        return "\n".join((*as_table(shown), self._summary()))

    def _share_text(self, owner: str) -> str:
        share = self.share_of(owner)
        return "" if share is None else percent(share)

    def _unused(self, owner: str) -> str:
        if self.count is None or self.share_of(owner) != 0:
            return ""
        return "; no product of the step" + (" that could be counted" if self.count.uncounted else "")

    def _summary(self) -> str:
        stacks = ""
        if self.experts:
            stacks = f"{sum(row.converted for row in self.experts)} of {len(self.experts)} stacks of experts converted; "
        unknown = sum(not row.gemms for row in self.weights)
        if len(self.weights) > unknown:
            stacks += f"0 of {len(self.weights) - unknown} other weights in FP8; "
        if unknown:
            stacks += f"{unknown} parameters of unknown use are not counted; "
        when = "a forward and backward pass" if self.count is None else "in the step"
        start = (
            f"{len(self.converted)} of {len(self.layers)} Linear layers converted; {self.fp8_gemms} FP8 GEMMs {when}; "
            f"{stacks}"
        )
        if self.not_trained:
            shown = ", ".join(self.not_trained[:3]) + ", ..." * (len(self.not_trained) > 3)
            start += f"{len(self.not_trained)} parameters of FP8 layers that no optimizer trains ({shown}); "
        if self.count is not None:
            return start + self.count.text
        share = "all" if self.fp8_flop_share == 1 else percent(self.fp8_flop_share)
        return f"{start}{share} of their FLOPs in FP8, by size; {_UNKNOWN}"


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines whose cells stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def fp8_modules(model: nn.Module) -> dict[str, Any]:
    """FP8 layers and products of experts in FP8, by name."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if isinstance(module, Float8Linear)
        or (isinstance(module, GroupedMatmul) and module.recipe is not None)
    }


def audit(
    model: nn.Module,
    *,
    step: Callable[[], object] | None = None,
    causal: Causal = "full",
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> Audit:
    """Lists every weight of a model that multiplies: in FP8 or not, and why; each shared one once.

    Args:
        model: any module, before or after conversion.
        step: runs one forward and backward pass of it; is called once, in eager mode, and its products are counted, so
            that shares are those of the whole step. What it does to weights and gradients stays.
        optimizer: one, or all that train the model: parameters of FP8 layers that none of them holds are named.
        causal: how fused attention with a causal mask counts: "full", all pairs, or "half" of them.

    Returns:
        Audit; print it for a table.

    Raises:
        TypeError: step is no function.
        ValueError: another convention.
    """
    count = None if step is None else count_matmuls(step, model, causal=causal)
    linears = ((fqn, m) for fqn, m in model.named_modules() if isinstance(m, nn.Linear))
    layers = tuple(_audit_layer(fqn, linear) for fqn, linear in linears)
    experts = audit_experts(model)
    idle = None if optimizer is None else _not_trained(model, optimizer)
    if count is None:
        return Audit(layers, experts, tuple(audit_weights(model)), not_trained=idle)
    ran: dict[str, list[Matmul]] = {}
    for row in count.of_model:
        ran.setdefault(row.owner, []).append(row)
    return Audit(
        tuple(_as_it_ran(layer, ran.get(layer.owner, [])) for layer in layers),
        tuple(row if row.fqn in ran else replace(row, gemms=0, fp8_gemms=0) for row in experts),
        tuple(row if row.fqn in ran else replace(row, gemms=0) for row in audit_weights(model, ran.keys())),
        count,
        idle,
    )


def _not_trained(model: nn.Module, optimizers: Optimizer | Iterable[Optimizer]) -> tuple[str, ...]:
    every = [optimizers] if isinstance(optimizers, Optimizer) else optimizers
    held = {id(p) for optimizer in every for group in optimizer.param_groups for p in group["params"]}
    layers = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, Float8Linear)]
    own = [(f"{fqn}.{name}", p) for fqn, m in layers for name, p in m.named_parameters(recurse=False)]
    return tuple(name.lstrip(".") for name, p in own if p.requires_grad and id(p) not in held)


def _as_it_ran(layer: LayerAudit, rows: list[Matmul]) -> LayerAudit:
    fp8 = sum(row.calls for row in rows if row.is_fp8)
    return replace(layer, gemms=sum(row.calls for row in rows), fp8_gemms=fp8)


def _rows_without_weight(count: MatmulCount) -> list[tuple[str, ...]]:
    """A row for each kind of product without a weight, of all layers together, and for each operator without a formula."""
    sums: dict[str, list[Matmul]] = {}
    for row in count.of_model:
        if row.role != "weight":
            sums.setdefault(row.name, []).append(row)
    rows: list[tuple[str, ...]] = []
    for name, same in sums.items():
        flops = sum(row.flops for row in same)
        fp8 = sum(row.flops for row in same if row.is_fp8)
        why = _ROLES.get(name, "no weight: a product of activations")
        rows.append((name, "", percent(flops / count.flops), "" if not fp8 else percent(fp8 / flops), why))
    for operator in dict.fromkeys(row.operator for row in count.uncounted):
        rows.append((operator, "", "unknown", "", "it may multiply matrices, and there is no formula for it"))
    return rows


def _audit_layer(fqn: str, linear: nn.Linear) -> LayerAudit:
    recipe = linear.recipe if isinstance(linear, Float8Linear) else None
    gemms, fp8_gemms = gemms_of(recipe, linear.weight)
    return LayerAudit(
        fqn=fqn,
        kind=type(linear).__name__,
        in_features=linear.in_features,
        out_features=linear.out_features,
        converted=recipe is not None,
        recipe="" if recipe is None else str(recipe),
        reason=getattr(linear, WHY_NOT, NEVER_OFFERED) if recipe is None else "",
        gemms=gemms,
        fp8_gemms=fp8_gemms,
        casts="" if recipe is None else casts_route(linear.weight, recipe),
        all_gather=weight_gather_precision(linear),
        four_bit_gemms=0 if recipe is None else sum(gemm.is_four_bit for gemm in recipe.gemms.values()),
    )
