"""Delayed and static scaling under a trainer of others: `update_scales` at each step, and amaxes in its checkpoints.

    transformers.Trainer(..., callbacks=[fp8core.callbacks.for_trainer()])
    lightning.Trainer(..., callbacks=[fp8core.callbacks.for_lightning()])

`state_dict()` of a model holds no amaxes (`fp8core.history`), so a resumed run would begin with dynamic scales. These save
them beside the checkpoint and load them. Neither library is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from fp8core.history import amax_state_dict, load_amax_state_dict, update_scales

FILE = "fp8_amaxes.pt"  # in a checkpoint's folder
KEY = "fp8_amaxes"  # in a checkpoint of Lightning's


def for_trainer() -> Any:
    """A `transformers.TrainerCallback`: amaxes go to `fp8_amaxes.pt` in each checkpoint's folder, and come from there.

    Raises:
        ImportError: transformers is not installed.
    """
    base: Any = importlib.import_module("transformers").TrainerCallback

    class TrainerAmaxes(base):
        """See `for_trainer`."""

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """After the weights of a checkpoint were loaded. Without its amaxes the next `update_scales` warns."""
            asked = args.resume_from_checkpoint
            folders = [asked] if isinstance(asked, str) else []
            folders.append(str(_folder(args, state)))
            found = [path for folder in folders if (path := Path(folder, FILE)).is_file()]
            if state.global_step and found:
                load_amax_state_dict(model, torch.load(found[0], map_location="cpu", weights_only=True))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """After each optimizer step."""
            update_scales(model)

        def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            """All ranks hold the same; one writes."""
            amaxes = amax_state_dict(model)
            if amaxes and state.is_world_process_zero:
                torch.save(amaxes, _folder(args, state) / FILE)

    return TrainerAmaxes()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir, f"checkpoint-{state.global_step}")


def for_lightning() -> Any:
    """A `lightning.pytorch.Callback`: amaxes go into the checkpoint itself.

    Raises:
        ImportError: lightning is not installed.
    """
    base: Any = importlib.import_module("lightning.pytorch").Callback

    class LightningAmaxes(base):
        """See `for_lightning`."""

        def __init__(self) -> None:
            self._loaded: dict[str, torch.Tensor] | None = None
            self._steps = 0

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            """Writes them."""
            checkpoint[KEY] = amax_state_dict(module)

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            """Keeps them until the weights are there."""
            self._loaded = checkpoint.get(KEY)

        def on_train_start(self, trainer: Any, module: Any) -> None:
            """Loads them. Without them the next `update_scales` warns."""
            self._steps = trainer.global_step
            if self._loaded:
                load_amax_state_dict(module, self._loaded)
            self._loaded = None

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            """After each optimizer step, not after each microbatch."""
            if trainer.global_step != self._steps:
                self._steps = trainer.global_step
                update_scales(module)

    return LightningAmaxes()
