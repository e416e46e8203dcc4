"""The command `sweep=NAME`: the request is checked before torch is imported, so that a mistyped name costs no seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.resume_alone import load_request
from harness.machine import environment, raw_output
from harness.store.errors import UsageError, one_line

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


def follow_sweep(overrides: Sequence[str], store: Any, rank: int) -> int:
    """Take part in the same command, of which another process of torchrun's is rank 0; return the exit code."""
    with raw_output.captured():
        from harness.engine.far import Follower
        from harness.engine.plan import make_plan
        from harness.suites import SUITES

        try:
            request = load_request(overrides, environment.device_kind)
            config, cases = request.config, make_plan(request.config, SUITES).cases
        except UsageError as error:  # rank 0 says so
            return Follower(rank, {}, Path(), one_line(error)).follow(store)
        by_id = {planned.case.case_id: planned for planned in cases}
        return Follower(rank, by_id, Path(config.results_dir)).follow(store)
