"""Determinism: what makes two runs of one seed equal, and which operators could not be made so."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

# How torch says of an operator that it has no deterministic kernel (ATen, Context.cpp); some say it in other words.
_LACKS = " does not have a deterministic implementation"
_DETERMINISM = re.compile("(?s).*determinis", re.IGNORECASE)


@contextmanager
def reproducible(device: str) -> Iterator[list[str]]:
    """One thread on a CPU, so that sums don't depend on how many cores are free; on a GPU deterministic kernels.

    What has no deterministic kernel runs all the same; it is listed in what is yielded, complete when the block has
    ended. cuBLAS repeats its results only with a workspace of fixed size, which it reads when it starts: it is set for
    the process unless it was set before (docs.nvidia.com/cuda/cublas, "Results Reproducibility").
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    found: list[str] = []
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with _collected(found):
            yield found
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


@contextmanager
def _collected(found: list[str]) -> Iterator[None]:
    """Lists what torch warns of as not deterministic, each once; other warnings go where they went before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_DETERMINISM.pattern, category=UserWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, *where: Any, **more: Any) -> None:
            text = " ".join(str(message).split())
            if not _DETERMINISM.match(text):
                show(message, *where, **more)
            elif (what := text.partition(_LACKS)[0][:200]) not in found:
                found.append(what)

        warnings.showwarning = collect
        yield
