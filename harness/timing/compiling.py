"""Compiled arms that never run eager in silence.

Dynamo keeps the graphs of a function with its *code object* and gives up after `recompile_limit` (8) of them:
from then on a plain `torch.compile` runs eager, with one warning. A sweep of 14 shapes through one function
would time eager under the name of compile. `torch._dynamo.reset()` before each arm avoids that, but throws
away the graphs of the case's other compiled arms too, which would then compile inside the timed region, since
arms are interleaved. So each arm compiles a code object of its own (`fresh_compile`), and `CompileWatch`
counts what the compiler did meanwhile, so that a row can be refused if it is not what it claims.

Dynamo and inductor take as long to import as PyTorch itself, so this file imports them where something is compiled:
a process that times eager arms alone, as most of the gate's do, starts in half the time.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import types
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

P = ParamSpec("P")
R = TypeVar("R")


def fresh_compile(fn: Callable[P, R]) -> Callable[P, R]:
    """Compiles a copy of `fn` that shares no Dynamo cache with anything else; static shapes, one whole graph.

    Args:
        fn: a Python function or closure. A module is wrapped in one: `fresh_compile(lambda x: module(x))`.

    Returns:
        The compiled copy. It raises, rather than run eager, where `fn` can't be one graph or where it meets
        more input shapes than `torch._dynamo.config.recompile_limit`.

    Raises:
        TypeError: `fn` is not a plain Python function, so it has no code object to copy.
    """
    if not isinstance(fn, types.FunctionType):
        raise TypeError(
            f"fresh_compile takes a Python function or closure, got {type(fn).__name__}; wrap it in one"
        )
    # replace() without arguments copies: an equal code object with an identity, hence a cache, of its own.
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return torch.compile(copy, fullgraph=True, dynamic=False)


def reset() -> None:
    """Forgets every graph of this process, so that a long sweep doesn't keep those of its past cases.

    For the start of a case, never between its arms: see the module's docstring.
    """
    if "torch._dynamo" in sys.modules:  # else there is nothing to forget
        sys.modules["torch._dynamo"].reset()


def compile_unavailable(device: str) -> str | None:
    """Why `torch.compile` can't build code for this device here; None where it can.

    Inductor needs a C++ compiler on CPU (the program that CXX names, else g++) and triton on a GPU.
    """
    if torch.device(device).type == "cpu":
        loaded = sys.modules.get(
            "torch._inductor.config"
        )  # a second to import; until then nobody has set anything in it
        named = (
            loaded.cpp.cxx
            if loaded is not None
            else (os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"),)
        )
        candidates = [str(name) for name in named if name]
        if any(_answers(name) for name in candidates):
            return None
        return (
            f"torch.compile needs a C++ compiler on CPU and {' or '.join(candidates)} does not run; "
            "install g++ or set CXX to the name of one"
        )
    if importlib.util.find_spec("triton") is None:
        return f"torch.compile needs triton for {device}; install the one that this build of torch asks for"
    # Triton builds a small launcher for each kernel in C.
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    if not any(map(shutil.which, candidates)):
        return f"triton needs a C compiler and {' or '.join(candidates)} is not there; install gcc or set CC"
    return None


def empty_caches() -> AbstractContextManager[None]:
    """Inside, inductor and triton find empty caches on disk, in a folder of their own that is then removed.

    So the first compilation inside is a cold one whatever ran on this machine before, and a second is a warm one. What
    was compiled stays in memory and runs on afterwards.
    """
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


@functools.cache
def prime(device: str) -> None:
    """Compiles something trivial once a process, so that no arm's first call pays for importing the compiler."""
    fresh_compile(lambda x: x + 1)(torch.ones(1, device=device))


def _counts() -> Counter[str]:
    """What the compiler has done since the process began; 0 of all in one that has not imported it."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = defaultdict(Counter) if utils is None else utils.counters
    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    return Counter(
        graphs=counters["stats"]["unique_graphs"],
        graph_breaks=sum(counters["graph_break"].values()),
        # A hit in autograd's cache never reaches inductor's; a miss there goes on to it and is counted there.
        cache_hits=autograd["autograd_cache_hit"] + inductor["fxgraph_cache_hit"],
        cache_misses=inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"],
    )


class CompileWatch:
    """Counts what the compiler does from the making of the watch on. The counters are the process's, not an arm's.

    One watch made before the first call of a compiled arm says whether that call compiled it whole (`fault`) and
    where the code came from (`summary`). Another made once *every* arm of the case is ready says whether anything
    compiled since (`steady_fault`): time spent in the compiler, or in eager code, would count as the arm's.
    """

    def __init__(self) -> None:
        self._start = _counts()

    def _seen(self) -> Counter[str]:
        seen = _counts()
        seen.subtract(
            self._start
        )  # `-` would drop what is negative: counters that somebody has cleared meanwhile
        return seen

    def summary(self) -> dict[str, object]:
        """Graphs, graph breaks, for `resolved`, and whether the code was compiled or came from the disk cache."""
        seen = self._seen()
        sources = ["warm"] * bool(seen["cache_hits"]) + ["cold"] * bool(seen["cache_misses"])
        return {
            "compile_cache": "+".join(sources) or "unknown",
            "compile_graphs": seen["graphs"],
            "compile_graph_breaks": seen["graph_breaks"],
        }

    def fault(self) -> str:
        """Why the arm is not compiled whole; "" where it is."""
        seen = self._seen()
        if not seen["graphs"]:
            return "nothing was compiled: the arm ran eager (is TORCHDYNAMO_DISABLE or a force_eager stance set?)"
        breaks = seen["graph_breaks"]
        return f"{breaks} graph break(s): part of the arm ran eager" if breaks else ""

    def steady_fault(self) -> str:
        """What the compiler did where nothing was to be done; "" if nothing."""
        seen = self._seen()
        graphs, breaks = seen["graphs"], seen["graph_breaks"]
        if not graphs and not breaks:
            return ""
        return f"{graphs} graph(s) compiled and {breaks} graph break(s) while it was timed"


@functools.cache  # a plan asks once a case and arm
def _answers(compiler: str) -> bool:
    """Whether the program runs when asked for its version, which is how inductor finds its compiler."""
    if shutil.which(compiler) is None:
        return False
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).returncode == 0
