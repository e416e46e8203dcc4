"""Recorder: writes which module files a Python process imported. A program of its own, put into processes as `sitecustomize`.

The gate copies this file into a folder that it puts first on PYTHONPATH of a benchmark command. Every Python process of the
command then imports it, leaves its place to the `sitecustomize` that would have been imported without it, and at its end
writes one file of names. It imports nothing that an interpreter has not loaded by then. Where a change holds files that are
no modules, it names the files that Python opens as well.
"""

import atexit
import os
import sys

FOLDER = os.environ.get("HARNESS_GATE_RECORD", "")
OPENED: "set[str]" = set()


def _record(folder: str, owner: int) -> None:
    """Writes `NAME<tab>FILE` of every module that has a file."""
    if os.getpid() != owner:  # a fork: its parent speaks for it
        return
    lines = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # A script that has ended: its name is gone, its loader is not
        if file is None and name == "__main__":
            file = getattr(getattr(module, "__loader__", None), "path", None)
        if isinstance(file, str) and file != __file__:
            lines.append(f"{name}\t{os.path.realpath(file)}")
    lines += [f"\t{os.path.realpath(file)}" for file in OPENED]
    path = f"{folder}/{owner}-{os.urandom(4).hex()}"
    with open(path + ".new", "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write("\n".join(line for line in lines if line.count("\t") == 1 and "\n" not in line))
    os.rename(path + ".new", path + ".modules")


def _note_opened(event: str, args: "tuple[object, ...]") -> None:
    if event == "open" and isinstance(args[0], str):
        OPENED.add(os.path.abspath(args[0]))


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
        if os.environ.get("HARNESS_GATE_OPENED"):
            sys.addaudithook(_note_opened)
        atexit.register(_record, FOLDER, os.getpid())
    _hand_over(os.path.dirname(os.path.realpath(__file__)))
