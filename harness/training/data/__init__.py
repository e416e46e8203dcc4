"""The texts that models are trained on, by name.

To add one: its file in this folder and its line in `corpus` and `CORPORA`.
"""

from __future__ import annotations

import functools
from pathlib import Path

from harness.store.errors import UsageError, unknown
from harness.training.data import bin as binary
from harness.training.data import shakespeare, stdlib
from harness.training.data.corpus import Corpus, Extent

__all__ = ["CORPORA", "Corpus", "Extent", "corpus", "extent"]

CORPORA = {
    "stdlib": "bytes of the Python standard library's sources; the default, needs no download",
    "shakespeare": "nanoGPT's character set; from path, the cache or its public address",
    "bytes": "bytes of the file at path",
    "bin": "uint16 token ids of nanoGPT's .bin at path, a file or a folder with train.bin and val.bin",
}


def corpus(name: str, path: str | Path | None = None, vocab_size: int | None = None) -> Corpus:
    """The corpus of that name; read once a process.

    Args:
        name: a key of `CORPORA`.
        path: of a file or folder; needed by "bytes" and "bin", allowed for "shakespeare".
        vocab_size: for "bin", which doesn't say it itself: the model's.

    Raises:
        UsageError: an unknown name, a path that is missing or too many, or what the corpus says of its file.
    """
    if name not in CORPORA:
        raise unknown("data", name, CORPORA)
    if path is None and name in ("bytes", "bin"):
        raise UsageError(f"data={name} needs a file: data_path=FILE")
    if path is not None and name == "stdlib":
        raise UsageError(f"data=stdlib takes no path, got {path}; use data=bytes for your own text")
    if name == "bin" and vocab_size is None:
        raise UsageError("data=bin needs the size of its vocabulary, 50257 for GPT-2's tokens")
    found = Path(path).expanduser().resolve() if path is not None else None
    if found is not None and not found.exists():
        raise UsageError(f"data={name}: no file {found}")
    return _read(name, found, vocab_size)


def extent(name: str, path: str | Path | None = None, vocab_size: int | None = None) -> Extent:
    """Size and vocabulary of the corpus of that name, without a download: what a plan may ask for.

    Args, Raises: as `corpus`.
    """
    if name == "shakespeare" and path is None:
        return shakespeare.EXTENT
    return corpus(name, path, vocab_size).extent


@functools.lru_cache(maxsize=8)
def _read(name: str, path: Path | None, vocab_size: int | None) -> Corpus:
    try:
        if name == "shakespeare":
            return shakespeare.load(path)
        if path is None:
            return stdlib.load()
        if name == "bytes":
            return stdlib.load_file(path)
        assert vocab_size is not None
        return binary.load(path, vocab_size)
    except OSError as error:
        raise UsageError(f"data={name}: cannot read {path}: {error}") from error
