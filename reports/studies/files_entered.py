"""How many files of this project one command enters, and how often it goes from one to another.

    python reports/studies/files_entered.py sweep=gemm device=cpu shapes=[] axes.M=64 axes.K=64 axes.N=64 isolate=false

With `isolate=false` all of a sweep is in one process; what other processes do is not counted.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

ROOT = Path(__file__).resolve().parents[2]


class Entered:
    """A profile function that counts calls by file, without the bodies of modules and classes, and changes of the file."""

    def __init__(self) -> None:
        self.calls, self.changes, self._last = Counter[str](), 0, ""
        self._known: dict[str, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return
        path = frame.f_code.co_filename
        if path not in self._known:
            own = Path(path).is_relative_to(ROOT / "harness") or Path(path).is_relative_to(ROOT / "fp8core")
            self._known[path] = str(Path(path).relative_to(ROOT)) if own else ""
        name = self._known[path]
        if name:
            self.calls[name] += 1
            self.changes += name != self._last
            self._last = name


def main(words: list[str]) -> int:
    """Runs the command and prints the counts, by room."""
    from harness.__main__ import main as command

    entered = Entered()
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        code = command(words)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    rooms = Counter("/".join(name.split("/")[:2]) for name in entered.calls)
    print(f"exit {code}; {len(entered.calls)} files, {entered.changes} changes of the file")
    print(", ".join(f"{room} {count}" for room, count in rooms.most_common()))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
