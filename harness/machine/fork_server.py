"""Fork server: the process that others are forked from, in some ten milliseconds, after it has imported what they need.

A fork takes over the thread that forks alone: whatever waits for another one, as the first parallel operation does for the pool
of OpenMP, waits for ever. So the server counts its threads after its imports, and where an import has started some that a fork
does not take over, `started_threads` names it: processes are then to be started anew, by "spawn".
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.machine.processes import state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from multiprocessing.context import ForkServerContext
    from types import ModuleType

MODULES = "FP8_HARNESS_PRELOAD"  # environment variable of the server, which imports them
LONGEST = 70  # bytes of a folder: a socket's path has 107 (unix(7)), of which multiprocessing adds up to 33
SHORT = ("/tmp", "/var/tmp", "/dev/shm")

_wanted: list[str] = []
_starting = threading.Lock()


def context(modules: Sequence[str]) -> ForkServerContext:
    """The context whose processes are forked from the server, which runs from now on.

    Args:
        modules: to import once for all; of no effect where it runs already.
    """
    from multiprocessing import forkserver

    with _starting:
        end_if_stopped()
        _wanted[:] = _wanted if _pid() else modules
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload([__name__])
        os.environ[MODULES] = " ".join(_wanted)
        try:
            with _short_folder():
                forkserver.ensure_running()
        finally:
            os.environ.pop(MODULES, None)
    return forked


def end_if_stopped() -> None:
    """Ends a server that was stopped, by whomever: nothing would ever be forked, nor would it say what has ended."""
    if state_of(_pid()) == "T":
        kill()


def kill() -> None:
    """End the server. It is started again where it is needed; whoever waits for one of its processes goes on."""
    if pid := _pid():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _pid() -> int:
    from multiprocessing import forkserver

    return int(forkserver._forkserver._forkserver_pid or 0)  # type: ignore[attr-defined]


@contextmanager
def _short_folder() -> Iterator[None]:
    """Within it multiprocessing makes its folder, where that of this process has a name too long for a socket."""
    from multiprocessing import util

    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > LONGEST:
        tempfile.tempdir = next((folder for folder in SHORT if os.access(folder, os.W_OK | os.X_OK)), before)
    try:
        util.get_temp_dir()
        yield
    finally:
        tempfile.tempdir = before


class _Count:
    """A finder of modules that counts threads as each begins and as it ends, and so knows in which they were started."""

    def __init__(self) -> None:
        self.culprits: list[str] = []
        self._running = [""]
        self._last = _threads()

    def find_spec(self, name: str, *where: Any) -> ModuleSpec | None:
        self._count()
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, *where) for finder in others)), None)
        loader = spec.loader if spec is not None else None
        if loader is not None and not isinstance(loader, type):  # those of built-in modules start no threads
            with suppress(AttributeError):
                setattr(loader, "exec_module", partial(self._exec, loader.exec_module, name))  # noqa: B010
        return spec

    def _exec(self, run: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
        self._running.append(name)
        try:
            run(module)
        finally:
            self._count()
            self._running.pop()

    def _count(self) -> None:
        now = _threads()
        self.culprits += [self._running[-1]] * (now > self._last)
        self._last = now


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _import(modules: Sequence[str]) -> str:
    """Import modules, at least one; the one that has started threads that a fork does not take over, "" for none.

    OpenBLAS, which numpy has, ends its threads before a fork and starts them again; so they are counted after one.
    """
    importlib.import_module("numpy")
    _fork_once()
    count = _Count()
    sys.meta_path.insert(0, count)
    try:
        for name in modules:
            with suppress(Exception):  # a process that needs it imports it itself, and says what is wrong
                importlib.import_module(name)
    finally:
        sys.meta_path.remove(count)
    _fork_once()
    return "" if _threads() == 1 else next(iter(count.culprits), modules[0])


def _fork_once() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


_preloaded = os.environ.pop(MODULES, "").split()
started_threads = _import(_preloaded) if _preloaded else ""  # in the server, and so in what is forked from it
