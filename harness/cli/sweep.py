"""The command `sweep=NAME`: the request is checked before torch is imported, so that a mistyped name costs no seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.cli.resume_alone import load_request
from harness.machine import environment, raw_output

if TYPE_CHECKING:
    from collections.abc import Sequence


def run_sweep(overrides: Sequence[str]) -> int:
    """Run one sweep from its command line; return the exit code of the contract (0, 1 or 2).

    What libraries write to standard error meanwhile goes to the log of the run.

    Raises:
        UsageError: the request is refused; nothing was written.
    """
    with raw_output.captured():
        request = load_request(overrides, environment.device_kind)
        from harness.cli.run import run_request  # torch

        return run_request(request)
