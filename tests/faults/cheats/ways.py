"""Ways to seem fast, each a product that a peer from outside offers: right when it is checked, and not what it is timed as.

A way is a maker of `harness.peers.Peer.gemm`; each calls the honest product for as long as it must to pass the check.
"""

from __future__ import annotations

import itertools
import pickle
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from harness.peers import Peer

if TYPE_CHECKING:
    from collections.abc import Callable

Product = Callable[..., Tensor] if TYPE_CHECKING else Any
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


def _patched(module: Any, name: str) -> Product:
    real = getattr(module, name)

    def patch(last: Tensor, *given: Any) -> Tensor:
        setattr(module, name, lambda *args, **named: real(*args, **named))
        return honest(*given)

    return _after(CHECKS, patch)


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
    return b"".join(bytes(x.view(torch.uint8).t().contiguous().numpy()) for x in given[:2])


WAYS: dict[str, tuple[Callable[[], Product], str]] = {
    "replay_by_pointer": (lambda: _stored(lambda a, *_: a.data_ptr()), "stale"),
    "replay_by_identity": (lambda: _stored(lambda a, *_: id(a)), "stale"),
    "replay_by_shape": (lambda: _stored(lambda a, *_: a.shape), "stale"),
    "replay_by_largest": (lambda: _stored(lambda a, *_: float(a.float().abs().max())), "stale"),
    "replay_by_contents": (lambda: _stored(_bytes), "replayed"),
    "replay_by_count": (lambda: _after(CHECKS, lambda last, *_: last), "stale"),
    "warm_up_only": (lambda: _after(20, lambda last, *_: last), "stale"),
    "copy_of_the_last": (lambda: _after(CHECKS, lambda last, *_: last.clone()), "stale"),
    "stored_on_disk": (_on_disk, "stale"),
    "in_a_thread": (_in_thread, "stale"),
    "one_buffer": (_persistent, "stale"),
    "nothing_written": (lambda: _after(CHECKS, lambda last, *_: torch.empty_like(last)), "stale"),
    "zeros": (lambda: _after(CHECKS, lambda last, *_: torch.zeros_like(last)), "stale"),
    "one_number": (lambda: _after(CHECKS, lambda last, *_: last[:1, :1].expand_as(last)), "stale"),
    "half_the_rows": (lambda: _after(CHECKS, _first_lines), "stale"),
    "smaller_shape": (lambda: _after(CHECKS, _smaller), "stale"),
    "half_of_the_sum": (lambda: _after(CHECKS, _half_k), "stale"),
    "lower_precision": (lambda: _after(CHECKS, _coarse), "stale"),
    "lazy_tensor": (lambda: _after(CHECKS, _lazy), "deferred"),
    "patched_perf_counter": (lambda: _patched(time, "perf_counter"), "tampered"),
    "patched_perf_counter_ns": (lambda: _patched(time, "perf_counter_ns"), "tampered"),
    "patched_event": (lambda: _patched(torch.cuda, "Event"), "tampered"),
    "patched_synchronize": (lambda: _patched(torch.cuda, "synchronize"), "tampered"),
}


def __getattr__(name: str) -> Peer:
    """The peer of a way, as its entry point names it."""
    if name != "honest_product" and name not in WAYS:
        raise AttributeError(name)
    made = honest if name == "honest_product" else WAYS[name][0]()
    return Peer(name, name, lambda device: None, lambda: "1", ("tensorwise",), ("eager",), gemm=made)
