"""A training run of several ranks: each takes its part of it (`harness.training.loop`), and this process counts the steps.

The ranks take some steps a command, so that progress is seen and a rank that hangs is found. Curves and facts are those of rank 0;
the proof of FP8 is the worst of all ranks'.
"""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

import torch

from harness.machine.ranks import Gang
from harness.store.proof import FIELD, ProofOutcome
from harness.training.determinism import reproducible
from harness.training.loop import Result, TrainingRun
from harness.training.parallel.ranked import LONGER, TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from harness.training.loop import OnStep, TrainingJob

SAID_S = 10.0  # between two commands, about
_under_way: list[tuple[TrainingRun, Any, list[str]]] = []  # of this rank; at most one


def train_on_ranks(
    make: Callable[..., TrainingJob],
    args: tuple[Any, ...],
    world: int,
    device: str,
    workspace: Path,
    on_step: OnStep,
) -> Result:
    """Trains on all ranks from the first step, or on from the newest checkpoint in the workspace, to the last.

    Args:
        make: importable by name; `make(*args)` is the job of any rank.
        args: picklable.
        world: ranks.
        device: "cpu" or "cuda".
        workspace: a folder of this run's own for checkpoints, which all ranks see.
        on_step: called now and then with the steps done and their total.

    Raises:
        RanksError: a rank raised, died or was late.
    """
    gang, n, step_s = Gang(world, device, first=pickle.dumps(begin)), 1, 0.0
    try:
        there = gang.run(begin, make, args, device, workspace.absolute(), timeout_s=TIMEOUT_S)[0]
        while there is not None:
            began = time.monotonic()
            there = gang.run(advance, n, timeout_s=TIMEOUT_S + LONGER * step_s * n)[0]
            step_s = (time.monotonic() - began) / n
            n = max(1, int(SAID_S / step_s))
            if there is not None:
                on_step(*there)
        found: list[Result] = gang.run(result, timeout_s=TIMEOUT_S)
    finally:
        gang.close()
    for worst in (
        ProofOutcome.UNPROVEN,
        ProofOutcome.DISPROVED,
    ):  # what refutes stands over what could not be compared
        for one in found:
            if one.facts.get(FIELD) == worst:
                found[0].facts |= {name: one.facts[name] for name in ("verify", FIELD)}
    return found[0]


def begin(
    make: Callable[..., TrainingJob], args: tuple[Any, ...], device: str, workspace: Path
) -> tuple[int, int] | None:
    """Makes the job on this rank, and loads its newest checkpoint: as `advance`."""
    context = reproducible(device)
    nondeterministic = context.__enter__()  # to the end of this process
    job = make(*args)
    torch.manual_seed(job.setup.seed)
    _under_way[:] = [(TrainingRun(job, device, workspace), context, nondeterministic)]
    return advance(0)


def advance(n: int) -> tuple[int, int] | None:
    """Takes up to n steps on this rank: those done and their total; None where none is left."""
    run, _, _ = _under_way[0]
    for _ in range(n):
        if run.under_way:
            run.advance()
            run.save_if_due()
    return (run.step, run.job.regime.steps) if run.under_way else None


def result() -> Result:
    """What there is to be known of the run, on this rank."""
    run, _, nondeterministic = _under_way[0]
    found = run.result()
    found.facts["nondeterministic"] = nondeterministic
    return found
