"""What tensor parallelism makes of one layer: which of its tensors are cut, and how their parts become one scale.

    column-wise   weight [N, K] cut along N (`Shard(0)`): input whole, output and grad_output [M, N] cut along N
    row-wise      weight [N, K] cut along K (`Shard(1)`): input [M, K] cut along K, output whole after a sum over ranks

A layer computes on its rank's parts, as plain tensors: DTensors are taken apart on the way in and put together on the
way out, with the layouts that `torch.distributed.tensor.parallel` expects. Scales are those of one process where the
recipe says that a group reaches across ranks and one number mends it:

    tensorwise    the largest amax of all parts, by one all-reduce for all tensors that are cut (weight and input of a
                  row-wise layer together); so codes equal those of one process
    delayed       amaxes in use are the same everywhere already: no all-reduce until `update_scales`
    rowwise       a row that is cut is scaled by each part's own amax. Finer than one scale for the whole row, and no
                  all-reduce of [M, 1]; but not what one process computes. Rows that aren't cut are
    blocks        whole blocks must lie within a part (a reason says so otherwise); then they are those of one process
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fp8core.arguments import is_dtensor
from fp8core.history import max_over_ranks
from fp8core.inputs.operands import expected_amax, find_amax
from fp8core.scaling import BLOCKS
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from fp8core.history import Amaxes
    from fp8core.recipe import Cast, Recipe

ORDER = "convert_to_float8_training first, then parallelize_module, then fully_shard"


class TPLayout(NamedTuple):
    """How a layer is cut.

    Attributes:
        mesh: the mesh of the weight; tensor parallelism is its last dimension.
        dim: of the weight: 0 column-wise, 1 row-wise, -1 nothing is cut.
    """

    mesh: DeviceMesh
    dim: int

    @property
    def roles(self) -> tuple[str, ...]:
        """Which of `fp8core.history.ROLES` are cut."""
        return (("weight", "grad_output"), ("weight", "input"), ())[self.dim]

    @property
    def size(self) -> int:
        """Ranks that share the layer."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def group(self) -> dist.ProcessGroup:
        """These ranks."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def input_placement(self) -> Placement:
        """The placement of the input that the layer takes."""
        from torch.distributed.tensor import Replicate, Shard

        return Shard(-1) if self.dim == 1 else Replicate()

    def local_features(self, in_features: int, out_features: int) -> tuple[int, int]:
        """A rank's (K, N)."""
        return in_features // self.size if self.dim == 1 else in_features, (
            out_features // self.size if self.dim == 0 else out_features
        )

    def local_input(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """A rank's part of the input; a plain tensor is one already.

        Raises:
            ValueError: a DTensor of another mesh or layout than this layer takes.
        """
        if not is_dtensor(x):
            return x
        from torch.distributed.tensor import Partial

        wanted = self.input_placement
        found = x.placements
        fits = len(found) == 1 and (
            found[0].is_shard(x.dim() - 1) if wanted.is_shard() else found[0].is_replicate()
        )
        if not fits:
            raise ValueError(
                f"input of {what} has layout {found}; it is cut {self}, so it takes ({wanted},): let the plan redistribute "
                "it (PrepareModuleInput, or input_layouts of the style), or call .redistribute"
            )
        return x.to_local(grad_placements=(Partial(),) if self.dim == 0 else found)

    def local_bias(self, bias: DTensor) -> torch.Tensor:
        """What this rank adds to its part of the output: of a sum over ranks, the first one's; each gets the gradient."""
        local = bias.to_local()
        if self.dim != 1 or self.mesh.get_local_rank(self.mesh.ndim - 1) == 0:
            return local
        return local - local.detach()

    def whole_output(self, y: torch.Tensor) -> DTensor:
        """The DTensor that the rank's part y belongs to."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        placement = (Shard(y.dim() - 1), Partial(), Replicate())[self.dim]
        return DTensor.from_local(y, self.mesh, (placement,), run_check=False)

    def check(self, in_features: int, out_features: int, recipe: Recipe) -> None:
        """Refuses a layer that these ranks can't share evenly, or whose blocks they would cut.

        Raises:
            ValueError: names the size at fault and the way out.
        """
        if recipe.is_four_bit:
            raise ValueError(
                f"recipe {recipe}: four bits are not offered under tensor parallelism, whose ranks would share neither scales "
                "nor random numbers; take recipe 'rowwise', or leave the layer out of the plan"
            )
        if self.dim < 0:
            return
        name, size = (("out_features", out_features), ("in_features", in_features))[self.dim]
        style = ("column-wise", "row-wise")[self.dim]
        if size % self.size:
            raise ValueError(
                f"{name}={size} cannot be cut {style} over {self.size} ranks: {size} / {self.size} is no whole number; "
                "take a tensor-parallel size that divides it, or leave the layer out of the plan"
            )
        cast = next((c for c in recipe.casts if c.granularity in BLOCKS), None)
        if cast is not None and size // self.size % BLOCKS[cast.granularity]:
            block = BLOCKS[cast.granularity]
            raise ValueError(
                f"recipe {recipe} scales blocks of {block}, and {name}={size} cut {style} over {self.size} ranks leaves "
                f"{size // self.size} a rank, which would cut a block; expected a multiple of {block}: take fewer "
                "ranks, or recipe rowwise"
            )

    def __str__(self) -> str:
        return ("column-wise", "row-wise", "nowhere")[self.dim]


def tp_layout_of(weight: torch.Tensor) -> TPLayout | None:
    """How tensor parallelism has cut this weight [N, K]; None if it is no DTensor."""
    if not is_dtensor(weight):
        return None
    placement: Any = weight.placements[-1]
    return TPLayout(weight.device_mesh, placement.dim if placement.is_shard() else -1)


def check_layer(layer: Any, tp: TPLayout, x: torch.Tensor) -> None:
    """Refuses what tensor parallelism, or a wrong order of conversions, has made of a Float8Linear.

    Args:
        layer: the Float8Linear, whose weight is a DTensor.
        tp: of that weight.
        x: its input.

    Raises:
        ValueError: the weight is FSDP's and not gathered, amaxes are DTensors, or as `TPLayout.check`.
    """
    by_plan = is_dtensor(x) or hasattr(layer, "_distribute_module_applied")
    if tp.mesh.ndim > 1 or not by_plan:
        raise ValueError(
            f"the weight of {layer} is a part of one, on {tp.mesh}: FSDP has not gathered it. Call the module that "
            f"fully_shard wraps. Or the layer was cut by other means than a plan: {ORDER}"
        )
    if layer.amaxes is not None and is_dtensor(layer.amaxes.in_use):
        raise ValueError(
            f"the style that cut {layer} has made DTensors of its amaxes too, which recipe {layer.recipe} can't use; "
            "take fp8core.Float8ColwiseParallel and Float8RowwiseParallel"
        )
    tp.check(layer.in_features, layer.out_features, layer.recipe)


class AmaxRequest(NamedTuple):
    """A tensor about to be cast, and all its casts; `amax` of the rank's part if it is known already."""

    x: torch.Tensor | None
    role: str
    casts: tuple[Cast | None, ...]
    amax: torch.Tensor | None = None


def shared_amaxes(
    tp: TPLayout | None, recipe: Recipe, memory: Amaxes | None, *tensors: AmaxRequest
) -> tuple[torch.Tensor | None, ...]:
    """What tensorwise casts of these tensors go by; one all-reduce for all that need one, none if none does.

    Returns:
        For each: float32, 0-dimensional, the amax of all parts; `amax` as given where no part is elsewhere.
    """
    needed = [
        tp is not None
        and seen.x is not None
        and seen.role in tp.roles
        and not isinstance(seen.x, Float8Tensor)
        and any(
            cast is not None
            and cast.granularity == "tensorwise"
            and expected_amax(cast, memory, seen.role) is None
            for cast in seen.casts
        )
        for seen in tensors
    ]
    if tp is None or not any(needed):
        return tuple(seen.amax for seen in tensors)
    with torch.no_grad():
        parts = [
            find_amax(seen.x, recipe.kernels) if seen.amax is None else seen.amax
            for seen, need in zip(tensors, needed, strict=True)
            if need and seen.x is not None
        ]
        together = iter(max_over_ranks(torch.stack(parts), tp.group).unbind())
    return tuple(next(together) if need else seen.amax for seen, need in zip(tensors, needed, strict=True))
