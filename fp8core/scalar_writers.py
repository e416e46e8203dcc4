"""Where single numbers go by name: TensorBoard, Weights & Biases, MLflow, each through its own API.

A run of theirs that is under way is written to and left open; else one is begun, and ended by `close`. Each takes the step that
the number is of: W&B as the metric "fp8_step", since its own step is that of the training that logs there.
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol


class ScalarWriter(Protocol):
    """What is asked of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Takes one number of one step."""
        ...


class _Wandb:
    def __init__(self) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._ends = wandb.run is None
        self._run = wandb.run or wandb.init()
        self._known: set[str] = set()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        if tag not in self._known:
            self._known.add(tag)
            self._run.define_metric(tag, step_metric="fp8_step")
        self._run.log({tag: scalar_value, "fp8_step": global_step})

    def close(self) -> None:
        if self._ends:
            self._run.finish()


class _Mlflow:
    def __init__(self) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        self._ends = self._mlflow.active_run() is None
        if self._ends:
            self._mlflow.start_run()

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        # MLflow takes letters, digits, and _ - . : / blank in the name of a metric
        name = "".join(c if c.isalnum() or c in "_-.:/ " else "-" for c in tag)
        self._mlflow.log_metric(name, scalar_value, step=global_step)

    def close(self) -> None:
        if self._ends:
            self._mlflow.end_run()


def _tensorboard() -> Any:
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter()


WRITERS = {"tensorboard": _tensorboard, "wandb": _Wandb, "mlflow": _Mlflow}


def writer_named(name: str) -> Any:
    """A `ScalarWriter` that has `close` as well.

    Raises:
        ImportError: its library is not installed.
    """
    try:
        return WRITERS[name]()
    except ImportError as error:
        raise ImportError(f"to={name!r} needs {name}: pip install {name} ({error})") from error
