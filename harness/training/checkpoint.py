"""Checkpoints of one run: whole, or not there.

    <folder>/step-00001200-<sha256>.pt      the last two of them

A checkpoint is written under another name, flushed to disk and renamed. Its name holds the hash of its content, so one
that was damaged later is recognised, named, and the one before it taken. A disk that refuses a checkpoint does not end
the run: the run then only has further to go back.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

KEPT = 2
_NAME = re.compile(r"step-(\d{8})-([0-9a-f]{16})\.pt")


class Checkpoints:
    """The checkpoints in one folder.

    Attributes:
        problems: what could not be written or read, and why.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        """A folder of the run's own, made when first written to; `identity` says which run it is."""
        self._folder, self._identity = folder, identity
        self.problems: list[str] = []

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write a checkpoint from which the run continues with `step`; older ones but one are removed."""
        temporary = self._folder / f"writing-{os.getpid()}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save({"identity": self._identity, "step": step, "state": state}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._folder / f"step-{step:08d}-{_digest(temporary)}.pt")
            for old in self._found()[KEPT:]:
                old.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch's own writer turns a full disk into a RuntimeError
            self.problems.append(f"step {step} was not saved: {_one_line(error)}")
        finally:
            temporary.unlink(missing_ok=True)

    def newest(self, device: str) -> tuple[int, dict[str, Any]] | None:
        """Step and state of the newest checkpoint that is whole; None where there is none."""
        for path in self._found():
            try:
                return self._load(path, device)
            except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                self.problems.append(f"{path.name} is not used: {_one_line(error)}")
        return None

    def _load(self, path: Path, device: str) -> tuple[int, dict[str, Any]]:
        named = _NAME.fullmatch(path.name)
        assert named is not None
        if _digest(path) != named[2]:
            raise ValueError("its content does not have the hash in its name")
        whole = torch.load(path, map_location=device, weights_only=True)
        if whole["identity"] != self._identity:
            raise ValueError(f"it is of run {whole['identity']!r}, not {self._identity!r}")
        return int(whole["step"]), whole["state"]

    def _found(self) -> list[Path]:
        """Newest first."""
        return sorted((p for p in self._folder.glob("step-*.pt") if _NAME.fullmatch(p.name)), reverse=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
