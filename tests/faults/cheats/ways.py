"""Ways to seem fast, each offered by a peer from outside: right when it is checked, and not what it is timed as.

`WAYS` is the table: what each does, and the causes by which it gets no speed. `UNSEEN` names what cannot be seen.
"""

from __future__ import annotations

import gc
import itertools
import pickle
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.tensor import quantize
from harness.peers import Peer, nanochat_style
from harness.timing.timers import CpuTimer, CudaTimer

Product = Callable[..., Any]
CHECKS = 2  # calls of the check of suite gemm, tensorwise: one under the profiler; and one to spare
STORE: dict[Any, Tensor] = {}


def honest(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, fast: bool) -> Tensor:
    """The product."""
    return torch._scaled_mm(a, b, scale_a=sa, scale_b=sb, out_dtype=torch.bfloat16, use_fast_accum=False)


def _after(calls: int, then: Callable[..., Any]) -> Product:
    count, last = itertools.count(), list[Tensor]()

    def product(*given: Any) -> Any:
        if next(count) < calls:
            last[:] = [honest(*given)]
            return last[0]
        return then(last[0], *given)

    return product


def _stored(key: Callable[..., Any], clone: bool = False) -> Product:
    STORE.clear()

    def product(*given: Any) -> Tensor:
        of = key(*given)
        if of not in STORE:
            STORE[of] = honest(*given)
        return STORE[of].clone() if clone else STORE[of]

    return product


class Lazy(torch.Tensor):
    """Computed when it is read."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def _lazy(last: Tensor, *given: Any) -> Tensor:
    return last.as_subclass(Lazy)


def _on_disk() -> Product:
    path = Path(tempfile.mkdtemp()) / "product"

    def product(*given: Any) -> Tensor:
        if not path.exists():
            path.write_bytes(pickle.dumps(honest(*given).float().numpy()))
        return torch.from_numpy(pickle.loads(path.read_bytes())).bfloat16()

    return product


def _in_thread() -> Product:
    def later(out: Tensor, *given: Any) -> None:
        time.sleep(0.05)
        out.copy_(honest(*given))

    def start(last: Tensor, *given: Any) -> Tensor:
        out = torch.zeros_like(last)
        threading.Thread(target=later, args=(out, *given), daemon=True).start()
        return out

    return _after(CHECKS, start)


def _persistent() -> Product:
    out: list[Tensor] = []

    def product(*given: Any) -> Tensor:
        if not out:
            out.append(honest(*given))
        return out[0]

    return product


def _first_cast() -> Any:
    """The codes and the scale of the first input of a shape, once what is checked has been cast."""
    seen, count = dict[Any, Any](), itertools.count()

    def cast(x: Tensor, dtype: torch.dtype, granularity: str) -> Any:
        made = seen.get((x.shape, dtype)) if next(count) >= 8 * CHECKS else None
        if made is None:
            made = seen[x.shape, dtype] = _cast(x, dtype)
        return made

    return cast


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes = quantize(x, dtype)
    return codes.qdata, codes.scale_inv


def _forward_once(layer: nn.Linear, recipe: str) -> nn.Module:
    """A layer that answers every later call by its first outputs."""
    real, kept, count = nanochat_style.linear(layer, recipe), list[Tensor](), itertools.count()

    def forward(x: Tensor) -> Tensor:
        if next(count) < CHECKS:
            kept[:] = [real(x)]
            return kept[0]
        return kept[0].detach() + 0 * real(x)

    made = nn.Module()
    made.forward = forward
    made.weight = layer.weight
    return made


def _patched(module: Any, name: str) -> Product:
    real = getattr(module, name)

    def patch(last: Tensor, *given: Any) -> Tensor:
        setattr(module, name, lambda *args, **named: real(*args, **named))
        return honest(*given)

    return _after(CHECKS, patch)


def _slow_clock() -> Product:
    def turned(last: Tensor, *given: Any) -> Tensor:
        for timer in gc.get_objects():
            if type(timer) is CpuTimer:
                timer._clock = lambda: time.perf_counter() / 1e6
        return honest(*given)

    return _after(CHECKS, turned)


def _found(last: Tensor, *given: Any) -> Tensor:
    """The latest tensor of the output's shape in this process: the reference's, or one that was kept to be compared."""
    if "found" not in STORE:
        like = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.shape == last.shape]
        STORE["found"] = like[-1].bfloat16() if like else last
    return STORE["found"]


def _first_lines(last: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, fast: bool) -> Tensor:
    half = a.shape[0] // 2
    return torch.cat([honest(a[:half], b, sa, sb, fast), last[half:]])


def _smaller(last: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, fast: bool) -> Tensor:
    return honest(a[: a.shape[0] // 2], b, sa, sb, fast)


def _half_k(last: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, fast: bool) -> Tensor:
    half = a.shape[1] // 2
    return honest(a[:, :half].contiguous(), b[:half].t().contiguous().t(), sa, sb, fast)


def _coarse(last: Tensor, *given: Any) -> Tensor:
    return honest(*given).to(torch.float8_e4m3fn).bfloat16()


def _bytes(*given: Any) -> bytes:
    return b"".join(bytes(x.view(torch.uint8).t().contiguous().cpu().numpy()) for x in given[:2])


class Way(NamedTuple):
    """What a way does, its maker, the causes by which it may be seen, and the part of a peer that it is."""

    does: str
    make: Callable[[], Any]
    causes: tuple[str, ...] = ("stale",)
    part: str = "gemm"


def _later(then: Callable[..., Any], calls: int = CHECKS) -> Callable[[], Product]:
    return lambda: _after(calls, then)


def _keyed(key: Callable[..., Any]) -> Callable[[], Product]:
    return lambda: _stored(key)


# "replayed" where what would be stored has not come again yet: then each time was honest.
REPLAY = ("stale", "replayed")
WAYS = {
    "replay_by_pointer": Way("stores results by address", _keyed(lambda a, *_: a.data_ptr()), REPLAY),
    "replay_by_identity": Way("stores results by tensor object", _keyed(lambda a, *_: id(a)), REPLAY),
    "replay_by_shape": Way("stores results by shape", _keyed(lambda a, *_: a.shape)),
    "replay_by_largest": Way(
        "stores results by the largest magnitude", _keyed(lambda a, *_: float(a.float().abs().max()))
    ),
    "replay_by_contents": Way("stores results by all contents", _keyed(_bytes), ("replayed",)),
    "replay_by_count": Way(
        "computes while it is checked, then returns the last result", _later(lambda last, *_: last)
    ),
    "warm_up_only": Way(
        "computes eight calls, then returns the last result", _later(lambda last, *_: last, 8), REPLAY
    ),
    "copy_of_the_last": Way("returns copies of the last result", _later(lambda last, *_: last.clone())),
    "stored_on_disk": Way("returns what it wrote to a file", _on_disk),
    "in_a_thread": Way("computes in a thread that it does not wait for", _in_thread),
    "one_buffer": Way("computes once into a buffer of its own", _persistent),
    "nothing_written": Way(
        "returns memory that it did not write", _later(lambda last, *_: torch.empty_like(last))
    ),
    "zeros": Way("returns zeros", _later(lambda last, *_: torch.zeros_like(last))),
    "one_number": Way("returns one number, expanded", _later(lambda last, *_: last[:1, :1].expand_as(last))),
    "operand_returned": Way(
        "returns a view of its operand", _later(lambda last, a, *_: a.t()[: last.shape[0]].view(torch.uint8))
    ),
    "found_in_memory": Way(
        "returns a tensor of the output's shape found in the process: the reference", _later(_found)
    ),
    "half_the_rows": Way("computes half of the rows", _later(_first_lines)),
    "smaller_shape": Way("returns half of the rows", _later(_smaller)),
    "half_of_the_sum": Way("adds up half of K", _later(_half_k)),
    "lower_precision": Way("rounds the product to FP8", _later(_coarse)),
    "lazy_tensor": Way("returns a tensor that is computed when it is read", _later(_lazy), ("deferred",)),
    "patched_perf_counter": Way(
        "replaces time.perf_counter", lambda: _patched(time, "perf_counter"), ("tampered",)
    ),
    "patched_perf_counter_ns": Way(
        "replaces time.perf_counter_ns", lambda: _patched(time, "perf_counter_ns"), ("tampered",)
    ),
    "patched_event": Way("replaces torch.cuda.Event", lambda: _patched(torch.cuda, "Event"), ("tampered",)),
    "patched_synchronize": Way(
        "replaces torch.cuda.synchronize", lambda: _patched(torch.cuda, "synchronize"), ("tampered",)
    ),
    "slow_clock": Way("slows the timer's own clock a million times", _slow_clock, ("too_fast",)),
    "first_cast": Way("a cast that returns the codes of the first input", _first_cast, REPLAY, "cast"),
    "first_forward": Way("a layer that returns its first output", lambda: _forward_once, part="linear"),
}


def _side_stream() -> Product:
    """No one waits for it but who reads the whole device."""
    stream: list[torch.cuda.Stream] = []

    def product(*given: Any) -> Tensor:
        stream[:] = stream or [torch.cuda.Stream()]
        with torch.cuda.stream(stream[0]):
            return honest(*given)

    return product


def _graph() -> Product:
    """A CUDA graph over the operands of its first call."""
    kept: list[Any] = []

    def product(*given: Any) -> Tensor:
        if not kept:
            honest(*given)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept[:] = [graph, honest(*given)]
        kept[0].replay()
        return kept[1]

    return product


def _slow_events() -> Product:
    """Events of its own in the timers of its process."""

    class Event:
        def __init__(self, **_: Any) -> None: ...
        def record(self, *_: Any) -> None: ...
        def query(self) -> bool:
            return False

        def elapsed_time(self, _: Any) -> float:
            return 1e-6

    def turned(last: Tensor, *given: Any) -> Tensor:
        for timer in gc.get_objects():
            if type(timer) is CudaTimer:
                timer._events = lambda n: [Event() for _ in range(n)]
        return honest(*given)

    return _after(CHECKS, turned)


# Written for a GPU; no GPU has run them yet.
GPU_WAYS = {
    "side_stream": Way("computes on a stream that it does not wait for", _side_stream, ("deferred",)),
    "stale_graph": Way("replays a CUDA graph over the operands of its first call", _graph, REPLAY),
    "slow_events": Way("puts events of its own into the timers", _slow_events, ("too_fast", "deferred")),
    "patched_event_method": Way(
        "replaces torch.cuda.Event.elapsed_time",
        lambda: _patched(torch.cuda.Event, "elapsed_time"),
        ("tampered",),
    ),
    **{
        name: WAYS[name]
        for name in (
            "replay_by_pointer",
            "replay_by_contents",
            "copy_of_the_last",
            "patched_event",
            "lazy_tensor",
        )
    },
}
UNSEEN = {
    "short_call_on_a_side_stream": "its calls take under 0.1 ms and twice what it shows: no host sees an idle device sooner",
    "cached_clones": "keeps copies by all contents: no contents come twice while it is timed, so it is timed as it computes",
    "knows_the_contents": "knows that contents are one tensor's elements from another one on, and turns a stored result alike",
    "constant_data": "returns what it stored where the case itself asks for operands that are all 0 or all 1",
    "clock_within_the_peak": "slows the clock of its own process by less than twice the measured peak shows",
    "training_step": "steps of suite train: they begin at the control's weights and their first loss is judged, not each later one",
}


def honest_layer(layer: nn.Linear, recipe: str) -> nn.Module:
    """The layer of a peer that stands in the tree."""
    return nanochat_style.linear(layer, recipe)


def __getattr__(name: str) -> Peer:
    """The peer of a way, as its entry point names it."""
    parts: dict[str, Any] = {
        "honest_gemm": honest,
        "honest_cast": lambda x, dtype, granularity: _cast(x, dtype),
        "honest_linear": honest_layer,
    }
    ways = WAYS | GPU_WAYS
    if name not in ways and name not in parts:
        raise AttributeError(name)
    part = name.removeprefix("honest_") if name in parts else ways[name].part
    made: dict[str, Any] = {part: parts[name] if name in parts else ways[name].make()}
    return Peer(name, name, lambda device: None, lambda: "1", ("tensorwise",), ("eager",), **made)
