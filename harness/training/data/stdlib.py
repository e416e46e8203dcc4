"""Corpora of bytes: the Python standard library's own sources (no download), or any file.

Of the standard library, every `.py` file of the modules that `sys.stdlib_module_names` lists, in the order of their
paths; without tests, which some distributions leave out, and without what is generated where Python is built or
installed. The text differs between Python versions: the sha256 in each row says which one it was.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path

import numpy as np

from harness.store.errors import UsageError
from harness.training.data.corpus import Corpus, split

VOCAB_SIZE = 256
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}


def load(folder: Path | None = None) -> Corpus:
    """The bytes of the standard library's sources.

    Raises:
        UsageError: there are none, as in a frozen or zipped Python.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((root / name).read_bytes() for name in stdlib_files(root))
    if not text:
        raise UsageError(f"data=stdlib: no Python sources in {root}; take data=bytes path=FILE")
    return _of_bytes("stdlib", text)


def stdlib_files(root: Path) -> list[str]:
    """The sources below `root`, as sorted relative paths with forward slashes."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).parts
        top = parts[0].removesuffix(".py") if len(parts) == 1 else parts[0]
        if top in sys.stdlib_module_names and not _LEFT_OUT.intersection(parts):
            found.append("/".join(parts))
    return sorted(found)


def load_file(path: Path) -> Corpus:
    """The bytes of any file."""
    return _of_bytes("bytes", path.read_bytes())


def _of_bytes(name: str, text: bytes) -> Corpus:
    return split(name, VOCAB_SIZE, hashlib.sha256(text).hexdigest(), np.frombuffer(text, dtype=np.uint8))
