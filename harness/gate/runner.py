"""Runner: measures two work trees (or one) round by round, judges, and measures again what was flagged.

A round is a pair of new processes, one a side. What one process is stuck with (where its memory lies, which kernels it
chose) is drawn anew in the next round, so the round is the unit of statistics. What a round does is an `Instrument`: a
sweep (`harness.gate.sweeping`) or a user's command (`harness.gate.command`).

(Forks of one process that has imported everything start ten times as fast and are no substitute: twenty A/A sessions
of them differed by six times the variance that their own rounds showed; docs/gate-statistics.md.)
"""

from __future__ import annotations

import math
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from harness import store
from harness.gate.collect import Collected
from harness.gate.decide import FEWEST_TO_CLAIM, FEWEST_TO_FLAG, Verdict
from harness.gate.exit_code import Exit, GateError
from harness.gate.judge import judge
from harness.gate.policy import Rule
from harness.gate.sides import Side, load_side
from harness.gate.unit import Cause, Control, Finding, Judgement, Key, State, Unit

if TYPE_CHECKING:
    from pathlib import Path

    from harness.gate.policy import Policy

JUDGING_S = 5.0  # reading the store, twice, and writing the verdicts
MARGIN = 1.2  # of the budget that is advised: rounds differ

Report = Callable[[str], None]


class OutOfTimeError(Exception):
    """The round under way would end after the time that was allowed."""


class SideError(Exception):
    """A side could not even begin."""

    def __init__(self, side: str, reason: str, kind: str = "") -> None:
        super().__init__(f"{side}: {reason}")
        self.side, self.reason, self.kind = side, reason, kind


@dataclass
class Round:
    """One round under way.

    Attributes:
        number: in its stage.
        sides: in the order in which they are measured where one follows the other.
        only: ids of the cases to measure; all where empty.
        order: draws all that is random.
        left: seconds that it may still take.
        said: of each side, what was measured; told to `Collected` if the round comes to its end.
    """

    number: int
    sides: Sequence[str]
    only: frozenset[str]
    order: random.Random
    left: Callable[[], float]
    said: dict[str, list[Callable[[Collected], None]]]

    def say(self, side: str, what: Callable[..., None], *about: Any) -> None:
        """Notes that a side said something: a method of `Collected` with its arguments."""
        self.said[side].append(lambda collected: what(collected, *about))


@dataclass
class Instrument:
    """What is measured in a round, and how.

    Attributes:
        trees: work tree by side ("baseline", "candidate"), or one side alone.
        words: what was asked for, as it was typed.
        blocks: of each arm in a round.
    """

    trees: Mapping[str, Path]
    words: Sequence[str]
    blocks: int

    def set_up(self, tell: Report) -> None:
        """Makes the trees ready; takes none of the time allowed.

        Raises:
            SideError: one cannot be.
        """

    def warm(self, left: Callable[[], float]) -> None:
        """Does, before the first round, what is not to be measured."""

    def measure(self, this: Round) -> None:
        """Measures one round.

        Raises:
            SideError: a side could not even begin.
            OutOfTimeError: the time is over.
        """
        raise NotImplementedError

    def judge_broken(self, error: SideError, left: Callable[[], float]) -> Judgement:
        """The judgement where one side could not begin: a candidate that does not import is a finding, not a crash.

        Raises:
            OutOfTimeError: the other one was tried, and the time is over.
        """
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """What the verdict has to say about how it was measured."""
        return ()

    def one_sided(
        self, suite: str, case: str, metric: str, before: float, broken: str, mends: str, note: str
    ) -> Judgement:
        """One finding: REGRESSED where the candidate is broken, IMPROVED where it mends the baseline.

        Args:
            suite: of the one unit.
            case: likewise.
            metric: likewise.
            before: whether the baseline works: 0, 1, or NaN where it was not tried.
            broken: why the candidate does not; "" where it does.
            mends: what is said where it does.
            note: what is said in any case.
        """
        unit = Unit(
            Key(suite, "", "", metric, "", ""), case, "", "higher", Rule("exact"), before, float(not broken)
        )
        finding = Finding(unit, Verdict.IMPROVED, mends)
        if broken:
            unit.set_aside(State.LOST, broken)
            finding = Finding(unit, Verdict.REGRESSED, broken, cause=Cause(suite))
        return Judgement(
            Side(str(self.trees.get("baseline", "baseline")), {}, {}, ""),
            Side(str(self.trees["candidate"]), {}, {}, ""),
            "broken",
            (finding,),
            Control(False, "no control case was measured"),
            (note,),
            Exit.REGRESSED if broken else Exit.OK,
            datetime.now(UTC).date(),
        )


@dataclass
class Session:
    """One sitting: the same sides, measured once for each stage, stored in `<folder>/<side>/stage<N>/`."""

    instrument: Instrument
    folder: Path
    tell: Report = lambda line: None
    clock: Callable[[], float] = time.monotonic
    rounds: int = 0  # measured to their end so far, in all stages

    def stage(
        self, number: int, pairs: int, only: Sequence[str] = (), ends: float = math.inf, least: int = 1, reserve: int = 0,
        too_slow: Callable[[float], GateError] | None = None,
    ) -> int:  # fmt: skip
        """Measures one stage and stores it.

        Args:
            number: 1, or 2 for the confirmation.
            pairs: rounds.
            only: ids of the cases to measure; all where empty.
            ends: by the clock, when it has to be over. No round is begun that would last longer, and one that does is
                broken off and forgotten: how many rounds there are depends on the machine and never on what they gave.
            least: rounds without which nothing can be decided.
            reserve: rounds of a later stage for which time is kept, once there are `least`.
            too_slow: the error where, after the first round, `least` and `reserve` rounds cannot fit; takes its seconds.

        Returns:
            The rounds that were measured. Without any, nothing is stored.

        Raises:
            SideError: a side could not even begin.
        """
        order = random.Random(number)
        sides = sorted(self.instrument.trees)
        collected = {side: Collected() for side in sides}

        def left() -> float:
            return max(ends - self.clock(), 0.0)

        try:
            if not self.rounds:
                self.instrument.warm(left)
        except OutOfTimeError:
            return 0
        started, longest, done = self.clock(), 0.0, 0
        while done < pairs:
            begun = self.clock()
            if begun + longest * (1 + (reserve if done >= least else 0)) > ends:
                break
            this = Round(
                done, order.sample(sides, len(sides)), frozenset(only), order, left, {s: [] for s in sides}
            )
            try:
                self.instrument.measure(this)
            except OutOfTimeError:
                break
            for side in sides:
                for say in this.said[side]:
                    say(collected[side])
            done += 1
            self.rounds += 1
            now = self.clock()
            if done == 1 and too_slow and now - begun > (ends - started) / (least + reserve):
                raise too_slow(now - begun)
            spent, longest = now - started, max(longest, now - begun)
            remaining = min(spent / done * (pairs - done), ends - now)
            self.tell(f"stage {number}, round {done} of {pairs}, {spent:.0f} s, about {remaining:.0f} s left")
        if done < pairs:
            self.tell(f"stage {number}: the time allowed holds {done} of {pairs} rounds")
        gate = {
            "session": self.folder.name,
            "stage": number,
            "pairs": pairs,
            "rounds": done,
            "blocks": self.instrument.blocks,
            "seconds": round(self.clock() - started, 1),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }
        for side, rows in collected.items() if done else ():
            writer = store.RunWriter(
                self.folder / side / f"stage{number}",
                run_id=f"{self.folder.name}-{side}-{number}",
                sweep="gate",
                env_id=rows.env_id,
                env=rows.env,
                about={
                    "made_by": "gate",
                    "command": " ".join(["python -m harness gate", *self.instrument.words]),
                    "gate": {**gate, "side": side},
                },
            )
            writer.append(rows.measurements())
            writer.close("finished")
        return done


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured and against what.

    Attributes:
        instrument: what is measured.
        policy: with the counts of pairs and blocks.
        results_dir: the session is stored in `<results_dir>/gate/<session>/`.
        stored_baseline: a run, where no tree of a baseline is measured.
        machine_free: see `judge`.
        command: what was typed, without its budget, for advice that can be copied.
        notes: what is told with the verdict, whatever it is.
    """

    instrument: Instrument
    policy: Policy
    results_dir: Path
    stored_baseline: str | None = None
    machine_free: bool = False
    command: str = "python -m harness gate"
    notes: tuple[str, ...] = ()

    def session(self, tell: Report) -> Session:
        """A session that has measured nothing yet; its name sorts by time and never collides."""
        name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-gate-{secrets.token_hex(2)}"
        return Session(self.instrument, self.results_dir / "gate" / name, tell)

    def judge(self, session: Session) -> Judgement:
        """Judges what a session has stored so far."""
        return judge(
            load_side(self.stored_baseline or session.folder / "baseline", "baseline", self.results_dir),
            load_side(session.folder / "candidate", "candidate", self.results_dir),
            self.policy,
            machine_free=self.machine_free,
        )

    def too_slow(self, rounds: int, seconds: float) -> GateError:
        """The time allowed cannot hold the rounds that a decision needs."""
        needed = 10 * math.ceil((MARGIN * rounds * seconds + JUDGING_S) / 10)
        return GateError(
            Exit.USAGE,
            f"a round takes {seconds:.0f} s, and a decision needs {FEWEST_TO_FLAG} rounds and {FEWEST_TO_CLAIM} to confirm, "
            f"which {self.policy.budget_s:g} s cannot hold: {self.command} --budget-s {needed}",
        )


def measure_and_judge(request: Request, tell: Report) -> Judgement:
    """Runs both stages: units that the first one flags are measured again in new processes.

    Raises:
        GateError: the time allowed cannot hold the rounds that a decision needs, which is known after one of them.
    """
    session, policy = request.session(tell), request.policy
    allowed_s = (policy.budget_s or math.inf) - JUDGING_S
    # Who asks for fewer pairs than can flag anything has asked for no decision, and gets none.
    judges_times = not request.machine_free and policy.on_slower == "fail"
    decides = judges_times and policy.pairs >= FEWEST_TO_FLAG
    least, reserve = (FEWEST_TO_FLAG, FEWEST_TO_CLAIM) if decides else (1, 0)
    too_slow = partial(request.too_slow, least + reserve)
    judgement: Judgement | None = None
    try:
        request.instrument.set_up(tell)
        ends = session.clock() + allowed_s
        if not session.stage(1, policy.pairs, ends=ends, least=least, reserve=reserve, too_slow=too_slow):
            raise GateError(
                Exit.USAGE,
                f"not one round was measured in the {policy.budget_s:g} s allowed; give more with --budget-s, or measure less",
            )
        judgement = request.judge(session)
        if judgement.to_confirm and not judgement.control.moved:
            pairs = max(policy.confirm_pairs, FEWEST_TO_CLAIM)
            tell(f"{len(judgement.to_confirm)} cases are flagged and measured again, {pairs} rounds")
            if session.stage(2, pairs, judgement.to_confirm, ends):
                judgement = request.judge(session)
    except SideError as error:
        if not session.rounds:
            ends = session.clock() + allowed_s
            try:
                judgement = request.instrument.judge_broken(error, lambda: max(ends - session.clock(), 0.0))
            except OutOfTimeError as late:
                raise GateError(
                    Exit.INCONCLUSIVE, f"{error}, and the other side did not end in time"
                ) from late
        else:  # it could begin before, so the code need not be why; what the first stage showed is no pass
            why = f"the {error.side} could not be planned again after rounds that it took part in: {error.reason}"
            if judgement is None:
                raise GateError(Exit.INCONCLUSIVE, f"{why}; measure again") from error
            code = judgement.code or Exit.INCONCLUSIVE
            judgement = replace(judgement, notes=(*judgement.notes, why), could_not_judge=True, code=code)
    return replace(judgement, notes=(*judgement.notes, *request.instrument.notes(), *request.notes))
