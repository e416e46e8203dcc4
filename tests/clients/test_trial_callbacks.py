"""Callbacks of a trial in the real loops of Trainer, Lightning and accelerate. Oracles: the state before, bit for bit; counts of
microbatches and steps; what was planted.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="pip install -e '.[clients]'")
accelerate = pytest.importorskip("accelerate", reason="pip install -e '.[clients]'")
lightning = pytest.importorskip("lightning", reason="pip install -e '.[clients]'")

from harness import ab

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

STEPS = 52  # three rounds, and no step more


class Net(nn.Module):
    """Two layers; raises in the call that was planted."""

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.calls, self.fails_at = 0, fails_at

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        return {"loss": (self.down(torch.relu(self.up(x))) - x).square().mean()}


ROWS = torch.randn(800, 32, generator=torch.Generator().manual_seed(0))


def state(model: nn.Module) -> list[Tensor]:
    return copy.deepcopy([*model.parameters()])


def equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, mine, theirs))


def hugging_face(
    model: Net, folder: Path, callbacks: list[Any], microbatches: int = 1, steps: int = 60
) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=16, save_strategy="no", report_to="none",
        gradient_accumulation_steps=microbatches, disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = [{"x": row} for row in ROWS]
    return transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)


class Task(lightning.LightningModule):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.model = model

    def training_step(self, rows: Tensor, index: int) -> Tensor:
        return self.model(rows)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(task: Task, callback: Any, microbatches: int = 1, steps: int = 60) -> Any:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=microbatches, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(task, torch.utils.data.DataLoader(ROWS, batch_size=16))
    return trainer


def answered(trial: Any) -> Any:
    result = trial.result()
    assert trial.done
    assert result.proved, result.proof
    assert not result.problem
    assert len(result.rounds) == 3
    assert sum(result.steps_run) == STEPS
    return result


@pytest.mark.parametrize(("microbatches", "stops"), [(1, True), (5, False)])
def test_trainer_counts_a_step_by_its_optimizer(microbatches: int, stops: bool, tmp_path: Path) -> None:
    """50 batches an epoch: each step of five has one forward pass a microbatch, over the ends of epochs too."""
    model = Net()
    trial = ab.Trial(model, steps=STEPS)
    trainer = hugging_face(
        model, tmp_path, [ab.hugging_face_callback(trial, stop_when_done=stops)], microbatches
    )
    with trial:
        trainer.train()
    result = answered(trial)
    assert not any(r.faults for r in result.rounds)
    assert trial._steps.expected.calls == microbatches
    assert trainer.state.global_step == (STEPS if stops else 60)


@pytest.mark.parametrize("at", [6, 12, 30])
def test_an_exception_in_trainer_restores_by_with_trial(at: int, tmp_path: Path) -> None:
    """Two microbatches a step: steps that count bf16's GEMMs, that are compared, that are timed."""
    model = Net(fails_at=at)
    before = state(model)
    trial = ab.Trial(model, steps=STEPS, restore=[])
    trainer = hugging_face(model, tmp_path, [ab.hugging_face_callback(trial)], 2)
    with pytest.raises(KeyboardInterrupt), trial:
        trainer.train()
    assert trial.done
    assert "raised KeyboardInterrupt" in trial.result().problem
    assert equal(state(model), before)


def test_an_epoch_that_another_callback_ends_within_a_step_is_named(tmp_path: Path) -> None:
    class Ends(transformers.TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            control.should_epoch_stop = state.global_step == 20
            return control

    model = Net()
    trial = ab.Trial(model, steps=STEPS)
    hugging_face(model, tmp_path, [Ends(), ab.hugging_face_callback(trial)], 2, 30).train()
    assert trial.done
    assert "left before its end" in trial.result().problem


def test_training_that_ends_early_ends_the_trial(tmp_path: Path) -> None:
    model = Net()
    trial = ab.Trial(model, steps=STEPS)
    hugging_face(model, tmp_path, [ab.hugging_face_callback(trial)], steps=20).train()
    assert trial.done
    assert trial.result().decision == "cannot tell"
    assert "0 rounds count" in trial.result().doubt


@pytest.mark.parametrize(("microbatches", "stops"), [(1, True), (5, False)])
@pytest.mark.parametrize("of", ["task", "model"])
def test_lightning_counts_a_step_by_its_optimizer(microbatches: int, stops: bool, of: str) -> None:
    task = Task(Net())
    trial = ab.Trial(task if of == "task" else task.model, steps=STEPS)
    trainer = fit(task, ab.lightning_callback(trial, stop_when_done=stops), microbatches)
    result = answered(trial)
    assert not any(r.faults for r in result.rounds)
    assert trial._steps.expected.shapes == ((16, 32),) * microbatches
    assert trial._steps.expected.updates == 1
    assert all(r.losses["fp8"] for r in result.rounds)
    assert trainer.global_step == (STEPS if stops else 60)


def test_a_shorter_step_at_the_end_of_lightnings_epoch_takes_its_block_with_it() -> None:
    """50 batches by 4: the thirteenth step of each epoch has two."""
    task = Task(Net())
    trial = ab.Trial(task.model, steps=STEPS)
    fit(task, ab.lightning_callback(trial), 4)
    faults = [why for r in answered(trial).rounds for why in r.faults.values()]
    assert faults
    assert all(why.startswith("a step of 2 forward passes") for why in faults)


@pytest.mark.parametrize("at", [6, 12, 30])
def test_an_exception_in_lightning_restores(at: int) -> None:
    task = Task(Net(fails_at=at))
    before = state(task)
    trial = ab.Trial(task, steps=STEPS, restore=[])
    with pytest.raises(SystemExit):  # what Lightning makes of Ctrl-C
        fit(task, ab.lightning_callback(trial), 2)
    assert trial.done
    assert "raised KeyboardInterrupt" in trial.result().problem
    assert equal(state(task), before)


def prepared(model: Net, microbatches: int) -> tuple[Any, ...]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(ROWS, batch_size=16)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=microbatches)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


@pytest.mark.parametrize(("microbatches", "by"), [(1, "step"), (1, "accumulate"), (5, "accumulate")])
def test_accelerate_counts_a_step_by_its_optimizer(microbatches: int, by: str) -> None:
    """Without microbatches `with trial.step(), accelerator.accumulate(model)` says the same."""
    inner = Net()
    trial = ab.Trial(inner, steps=STEPS)
    accelerator, model, optimizer, loader = prepared(inner, microbatches)
    while not trial.done:
        for batch in loader:
            one = trial.step() if by == "step" else ab.accumulate(trial, accelerator, model)
            with one, accelerator.accumulate(model) if by == "step" else torch.enable_grad():
                accelerator.backward(model(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
    result = answered(trial)
    assert not any(r.faults for r in result.rounds)
    assert trial._steps.expected.calls == microbatches
    assert trial._steps.expected.updates == 1


@pytest.mark.parametrize("at", [6, 12, 30])
def test_an_exception_in_accelerates_loop_restores(at: int) -> None:
    inner = Net(fails_at=at)
    before = state(inner)
    trial = ab.Trial(inner, steps=STEPS, restore=[])
    accelerator, model, optimizer, loader = prepared(inner, 2)

    def loop() -> None:
        for batch in loader:
            with ab.accumulate(trial, accelerator, model):
                accelerator.backward(model(batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert trial.done
    assert "raised KeyboardInterrupt" in trial.result().problem
    assert equal(state(inner), before)
