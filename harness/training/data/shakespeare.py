"""nanoGPT's character set: tiny Shakespeare, 1,115,394 characters, 65 different ones, 90 % for training.

From a file that is named, else from the cache, else from its public address; only with the pinned sha256, since the
losses that nanoGPT publishes belong to exactly this text. Source: karpathy/nanoGPT, data/shakespeare_char.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np

from harness.store.errors import UsageError
from harness.training.data.corpus import Corpus, CorpusInfo, split

ADDRESS = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TIMEOUT_S = 30
# As nanoGPT's prepare.py prints it; the pinned sha256 makes it true of every copy that `load` accepts.
INFO = CorpusInfo("shakespeare", vocab_size=65, sha256=SHA256, train=1_003_854, heldout=111_540)


def load(path: Path | None = None) -> Corpus:
    """The characters as indices into their sorted set.

    Raises:
        UsageError: the file is another text, or there is none and it cannot be downloaded.
    """
    place = path or kept()
    text = _checked(place.read_bytes(), str(place)) if path or place.is_file() else _downloaded()
    letters, ids = np.unique(np.frombuffer(text, dtype=np.uint8), return_inverse=True)  # the text is ASCII
    return split("shakespeare", len(letters), SHA256, ids.astype(np.uint8))


def cache_folder() -> Path:
    """Where downloads are kept: $XDG_CACHE_HOME/fp8-harness, else ~/.cache/fp8-harness."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8-harness"


def kept() -> Path:
    """Where a download is kept, whether it is there or not."""
    return cache_folder() / f"shakespeare-{SHA256[:16]}.txt"


def _downloaded() -> bytes:
    try:
        with urllib.request.urlopen(ADDRESS, timeout=TIMEOUT_S) as answer:
            text = _checked(answer.read(), ADDRESS)
    except OSError as error:  # URLError and timeouts among them
        raise UsageError(
            f"data=shakespeare cannot be downloaded from {ADDRESS}: {error}; give a copy by data_path=FILE, "
            "or take data=stdlib"
        ) from error
    _write(kept(), text)
    return text


def _checked(text: bytes, where: str) -> bytes:
    found = hashlib.sha256(text).hexdigest()
    if found != SHA256:
        raise UsageError(
            f"{where} is not nanoGPT's text: {len(text)} bytes with sha256 {found}, expected {SHA256}; for a text of "
            "your own take data=bytes data_path=FILE"
        )
    return text


def _write(path: Path, text: bytes) -> None:
    """Whole or not at all; a cache that cannot be written costs a download the next time, nothing else."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
