"""Interpreter state: what an arm may change of Python, NumPy and its process as the operating system sees it.

Each entry is a pair of functions: one that reads it and one that sets what was read.
"""

from __future__ import annotations

import locale
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Pair = tuple[Callable[[], Any], Callable[[Any], object]]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
LIMITS = ("AS", "DATA", "NOFILE", "STACK")
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_RECURSION = sys.getrecursionlimit()
_raised = [_RECURSION]  # the highest that was seen


def _recursion_limit() -> int:
    """The limit, as far as it is lowered: torch's compiler raises it for good, and libraries for as long as they run."""
    now = sys.getrecursionlimit()
    _raised[0] = max(_raised[0], now)
    return min(now, _RECURSION)


def _set_recursion_limit(wanted: int) -> None:
    sys.setrecursionlimit(_raised[0] if wanted == _RECURSION else wanted)


def of_any_process() -> Mapping[str, Pair]:
    """What has a meaning in every process, by the name that rows have it by."""
    found: dict[str, Pair] = {
        "cpu_affinity": (lambda: os.sched_getaffinity(0), _set_affinity),
        # Only a privileged process may lower it again.
        "nice": (
            partial(os.getpriority, os.PRIO_PROCESS, 0),
            partial(os.setpriority, os.PRIO_PROCESS, 0),
        ),
        "numpy_errors": (np.geterr, lambda wanted: np.seterr(**wanted)),
        "recursion_limit": (_recursion_limit, _set_recursion_limit),
        "switch_interval": (
            lambda: round(sys.getswitchinterval(), 6),
            sys.setswitchinterval,
        ),  # whole microseconds
        "locale": (partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    }
    for name in LIMITS:
        number = getattr(resource, f"RLIMIT_{name}")
        found[f"limit_{name}"] = (partial(resource.getrlimit, number), partial(resource.setrlimit, number))
    return found


def of_this_process() -> Mapping[str, Pair]:
    """What refers to objects of this process, by the name that rows have it by."""
    found: dict[str, Pair] = {
        "standard_streams": (lambda: Objects((sys.stdout, sys.stderr)), _set_streams),
        "tracing": (
            lambda: Objects((sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace())),
            _set_tracing,
        ),
        "warnings_as_errors": (lambda: Objects(tuple(_errors())), _set_errors),
        "interval_timers": (lambda: tuple(map(_interval, TIMERS)), _set_intervals),
    }
    for number in SIGNALS:
        found[f"handler_{number.name}"] = (
            partial(signal.getsignal, number),
            partial(signal.signal, number),  # raises outside of the main thread
        )
    return found


class Objects(NamedTuple):
    """Objects of this process, shown shortly."""

    held: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join(str(one) for one in self.held)


def _set_affinity(wanted: set[int]) -> None:
    """Set it for the threads that were started under the present one too, torch's among them."""
    now = os.sched_getaffinity(0)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            if os.sched_getaffinity(int(task.name)) == now:
                os.sched_setaffinity(int(task.name), wanted)


def _set_streams(wanted: Objects) -> None:
    sys.stdout, sys.stderr = wanted.held


def _set_tracing(wanted: Objects) -> None:
    profile, trace, of_threads, trace_of_threads = wanted.held
    threading.setprofile(of_threads)
    threading.settrace(trace_of_threads)
    sys.setprofile(profile)
    sys.settrace(trace)


def _errors() -> list[Any]:
    return [one for one in warnings.filters if one[0] == "error"]


def _set_errors(wanted: Objects) -> None:
    """Set which warnings raise; the filters that do something else stay, which imports add for all who import later."""
    missing = [one for one in wanted.held if one not in warnings.filters]
    kept = [one for one in warnings.filters if one[0] != "error" or one in wanted.held]
    warnings.filters[:] = [*missing, *kept]  # type: ignore[index]
    for name in ("_filters_mutated", "_filters_mutated_lock_held"):  # the latter from Python 3.14 on
        if hasattr(warnings, name):
            with getattr(warnings, "_lock", nullcontext()):
                getattr(warnings, name)()


def _interval(number: int) -> float | None:
    """Seconds between two signals of a timer, 0 for one that fires once; None where it is not set."""
    left, interval = signal.getitimer(number)
    return interval if left or interval else None


def _set_intervals(wanted: tuple[float | None, ...]) -> None:
    """Set the timers that repeat, and stop those that were not set; when one that fires once is due is not known."""
    for number, interval in zip(TIMERS, wanted, strict=True):
        if interval is None:
            signal.setitimer(number, 0.0)
        elif interval and _interval(number) != interval:
            signal.setitimer(number, interval, interval)
