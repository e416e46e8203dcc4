"""nanoGPT's `.bin` files: token ids as little-endian uint16, nothing else; memory-mapped.

A folder with train.bin and val.bin, as nanoGPT's prepare.py leaves it, or one file, whose last 10 % are held out.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.errors import UsageError
from harness.training.data.corpus import Corpus, split

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

_PIECE = 1 << 22  # ids read at once while a file is checked


def load(path: Path, vocab_size: int) -> Corpus:
    """The ids of a file or of a folder's train.bin and val.bin.

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
                "0 to "
                f"{vocab_size - 1}: give the vocabulary that the file was made with, or another file"
            )
    return ids
