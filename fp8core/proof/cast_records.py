"""Records of a watched step, and where they go: a callable, a file of JSON lines, or by name TensorBoard, W&B and MLflow.

A run of theirs that is under way is written to and left open; else one is begun, and ended by `close`. Each takes the step that
the number is of: W&B as the metric "fp8_step", since its own step is that of the training that logs there.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fp8core.proof.cast_stats import CAST, CODES_ONLY, HIGH_PRECISION, NOT_SEEN, slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fp8core.proof.cast_stats import OperandStats, StepStats
    from fp8core.recipe import Recipe

# of a record, as they go to TensorBoard
FIGURES = (
    "amax",
    "scale",
    "largest_scale",
    "saturated_share",
    "underflow_share",
    "sqnr_db",
    "nonfinite",
)


@dataclass(frozen=True, slots=True)
class CastRecord:
    """One operand of one layer in one watched step; all calls and microbatches of the step together.

    Attributes:
        step: counted from 0, or from where `watch` was told to begin.
        layer: fully qualified name; of stacked experts that of their weight.
        operand: "input", "weight" or "grad_output".
        gemms: of `fp8core.recipe.GEMMS`, those that read this cast of it.
        status: "cast"; "high precision": not cast; "codes only": cast before it came here, so that the tensor itself was
            not there to compare with; "not seen": no training pass of the step came here, all figures are None.
        dtype: of the codes ("float8_e4m3fn"), or "" where there are none.
        granularity, scaling: of the cast ("rowwise", "dynamic"), or "".
        amax: largest magnitude of this rank's tensor, exact; None where a value is not finite.
        scale, largest_scale: the smallest and the largest scale in use (high precision -> FP8); equal where there is one.
        saturated_share: share of all elements that lie beyond the format's range under their scale and were clipped; at
            least 1 / elements where the amax itself was.
        underflow_share: share of the nonzero elements that became 0.
        sqnr_db: 10 log10(sum x**2 / sum (x - cast)**2); None where no error was made.
        nonfinite: NaN and Inf among `elements`, estimated, at least 1 if there is one; the three figures above are then None.
        elements: of the tensor, all calls together; for experts rows of padding count too.
        sampled: how many of them the shares and the SQNR are from. The share's standard error is sqrt(share / sampled).
        calls: passes of the step with a backward pass.
        rank: of torch.distributed; 0 without.
    """

    step: int
    layer: str
    operand: str
    gemms: tuple[str, ...]
    status: str
    dtype: str = ""
    granularity: str = ""
    scaling: str = ""
    amax: float | None = None
    scale: float | None = None
    largest_scale: float | None = None
    saturated_share: float | None = None
    underflow_share: float | None = None
    sqnr_db: float | None = None
    nonfinite: int | None = None
    elements: int = 0
    sampled: int = 0
    calls: int = 0
    rank: int = 0


def records_of(step: StepStats, number: int, rank: int, recipes: dict[str, Recipe]) -> Iterator[CastRecord]:
    """What a step showed of each module, in the order of `recipes`: name -> what it runs. One wait for each device."""
    step.count()
    by_device: dict[torch.device, list[OperandStats]] = {}
    for seen in (seen for of_module in step.seen.values() for seen in of_module.values()):
        if seen.rows:
            by_device.setdefault(seen.rows[0][0].device, []).append(seen)
    rows: dict[OperandStats, list[float]] = {}
    for group in by_device.values():
        rows.update(zip(group, torch.stack([seen.merge() for seen in group]).tolist(), strict=True))
    for module, recipe in recipes.items():
        for (name, *_), seen in step.seen.get(module, {}).items():
            slot = seen.slot
            figures = _figures(seen, rows.get(seen))
            yield CastRecord(number, name, slot.role, slot.gemms, seen.status, rank=rank, **figures)
        if module not in step.seen:
            for slot, cast in slots(recipe).items():
                status = HIGH_PRECISION if cast is None else NOT_SEEN
                yield CastRecord(number, module, slot.role, slot.gemms, status, rank=rank)


def _figures(seen: OperandStats, row: list[float] | None) -> dict[str, Any]:
    cast, status = seen.cast, seen.status
    result: dict[str, Any] = {"elements": seen.elements, "sampled": seen.sampled, "calls": seen.calls}
    if cast is not None:
        dtype = str(cast.format.dtype).removeprefix("torch.")
        result |= {"dtype": dtype, "granularity": cast.granularity, "scaling": cast.scaling}
    if row is None:
        return result
    amax, scale_inv, negated_least, saturated, underflowed, not_zero, nonfinite, signal, noise = row
    if status != HIGH_PRECISION:
        result |= {"scale": _inverse(scale_inv), "largest_scale": _inverse(-negated_least)}
    if status != CODES_ONLY:
        finite = math.isfinite(amax)
        result |= {"amax": amax if finite else None, "nonfinite": max(round(nonfinite), int(not finite))}
    if status == CAST and not result["nonfinite"] and math.isfinite(noise):
        assert cast is not None
        if cast.granularity == "tensorwise" and amax > cast.format.overflow_threshold * scale_inv:
            saturated = max(saturated, 1.0)  # the amax is of all elements, the others are of a sample
        result |= {
            "saturated_share": saturated / seen.elements,
            "underflow_share": underflowed / not_zero if not_zero else 0.0,
            "sqnr_db": 10 * math.log10(signal / noise) if signal and noise else None,
        }
    return result


def _inverse(scale_inv: float) -> float | None:
    """The scale; None where it is no finite number."""
    return 1 / scale_inv if scale_inv and math.isfinite(scale_inv) and math.isfinite(1 / scale_inv) else None


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


def _tensorboard(folder: str | None = None) -> Any:
    return importlib.import_module("torch.utils.tensorboard").SummaryWriter(folder)


WRITERS: Mapping[str, Callable[..., Any]] = {"tensorboard": _tensorboard, "wandb": _Wandb, "mlflow": _Mlflow}


def writer_named(name: str, folder: str | None = None) -> Any:
    """A `ScalarWriter` that has `close` as well.

    Args:
        name: one of `WRITERS`.
        folder: where TensorBoard's events go; None: "runs/" and the time, as TensorBoard has it. Others have no folder.

    Raises:
        ImportError: its library is not installed.
    """
    try:
        return WRITERS[name]() if folder is None else WRITERS[name](folder)
    except ImportError as error:
        raise ImportError(f"to={name!r} needs {name}: pip install {name} ({error})") from error


class Sink(NamedTuple):
    """Where records go: what takes one, and what ends it."""

    write: Callable[[CastRecord], object]
    close: Callable[[], object] = lambda: None


def sink_of(to: Any, rank: int) -> Sink:
    """What `fp8core.watch` was told as `to`.

    Raises:
        TypeError: nothing that takes records.
        OSError: the file can't be opened.
        ImportError: the library of that name is not installed.
    """
    if to is None:
        return Sink(lambda _: None)
    if isinstance(to, str) and to in WRITERS:
        writer = writer_named(to)
        return Sink(partial(_add_scalars, writer), writer.close)
    if callable(getattr(to, "add_scalar", None)):
        return Sink(partial(_add_scalars, to))
    if isinstance(to, str | os.PathLike):
        path = Path(to)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        file = path.open("a", encoding="utf-8", buffering=1)
        return Sink(lambda record: file.write(json.dumps(asdict(record), allow_nan=False) + "\n"), file.close)
    if callable(to):
        return Sink(to)
    raise TypeError(f"to is a {type(to).__name__}; expected a callable, a path, or an object with add_scalar")


def _add_scalars(writer: ScalarWriter, record: CastRecord) -> None:
    for figure in FIGURES:
        value = getattr(record, figure)
        if value is not None:
            tag = f"fp8/{record.layer}/{record.operand}/{'+'.join(record.gemms)}/{figure}"
            writer.add_scalar(tag, value, record.step)
