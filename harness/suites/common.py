"""What the suites share: random data, operand sets, arms that compile, the layers of a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile

from fp8core.gemm import backend_named, layout
from harness.store.cause import Cause
from harness.suites.shapes import FROM_MODEL, Layer
from harness.timing.compiling import compile_unavailable
from harness.timing.timers import last_level_cache_bytes
from harness.timing.workload import Axis, Unsupported

if TYPE_CHECKING:
    from fp8core.recipe import Recipe
    from harness.peers import Peer
    from harness.store.case import Scalar

T = TypeVar("T")

SIZES = {
    "M": Axis("rows of A and of the result", linked=True),
    "K": Axis("contracted dimension", linked=True),
    "N": Axis("columns of B and of the result", linked=True),
    "tokens": Axis("tokens of one step, for named shape sets", linked=True),
}
OUTLIER_SHARE, OUTLIER_FACTOR = 1e-3, 100.0
DATA = {
    "randn": "Gaussian",
    "uniform": "uniform in [-1, 1)",
    "outlier_1e-3": "Gaussian, one element in a thousand 100 times as large",
    "zeros": "all 0: draws less power than any training step, only on purpose",
    "ones": "all 1: likewise",
}


def generator(device: str, seed: int, stream: int) -> torch.Generator:
    """A random stream of its own for each operand of a case; the same for all arms."""
    return torch.Generator(device).manual_seed(seed * 1000 + stream)


def draw(
    data: str, shape: tuple[int, ...], random: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """A tensor of the named distribution, contiguous, on the generator's device.

    Raises:
        ValueError: a distribution that is not in `DATA`.
    """
    x = torch.empty(shape, device=random.device, dtype=dtype)
    if data == "zeros":
        return x.zero_()
    if data == "ones":
        return x.fill_(1)
    if data == "uniform":
        return x.uniform_(-1, 1, generator=random)
    x.normal_(generator=random)
    if data == "randn":
        return x
    if data == "outlier_1e-3":
        chosen = torch.rand(shape, device=random.device, generator=random) < OUTLIER_SHARE
        return torch.where(chosen, x * OUTLIER_FACTOR, x)
    raise ValueError(f"data={data!r} is no distribution; known: {', '.join(DATA)}")


def compile_missing(device: str) -> Unsupported | None:
    """Why compiled arms can't run on this device."""
    reason = compile_unavailable(device)
    return Unsupported("device", reason, Cause.MISSING) if reason else None


def peer_missing(peer: Peer, device: str) -> Unsupported | None:
    """Why a peer can't run on this device; it says how to get it."""
    reason = peer.missing(device)
    return Unsupported("device", reason, Cause.MISSING) if reason else None


def kernels_missing(device: str, instead: str) -> Unsupported | None:
    """Why arms of fp8core's kernels can't run on this device; `instead` says what they would time there."""
    if torch.device(device).type == "cuda" and torch.version.hip is None:
        return None
    return Unsupported("device", f"fp8core's kernels run on NVIDIA GPUs; here this arm would {instead}")


def profiled(run: Callable[[], T], device: str) -> tuple[T, list[Any]]:
    """A call's result, and the events that a profiler saw: operators, and kernels on a GPU."""
    on_gpu = torch.device(device).type == "cuda"
    # Kineto writes each start to stderr unless told otherwise; without a GPU the older tracer starts a second faster.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(use_kineto=on_gpu, use_device="cuda" if on_gpu else None) as profiler:
        result = run()
        if on_gpu:
            torch.cuda.synchronize()
    return result, list(profiler.function_events or [])


def kernel_names(events: Sequence[Any]) -> dict[str, object]:
    """`{"kernels": [...]}` of what ran on a GPU; {} without one."""
    names = sorted({event.name[:160] for event in events if event.device_type == DeviceType.CUDA})
    return {"kernels": names} if names else {}


def way_out(M: int, K: int, N: int, multiple: int, any_shape: str) -> str:
    """The nearest sizes that FP8 matmul takes, and the arm that takes any.

    >>> way_out(8, 100, 32, 16, "bf16_eager")
    'nearest: K=96 or 112; arms=[bf16_eager] takes M=8, K=100, N=32'
    """
    near = []
    for name, size in (("K", K), ("N", N)):
        below = size // multiple * multiple
        if size != below:
            near.append(f"{name}={f'{below} or ' if below else ''}{below + multiple}")
    return (f"nearest: {', '.join(near)}; " if near else "") + f"arms=[{any_shape}] takes M={M}, K={K}, N={N}"


COPIES_MOST = 4096  # operand sets of a call that takes microseconds
_ARMS_MOST = 32  # arms of a case, with room for what they compute


class Rotation(Sequence[Callable[[], object]]):
    """Closures over copies of a workload's operands, made when first asked for.

    Load over a few seconds must not find its operands in a cache, so it takes turns between sets: at least 3,
    and more until they exceed 256 MB and 4 times the L2 cache (at most 16, and what memory allows). Copies hold
    the same values at other addresses, which is all that matters to a cache.
    """

    def __init__(
        self, closure: Callable[..., object], operands: Sequence[Tensor], device: str, most: int = 16
    ) -> None:
        self._closure, self._operands = closure, operands
        size = max(sum(x.numel() * x.element_size() for x in operands), 1)
        on_gpu = torch.device(device).type == "cuda"
        l2 = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
        self._count = min(most, max(3, -(-max(256 * 2**20, 4 * l2) // size)))
        if on_gpu:
            # All arms of a case make such copies. One set alone, larger than any cache, evicts itself.
            self._count = max(1, min(self._count, torch.cuda.mem_get_info(device)[0] // (_ARMS_MOST * size)))
        self._made: list[Callable[[], object]] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Callable[[], object]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Callable[[], object]]: ...
    def __getitem__(self, index: int | slice) -> Callable[[], object] | Sequence[Callable[[], object]]:
        while len(self._made) < self._count:
            self._made.append(_over_copies(self._closure, self._operands))
        return self._made[index]


def covering(closure: Callable[..., object], operands: Sequence[Tensor], device: str) -> Rotation | tuple[()]:
    """A rotation whose operands exceed twice the last cache of a GPU; () where that many cannot be had, and on a CPU."""
    if torch.device(device).type != "cuda":
        return ()
    found = Rotation(closure, operands, device, COPIES_MOST)
    size = sum(x.numel() * x.element_size() for x in operands)
    twice = 2 * last_level_cache_bytes(torch.cuda.get_device_properties(device))
    return found if len(found) >= 2 and len(found) * size >= twice else ()


def _over_copies(closure: Callable[..., object], operands: Sequence[Tensor]) -> Callable[[], object]:
    copies = [_copy(x) for x in operands]
    return lambda: closure(*copies)


def _copy(x: Tensor) -> Tensor:
    """A copy with the same strides that requires a gradient where x does."""
    copy = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    raw = (
        torch.uint8 if x.is_floating_point() and x.element_size() == 1 else x.dtype
    )  # float8 through its bytes
    copy.view(raw).copy_(x.detach().view(raw))
    return copy.requires_grad_(x.requires_grad)


def model_layers(shapes: Sequence[str], model: Any) -> list[Layer]:
    """The nn.Linear layers of the model of the command line; [] where no shape set asks for it.

    Args:
        shapes: shape sets; only "from_model" needs a model.
        model: an nn.Module, the path of a Hugging Face `config.json` or of its folder, or the mapping `{"_target_":
            "package.module.callable", **arguments}`, which is called with the default device "meta", so that no weight
            is allocated.

    Raises:
        ValueError: no model, or one that cannot be built or that has no nn.Linear.
    """
    if FROM_MODEL not in shapes:
        return []
    if isinstance(model, str):
        return _of_config(model)
    built = model if isinstance(model, nn.Module) else _build(model)
    layers = [Layer(*named) for named in _linears(built)]
    if not layers:
        raise ValueError(
            f"{type(built).__name__} has no nn.Linear layer; shapes=from_model needs at least one"
        )
    return layers


def _of_config(path: str) -> list[Layer]:
    """The layers of a `config.json`, the blocks of a stack as one; each expert counts."""
    from harness.training.models.hugging_face import read

    counts: dict[tuple[str, int, int], int] = {}
    for part in read(path).parts:
        key = _stacked(part.name), part.K, part.N
        counts[key] = counts.get(key, 0) + part.count
    return [Layer(*key, count) for key, count in counts.items()]


def _stacked(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _linears(model: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """Name, sizes and count of the linear layers; the blocks of a stack (`layers.0`, `layers.1`) become one."""
    counts: dict[tuple[str, int, int], int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            key = (_stacked(name) or "linear", module.in_features, module.out_features)
            counts[key] = counts.get(key, 0) + 1
    for (name, inner, outer), count in counts.items():
        yield name, inner, outer, count


def _build(spec: Any) -> nn.Module:
    if not isinstance(spec, Mapping) or "_target_" not in spec:
        raise ValueError(
            "shapes=from_model needs a model: model._target_=package.module.callable or model=PATH/config.json"
        )
    from harness.training.models.user import BATCH, TARGET, made

    with torch.device("meta"):
        built = made({key: value for key, value in spec.items() if key != BATCH}, "model")
    if not isinstance(built, nn.Module):
        target = spec[TARGET]
        raise ValueError(f"model._target_={target!r} made a {type(built).__name__}; expected an nn.Module")
    return built


def refuse_shapes(suite: str, shapes: Sequence[str], instead: str) -> None:
    """For the `points` of a suite that has no use for shape sets.

    Raises:
        ValueError: some are named; says what the suite takes instead.
    """
    if shapes:
        raise ValueError(f"suite {suite} takes {instead}, not shapes={list(shapes)}")


def with_defaults(
    points: Sequence[Mapping[str, Scalar]], axes: Mapping[str, Sequence[Scalar]], known: Mapping[str, Axis]
) -> list[dict[str, Scalar]]:
    """Points that also fix every crossed axis which the sweep leaves open: to its default or its first choice."""
    open_axes = {
        name: axis.choices[0] if axis.default is None else axis.default
        for name, axis in known.items()
        if not axis.linked
        and not axis.optional
        and name not in axes
        and (axis.choices or axis.default is not None)
    }
    return [{**open_axes, **point} for point in points]


def crossed_points(
    suite: str, instead: str, known: Mapping[str, Axis]
) -> Callable[..., list[dict[str, Scalar]]]:
    """The `points` of a suite without linked axes, which takes something else than shapes; see `refuse_shapes`."""

    def points(
        shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
    ) -> list[dict[str, Scalar]]:
        """No linked axes.

        Raises:
            ValueError: shapes are named, which this suite has no use for.
        """
        refuse_shapes(suite, shapes, instead)
        return with_defaults([{}], axes, known)

    return points


def recipe_unsupported(recipe: Recipe | None, tokens: int, device: str) -> Unsupported | None:
    """The first FP8 GEMM of a model under a recipe that this device has no kernel for, or whose tokens don't fit.

    Args:
        recipe: None, or an emulated one, runs everywhere.
        tokens: of one forward pass.
        device: "cpu" or "cuda".
    """
    if recipe is None or not backend_named(recipe.backend).is_fp8:
        return None
    rules = backend_named(recipe.backend)
    if recipe.backend == "triton" and (why := kernels_missing(device, "emulate them, by recipe.emulated()")):
        return why
    for name, gemm in recipe.gemms.items():
        if gemm.a is None or gemm.b is None:
            continue
        reason = rules.device_reason(device, gemm.a.format, gemm.b.format)
        reason = reason or rules.granularity_reason(device, gemm.granularity, recipe.nearest)
        if reason:
            return Unsupported("device", reason)
        if name == "grad_weight" and tokens % layout.MULTIPLE:
            return Unsupported(
                "shape",
                f"batch x seq = {tokens} tokens; GEMM grad_weight takes multiples of {layout.MULTIPLE}",
            )
    return None
