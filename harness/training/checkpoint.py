"""Checkpoints of one run, by torch.distributed.checkpoint, of one process or of several ranks: whole, or not there.

    <folder>/step-00001200-<sha256>/    the last two of them: shards of each rank, `.metadata`, `run.pt`
    <folder>/writing-step-00001200/     under way, or left by a run that was killed meanwhile

All ranks write into a folder of another name, flushed to disk; once all have, rank 0 renames it. Its name holds the hash of
`run.pt`, which holds that of every other file, so one that was damaged later is recognised, named, and the one before it
taken. A disk that refuses a checkpoint does not end the run: the run then only has further to go back. All methods are
collective: every rank calls them at the same step.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.store.errors import Cause, UsageError, one_line
from harness.training.parallel.together import gathered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

KEPT = 2
_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{16})")
_RUN, _METADATA = "run.pt", ".metadata"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW


class UnreadableError(UsageError):
    """A checkpoint that could not be loaded: it stays, and so do those before it."""

    cause = Cause.INTERRUPTED


class Checkpoints:
    """The checkpoints in one folder.

    Args:
        folder: of the run's own, which all ranks see; made when first written to.
        identity: says which run it is; a checkpoint of another one is not taken.
        ranks: that train together; above 1 this process is one of a group.

    Attributes:
        problems: what could not be written or read, and why.
    """

    def __init__(self, folder: Path, identity: str, ranks: int = 1) -> None:
        self._folder, self._identity, self._ranks = folder, f"{identity} ranks={ranks}", ranks
        self._rank = dist.get_rank() if ranks > 1 else 0
        self.problems: list[str] = []

    def save(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, run: dict[str, Any]
    ) -> None:
        """Writes a checkpoint from which the run continues with `step`; older ones but one are removed.

        Args:
            step: updates made.
            model: each rank writes its part.
            optimizer: of its parameters.
            run: what else there is to the run, alike on all ranks.
        """
        place = self._folder / f"writing-step-{step:08d}"
        mine, why = self._agreed(self._write, place, model, optimizer)
        found = gathered(mine)
        why = why or self._agreed(self._finish, place, found, {"step": step, "run": run})[1]
        if why:
            self.problems.append(f"step {step} was not saved: {why}")
            if not self._rank:
                shutil.rmtree(place, ignore_errors=True)

    def _write(self, place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """This rank's shards: the hash of each by name, and its random numbers. Where torch fails, it does on all ranks."""
        from torch.distributed.checkpoint.filesystem import FileSystemWriter  # dear
        from torch.distributed.checkpoint.state_dict_saver import save

        class Unnamed(FileSystemWriter):
            """Without the name of its folder, which tells whose machine this is."""

            def storage_meta(self) -> None:
                return None

        state = {f"model.{name}": value for name, value in model.state_dict().items()}
        for name, p in model.named_parameters():
            moments = optimizer.state.get(p, {})
            state |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
        with _quiet():
            save(state, storage_writer=Unnamed(place), no_dist=self._ranks == 1)
        hashes = {path.name: _digest(path) for path in place.glob(f"__{self._rank}_*")}
        cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else None
        return hashes, (torch.get_rng_state().tolist(), cuda)

    def _finish(self, place: Path, found: list[Any], whole: dict[str, Any]) -> None:
        """On rank 0, once all shards are there: the rest and the name."""
        if self._rank:
            return
        hashes = {name: digest for own, _ in found for name, digest in own.items()}
        hashes[_METADATA] = _digest(place / _METADATA)
        whole |= {"identity": self._identity, "rng": [rng for _, rng in found], "sha256": hashes}
        with (place / _RUN).open("wb") as file:
            torch.save(whole, file)
            file.flush()
            os.fsync(file.fileno())
        name = f"step-{whole['step']:08d}-{_digest(place / _RUN)}"
        place.rename(self._folder / name)
        # One of a later step is damaged or another run's: else this run had begun there
        names = self._names()
        for old in {*names} - {*names[names.index(name) :][:KEPT]}:
            shutil.rmtree(self._folder / old, ignore_errors=True)

    def load_newest(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[int, dict[str, Any]] | None:
        """Loads the newest checkpoint that is whole: its step and what else it holds; None where there is none.

        Raises:
            UnreadableError: it is whole and could not be loaded.
        """
        for left in self._folder.glob("writing-step-*") if not self._rank else ():
            shutil.rmtree(left, ignore_errors=True)
        for name in gathered(self._names())[0]:  # rank 0's look: another node may see a rename late
            place = self._folder / name
            whole, why = self._agreed(self._checked, place)
            if why:
                self.problems.append(f"{name} is not used: {why}")
                continue
            if why := self._agreed(self._load, place, model, optimizer)[1]:  # the model is half loaded
                raise UnreadableError(f"{place}: {why}; remove it to continue from the one before")
            cpu, cuda = whole["rng"][self._rank]
            torch.set_rng_state(torch.as_tensor(cpu, dtype=torch.uint8))
            if cuda is not None and torch.cuda.is_initialized():
                torch.cuda.set_rng_state(torch.as_tensor(cuda, dtype=torch.uint8))
            return int(whole["step"]), whole["run"]
        return None

    def _checked(self, place: Path) -> dict[str, Any]:
        """What `run.pt` of a checkpoint holds.

        Raises:
            ValueError: it is another run's, or what this rank wrote has changed.
        """
        if not place.name.endswith(_digest(place / _RUN)):
            raise ValueError(f"{_RUN} does not have the hash in the folder's name")
        whole: dict[str, Any] = torch.load(place / _RUN, map_location="cpu", weights_only=True)
        if whole["identity"] != self._identity:
            raise ValueError(f"it is of run {whole['identity']!r}, not {self._identity!r}")
        mine = (_METADATA, f"__{self._rank}_")
        for file, digest in whole["sha256"].items():
            if file.startswith(mine) and digest != _digest(place / file):
                raise ValueError(f"{file} has changed since it was written")
        return whole

    def _load(self, place: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        there = FileSystemReader(place).read_metadata().state_dict_metadata
        names = {p: name for name, p in model.named_parameters()}
        kept, moments = model.state_dict(), dict[int, dict[str, torch.Tensor]]()
        state = {f"model.{name}": value for name, value in kept.items()}
        for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            mine = {key: f"optimizer.{names[p]}.{key}" for key in _MOMENTS}
            mine = {
                key: name for key, name in mine.items() if name in there
            }  # one without a gradient has none
            moments[number] = {key: torch.zeros(()) if key == "step" else torch.zeros_like(p) for key in mine}
            state |= {name: moments[number][key] for key, name in mine.items()}
        with _quiet():
            load(state, checkpoint_id=place, no_dist=self._ranks == 1)
        model.load_state_dict(kept)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})

    def _agreed(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, str]:
        """What `fn(*args)` returns here, and why it failed on the first rank where it did; "" if on none."""
        from torch.distributed.checkpoint.api import CheckpointException  # no Exception

        mine, why = None, ""
        try:
            mine = fn(*args)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - the others are not to wait for this rank
            faults = getattr(error, "failures", {})  # rank -> (error, traceback), of torch's collective ones
            why = one_line(next((fault for fault, _ in faults.values()), error))
        messages = [
            f"rank {rank}: {word}" if self._ranks > 1 else word
            for rank, word in enumerate(gathered(why))
            if word
        ]
        return mine, messages[0] if messages else ""

    def _names(self) -> list[str]:
        """Newest first."""
        return sorted((p.name for p in self._folder.glob("step-*") if _NAME.fullmatch(p.name)), reverse=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns of what it will take out, and of one process that is no group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
