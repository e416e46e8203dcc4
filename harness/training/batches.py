"""The batches of a training case: of a corpus for the models of this project, of the user's function for others."""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch

from harness.store.errors import UsageError
from harness.training.data import corpus, corpus_info
from harness.training.models import ModelSpec, resolve
from harness.training.models.random_tokens import NAMED
from harness.training.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from harness.store.case import Case
    from harness.training.data import Corpus, CorpusInfo


def corpus_of(model: str, data: str, path: str = "") -> Corpus | None:
    """The text that a model reads; None for a user's model, which brings batches of its own."""
    spec = resolve(model)
    return corpus(data, path or None, spec.vocab_size) if isinstance(spec, ModelSpec) else None


def text_of(case: Case) -> Corpus | None:
    """The text that a training case reads."""
    return corpus_of(case.text("model"), case.text("data"), case.text("data_path"))


def setup_of(case: Case, **own: Any) -> Setup:
    """What a training case trains; `own`: fields of the set-up that its axes do not give alike in every suite."""
    text = corpus_of_case(case)
    return Setup(
        model=case.text("model"),
        seq=case.integer("seq"),
        compute=case.text("compute"),
        checkpointing=case.text("checkpointing"),
        accumulation=case.integer("accumulation"),
        layers=case.integer("layers") or None,
        vocab_size=text.vocab_size if text is not None else None,
        **own,
    )


def corpus_of_case(case: Case) -> CorpusInfo | None:
    """The size of the text that a training case reads, without a download."""
    return _extent_of(case.text("model"), case.text("data"), case.text("data_path"))


def _extent_of(model: str, data: str, path: str) -> CorpusInfo | None:
    spec = resolve(model)
    return corpus_info(data, path or None, spec.vocab_size) if isinstance(spec, ModelSpec) else None


def fetch(cases: Iterable[Case]) -> None:
    """Reads every text that training cases name, so that a run that cannot have one ends before it starts.

    Raises:
        UsageError: a text cannot be downloaded or read.
    """
    names = ("model", "data", "data_path")
    axes = (dict(case.axes) for case in cases)
    for model, data, path in sorted({tuple(str(a[n]) for n in names) for a in axes if {*names} <= a.keys()}):
        corpus_of(model, data, path)


def check(
    model: str, data: str, path: str, seq: int, layers: int, batch: int, *, judged: bool = False
) -> None:
    """Refuses lengths that the model or the text does not have, and a batch function that can't be used.

    With `judged` its losses are, so that random tokens will not do.

    Raises:
        UsageError: names the value, the limit and whose it is; or the function and what it did.
    """
    spec, text = resolve(model), _extent_of(model, data, path)
    if not isinstance(spec, ModelSpec) or text is None:
        if judged and not isinstance(spec, ModelSpec) and not spec.batch_target:
            raise UsageError(
                f"{spec.target}: model.batch is not named, and a loss on random tokens says nothing of training; name {NAMED} "
                "(sweep=train times the steps without it)"
            )
        _check_function(model, batch)
        return
    if judged and data == "random":
        raise UsageError(
            "data=random: a loss on random tokens says nothing of training; take another text (sweep=train times the steps with it)"
        )
    if seq > spec.max_seq:
        raise UsageError(f"seq={seq}: model {spec.name} takes at most {spec.max_seq} tokens")
    if layers > spec.layers:
        raise UsageError(f"layers={layers}: model {spec.name} has {spec.layers}")
    if text.train <= seq:
        raise UsageError(f"data={text.name}: the training part has {text.train} tokens, seq={seq} needs more")


@functools.lru_cache(maxsize=16)  # cases differ in what this does not depend on
def _check_function(model: str, batch: int) -> None:
    """Refuses a batch function that fails, or gives something else for the same step and seed when asked again."""
    spec = resolve(model)
    assert not isinstance(spec, ModelSpec)
    first, again = (digest(spec.batch(0, 0, batch, "cpu")) for _ in range(2))
    if first != again:
        raise UsageError(
            f"{spec.batch_target} returned two different batches for the same step=0 and seed=0, so arms would not read "
            "the same data; draw them from a generator seeded by step and seed"
        )


def digest(tensors: Iterable[Tensor]) -> str:
    """Says of batches whether they are the same: 16 hex digits of a SHA-256 over shapes, dtypes and bytes."""
    seen = hashlib.sha256()
    for tensor in tensors:
        bits = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        seen.update(f"{list(tensor.shape)} {tensor.dtype}".encode())
        seen.update(bits.numpy().tobytes())
    return seen.hexdigest()[:16]


def microbatches_of(
    model: str, text: Corpus | None, step: int, seed: int, size: tuple[int, int, int], device: str
) -> list[tuple[Tensor, ...]]:
    """The microbatches of one optimizer step.

    All sequences of a step are drawn at once and then cut, so that a step sees the same ones however it is cut.

    Args:
        model: as the case names it.
        text: of `corpus_of`.
        step: from 0.
        seed: of the data.
        size: microbatches, sequences in each, tokens of a sequence.
        device: where they go.
    """
    count, batch, seq = size
    if text is not None:
        whole: tuple[Tensor, ...] = text.batch(step, seed, count * batch, seq, device)
    else:
        spec = resolve(model)
        assert not isinstance(spec, ModelSpec)
        whole = spec.batch(step, seed, count * batch, device)
    return [tuple(part[i * batch : (i + 1) * batch] for part in whole) for i in range(count)]
