"""The texts that models are trained on, by name.

To add one: what reads it, and its line in `corpus` and `CORPORA`.

Of the standard library these are the bytes of every `.py` file of the modules that `sys.stdlib_module_names` lists, in the
order of their paths; without tests, which some distributions leave out, and without what is generated where Python is built
or installed. The text differs between Python versions: the sha256 in each row says which one it was.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.errors import UsageError, unknown
from harness.training.data import shakespeare
from harness.training.data.corpus import Corpus, CorpusInfo, split

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["CORPORA", "Corpus", "CorpusInfo", "corpus", "corpus_info"]

CORPORA = {
    "stdlib": "bytes of the Python standard library's sources; the default, needs no download",
    "shakespeare": "nanoGPT's character set; from path, the cache or its public address",
    "bytes": "bytes of the file at path",
    "random": "random tokens of the model's whole vocabulary: times and shapes alone, no loss is judged",
    "bin": "uint16 token ids of nanoGPT's .bin at path, a file or a folder with train.bin and val.bin",
}
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
_DRAWN = 1 << 20  # random tokens
_PIECE = 1 << 22  # ids of a .bin read at once while it is checked


def corpus(name: str, path: str | Path | None = None, vocab_size: int | None = None) -> Corpus:
    """The corpus of that name; read once a process.

    Args:
        name: a key of `CORPORA`.
        path: of a file or folder; needed by "bytes" and "bin", allowed for "shakespeare".
        vocab_size: for "bin" and "random", which don't say it themselves: the model's.

    Raises:
        UsageError: an unknown name, a path that is missing or too many, or what the corpus says of its file.
    """
    if name not in CORPORA:
        raise unknown("data", name, CORPORA)
    if path is None and name in ("bytes", "bin"):
        raise UsageError(f"data={name} needs a file: data_path=FILE")
    if path is not None and name in ("stdlib", "random"):
        raise UsageError(f"data={name} takes no path, got {path}; use data=bytes for your own text")
    if name in ("bin", "random") and vocab_size is None:
        raise UsageError(f"data={name} needs the size of its vocabulary, 50257 for GPT-2's tokens")
    found = Path(path).expanduser().resolve() if path is not None else None
    if found is not None and not found.exists():
        raise UsageError(f"data={name}: no file {found}")
    return _read(name, found, vocab_size)


def corpus_info(name: str, path: str | Path | None = None, vocab_size: int | None = None) -> CorpusInfo:
    """Size and vocabulary of the corpus of that name, without a download: what a plan may ask for.

    Args, Raises: as `corpus`.
    """
    if name == "shakespeare" and path is None:
        return shakespeare.INFO
    return corpus(name, path, vocab_size).info


@functools.lru_cache(maxsize=8)
def _read(name: str, path: Path | None, vocab_size: int | None) -> Corpus:
    try:
        if name == "shakespeare":
            return shakespeare.load(path)
        if name == "random":
            assert vocab_size is not None
            return _random(vocab_size)
        if path is None:
            return stdlib()
        if name == "bytes":
            return _of_bytes(name, path.read_bytes())
        assert vocab_size is not None
        return _binary(path, vocab_size)
    except OSError as error:
        raise UsageError(f"data={name}: cannot read {path}: {error}") from error


def _of_bytes(name: str, text: bytes) -> Corpus:
    return split(name, 256, hashlib.sha256(text).hexdigest(), np.frombuffer(text, dtype=np.uint8))


def _random(vocab_size: int) -> Corpus:
    ids = np.random.default_rng(0).integers(0, vocab_size, _DRAWN, dtype=np.uint32)
    return split("random", vocab_size, hashlib.sha256(ids.tobytes()).hexdigest(), ids)


def stdlib(folder: Path | None = None) -> Corpus:
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
    parts = [path.relative_to(root).parts for path in root.rglob("*.py")]
    return sorted(
        "/".join(each)
        for each in parts
        if each[0].removesuffix(".py" if len(each) == 1 else "") in sys.stdlib_module_names
        and not _LEFT_OUT.intersection(each)
    )


def _binary(path: Path, vocab_size: int) -> Corpus:
    """nanoGPT's `.bin`, little-endian uint16, memory-mapped: a folder's train.bin and val.bin, or a file, whose last 10 % are held out.

    Each file is read once, piece by piece, for its sha256 and its largest id.

    Raises:
        UsageError: a file is missing, empty, no whole number of uint16, or holds an id beyond the vocabulary.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        train, heldout = (_ids(path / name, vocab_size, digest) for name in ("train.bin", "val.bin"))
        return Corpus("bin", vocab_size, digest.hexdigest(), train, heldout)
    ids = _ids(path, vocab_size, digest)
    return split("bin", vocab_size, digest.hexdigest(), ids)


def _ids(path: Path, vocab_size: int, digest: Any) -> npt.NDArray[Any]:
    if not path.is_file():
        raise UsageError(f"data=bin: no file {path}; a folder needs train.bin and val.bin")
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise UsageError(
            f"{path} has {size} bytes; expected uint16 token ids, two bytes each and at least one"
        )
    ids = np.memmap(path, dtype="<u2", mode="r")
    for start in range(0, len(ids), _PIECE):
        piece = ids[start : start + _PIECE]
        digest.update(piece.tobytes())
        if int(piece.max()) >= vocab_size:
            place = start + int(np.argmax(piece >= vocab_size))
            raise UsageError(
                f"{path} holds token id {ids[place]} at position {place}; the vocabulary has {vocab_size} tokens, "
                f"0 to {vocab_size - 1}: give the vocabulary that the file was made with, or another file"
            )
    return ids
