"""Recorder: writes which files a Python process reads, and who reads them. A program of its own, put into processes as `sitecustomize`.

The gate copies this file into a folder that it puts first on PYTHONPATH of a benchmark command. Every Python process of the
command then imports it, and it leaves its place to the `sitecustomize` that would have been imported without it. It imports
nothing that an interpreter has not loaded by then, and appends a line when something happens first, so that forks and
processes that are killed are seen too: `KIND<tab>BY<tab>WHAT`.

    started   a file that the interpreter, `-m` or pytest's collection was made to run by the command itself
    code      a file that was imported, or is run by what the command started
    data      a file that was opened otherwise
    missing   where an import looked in the work tree; most were found elsewhere
    text      length and sum of the bytes of a source that was compiled
    ended     an exception that nothing caught, or a call of `sys.exit`
    process   the process, and a prefix of its installation

BY is the innermost file of the work tree on the stack; "" where none is.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import NoReturn

FOLDER, TREE = os.environ.get("HARNESS_GATE_RECORD", ""), os.environ.get("HARNESS_GATE_TREE", "")
INNER = "HARNESS_GATE_INNER"  # a process that was started by one that records
LINES, START, OUTERMOST = f"{FOLDER}/lines", os.getcwd(), INNER not in os.environ
SEEN: "set[tuple[str, str, str]]" = set()
OVER = False  # an exception is being printed, with the lines of files where it was raised
_exit = sys.exit


def _note(kind: str, by: str, what: str) -> None:
    line = (kind, by, what)
    if line in SEEN or "\t" in by + what or "\n" in by + what:
        return
    SEEN.add(line)
    try:
        file = os.open(LINES, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, ("\t".join(line) + "\n").encode("utf-8", "surrogateescape"))
        os.close(file)
    except OSError:  # the gate that asked is gone
        pass


def _how(file: str) -> "tuple[str, str]":
    """How a file came to be opened, and by which file of the work tree."""
    try:
        frame: FrameType | None = sys._getframe(2)
    except ValueError:  # by the interpreter itself
        return ("started" if OUTERMOST else "code"), ""
    kind, direct, imported = "data", True, False
    while frame is not None:
        name, function, module = (
            frame.f_code.co_filename,
            frame.f_code.co_name,
            frame.f_globals.get("__name__"),
        )
        if name.startswith("<frozen importlib"):
            imported |= function == "_find_and_load"
            if function in ("_find_and_load", "get_code"):
                kind = "code"
        elif module == "runpy" and direct and not imported:
            kind = "started"
        elif module == "_pytest.pathlib" and function == "import_path":
            asked = frame.f_locals.get("path", frame.f_locals.get("p"))
            kind = "started" if str(asked) == file else "code"
        elif not name.startswith("<") and (name := os.path.join(START, name)).startswith(TREE + os.sep):
            return ("code" if kind == "started" else kind), os.path.normpath(name)
        direct &= name.startswith("<frozen importlib") or module == "runpy"
        frame = frame.f_back
    return (kind if OUTERMOST else "code"), ""


def _on_event(event: str, args: "tuple[object, ...]") -> None:
    global OVER
    if event == "open" and not OVER:
        path, mode, flags = args
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or path == LINES:
            return
        writes = (
            not {"w", "x", "a"}.isdisjoint(mode)
            if isinstance(mode, str)
            else flags & os.O_ACCMODE == os.O_WRONLY  # type: ignore[operator]
        )
        if not writes:
            file = os.path.abspath(path)
            folder, name = os.path.split(file)
            if file.endswith(".pyc") and os.path.basename(folder) == "__pycache__":  # of this source
                file = os.path.join(os.path.dirname(folder), name.partition(".")[0] + ".py")
            _note(*_how(file), file)
    elif event == "import" and isinstance(args[1], str):  # an extension
        _note("code", "", os.path.abspath(args[1]))
    elif event == "compile" and args[0] and isinstance(args[0], (str, bytes)):
        source = args[0].encode("utf-8", "surrogatepass") if isinstance(args[0], str) else args[0]
        _note("text", "", f"{len(source)} {sum(source)}")
    elif event == "sys.excepthook":
        _note("ended", "", getattr(args[1], "__name__", "exception"))
        OVER = True


class _Looked:
    """The last finder: it finds nothing, and notes where."""

    @staticmethod
    def find_spec(name: str, path: "Sequence[str] | None" = None, target: object = None, /) -> None:
        for entry in sys.path if path is None else path:
            if isinstance(entry, str) and (place := os.path.abspath(entry)).startswith(TREE):
                _note("missing", "", os.path.join(place, name.rpartition(".")[2]))


def _noted_exit(status: "str | int | None" = None, /) -> "NoReturn":
    _note("ended", "", f"sys.exit({status!r:.60})")
    _exit(status)


def _begin() -> None:
    for prefix in {sys.prefix, sys.base_prefix}:
        _note("process", str(os.getpid()), prefix)


def _hand_over(own_folder: str) -> None:
    """Imports the `sitecustomize` that this file stands before, if there is one."""
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != own_folder]
    this = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        if "sitecustomize" not in sys.modules and this is not None:
            sys.modules["sitecustomize"] = this


if __name__ == "sitecustomize":
    if FOLDER:
        _begin()
        os.environ[INNER] = "1"
        os.register_at_fork(after_in_child=_begin)
        sys.addaudithook(_on_event)
        sys.exit = _noted_exit
    _hand_over(os.path.dirname(os.path.realpath(__file__)))
    if FOLDER:
        sys.meta_path.append(_Looked)
