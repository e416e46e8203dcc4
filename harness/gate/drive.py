"""Drive: measure, judge, measure again what was flagged, judge again. The only part of the gate that measures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.codes import Exit, GateError
from harness.gate.decide import fewest_rounds
from harness.gate.judge import Judgement, judge
from harness.gate.session import Session, new_session
from harness.gate.sides import load_side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.gate.policy import Policy
    from harness.gate.session import Tell

# Of the time allowed. The confirmation needs more rounds: at its level, and by Holm over all that was flagged.
FIRST_SHARE = 0.45
JUDGING_S = 5.0  # reading the store, twice, and writing the verdicts


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured and against what.

    Attributes:
        trees: work tree by side; without a "baseline", a stored one is judged against.
        words: the sweep's command line.
        policy: with the counts of pairs and blocks.
        results_dir: the session is stored in `<results_dir>/gate/<session>/`.
        stored_baseline: a run, where `trees` has no baseline.
        machine_free: see `judge`.
        alone: one process at a time (see `Session`).
        pads: share by which a side is slowed, for experiments.
    """

    trees: Mapping[str, Path]
    words: Sequence[str]
    policy: Policy
    results_dir: Path
    stored_baseline: str | None = None
    machine_free: bool = False
    alone: bool = False
    pads: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0


def measure_and_judge(request: Request, tell: Tell) -> Judgement:
    """Run both stages: units that the first one flags are measured again in new processes.

    Raises:
        GateError: the time allowed did not hold one round.
    """
    session = open_session(request, tell)
    policy = request.policy
    began, allowed = session.clock(), (policy.budget_s or math.inf) - JUDGING_S
    if not session.stage(1, policy.pairs, ends=began + FIRST_SHARE * allowed):
        raise GateError(
            Exit.USAGE,
            f"not one round was measured in the {FIRST_SHARE:.0%} of {policy.budget_s:g} s that the first stage may "
            "take; give more with --budget-s, or measure less",
        )
    judgement = judge_session(request, session)
    if judgement.to_confirm and not judgement.control.moved:
        flagged = sum(f.flagged for f in judgement.findings)
        # Holm over many units needs more rounds than over few, or no number of regressions could be confirmed.
        pairs = max(policy.confirm_pairs, fewest_rounds(flagged, policy.alpha_confirm) + 1)
        tell(f"{len(judgement.to_confirm)} cases are flagged and measured again, {pairs} rounds")
        if session.stage(2, pairs, judgement.to_confirm, ends=began + allowed):
            judgement = judge_session(request, session)
    return judgement


def open_session(request: Request, tell: Tell) -> Session:
    """A session that has measured nothing yet."""
    return Session(
        trees=request.trees,
        words=request.words,
        folder=request.results_dir / "gate" / new_session(),
        blocks=request.policy.blocks,
        alone=request.alone,
        pads=request.pads,
        seed=request.seed,
        tell=tell,
    )


def judge_session(request: Request, session: Session) -> Judgement:
    """Judges what a session has stored so far."""
    before = (
        session.folder / "baseline" if "baseline" in request.trees else Path(str(request.stored_baseline))
    )
    return judge(
        load_side(before, "baseline", request.results_dir),
        load_side(session.folder / "candidate", "candidate", request.results_dir),
        request.policy,
        machine_free=request.machine_free,
    )
