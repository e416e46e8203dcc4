"""Lightning, two batches a step, on a small Llama of this project. Runs on a CPU."""

import os

import lightning
import torch
from torch.utils.data import DataLoader

from harness import ab
from harness.training.models.llama import Llama, LlamaConfig


class Task(lightning.LightningModule):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=64, max_seq=32, layers=2, width=64, heads=4, kv_heads=2, ffn=128)
        self.model = Llama(config)

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """Loss of one batch."""
        return self.model(rows[:, :-1], rows[:, 1:])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
loader = DataLoader((torch.arange(4096) % 61).unfold(0, 33, 2), batch_size=4, shuffle=True)
task = Task()
trial = ab.Trial(task, recipe="tensorwise", steps=100)
trainer = lightning.Trainer(
    accelerator="cpu",
    callbacks=[ab.lightning_callback(trial)],
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    max_steps=110,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(task, loader)
print(trial.report())
