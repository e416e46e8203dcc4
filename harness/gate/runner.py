"""Runner: measures two work trees (or one) round by round, judges, and measures again what was flagged.

A round is a pair of new processes, one a side. What one process is stuck with (where its memory lies, which kernels it
chose) is drawn anew in the next round, so the round is the unit of statistics. What a round does is an `Instrument`: a
sweep (`harness.gate.sweeping`) or a user's command (`harness.gate.command`).

(Forks of one process that has imported everything start ten times as fast and are no substitute: twenty A/A sessions
of them differed by six times the variance that their own rounds showed; docs/gate-statistics.md.)
"""

from __future__ import annotations

import math
import random
import secrets
import shutil
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from harness import store
from harness.gate.collect import Collected
from harness.gate.decide import FEWEST_TO_CLAIM, FEWEST_TO_FLAG, UnitVerdict, missing
from harness.gate.judge import judge
from harness.gate.options import Exit, GateError
from harness.gate.policy import MetricRule
from harness.gate.sides import Side, load_side
from harness.gate.unit import ControlCase, Judgement, SlowdownCause, Unit, UnitKey, UnitState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from harness.gate.policy import Policy

How = Literal["broken", "refused", "ended"]
JUDGING_S = 5.0  # reading the store, twice, and writing the verdicts
MARGIN = 1.2  # of the budget that is advised: rounds differ


class OutOfTimeError(Exception):
    """The round under way would end after the time that was allowed."""


class SideError(Exception):
    """A side could not even begin.

    Attributes:
        side, reason: which, and why.
        how: "broken": by an exit code that says that its code is; "refused": it works, and not as asked; "ended": from outside.
        what: suite, case and metric of the finding that the candidate does not run.
    """

    def __init__(self, side: str, reason: str, how: How, what: tuple[str, str, str]) -> None:
        super().__init__(reason)
        self.side, self.reason, self.how, self.what = side, reason, how, what


@dataclass
class GateRound:
    """One round under way.

    Attributes:
        number: in its stage.
        sides: in the order in which they are measured where one follows the other.
        only: ids of the cases to measure; all where empty.
        order: draws all that is random.
        left: seconds that it may still take.
        collected: the rows of each side; forgotten if the round is broken off.
    """

    number: int
    sides: Sequence[str]
    only: frozenset[str]
    order: random.Random
    left: Callable[[], float]
    collected: dict[str, Collected]


@dataclass
class Instrument:
    """What is measured in a round, and how.

    Attributes:
        trees: work tree by side ("baseline", "candidate"), or one side alone.
        words: what was asked for, as it was typed.
        blocks: of each arm in a round.
        alone: one process at a time, and a drift cancels less: "cases", for memory (`--alone`); "sweeps", where sides take no
            turns; "clocks", and each has a clock of its own; "" while both are alive.
    """

    trees: Mapping[str, Path]
    words: Sequence[str]
    blocks: int
    alone: str = field(default="", kw_only=True)

    def set_up(self, report: Callable[[str], None]) -> None:
        """Makes the trees ready; takes none of the time allowed.

        Raises:
            SideError: one cannot be.
        """

    def warm(self, left: Callable[[], float]) -> None:
        """Does, before the first round, what is not to be measured."""

    def measure(self, this: GateRound) -> None:
        """Measures one round.

        Raises:
            SideError: a side could not even begin.
            OutOfTimeError: the time is over.
        """
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """What the verdict has to say about how it was measured."""
        return ()


@dataclass
class Session:
    """One sitting: the same sides, measured once for each stage, stored in `<folder>/<side>/stage<N>/`, and judged.

    Attributes:
        instrument: what is measured.
        policy: with the counts of pairs and blocks.
        results_dir: the session is stored in `<results_dir>/gate/<session>/`.
        stored_baseline: a run, where no tree of a baseline is measured.
        machine_free: see `judge`.
        notes: printed with the verdict, whatever it is.
        rounds: measured to their end so far, in all stages.
    """

    instrument: Instrument
    policy: Policy
    results_dir: Path
    stored_baseline: str | None = None
    machine_free: bool = False
    notes: tuple[str, ...] = ()
    report: Callable[[str], None] = lambda line: None
    clock: Callable[[], float] = time.monotonic
    rounds: int = 0

    def __post_init__(self) -> None:
        # A name that sorts by time and never collides
        name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-gate-{secrets.token_hex(2)}"
        self.folder = self.results_dir / "gate" / name

    def stage(
        self, number: int, pairs: int, only: Sequence[str] = (), ends: float = math.inf, least: int = 1, reserve: int = 0
    ) -> int:  # fmt: skip
        """Measures one stage and stores it.

        Args:
            number: 1, or 2 for the confirmation.
            pairs: rounds.
            only: ids of the cases to measure; all where empty.
            ends: by the clock, when it has to be over. No round is begun that would last longer, and one that does is
                broken off and forgotten. What rounds gave makes a stage longer, as often as more rounds settle what is open
                and the time holds them.
            least: rounds without which nothing can be decided.
            reserve: rounds of a later stage for which time is kept, once there are `least`.

        Returns:
            The rounds that were measured. Without any, nothing is stored.

        Raises:
            SideError: a side could not even begin.
            GateError: after the first round it is known that the time cannot hold `least` and `reserve` rounds.
        """
        order = random.Random(number)
        sides = sorted(self.instrument.trees)
        collected = {side: Collected() for side in sides}

        def left() -> float:
            return max(ends - self.clock(), 0.0)

        def held() -> float:
            """Rounds that the time holds beside those of a later stage."""
            return (ends - self.clock()) / longest - reserve if longest else math.inf

        def store_so_far() -> None:
            about = {"stage": number, "pairs": pairs, "rounds": done, "looks": looks}
            self._store(collected, **about, seconds=round(self.clock() - started, 1))

        try:
            if not self.rounds:
                self.instrument.warm(left)
        except OutOfTimeError:
            return 0
        started, longest, done, looks = self.clock(), 0.0, 0, 1
        while done < pairs:
            begun = self.clock()
            if begun + longest * (1 + (reserve if done >= least else 0)) > ends:
                break
            heard = {side: replace(rows, rows=[*rows.rows]) for side, rows in collected.items()}
            this = GateRound(done, order.sample(sides, len(sides)), frozenset(only), order, left, heard)
            try:
                self.instrument.measure(this)
            except OutOfTimeError:
                break
            collected = heard
            done += 1
            self.rounds += 1
            now = self.clock()
            if done == 1 and reserve and now - begun > (ends - started) / (least + reserve):
                raise self._too_slow(least + reserve, now - begun)
            spent, longest = now - started, max(longest, now - begun)
            remaining = min(spent / done * (pairs - done), ends - now)
            self.report(
                f"stage {number}, round {done} of {pairs}, {spent:.0f} s, about {remaining:.0f} s left"
            )
            if done == pairs and reserve and (room := held()) >= 1:
                store_so_far()
                judgement = self.judge()
                if judgement.undecided and not judgement.control.moved:
                    still = {f.key for f in judgement.undecided}
                    ahead = [f.decision for f in self.judge(looks + 1).undecided if f.key in still]
                    pairs += missing(ahead, done, room)
                    looks += pairs > done
        if done < pairs:
            self.report(f"stage {number}: the time allowed holds {done} of {pairs} rounds")
        if done:
            store_so_far()
        return done

    def _store(self, collected: Mapping[str, Collected], **gate: float) -> None:
        """Writes the rows of a stage, in the place of those of its first rounds."""
        for side, rows in collected.items():
            folder = self.folder / side / f"stage{gate['stage']}"
            shutil.rmtree(folder, ignore_errors=True)
            writer = store.RunWriter(
                folder,
                run_id=f"{self.folder.name}-{side}-{gate['stage']}",
                sweep="gate",
                env_id=rows.env_id,
                env=rows.env,
                about={
                    "made_by": "gate",
                    "command": " ".join(["python -m harness gate", *self.instrument.words]),
                    "gate": {
                        **gate,
                        "session": self.folder.name,
                        "blocks": self.instrument.blocks,
                        "alone": self.instrument.alone,
                        "side": side,
                    },
                },
            )
            writer.append(rows.measurements())
            writer.close("finished")

    def judge(self, looks: int = 1) -> Judgement:
        """Judges what is stored so far, as the look at the first stage that it is, or at least as that one."""
        baseline = load_side(self.stored_baseline or self.folder / "baseline", "baseline", self.results_dir)
        candidate = load_side(self.folder / "candidate", "candidate", self.results_dir)
        candidate = replace(candidate, looks=max(looks, candidate.looks))
        return judge(baseline, candidate, self.policy, machine_free=self.machine_free)

    def _too_slow(self, rounds: int, seconds: float) -> GateError:
        """The time allowed cannot hold the rounds that a decision needs."""
        needed = 10 * math.ceil((MARGIN * rounds * seconds + JUDGING_S) / 10)
        return GateError(
            Exit.USAGE,
            f"a round takes {seconds:.0f} s, and a decision needs {FEWEST_TO_FLAG} rounds and {FEWEST_TO_CLAIM} to confirm, "
            f"which {self.policy.budget_s:g} s cannot hold: give --budget-s {needed}",
        )

    def _broken(self, error: SideError) -> Judgement:
        """One finding: the candidate does not run, which is no crash of the gate.

        Raises:
            GateError: its code need not be why (exit 6), it refuses the request (2), or it is the baseline (5).
        """
        if error.how == "ended":
            raise GateError(Exit.INCONCLUSIVE, f"{error.reason}, which need not be its code's doing")
        if error.side == "baseline":
            raise GateError(Exit.NO_BASELINE, error.reason)
        if error.how == "refused":
            raise GateError(Exit.USAGE, error.reason)
        suite, case, metric = error.what
        unit = Unit(
            UnitKey(suite, "", "", metric, "", ""), case, "", "higher", MetricRule("exact"), after=0.0,
            state=UnitState.LOST, verdict=UnitVerdict.REGRESSED, reason=error.reason, cause=SlowdownCause(suite),
        )  # fmt: skip
        baseline, candidate = (
            Side(str(self.instrument.trees.get(side, side)), {}, {}, "") for side in ("baseline", "candidate")
        )
        return Judgement(
            baseline,
            candidate,
            "broken",
            (unit,),
            ControlCase(False, "no control case was measured"),
            ("the candidate does not run; no time was judged",),
            Exit.REGRESSED,
            datetime.now(UTC).date(),
        )

    def run(self) -> Judgement:
        """Runs both stages: units that the first one flags are measured again in new processes.

        Raises:
            GateError: the time allowed cannot hold the rounds that a decision needs, which is known after one of them.
        """
        policy = self.policy
        allowed_s = (policy.budget_s or math.inf) - JUDGING_S
        # Who asks for fewer pairs than can flag anything has asked for no decision, and gets none.
        decides = not self.machine_free and policy.on_slower == "fail" and policy.pairs >= FEWEST_TO_FLAG
        least, reserve = (FEWEST_TO_FLAG, FEWEST_TO_CLAIM) if decides else (1, 0)
        judgement: Judgement | None = None
        try:
            self.instrument.set_up(self.report)
            ends = self.clock() + allowed_s
            if not self.stage(1, policy.pairs, ends=ends, least=least, reserve=reserve):
                raise GateError(
                    Exit.USAGE,
                    f"not one round was measured in the {policy.budget_s:g} s allowed; give more with --budget-s, or measure less",
                )
            judgement = self.judge()
            if judgement.to_confirm and not judgement.control.moved:
                pairs = max(policy.confirm_pairs, FEWEST_TO_CLAIM)
                self.report(
                    f"{len(judgement.to_confirm)} cases are flagged and measured again, {pairs} rounds"
                )
                if self.stage(2, pairs, judgement.to_confirm, ends):
                    judgement = self.judge()
        except SideError as error:
            if not self.rounds:
                judgement = self._broken(error)
            else:  # it could begin before, so the code need not be why; what the first stage showed is no pass
                why = f"the {error.side} could not be planned again after rounds that it took part in: {error.reason}"
                if judgement is None:
                    raise GateError(Exit.INCONCLUSIVE, f"{why}; measure again") from error
                code = judgement.code or Exit.INCONCLUSIVE
                judgement = replace(judgement, notes=(*judgement.notes, why), could_not_judge=True, code=code)
        return replace(judgement, notes=(*judgement.notes, *self.instrument.notes(), *self.notes))
