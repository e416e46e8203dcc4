"""`python WORDS` without the 2 to 5 s of imports: forked from the server of arms and ranks, which has torch and the harness.

Of its own are its folder, environment, arguments, paths of modules, output and exit code, and the server of its own arms. Not
what a module reads of the environment as it is imported, nor the start: a test of those starts an interpreter.
"""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, process, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from harness.engine import served
from harness.machine import fork_server


def run(
    words: Sequence[str], cwd: str | Path = ".", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end, as `subprocess.run` with captured text."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        started = start(words, cwd, env, out, err)
        started.join()
        texts = [file.read_text(errors="replace") if file.exists() else "" for file in (out, err)]
    return subprocess.CompletedProcess(words, started.exitcode or 0, *texts)


def start(
    words: Sequence[str],
    cwd: str | Path = ".",
    env: Mapping[str, str] | None = None,
    *files: Path,
) -> BaseProcess:
    """The process; its output goes to the files, else to /dev/null.

    Args:
        words: `-m MODULE`, `-c CODE` or a file, and its arguments.
        cwd: its current folder.
        env: its environment; None: the one that is here.
        files: of its standard output and standard error.
    """
    out, err = files or (Path(os.devnull),) * 2
    given = (list(words), str(Path(cwd).absolute()), dict(os.environ if env is None else env), out, err)
    context = fork_server.context(served.PRELOADED)
    started = context.Process(target=_become, args=given, daemon=False)
    started.start()
    return started


def _become(words: list[str], cwd: str, env: dict[str, str], out: Path, err: Path) -> None:
    assert threading.active_count() == len([*Path("/proc/self/task").iterdir()]) == 1, (
        fork_server.started_threads
    )
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None
    process._parent_process = None
    process.current_process().name = "MainProcess"
    own, util.spawnv_passfds = util.spawnv_passfds, _fork
    forkserver.ensure_running()  # before there is a thread that a fork would not take over
    util.spawnv_passfds = own
    kind, *rest = words
    code = rest.pop(0) if kind in ("-m", "-c") else kind
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix, "__editable__"))]
    installed = [
        path for path in installed if not path.endswith("_vendor")
    ]  # setuptools adds it, once imported
    first = {"-m": cwd, "-c": ""}.get(kind, str(Path(kind).parent.absolute()))
    sys.path[:] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *installed]
    sys.argv[:] = ["-c" if kind == "-c" else code, *rest]
    try:
        if kind == "-m":
            sys.modules.pop(f"{code}.__main__", None)
            runpy.run_module(code, run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_path(code, run_name="__main__")
    except Exception:  # noqa: BLE001  # what ends an interpreter
        traceback.print_exc()
        sys.exit(1)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()


def _fork(_: bytes, words: Sequence[str], descriptors: Sequence[int]) -> int:
    """In place of `spawnv_passfds`, which starts an interpreter for multiprocessing's code of a server."""
    if pid := os.fork():
        return pid
    try:
        for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if number not in {0, 1, 2, *map(int, descriptors)}:
                with suppress(OSError):
                    os.close(number)
        exec(words[-1], {"__name__": "__main__"})
    finally:
        os._exit(0)
