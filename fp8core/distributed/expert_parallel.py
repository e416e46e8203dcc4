"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to them and back.

    x [T, K] by expert --all-to-all--> tokens of our experts, from all ranks --experts--> results --all-to-all--> [T, N]

Ranks send as many rows as tokens chose, so one small all-to-all of counts comes first, and each rank waits for it: the
sizes of what follows must be known to Python. Rows arrive by rank and are sorted by expert, then by rank, so that the
experts see the tokens of all ranks in the order in which one process would, and pad them to 16 themselves
(`fp8core.experts.moe.GroupedMatmul.pad`). Scales of tokens, channels and blocks are then those of one process; a tensorwise
scale of activations is of the tokens of one rank.

What travels, a row of K elements:

    high precision   x as it is: 2 K bytes of bfloat16, 4 K of float32
    fp8              e4m3 codes and one power-of-two float32 scale: K + 4 bytes, as uint8, which every backend sends

`dispatch` chooses for the tokens on their way to the experts, `gradient` (e5m2) for both gradients on theirs; results
come back in high precision, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.3: FP8 dispatch, bfloat16 combine). A
recipe whose first cast is rowwise finds in decoded FP8 rows the very codes that it would have made (see the tests).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fp8core.arguments import check_known, check_type
from fp8core.cast import dequantize
from fp8core.distributed.fsdp_state import local_of
from fp8core.formats import native_pair
from fp8core.inputs.operands import cast_one
from fp8core.recipe import Cast
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

PAYLOADS = ("high_precision", "fp8")
SCALE_BYTES = 4

_TOKENS, _GRADIENTS = (Cast(fmt, "rowwise", power_of_two=True) for fmt in native_pair())


class ExpertParallel(nn.Module):
    """Experts of which this rank holds a share, called as one would call all of them.

    Attributes:
        experts: called with (x [t, K], offsets int32 [E / ranks]) -> [t, N], on tokens of this rank's experts.
        group: whose ranks hold the others; None: all ranks.
        dispatch: "high_precision" or "fp8", for tokens.
        gradient: the same, for gradients.
    """

    def __init__(
        self,
        experts: nn.Module,
        group: dist.ProcessGroup | None = None,
        *,
        dispatch: str = "high_precision",
        gradient: str = "high_precision",
    ) -> None:
        """`experts` holds its share already, see `parallelize_experts`."""
        super().__init__()
        check_known("dispatch", dispatch, PAYLOADS)
        check_known("gradient", gradient, PAYLOADS)
        self.experts = experts
        self.group = group
        self.dispatch, self.gradient = dispatch, gradient

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Run the experts of all ranks.

        Args:
            x: [T, K], rows sorted by expert; T may differ between ranks and may be 0.
            offsets: int32 [E], where each expert's rows end; the last is T.

        Returns:
            [T, N], a row for each of x.

        Raises:
            ValueError: E is not a multiple of the number of ranks, or x is no matrix.
        """
        world = dist.get_world_size(self.group)
        if x.dim() != 2:
            raise ValueError(
                f"x has shape {list(x.shape)}; expected [T, K], flatten leading dimensions first"
            )
        check_divides(offsets.shape[0], world)
        sent = torch.diff(offsets, prepend=offsets.new_zeros(1)).view(world, -1)  # [rank, expert of it]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.group)
        away, here = torch.stack((sent.sum(1), received.sum(1))).tolist()
        if sum(away) != x.shape[0]:
            raise ValueError(
                f"offsets end at {sum(away)}, but there are {x.shape[0]} rows; the last must be that"
            )
        gradient = _GRADIENTS if self.gradient == "fp8" else None
        out = _Route(away, here, self.group, _TOKENS if self.dispatch == "fp8" else None, gradient)
        arrived = _AllToAll.apply(x, out)
        numbers = torch.arange(received.shape[1], device=x.device).repeat(world)
        expert = numbers.repeat_interleave(received.flatten(), output_size=sum(here))
        order = expert.argsort(stable=True)
        ends = received.sum(0).cumsum(0).to(torch.int32)
        results = self.experts(arrived.index_select(0, order), ends).index_select(0, order.argsort())
        return _AllToAll.apply(results, _Route(here, away, self.group, None, gradient))

    def extra_repr(self) -> str:
        """What travels."""
        return f"dispatch={self.dispatch}, gradient={self.gradient}"


def parallelize_experts(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    dispatch: str = "high_precision",
    gradient: str = "high_precision",
    mean_gradient: bool = False,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Leaves each rank its share of all experts of a model, and lets tokens travel.

    Before or after `fp8core.convert_experts_to_float8`, which changes no parameter. The optimizer is made afterwards.

    Args:
        model: with the same values on all ranks of the group; changed in place. Experts are modules, not PyTorch's own,
            that hold parameters of three dimensions, [E, ., .] each, and are called as `ExpertParallel` is.
        group: whose ranks share them out; None: all ranks.
        dispatch: see `ExpertParallel`.
        gradient: likewise.
        mean_gradient: divide the experts' gradients by the number of ranks: what data parallelism does to the others'
            gradients when each rank's loss is the mean over its own tokens.
        module_filter_fn: called with (module, fully qualified name) of experts; False leaves them whole on each rank.

    Returns:
        The model; the new ExpertParallel if it is experts itself.

    Raises:
        ValueError: no experts, a number of them that the ranks don't divide, or experts that are shared out or sharded
            already.
    """
    check_type("model", model, nn.Module)
    found = [
        (fqn, module)
        for fqn, module in model.named_modules()
        if _stacked(module)
        and not type(module).__module__.startswith(
            "torch.nn."
        )  # a convolution's weight has three dimensions too
        and (module_filter_fn is None or module_filter_fn(module, fqn))
    ]
    if not found:
        raise ValueError("the model has no experts: no module holds parameters of three dimensions [E, ., .]")
    world = dist.get_world_size(group)
    held = {m.experts for m in model.modules() if isinstance(m, ExpertParallel)}
    for fqn, module in found:
        if module in held:
            raise ValueError(f"{fqn}: these experts are shared out already; call parallelize_experts once")
        for name, weight in _stacked(module).items():
            full = f"{fqn}.{name}" if fqn else name
            check_divides(weight.shape[0], world, full)
            if local_of(weight) is not None:
                raise ValueError(f"{full} is a DTensor already; parallelize_experts first, then fully_shard")
    wrapped = {}
    rank = dist.get_rank(group)
    for _, module in found:
        for name, weight in _stacked(module).items():  # a copy, so that the rest of the memory is freed
            share = weight.detach().chunk(world)[rank].clone()
            setattr(module, name, nn.Parameter(share, weight.requires_grad))
        if mean_gradient:
            module.register_forward_pre_hook(partial(_divide_gradients, world))
        wrapped[module] = ExpertParallel(module, group, dispatch=dispatch, gradient=gradient)
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child in wrapped and not isinstance(parent, ExpertParallel):
                setattr(parent, name, wrapped[child])
    return wrapped.get(model, model)


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that differ from rank to rank: no gradient all-reduce is for them.

    For DistributedDataParallel, before it wraps the model:
    `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(expert_parameters(model)))`.
    """
    return {
        f"{fqn}.experts.{name}" if fqn else f"experts.{name}": weight
        for fqn, module in model.named_modules()
        if isinstance(module, ExpertParallel)
        for name, weight in _stacked(module.experts).items()
    }


def gather_experts(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the model as one process would have it: all experts, under the names they had before.

    A collective: all ranks call it. Where ranks hold different data elsewhere (FSDP), that stays as it is.

    Returns:
        Name -> tensor; the experts' are whole copies on each rank.
    """
    state: dict[str, torch.Tensor] = dict(model.state_dict())
    for fqn, module in model.named_modules():
        if not isinstance(module, ExpertParallel):
            continue
        prefix = f"{fqn}." if fqn else ""
        world, stacked = dist.get_world_size(module.group), _stacked(module.experts)
        for name in list(state):
            if name.startswith(f"{prefix}experts."):
                value = state.pop(name)
                if name.removeprefix(f"{prefix}experts.") in stacked:
                    shares = [torch.empty_like(value) for _ in range(world)]
                    dist.all_gather(shares, value.contiguous(), group=module.group)
                    value = torch.cat(shares)
                state[prefix + name.removeprefix(f"{prefix}experts.")] = value
    return state


def check_divides(experts: int, world: int, what: str = "the offsets") -> None:
    """Refuses a number of experts that the ranks don't divide."""
    if experts % world:
        raise ValueError(
            f"{what}: {experts} experts can't be shared out evenly over {world} ranks; change one of them"
        )


def _stacked(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters [E, ., .] and [E, .] of a module of experts; none of another module."""
    own = dict(module.named_parameters(recurse=False))
    counts = {p.shape[0] for p in own.values() if p.dim() == 3}
    return {name: p for name, p in own.items() if p.dim() in (2, 3) and p.shape[0] in counts}


_DIVIDED = WeakTensorKeyDictionary()  # weights whose gradients are divided -> by what


def _divide_gradients(world: int, experts: nn.Module, _: object) -> None:
    """At each call, of the weights as they are then: a copied or loaded model has others, and FSDP gathers its own."""
    for weight in _stacked(experts).values():
        if weight.requires_grad and weight not in _DIVIDED:
            weight.register_hook(lambda grad: grad / world)
            _DIVIDED[weight] = world


class _Route(NamedTuple):
    """Rows to and from each rank, and how they are cast on the way there, and gradients on the way back."""

    away: list[int]
    here: list[int]
    group: dist.ProcessGroup | None
    cast: Cast | None
    gradient: Cast | None


class _AllToAll(torch.autograd.Function):
    """Rows [T, K] to their ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, route: _Route) -> torch.Tensor:
        ctx.route = route
        return _exchange(x, route.away, route.here, route.group, route.cast)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        route: _Route = ctx.route
        return _exchange(grad, route.here, route.away, route.group, route.gradient), None


def _exchange(
    x: torch.Tensor, away: list[int], here: list[int], group: dist.ProcessGroup | None, cast: Cast | None
) -> torch.Tensor:
    """One all-to-all of rows, cast on the way if `cast` is not None; the result has x's dtype."""
    if cast is None:
        arrived = x.new_empty(sum(here), x.shape[1])
        dist.all_to_all_single(arrived, x.contiguous(), here, away, group)
        return arrived
    operand = cast_one(x.contiguous(), cast, 1)
    assert isinstance(operand, Float8Tensor)
    # [T, 4]; of no tokens a scale may have a stride of 0, which has no bytes to view
    scales = operand.scale_inv.reshape(-1).view(torch.uint8).view(-1, SCALE_BYTES)
    packed = torch.cat((operand.qdata.contiguous().view(torch.uint8), scales), 1)
    arrived = packed.new_empty(sum(here), packed.shape[1])
    dist.all_to_all_single(arrived, packed, here, away, group)
    codes, scales = arrived.split((x.shape[1], SCALE_BYTES), 1)
    scale_inv = scales.contiguous().view(torch.float32)
    return dequantize(codes.contiguous().view(cast.format.dtype), scale_inv, x.dtype)
