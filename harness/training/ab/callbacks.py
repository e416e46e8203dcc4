"""Trials in the loops of Hugging Face `Trainer`, Lightning and accelerate. None of them is imported before it is used.

docs/howto-ab-adapters.md shows each in a script.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fp8core.arguments import check_type
from harness.store.errors import UsageError
from harness.training.ab.trial import Trial, UnfinishedStepError

if TYPE_CHECKING:
    from collections.abc import Iterator


def hugging_face_callback(trial: Trial, *, stop_when_done: bool = False) -> Any:
    """A `transformers.TrainerCallback` that runs a trial in `Trainer`.

        trial = ab.Trial(model)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[ab.hugging_face_callback(trial)])
        with trial:
            trainer.train()

    A step of the trial has all microbatches, gradient clipping, the optimizer and the learning rate; logging, evaluation,
    saving and the loading of batches lie between steps. `Trainer` tells a callback of no exception: `with trial:` restores
    then.

    Args:
        trial: of the model that `Trainer` is given.
        stop_when_done: end training with the trial.

    Raises:
        UsageError: transformers is not installed.
        TypeError: the trial is none.
    """
    base: Any = _library(trial, "hugging_face_callback", "transformers").TrainerCallback

    class HuggingFaceTrial(base):
        """Hooks of `Trainer`: `on_step_begin` comes before the first microbatch, `on_step_end` after the optimizer."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trial.begin_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            trial.end_step()
            control.should_training_stop |= stop_when_done and trial.done
            return control

        def on_train_end(self, *_: Any, **__: Any) -> None:
            trial.close()

    return HuggingFaceTrial()


def lightning_callback(trial: Trial, *, stop_when_done: bool = False) -> Any:
    """A `lightning.pytorch.Callback` that runs a trial in Lightning's `Trainer`, restoring also after an exception.

        trial = ab.Trial(task)
        lightning.Trainer(callbacks=[ab.lightning_callback(trial)]).fit(task, loader)

    A step of the trial has all batches of `accumulate_grad_batches` and the optimizer; the loading of the second and later
    ones lies within it.

    Args:
        trial: of the LightningModule or the model in it.
        stop_when_done: end training with the trial.

    Raises:
        UsageError: lightning is not installed.
        TypeError: the trial is none.
    """
    base: Any = _library(trial, "lightning_callback", "lightning").Callback

    class LightningTrial(base):
        """Hooks of Lightning's `Trainer`; its `global_step` counts steps of optimizers."""

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if not trial.in_hooked_step:
                self.updates = trainer.global_step
                trial.begin_step()
            # Lightning calls training_step, not the module, so no forward pass is seen
            if trial.model is pl_module:
                trial.add_batch(batch)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if trial.in_hooked_step and isinstance(loss, Tensor) and loss.numel() == 1:
                trial.loss(loss)
            if trainer.global_step != self.updates:
                trial.end_step()
            if stop_when_done and trial.done:
                trainer.should_stop = True

        def on_train_epoch_end(self, *_: Any) -> None:
            trial.end_step(UnfinishedStepError("left before its end: the epoch ended"))

        def on_train_end(self, *_: Any) -> None:
            trial.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trial.__exit__(type(exception), exception, exception.__traceback__)

    return LightningTrial()


@contextmanager
def accumulate(trial: Trial, accelerator: Any, *models: Any) -> Iterator[None]:
    """`accelerator.accumulate(*models)` in a trial: a step goes on until the accelerator lets the optimizer update.

        for batch in loader:
            with ab.accumulate(trial, accelerator, model):
                accelerator.backward(model(**batch).loss)
                optimizer.step(); optimizer.zero_grad()

    The loading of the second and later microbatches lies within the step.

    Args:
        trial: of the model before `accelerator.prepare`.
        accelerator: accelerate's `Accelerator`.
        models: what `accelerator.accumulate` takes.

    Raises:
        UsageError: the accelerator is none.
        TypeError: the trial is none.
    """
    check_type("trial", trial, Trial, "ab.accumulate(ab.Trial(model), accelerator, model)")
    if not (hasattr(accelerator, "accumulate") and hasattr(accelerator, "sync_gradients")):
        raise UsageError(
            f"accelerator is a {type(accelerator).__name__}: expected accelerate's Accelerator; in a loop without it put "
            "trial.step() around each optimizer step"
        )
    if not trial.in_hooked_step:
        trial.begin_step()
    try:
        with accelerator.accumulate(*models):
            yield
    except BaseException as error:
        trial.end_step(error)
        raise
    if accelerator.sync_gradients:
        trial.end_step()


def _library(trial: object, adapter: str, name: str) -> Any:
    check_type("trial", trial, Trial, f"ab.{adapter}(ab.Trial(model))")
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"{name} is not installed; in a checkout: pip install -e '.[clients]'") from None
