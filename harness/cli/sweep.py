"""The command `sweep=NAME`: the request is checked before torch is imported, so that a mistyped name costs no seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.resume_alone import load_request
from harness.machine import environment, raw_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.cli.config import Request


def run_sweep(overrides: Sequence[str]) -> int:
    """Run one sweep from its command line; return the exit code of the contract (0, 1 or 2).

    What libraries write to standard error meanwhile goes to the log of the run.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    with raw_output.captured():
        return _run_sweep(overrides)


def _run_sweep(overrides: Sequence[str]) -> int:
    shown = any(word.startswith("dry_run=") for word in overrides)
    request = load_request(overrides, _as_named if shown else environment.device_kind)
    if shown and not (request.config["dry_run"] and _is_of_sweeps(request)):
        environment.device_kind(request.config["device"])
    if _is_of_sweeps(request):
        from harness.cli.parts import run_parts

        return run_parts(request, run_sweep)
    from harness.cli.run import run_request  # torch

    return run_request(request)


def _is_of_sweeps(request: Request) -> bool:
    return any(part["sweep"] for part in request.config["parts"].values())


def _as_named(device: str) -> str:
    """The timetable of a GPU can be shown where there is none."""
    return device if device in ("cpu", "cuda") else environment.device_kind(device)
