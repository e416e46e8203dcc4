"""What the reference job refuses before anything is trained: GPUs, ranks, recipe, model, data, and where reports go."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fp8core import RECIPES
from harness.store.errors import UsageError, one_line, unknown
from harness.suites.common import recipe_unsupported
from harness.training import batches
from harness.training.models import resolve

if TYPE_CHECKING:
    from harness.cli.reference_settings import Settings
    from harness.training.data.corpus import Corpus


class LocalGpuError(UsageError):
    """One rank alone has no GPU that it could take, before there is a group."""


def local_gpu() -> int:
    """The GPU of this rank.

    Raises:
        LocalGpuError: nobody says which, or there is none of that number.
    """
    text, count = os.environ.get("LOCAL_RANK", ""), torch.cuda.device_count()
    if not text.isdecimal() or int(text) >= count:
        raise LocalGpuError(
            f"LOCAL_RANK={text or 'not set'}: expected the number of a GPU of this host, below {count}; torchrun sets it, with "
            "--nproc-per-node of at most that many"
        )
    return int(text)


def check_recipe(settings: Settings, ranks: int, device: str) -> None:
    """Refuses one rank, and a recipe that is unknown, has no kernel on this device or takes no such count of tokens.

    Raises:
        UsageError: in one line.
    """
    if ranks < 2:
        raise UsageError(
            "1 rank: the recipe shards over 2 or more; give more nodes (sbatch --nodes=2) or GPUs of a node"
        )
    if settings.recipe not in RECIPES:
        raise unknown("recipe", settings.recipe, RECIPES)
    tokens = settings.batch * settings.seq
    if why := recipe_unsupported(RECIPES[settings.recipe], tokens, device):
        others = [name for name, recipe in RECIPES.items() if not recipe_unsupported(recipe, tokens, device)]
        raise UsageError(
            f"recipe={settings.recipe}, batch={settings.batch}, seq={settings.seq}: {why.reason}; "
            + (f"recipes that run here: {', '.join(others)}" if others else "no recipe runs here")
        )


def checked_data(settings: Settings) -> Corpus | None:
    """The text to train on; None where the model brings its own batches.

    Raises:
        UsageError: a model and data that do not go together.
    """
    mine = settings
    batches.check(mine.model, mine.data, mine.data_path, mine.seq, 0, mine.batch, judged=True)
    text = batches.corpus_of(mine.model, mine.data, mine.data_path)
    vocabulary = text.vocab_size if text is not None else 0
    if vocabulary > getattr(resolve(mine.model), "vocab_size", vocabulary):
        raise UsageError(
            f"data={mine.data} has {vocabulary} tokens, more than model {mine.model}; name another"
        )
    return text


def check_reports(reports_dir: str) -> None:
    """Makes the folder of the report, which is written last of all.

    Raises:
        UsageError: no file can be written there.
    """
    try:
        Path(reports_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=reports_dir):
            pass
    except OSError as error:
        raise UsageError(
            f"reports_dir={reports_dir}: the report cannot be written there ({one_line(error)}); name a folder that rank 0 can "
            "write to"
        ) from error
