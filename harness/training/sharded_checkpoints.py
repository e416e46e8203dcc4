"""Checkpoints of a run of several ranks, by torch.distributed.checkpoint: whole, or not there.

    <folder>/step-00001200/             shards of each rank, `.metadata`, and `run.pt`: the last two of them
    <folder>/writing-step-00001200/     under way, or left by a job that was killed meanwhile

All ranks write into a folder of another name, flushed to disk; once all have, rank 0 renames it. So a job that is killed in
the middle of a save continues from the checkpoint before. One that cannot be read is named, and the one before it taken. A
disk that refuses a checkpoint does not end the run. All methods are collective: every rank calls them at the same step.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from harness.store.errors import UsageError, one_line
from harness.training.checkpoint import KEPT

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

_NAME = re.compile(r"step-(\d{8})")
_RUN = "run.pt"


class ShardedCheckpoints:
    """The checkpoints in one folder that all ranks see.

    Args:
        folder: of this run alone; made when first written to.
        identity: says which run it is, the number of its ranks included; a checkpoint of another one is refused.

    Attributes:
        problems: what could not be written or read, and why.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self._folder, self._identity = folder, identity
        self.problems: list[str] = []

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> None:
        """Writes a checkpoint from which the run continues with `step`; older ones but one are removed.

        Args:
            step: updates made.
            model: sharded; each rank writes its part.
            optimizer: of its parameters.
            run: what else there is to the run, alike on all ranks; rank 0 writes it.
        """
        place, first = self._folder / f"writing-step-{step:08d}", dist.get_rank() == 0
        problem = ""
        if first:
            shutil.rmtree(place, ignore_errors=True)
        dist.barrier()
        try:
            place.mkdir(parents=True, exist_ok=True)
            save(self._shards(model, optimizer), checkpoint_id=place)  # flushes every file
            if first:
                with (place / _RUN).open("wb") as file:
                    torch.save({"identity": self._identity, "step": step, "run": run}, file)
                    file.flush()
                    os.fsync(file.fileno())
                target = self._folder / f"step-{step:08d}"
                shutil.rmtree(target, ignore_errors=True)  # one that could not be read
                place.rename(target)
                _flush(self._folder)
                for old in self._names()[KEPT:]:
                    shutil.rmtree(self._folder / old, ignore_errors=True)
        except (OSError, RuntimeError, CheckpointException) as error:
            problem = f"step {step} was not saved: {_words(error)}"
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(
            problems, problem
        )  # before any rank goes on: the checkpoint is there, or is known not to be
        self.problems += [f"rank {rank}: {why}" for rank, why in enumerate(problems) if why][:1]
        if first and any(problems):
            shutil.rmtree(place, ignore_errors=True)

    def load_newest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest checkpoint that is whole: its step and what else it holds; None where there is none.

        Raises:
            UsageError: there are some, and none can be read.
        """
        box = [self._names()]  # rank 0's look: another node may see a rename late
        dist.broadcast_object_list(box, src=0)
        for name in box[0]:
            found: dict[str, Any] | str = self._load(self._folder / name, model, optimizer)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, found if isinstance(found, str) else "")
            why = next((f"rank {rank}: {text}" for rank, text in enumerate(every) if text), "")
            if not why:
                assert isinstance(found, dict)
                return int(found["step"]), found["run"]
            self.problems.append(f"{name} is not used: {why}")
        if box[0]:
            raise UsageError(
                f"no checkpoint in {self._folder} can be used ({self.problems[0]}); remove the folder to train from the start"
            )
        return None

    def _load(self, place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | str:
        """What `run.pt` holds, model and optimizer loaded; or why this rank cannot use it. No rank leaves the others waiting."""
        whole, why = dict[str, Any](), ""
        try:
            whole = torch.load(place / _RUN, map_location="cpu", weights_only=True)
            if whole["identity"] != self._identity:
                why = f"it is of run {whole['identity']!r}, not {self._identity!r}"
        except Exception as error:  # noqa: BLE001 - unpickling what is damaged raises whatever it likes
            why = _words(error)
        doubts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(doubts, why)
        if any(doubts):
            return why or "another rank cannot read it"
        state = self._shards(model, optimizer)
        try:
            load(state, checkpoint_id=place)
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            return _words(error)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state["rng"][str(dist.get_rank())])
        return whole

    @staticmethod
    def _shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with warnings.catch_warnings():  # torch's own deprecations, once a save
            warnings.simplefilter("ignore", FutureWarning)
            of_model, of_optimizer = get_state_dict(model, optimizer)
        rng = {str(dist.get_rank()): torch.get_rng_state()}
        return {"model": of_model, "optimizer": of_optimizer, "rng": rng}

    def _names(self) -> list[str]:
        """Newest first."""
        return sorted((p.name for p in self._folder.glob("step-*") if _NAME.fullmatch(p.name)), reverse=True)


def _flush(folder: Path) -> None:
    """Writes the rename itself to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _words(error: BaseException) -> str:
    """One line; of what several ranks raised, the first one's."""
    faults = getattr(error, "failures", {})  # rank -> (error, traceback)
    for rank, fault in sorted(faults.items()):
        return f"rank {rank}: {one_line(fault[0])}"
    return one_line(error)
