"""Corpus: token ids of a text, split by position into training and held-out parts, and the batches taken from it.

A batch is a pure function of (step, seed, batch_size, block): all arms of a case read the same ones, and a run that
goes on from step n needs no other record of where it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

TRAIN_SHARE = 0.9  # nanoGPT's split, by position


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """What can be said of a corpus without its ids.

    Attributes:
        name: which corpus.
        vocab_size: ids are 0..vocab_size-1.
        sha256: of the bytes that the ids come from.
        train: number of ids in the training part.
        heldout: number of ids in the held-out part.
    """

    name: str
    vocab_size: int
    sha256: str
    train: int
    heldout: int


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Token ids with the name they go by.

    Attributes:
        name: which corpus.
        vocab_size: ids are 0..vocab_size-1.
        sha256: of the bytes that the ids came from.
        train: ids [n]; uint8, uint16 or uint32, memory-mapped where large.
        heldout: likewise; never in a training batch.
    """

    name: str
    vocab_size: int
    sha256: str
    train: npt.NDArray[Any]
    heldout: npt.NDArray[Any]

    @property
    def info(self) -> CorpusInfo:
        """Sizes and name of the corpus, without the ids."""
        return CorpusInfo(self.name, self.vocab_size, self.sha256, len(self.train), len(self.heldout))

    def batch(
        self, step: int, seed: int, batch_size: int, block: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows of the training part at places drawn with numpy's Philox, keyed by (seed, step).

        Args:
            step: of the training run, from 0.
            seed: of the order of the data, 0 or more.
            batch_size: number of windows.
            block: tokens in each.
            device: where the tensors go.

        Returns:
            Tokens and, one place further on, targets; int64 [batch_size, block].

        Raises:
            UsageError: the training part has no window of `block` tokens and a target.
        """
        self._check_block(self.train, "training", block)
        stream = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
        return _windows(self.train, stream.integers(0, len(self.train) - block, batch_size), block, device)

    def heldout_batches(
        self, count: int, batch_size: int, block: int, device: torch.device | str = "cpu"
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`count` batches of windows evenly spread over the held-out part: the same at every call.

        Raises:
            UsageError: the held-out part has no window of `block` tokens and a target.
        """
        self._check_block(self.heldout, "held-out", block)
        starts = np.linspace(0, len(self.heldout) - block - 1, count * batch_size).astype(np.int64)
        return [_windows(self.heldout, part, block, device) for part in starts.reshape(count, batch_size)]

    def _check_block(self, ids: npt.NDArray[Any], part: str, block: int) -> None:
        if len(ids) <= block:
            raise UsageError(
                f"data={self.name}: the {part} part has {len(ids)} tokens, a window needs {block} and a target; "
                f"take a longer text or seq={max(len(ids) - 1, 1)} at most"
            )


def split(name: str, vocab_size: int, sha256: str, ids: npt.NDArray[Any]) -> Corpus:
    """A corpus whose first 90 % are for training and whose rest is held out, as nanoGPT cuts its texts."""
    cut = int(len(ids) * TRAIN_SHARE)
    return Corpus(name, vocab_size, sha256, ids[:cut], ids[cut:])


def _windows(
    ids: npt.NDArray[Any], starts: npt.NDArray[np.int64], block: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    import torch  # only batches need it: reading a corpus does not

    window = ids[starts[:, None] + np.arange(block + 1)].astype(np.int64)
    tokens = torch.from_numpy(window).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
