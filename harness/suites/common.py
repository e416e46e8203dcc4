"""What every suite is made of: its points, reasons to skip an arm, random data, what is timed over which operands."""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType

from fp8core.gemm import backend_named, layout
from fp8core.proof.profiled_gemms import profiler_events
from fp8core.tensor import Float8Tensor
from harness.store.case import expand
from harness.store.errors import Cause
from harness.suites.shapes import FROM_MODEL, Layer
from harness.timing.compiling import compile_unavailable
from harness.timing.timers import last_level_cache_bytes
from harness.timing.workload import Numerics, Unsupported, Workload

if TYPE_CHECKING:
    from fp8core.recipe import Gemm, Recipe
    from harness.peers import Peer
    from harness.store.case import Case
    from harness.suites.shapes import Axes, Point
    from harness.timing.workload import Axis

T = TypeVar("T")
Closure = Callable[[], object]
Size = tuple[int, int, int]  # M, K, N
Judge = Callable[[Any, Sequence[Tensor], int], str]  # see `Rotation`
Points = Callable[[Sequence[str], "Axes", Any], "list[Point]"]

JUDGED = 32  # lines of an output of the timed calls that are compared

_chance = random.SystemRandom()  # no seed by which an arm could know what comes

OUTLIER_SHARE, OUTLIER_FACTOR = 1e-3, 100.0
DATA = {
    "randn": "Gaussian",
    "uniform": "uniform in [-1, 1)",
    "outlier_1e-3": "Gaussian, one element in a thousand 100 times as large",
    "zeros": "all 0: draws less power than any training step, only on purpose",
    "ones": "all 1: likewise",
}

# Points


def refuse_shapes(suite: str, shapes: Sequence[str], instead: str) -> None:
    """For the `points` of a suite that has no use for shape sets.

    Raises:
        ValueError: some are named; says what the suite takes instead.
    """
    if shapes:
        raise ValueError(f"suite {suite} takes {instead}, not shapes={list(shapes)}")


def with_defaults(points: Sequence[Point], axes: Axes, known: Mapping[str, Axis]) -> list[Point]:
    """Points that also fix every crossed axis which the sweep leaves open: to its default or its first choice."""
    open_axes = {
        name: axis.choices[0] if axis.default is None else axis.default
        for name, axis in known.items()
        if not (axis.linked or axis.optional or name in axes) and (axis.choices or axis.default is not None)
    }
    return [{**open_axes, **point} for point in points]


def crossed_points(
    suite: str,
    instead: str,
    known: Mapping[str, Axis],
    required: Sequence[str] = (),
    every: str = "",
    check: Callable[[Case], None] | None = None,
) -> Points:
    """The `points` of a suite without linked axes, which takes something else than shapes; see `refuse_shapes`.

    Args:
        suite: its name.
        instead: what it takes.
        known: its axes.
        required: axes without a default, which the sweep must give.
        every: the axis of which all choices are cases where the sweep leaves it open.
        check: tries each case on paper; raises ValueError, as UsageError is, for one that there cannot be.
    """

    def points(shapes: Sequence[str], axes: Axes, model: Any) -> list[Point]:
        """No linked axes.

        Raises:
            ValueError: shapes are named, a required axis is missing, or a case is refused.
        """
        refuse_shapes(suite, shapes, instead)
        if missing := [f"axes.{name}" for name in required if name not in axes]:
            raise ValueError(f"suite {suite} needs {' and '.join(missing)}")
        choices = known[every].choices if every and every not in axes else ()
        fixed = with_defaults([{every: choice} for choice in choices] or [{}], axes, known)
        if check is not None:
            for case in expand(suite, axes, fixed):
                check(case)
        return fixed

    return points


def layer_points(of: Callable[..., list[Point]], known: Mapping[str, Axis]) -> Points:
    """The `points` of a suite that takes the layers of shape sets, each at each number of tokens, or M, K and N.

    Args:
        of: `shapes.linear_points` or `shapes.gemm_points`, which say what they refuse.
        known: the axes.
    """
    return lambda shapes, axes, model: with_defaults(
        of(shapes, axes, model_layers(shapes, model)), axes, known
    )


def sizes(case: Case) -> Size:
    """M, K and N."""
    return case.integer("M"), case.integer("K"), case.integer("N")


def ranks_of(case: Case) -> int:
    """Processes that train together; 1 where the case leaves the axis open."""
    return case.integer("ranks") if "ranks" in dict(case.axes) else 1


def flops(case: Case) -> float:
    """Floating-point operations of a product of M, K and N."""
    return 2.0 * math.prod(sizes(case))


# Reasons to skip an arm


def lacking(reason: str | None, cause: Cause = Cause.UNSUPPORTED) -> Unsupported | None:
    """A device that lacks something for a reason; None without one."""
    return Unsupported("device", reason, cause) if reason else None


def compile_missing(device: str, recipe: Recipe | None = None) -> Unsupported | None:
    """Why compiled arms can't run on this device, in whole or of a recipe."""
    casts = recipe.casts if recipe is not None and torch.device(device).type == "cpu" else ()
    blocks = any(cast.is_four_bit and cast.granularity == "1x32" for cast in casts)
    why = "torch's compiler has no e8m0, the scales of 1x32, on a CPU: take the eager arm" * blocks
    return lacking(compile_unavailable(device), Cause.MISSING) or lacking(why)


def peer_missing(peer: Peer | None, device: str) -> Unsupported | None:
    """Why a peer can't run on this device; it says how to get it."""
    return lacking(peer.missing(device), Cause.MISSING) if peer else None


def peer_facts(peer: Peer | None) -> dict[str, object]:
    """What a row holds of the peer that ran; {} for ours."""
    return peer.facts if peer else {}


def kernels_missing(device: str, instead: str) -> Unsupported | None:
    """Why arms of fp8core's kernels can't run on this device; `instead` says what they would time there."""
    if torch.device(device).type == "cuda" and torch.version.hip is None:
        return None
    return lacking(f"fp8core's kernels run on NVIDIA GPUs; here this arm would {instead}")


def fast_accum_missing(device: str) -> Unsupported | None:
    """Why an arm with fast accumulation can't run on this device."""
    ignored = "a CPU ignores use_fast_accum: this arm would repeat the one without it"
    return lacking(ignored if torch.device(device).type == "cpu" else None)


def gemm_refused(size: Size, gemm: Gemm, backend: str, name: str = "") -> Unsupported | None:
    """Why no device multiplies operands of these sizes and casts: the rule, the nearest sizes, the arm that takes any.

    Args:
        size: M, K, N.
        gemm: how the operands are cast; one in high precision takes any size.
        backend: whose rules hold.
        name: of the GEMM, where a step has several.
    """
    if gemm.a is None or gemm.b is None:
        return None
    rules = backend_named(backend)
    reason = rules.shape_reason(*size, gemm.a.format, gemm.b.format, gemm.granularity)
    return Unsupported("shape", f"{name}{reason}; {way_out(*size)}") if reason else None


def gemm_missing(gemm: Gemm, backend: str, device: str, nearest: str = "") -> Unsupported | None:
    """Why this device has no kernel for a GEMM's casts; `nearest` is the recipe to name as the way out."""
    if gemm.a is None or gemm.b is None:
        return None
    rules = backend_named(backend)
    reason = rules.device_reason(device, gemm.a.format, gemm.b.format)
    return lacking(reason or rules.granularity_reason(device, gemm.granularity, nearest))


def way_out(M: int, K: int, N: int) -> str:
    """The nearest sizes that FP8 matmul takes, and the arm that takes any.

    >>> way_out(8, 100, 32)
    'nearest: K=96 or 112; arms=[bf16_eager] takes M=8, K=100, N=32'
    """
    near = []
    for name, size in (("K", K), ("N", N)):
        below = size // layout.MULTIPLE * layout.MULTIPLE
        if size != below:
            near.append(f"{name}={f'{below} or ' if below else ''}{below + layout.MULTIPLE}")
    return (f"nearest: {', '.join(near)}; " if near else "") + f"arms=[bf16_eager] takes M={M}, K={K}, N={N}"


def recipe_unsupported(recipe: Recipe | None, tokens: int, device: str) -> Unsupported | None:
    """The first FP8 GEMM of a model under a recipe that this device has no kernel for, or whose tokens don't fit.

    Args:
        recipe: None, or an emulated one, runs everywhere.
        tokens: of one forward pass.
        device: "cpu" or "cuda".
    """
    if recipe is None or not backend_named(recipe.backend).is_fp8:
        return None
    if recipe.backend == "triton" and (why := kernels_missing(device, "emulate them, by recipe.emulated()")):
        return why
    for gemm in recipe.gemms.values():
        if why := gemm_missing(gemm, recipe.backend, device, recipe.nearest):
            return why
    if recipe.grad_weight.is_fp8 and tokens % layout.MULTIPLE:
        reason = f"batch x seq = {tokens} tokens; GEMM grad_weight takes multiples of {layout.MULTIPLE}"
        return Unsupported("shape", reason)
    return None


# Data


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
    if data not in DATA:
        raise ValueError(f"data={data!r} is no distribution; known: {', '.join(DATA)}")
    x = torch.empty(shape, device=random.device, dtype=dtype)
    if data in ("zeros", "ones"):
        return x.fill_(data == "ones")
    if data == "uniform":
        return x.uniform_(-1, 1, generator=random)
    x.normal_(generator=random)
    if data == "randn":
        return x
    chosen = torch.rand(shape, device=random.device, generator=random) < OUTLIER_SHARE
    return torch.where(chosen, x * OUTLIER_FACTOR, x)


# Checks


def outcome(values: Mapping[str, float], fault: str = "") -> Numerics:
    """Figures, and the fault of a result that may not be timed."""
    return Numerics(values, ok=not fault, reason=fault)


def profiled(run: Callable[[], T], device: str) -> tuple[T, list[Any]]:
    """A call's result, and the events that a profiler saw: operators, and kernels on a GPU."""
    with profiler_events(torch.device(device).type == "cuda") as events:
        result = run()
    return result, events


def kernel_names(events: Sequence[Any]) -> dict[str, object]:
    """`{"kernels": [...]}` of what ran on a GPU; {} without one."""
    names = sorted({event.name[:160] for event in events if event.device_type == DeviceType.CUDA})
    return {"kernels": names} if names else {}


# What is timed


def timed(
    function: Callable[..., object],
    operands: Sequence[Tensor],
    check: Callable[[], Numerics],
    judge: Judge,
    **declared: Any,
) -> Workload:
    """A workload that calls a function over operands whose contents change; see `Rotation`, and `Workload` for the rest."""
    return Workload(
        run=Rotation(function, operands, judge),
        check=check,
        variants=Rotation(function, operands, judge, 16),
        covering=covering(function, operands, judge),
        **declared,
    )


def moved(what: str, source: Tensor, **resolved: object) -> Workload:
    """A matrix moved by one operator of PyTorch's: "copy", "transpose" (written across) or "read" (its largest value)."""
    across = source.t() if what == "transpose" else source
    shape = () if what == "read" else across.shape
    target = torch.full(shape, float("nan"), dtype=source.dtype, device=source.device)

    def move(source: Tensor, target: Tensor) -> Tensor:
        if what == "read":
            return torch.amax(source, dim=(0, 1), out=target)
        return target.copy_(source.t() if what == "transpose" else source)

    def finds(place: int) -> bool:
        """Whether the reduction finds a largest value put in this place."""
        flat = source.view(-1)
        before = flat[place].clone()
        flat[place] = 2.0**14
        found = float(move(source, target)) == 2.0**14
        flat[place] = before
        return found

    def check() -> Numerics:
        if what == "read":
            right = all(finds(place) for place in (0, source.numel() // 2, -1))
            right &= torch.equal(move(source, target), source.max())
        else:
            move(source, target)
            right = torch.equal(target, across)
        return outcome({}, "" if right else f"{what} did not yield what it should")

    def judge(moved: Tensor, operands: Sequence[Tensor], seed: int) -> str:
        source = operands[0]
        exact = source.max() if what == "read" else source.t() if what == "transpose" else source
        return "" if torch.equal(moved, exact) else f"{what} did not yield what it should"

    size = float(source.nbytes * (1 if what == "read" else 2))
    facts = {**resolved, "backend": "torch"}
    return timed(move, (source, target), check, judge, bytes_moved=size, resolved=facts)


COPIES_MOST = 4096  # operand sets of a call that takes microseconds
_ARMS_MOST = 32  # arms of a case, with room for what they compute
_SETS = 64  # overlapping ones
_ALIGNED = {"cuda": 256}  # bytes, as allocators and vector units want them; elsewhere:
_ALIGNED_ON_HOST = 64


class Rotation(Sequence[Closure]):
    """Calls of a function over operand sets of different contents; each set is used once and then filled anew.

    What was stored for an address, for contents or for a count of calls is wrong at the next call. An operand's sets lie in
    one buffer, which repeats its elements from a random one on; a set begins a few elements behind the last one. So all
    have the same shape, strides, distribution and largest magnitude, by which delayed scales stay right.

    The sets of a sample that stands alone overlap: they take the memory of one. Load over a few seconds must not find
    its operands in a cache: there they lie apart, at least 3 and more until they exceed 256 MB and 4 times the L2 cache, at
    most `apart`, and what memory allows.

    Args:
        function: what is timed; what it returns is compared with the reference of the operands that it was given.
        operands: their elements and layouts; never handed to the function.
        judge: (result, operands, seed of the lines to look at) -> what is wrong; "" for nothing.
        apart: the most sets that do not overlap; 0: they overlap.

    Attributes:
        result: of the last call.
        at: the operands of the last call.
        turned: the element that each operand begins with now, by which `fill` makes the same contents again.
    """

    def __init__(
        self, function: Callable[..., object], operands: Sequence[Tensor], judge: Judge, apart: int = 0
    ) -> None:
        self.function, self.judge, self._operands, self._apart = function, judge, operands, apart
        self.set_bytes = max(sum(x.nbytes for x in operands), 1)
        device = operands[0].device
        on_gpu = device.type == "cuda"
        l2 = torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 0
        self._count = min(apart, max(3, -(-max(256 * 2**20, 4 * l2) // self.set_bytes))) if apart else _SETS
        if on_gpu and apart:
            # All arms of a case make such copies. One set alone, larger than any cache, evicts itself.
            free = torch.cuda.mem_get_info(device)[0]
            self._count = max(1, min(self._count, free // (_ARMS_MOST * self.set_bytes)))
        self._aligned = _ALIGNED.get(device.type, _ALIGNED_ON_HOST)
        self._sources = [elements(x) for x in operands]
        self._buffers: list[Tensor] = []
        self._sets: list[tuple[Tensor, ...]] = []
        self._left = 0
        self.result: object = None
        self.at: tuple[Tensor, ...] = ()
        self.turned: tuple[int, ...] = ()
        self._turn: Iterator[tuple[Tensor, ...]] = self._first_turn()

    def __call__(self) -> object:
        """The next call."""
        self.result = None  # freed before the next one is made, as where nobody keeps it
        self.at = at = next(self._turn)
        self.result = self.function(*at)
        return self.result

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        self.begin(0)
        return functools.partial(self.function, *self._sets[index])

    def grow(self, calls: int) -> None:
        """Makes a set for each of so many calls, where they overlap; those before are gone."""
        if not self._apart and self._count < min(calls, COPIES_MOST):
            self._count, self._sets = min(calls, COPIES_MOST), []

    def begin(self, calls: int) -> int:
        """Before calls that are timed: fills the sets anew where fewer are left; how many calls have a set each."""
        calls = min(calls, self._count)
        if not self._sets or calls > self._left:
            self.fill([_chance.randrange(len(source)) for source in self._sources])
            self._left = self._count
        self._left -= calls
        return calls

    @torch.no_grad()
    def fill(self, turned: Sequence[int]) -> None:
        """Makes the contents of all sets, the operands' elements from these on."""
        if not self._sets:
            self._make()
        self.turned, self._left = tuple(turned), 0
        for source, buffer, first in zip(self._sources, self._buffers, turned, strict=True):
            size = len(source)
            buffer[: size - first] = source[first:]
            buffer[size - first : size] = source[:first]
            while size < len(buffer):
                more = min(size, len(buffer) - size)
                buffer[size : size + more] = buffer[:more]
                size += more
        # A cast may be kept for as long as its version stands
        torch.autograd.graph.increment_version(list(itertools.chain(*self._sets)))

    def _make(self) -> None:
        """The buffers, and the operands of each set as tensors of their own: the views of one would show that they are."""
        self._buffers, columns = [], []
        shorter = -(
            -self._sources[0].nbytes // self._aligned
        )  # sets until the first operand's contents recur
        for place, (x, source) in enumerate(zip(self._operands, self._sources, strict=True)):
            step = self._aligned // x.itemsize
            if self._apart:
                step *= 1 + -(-len(source) // step)
            buffer = torch.empty((self._count - 1) * step + len(source), dtype=source.dtype, device=x.device)
            self._buffers.append(buffer)
            storage = buffer.untyped_storage()
            column = []
            for number in range(self._count):
                # By the time it recurs its neighbours have moved on
                at = number if self._apart else (number + place * (number // shorter)) % self._count
                one = torch.empty(0, dtype=x.dtype, device=x.device).set_(
                    storage, at * step, x.shape, x.stride()
                )
                column.append(one.requires_grad_(x.requires_grad))
            columns.append(column)
        self._sets = list(zip(*columns, strict=True))
        self._turn = itertools.cycle(self._sets)

    def _first_turn(self) -> Iterator[tuple[Tensor, ...]]:
        self.begin(0)
        yield next(self._turn)


def covering(function: Callable[..., object], operands: Sequence[Tensor], judge: Judge) -> Sequence[Closure]:
    """A rotation whose operands exceed twice the last cache of a GPU; () where that many cannot be had, and on a CPU."""
    device = operands[0].device
    if device.type != "cuda":
        return ()
    sets = Rotation(function, operands, judge, COPIES_MOST)
    twice = 2 * last_level_cache_bytes(torch.cuda.get_device_properties(device))
    return sets if len(sets) >= 2 and len(sets) * sets.set_bytes >= twice else ()


def elements(x: Tensor) -> Tensor:
    """The memory of a tensor as one row; float8 as its bytes, which every device copies."""
    raw = x.detach()
    raw = raw.view(torch.uint8) if x.dtype.is_floating_point and x.itemsize == 1 else raw
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return raw.as_strided((span,), (1,))


def leaves(result: Any) -> Iterator[Any]:
    """The tensors of a result, and whatever else is in it."""
    if type(result) is Float8Tensor:
        result = result.qdata, result.scale_inv
    if type(result) in (tuple, list):
        for part in result:
            yield from leaves(part)
    else:
        yield result


# The layers of a model


def model_layers(shapes: Sequence[str], model: Any) -> list[Layer]:
    """The nn.Linear layers of the model of the command line, the blocks of a stack as one; [] where no shape set asks.

    Args:
        shapes: shape sets; only "from_model" needs a model.
        model: an nn.Module, or the mapping `{"_target_": "package.module.callable", **arguments}`, which is called with
            the default device "meta", so that no weight is allocated. Of a model of transformers each expert counts.

    Raises:
        ValueError: no model, or one that cannot be built or that has no nn.Linear.
    """
    if FROM_MODEL not in shapes:
        return []
    counts: Counter[tuple[str, int, int]] = Counter()
    built = model if isinstance(model, nn.Module) else _build(model)
    if hasattr(getattr(built, "config", None), "num_hidden_layers"):
        from harness.training.models.hugging_face import read_off

        for part in read_off(built, "").parts:
            counts[_stacked(part.name), part.K, part.N] += part.count
    else:
        for name, module in built.named_modules():
            if isinstance(module, nn.Linear):
                counts[_stacked(name) or "linear", module.in_features, module.out_features] += 1
    if not counts:
        raise ValueError(
            f"{type(built).__name__} has no nn.Linear layer; shapes=from_model needs at least one"
        )
    return [Layer(*key, count) for key, count in counts.items()]


def _stacked(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _build(spec: Any) -> nn.Module:
    from harness.training.models.user import BATCH, TARGET, made

    if not isinstance(spec, Mapping) or TARGET not in spec:
        raise ValueError(
            "shapes=from_model needs a model: model._target_=package.module.callable or model=PATH/config.json"
        )
    with torch.device("meta"):
        built = made({key: value for key, value in spec.items() if key != BATCH}, "model")
    if not isinstance(built, nn.Module):
        raise ValueError(
            f"model._target_={spec[TARGET]!r} made a {type(built).__name__}; expected an nn.Module"
        )
    return built
