"""Checkpoints of a run of several ranks, by torch.distributed.checkpoint: whole, or not there.

    <folder>/step-00001200/             shards of each rank, `.metadata`, and `run-<sha256>.pt`: the last two of them
    <folder>/writing-step-00001200/     under way, or left by a job that was killed meanwhile

All ranks write into a folder of another name, flushed to disk; once all have, rank 0 renames it. So a job that is killed in
the middle of a save continues from the checkpoint before. `run-<sha256>.pt` has its own hash in its name, which every rank
checks, and holds the sha256 of every other file: one that changed on the disk is recognised by the rank that wrote it. A
checkpoint that cannot be used is named, and the one before it taken. A disk that refuses a checkpoint does not end the run. All
methods are collective: every rank calls them at the same step.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from harness.store.errors import UsageError, one_line
from harness.training.checkpoint import KEPT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

_NAME = re.compile(r"step-(\d{8})")
_RUN = re.compile(r"run-([0-9a-f]{64})\.pt")
_METADATA = ".metadata"


class ShardedCheckpoints:
    """The checkpoints in one folder that all ranks see.

    Args:
        folder: of this run alone; made when first written to.
        identity: says which run it is, the number of its ranks included; a checkpoint of another one is refused.
        told: called with each problem when it is met, on every rank.

    Attributes:
        problems: what could not be written or read, and why.
    """

    def __init__(
        self, folder: Path, identity: str, told: Callable[[str], None] = lambda problem: None
    ) -> None:
        self._folder, self._identity, self._told = folder, identity, told
        self.problems: list[str] = []

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> bool:
        """Writes a checkpoint from which the run continues with `step`; older ones but one are removed.

        Args:
            step: updates made.
            model: sharded; each rank writes its part.
            optimizer: of its parameters.
            run: what else there is to the run, alike on all ranks; rank 0 writes it.

        Returns:
            Whether it is there; if not, `problems` has one more.
        """
        place, first = self._folder / f"writing-step-{step:08d}", dist.get_rank() == 0
        if first:
            shutil.rmtree(place, ignore_errors=True)
        dist.barrier()
        state, hashes, problem = dict[str, Any](), dict[str, str](), ""
        try:
            place.mkdir(parents=True, exist_ok=True)
            state = self._shards(model, optimizer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are not to wait in `save` for this rank
            problem = _words(error)
        found = _gathered(problem)
        if not any(found):
            try:
                save(state, checkpoint_id=place)  # flushes every file
                hashes = {path.name: _digest(path) for path in _own_files(place)}
            except (OSError, RuntimeError, CheckpointException) as error:
                problem = _words(error)
            every: list[dict[str, str]] = _gathered(hashes)
            found = _gathered(problem)
            if first and not any(found):
                found[0] = self._finish(place, step, run, {n: h for one in every for n, h in one.items()})
            found = _gathered(
                found[0] or problem
            )  # before any rank goes on: it is there, or is known not to be
        if first and any(found):
            shutil.rmtree(place, ignore_errors=True)
        for rank, why in [(r, w) for r, w in enumerate(found) if w][:1]:
            self._note(f"rank {rank}: step {step} was not saved: {why}")
        return not any(found)

    def _finish(self, place: Path, step: int, run: dict[str, Any], hashes: dict[str, str]) -> str:
        """On rank 0, once all shards are there: the rest and the name; why it could not be done, "" where it was."""
        target = self._folder / f"step-{step:08d}"
        try:
            hashes = hashes | {_METADATA: _digest(place / _METADATA)}
            whole = io.BytesIO()
            torch.save({"identity": self._identity, "step": step, "run": run, "sha256": hashes}, whole)
            name = f"run-{hashlib.sha256(whole.getbuffer()).hexdigest()}.pt"
            with (place / name).open("wb") as file:
                file.write(whole.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(target, ignore_errors=True)  # one that could not be read
            place.rename(target)
            _flush(self._folder)
            for old in self._names()[KEPT:]:
                shutil.rmtree(self._folder / old, ignore_errors=True)
        except (OSError, RuntimeError) as error:
            return _words(error)
        return ""

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
            found = self._load(self._folder / name, model, optimizer)
            if isinstance(found, dict):
                return int(found["step"]), found["run"]
            self._note(f"{name} is not used: {found}")
        if box[0]:
            raise UsageError(
                f"no checkpoint in {self._folder} can be used ({self.problems[0]}); remove the folder to train from the start"
            )
        return None

    def _load(self, place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | str:
        """What `run-<sha256>.pt` holds, model and optimizer loaded; or why a rank cannot use it, the same on all ranks."""
        whole, why = dict[str, Any](), ""
        try:
            content, why = _run_file(place)
            if not why:
                whole = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                why = self._doubt(place, whole)
        except Exception as error:  # noqa: BLE001 - unpickling what is damaged raises whatever it likes
            why = _words(error)
        doubt = _first(_gathered(why))
        if doubt:
            return doubt
        try:
            state = self._shards(model, optimizer)
            if (
                f"cuda_rng.{dist.get_rank()}"
                not in FileSystemReader(place).read_metadata().state_dict_metadata
            ):
                state.pop("cuda_rng", None)  # made without a GPU
        except Exception as error:  # noqa: BLE001 - the others are not to wait in `load` for this rank
            why = _words(error)
        doubt = _first(_gathered(why))
        if doubt:
            return doubt
        try:
            load(state, checkpoint_id=place)
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            torch.set_rng_state(state["rng"][str(dist.get_rank())])
            if "cuda_rng" in state:
                torch.cuda.set_rng_state(state["cuda_rng"][str(dist.get_rank())])
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            why = _words(error)
        return _first(_gathered(why)) or whole

    def _doubt(self, place: Path, whole: dict[str, Any]) -> str:
        """Why this rank cannot use what it found: another run's, or its own files are not those that were written."""
        if whole["identity"] != self._identity:
            return f"it is of run {whole['identity']!r}, not {self._identity!r}"
        hashes: dict[str, str] = whole["sha256"]
        mine = f"__{dist.get_rank()}_"
        for name in (name for name in hashes if name == _METADATA or name.startswith(mine)):
            if not (place / name).exists():
                return f"{name} is missing"
            if _digest(place / name) != hashes[name]:
                return f"{name} has changed since it was written (sha256)"
        return ""

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        self._told(problem)

    @staticmethod
    def _shards(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with warnings.catch_warnings():  # torch's own deprecations, once a save
            warnings.simplefilter("ignore", FutureWarning)
            of_model, of_optimizer = get_state_dict(model, optimizer)
        rank = str(dist.get_rank())
        state = {"model": of_model, "optimizer": of_optimizer, "rng": {rank: torch.get_rng_state()}}
        if torch.cuda.is_initialized():
            state["cuda_rng"] = {rank: torch.cuda.get_rng_state()}
        return state

    def _names(self) -> list[str]:
        """Newest first."""
        return sorted((p.name for p in self._folder.glob("step-*") if _NAME.fullmatch(p.name)), reverse=True)


def _gathered(mine: Any) -> list[Any]:
    """What each rank has, in their order."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _first(problems: list[str]) -> str:
    """The first rank's problem, with its number; "" where there is none."""
    return next((f"rank {rank}: {why}" for rank, why in enumerate(problems) if why), "")


def _own_files(place: Path) -> list[Path]:
    """The shards that this rank has written."""
    return sorted(place.glob(f"__{dist.get_rank()}_*.distcp"))


def _run_file(place: Path) -> tuple[bytes, str]:
    """The content of a checkpoint's `run-<sha256>.pt`, and why it cannot be used, "" where it can."""
    for path in sorted(place.iterdir()):
        if named := _RUN.fullmatch(path.name):
            content = path.read_bytes()
            changed = hashlib.sha256(content).hexdigest() != named[1]
            return content, "run-<sha256>.pt has changed since it was written (sha256)" * changed
    return b"", "run-<sha256>.pt is missing"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
