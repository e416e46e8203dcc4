"""Lightning: conversion in configure_model, amaxes in its checkpoint, a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

lightning = pytest.importorskip("lightning", reason="pip install -e '.[clients]'")
pytest.importorskip("transformers", reason="pip install -e '.[clients]'")

from tiny_models import BOUND, batch, largest_difference, made, report

import fp8core
from fp8core import callbacks

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


class Task(lightning.LightningModule):
    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.recipe, self.losses, self.model = recipe, [], made("llama")

    def configure_model(self) -> None:
        if self.recipe and fp8core.audit(self.model).fp8_gemms == 0:
            fp8core.convert_to_float8_training(self.model, config=self.recipe)

    def training_step(self, _: Any, index: int) -> torch.Tensor:
        loss = self.model(**batch(self.global_step % 2)).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trained(recipe: str, steps: int, folder: Path, resume: Path | None = None) -> tuple[Task, Path]:
    task = Task(recipe)
    trainer = lightning.Trainer(
        accelerator="cpu", precision="bf16-mixed", max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
        callbacks=[callbacks.for_lightning()],
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(range(100)), ckpt_path=resume)
    saved = folder / f"{recipe}-{steps}.ckpt"
    trainer.save_checkpoint(saved)
    return task, saved


def test_losses_beside_bf16_and_a_resumed_run(tmp_path: Path) -> None:
    """Oracles: bfloat16; and, bit for bit, the run that was not interrupted."""
    bf16, _ = trained("", 16, tmp_path)
    whole, _ = trained("delayed", 16, tmp_path)
    report("lightning, delayed", bf16.losses, whole.losses)
    assert largest_difference(whole.losses, bf16.losses) < BOUND
    _, half = trained("delayed", 8, tmp_path)
    rest, _ = trained("delayed", 16, tmp_path, resume=half)
    assert rest.losses == whole.losses[8:]
    assert all(map(torch.equal, rest.parameters(), whole.parameters()))
    state = torch.load(half, weights_only=False)
    assert any(key.endswith("amaxes.in_use") for key in state.pop(callbacks.KEY))
    torch.save(state, tmp_path / "without.ckpt")
    with pytest.warns(fp8core.AmaxesMissingWarning):
        trained("delayed", 10, tmp_path, resume=tmp_path / "without.ckpt")
