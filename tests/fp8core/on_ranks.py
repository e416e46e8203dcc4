"""Ranks for tests: a function, or the body of a test, in several processes that form a group of gloo, as arms have them."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.engine.arm_process import Conditions
from harness.engine.arms import Process, TimeLimits
from harness.machine.ranks import Meeting, Seat, join

Test = Callable[..., None]


def run(fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """What `fn(*args)`, importable by name, returns on each rank; a rank that raises prints its traceback.

    Raises:
        RemoteError, LateError: see `harness.engine.arms.ArmRunner.ask`.
    """
    process = Process(Conditions.here(), TimeLimits(silence_s=timeout_s), _print, world)
    try:
        found = process.call_each(_called, pickle.dumps((fn, args)).hex(), what="its start")
    finally:
        process.close()
    return [pickle.loads(bytes.fromhex(one)) for one in found]


def _called(_: object, pickled: str) -> str:
    fn, args = pickle.loads(bytes.fromhex(pickled))
    if not dist.is_initialized():  # the only rank
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            join(Seat(0, 0, "lo", Meeting(1, "cpu", f"{folder}/store", 60.0)))
    try:
        return pickle.dumps(fn(*args)).hex()
    except BaseException:
        traceback.print_exc()
        raise


def _print(lines: list[str]) -> None:
    os.write(2, "".join(f"{line}\n" for line in lines).encode())


def on_ranks(world: int) -> Callable[[Test], Test]:
    """Runs a test in so many ranks of gloo, or in as many as its parameter `world` says; each asserts for itself."""

    def decorate(fn: Test) -> Test:
        @functools.wraps(fn)
        def test(**parameters: Any) -> None:
            size = parameters.get("world", world)
            run(_run, size, fn.__module__, fn.__name__, parameters, timeout_s=400)

        return test

    return decorate


def _run(module: str, name: str, parameters: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    inspect.unwrap(getattr(importlib.import_module(module), name))(**parameters)
