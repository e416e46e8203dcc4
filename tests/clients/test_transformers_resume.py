"""transformers' Trainer with delayed scaling: a resumed run is the run that was not interrupted, by the callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install -e '.[clients]'")
pytest.importorskip("accelerate", reason="pip install -e '.[clients]'")

from tiny_models import batch, made

from fp8core import AmaxesMissingWarning, callbacks, convert_to_float8_training

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


class Batches(torch.utils.data.Dataset):
    """One batch for each step, as `tiny_models` makes them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index % 2] for name, value in batch(index // 16 % 2).items()}


def trained(folder: Path, steps: int, resume: str | None = None) -> Any:
    """The trainer after so many steps, a checkpoint at the fourth."""
    model = convert_to_float8_training(made("llama"), config="delayed")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=4, per_device_train_batch_size=16, learning_rate=3e-3,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=Batches(), callbacks=[callbacks.for_trainer()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_a_resumed_run_is_the_whole_one_bit_for_bit(tmp_path: Path) -> None:
    """Oracle: the run that was not interrupted. Without the amaxes it differs, and a warning says so."""
    whole = trained(tmp_path, 8)
    half = tmp_path / "checkpoint-4"
    assert (half / callbacks.FILE).is_file()
    rest = trained(tmp_path, 8, resume=str(half))
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
    (half / callbacks.FILE).unlink()
    with pytest.warns(AmaxesMissingWarning):
        other = trained(tmp_path, 8, resume=str(half))
    assert not all(map(torch.equal, other.model.parameters(), whole.model.parameters()))
