"""Session: measures two work trees (or one) so that their rounds are pairs, and stores both sides.

A round is a pair of new processes, one a side, alive together. Within it, case by case, each side builds and checks
its arms, and then the two take turns: one block of samples each, in random order, several times. A neighbour on the
machine, a clock or a temperature strikes both sides of a turn alike; what one process is stuck with (where its memory
lies, which kernels it chose) is drawn anew in the next round. So the round, not the block, is the unit of statistics.

(Forks of one process that has imported everything start ten times as fast and are no substitute: twenty A/A sessions
of them differed by six times the variance that their own rounds showed; docs/gate.md.)

Cost: `pairs` x (start of two processes, 3 s on two free CPU cores and 10 s with CUDA, + 2 x (checks of every case + cases
x arms x blocks x block_ms)).
"""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from harness import store
from harness.case import Case
from harness.gate.codes import Exit, GateError
from harness.gate.process import Process, WorkerError
from harness.gate.sides import CONTROL_SUITE
from harness.measurement import METRICS, Measurement

if TYPE_CHECKING:
    from pathlib import Path

START_S, PREPARE_S, BLOCK_S = 180.0, 600.0, 120.0  # an answer later than this is none
CONTROL = "control"  # the worker's name of the control
TIMED_REGIME = "isolated"
DURATIONS = ("ms", "us", "s")

Tell = Callable[[str], None]


@dataclass(slots=True)
class _Row:
    """One row under way: what the processes of one side said about one metric of one arm."""

    about: dict[str, Any]
    samples: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    clocks: list[float] = field(default_factory=list)
    late: int = 0
    timing: dict[str, Any] = field(default_factory=dict)
    failure: str = ""
    timed: bool = False

    def add(self, number: int, samples: Sequence[float], clocks: Sequence[float] = (), late: int = 0) -> None:
        self.samples += samples
        self.rounds += [number] * len(samples)
        self.clocks += clocks
        self.late += late

    def measurement(self) -> Measurement:
        status = "failed" if self.failure else str(self.about["status"])
        reason = self.failure or str(self.about.get("reason", ""))
        if status == "ok" and not self.samples:
            status, reason = "failed", "no block of it was timed"
        sound = status == "ok"
        metric = METRICS[str(self.about["metric"])]
        if sound and metric.unit not in DURATIONS:
            # No time, so the same in every process; where it is not, the worst of them stands.
            self.samples = [min(self.samples) if metric.better == "higher" else max(self.samples)]
            self.rounds = []
        return Measurement(
            **{
                name: self.about[name]
                for name in ("suite", "case_id", "arm", "baseline", "axes", "seed", "metric")
            },
            status=status,  # type: ignore[arg-type]
            reason="" if sound else reason,
            regime=TIMED_REGIME if self.timed and sound else "",
            resolved=self.about.get("resolved", {}),
            samples=tuple(self.samples) if sound else (),
            rounds=tuple(self.rounds) if sound else (),
            sample_clock_mhz=tuple(self.clocks) if sound and len(self.clocks) == len(self.samples) else (),
            flops=self.about.get("flops", {}),
            bytes_moved=self.about.get("bytes_moved"),
            timing={**self.timing, "late_samples": self.late} if self.timed and sound else {},
        )


@dataclass(slots=True)
class _Collected:
    """All rows of one side in one stage."""

    env: dict[str, Any] = field(default_factory=dict)
    env_id: str = ""
    rows: dict[tuple[str, str, str], _Row] = field(default_factory=dict)

    def take(self, number: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds what `prepare` said."""
        for said in rows:
            if said["metric"] not in METRICS:  # a metric that only the other commit knows
                continue
            row = self.rows.setdefault((said["case_id"], said["arm"], said["metric"]), _Row(dict(said)))
            row.timed |= said["status"] == "ok" and not said.get("samples")
            if said["status"] == "failed":
                row.failure = row.failure or f"{said.get('reason', '')} (round {number})"
            row.add(number, said.get("samples", ()))

    def time(self, number: int, case_id: str, block: Mapping[str, Any], control: Case) -> None:
        """Adds one block of every arm."""
        for name, samples in block["samples"].items():
            if name == CONTROL:
                row = self.rows.setdefault(
                    (control.case_id, "bf16_mm", "time_ms"), _Row(_control_row(control))
                )
                row.timed = True
            else:
                row = self._sure_row(case_id, name)
            row.add(number, samples, block["clocks"][name], block["late"][name])
            row.timing = block["timing"][name]
        for name, fault in block["faults"].items():
            if name != CONTROL:
                row = self._sure_row(case_id, name)
                row.failure = row.failure or f"{fault} (round {number})"

    def died(self, number: int, case: Mapping[str, Any], why: str) -> None:
        """The process of a round was lost: every arm of the case under way fails, if it was heard of or not."""
        for arm, baseline in case["arms"].items():
            about = {n: case[n] for n in ("suite", "case_id", "axes", "seed")} | {
                "arm": arm,
                "baseline": baseline,
            }
            row = self._timed_row(case["case_id"], arm) or self.rows.setdefault(
                (case["case_id"], arm, "time_ms"),
                _Row(about | {"metric": "time_ms", "status": "ok"}, timed=True),
            )
            row.failure = row.failure or f"worker: {why} (round {number})"

    def _sure_row(self, case_id: str, arm: str) -> _Row:
        row = self._timed_row(case_id, arm)
        assert row is not None, f"{arm} of {case_id} was timed without having been prepared"
        return row

    def _timed_row(self, case_id: str, arm: str) -> _Row | None:
        return next((r for k, r in self.rows.items() if k[:2] == (case_id, arm) and r.timed), None)


def _control_row(case: Case) -> dict[str, Any]:
    return {
        "suite": CONTROL_SUITE,
        "case_id": case.case_id,
        "arm": "bf16_mm",
        "baseline": "",
        "axes": case.axes_json,
        "seed": 0,
        "metric": "time_ms",
        "status": "ok",
        "resolved": {"timed": "a bf16 product of fixed size, by PyTorch alone"},
    }


def new_session() -> str:
    """A name that sorts by time and never collides."""
    return f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-gate-{secrets.token_hex(2)}"


@dataclass(slots=True)
class Session:
    """One sitting: the same sides, measured once for each stage.

    Attributes:
        trees: work tree by side ("baseline", "candidate"), or one side alone.
        words: the command line of the sweep, as `python -m harness` takes it.
        folder: where the sides are stored: `<folder>/<side>/stage<N>/`.
        blocks: blocks of each arm in a round.
        alone: one process at a time, where both would not fit into the device's memory; a drift then cancels less.
        pads: share by which a side is slowed, for experiments.
        seed: of the order of the sides.
        tell: hears a line a round.
    """

    trees: Mapping[str, Path]
    words: Sequence[str]
    folder: Path
    blocks: int
    alone: bool = False
    pads: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    tell: Tell = lambda line: None

    def stage(self, number: int, pairs: int, only: Sequence[str] = ()) -> None:
        """Measures one stage and stores it.

        Args:
            number: 1, or 2 for the confirmation.
            pairs: rounds.
            only: ids of the cases to measure; all where empty.

        Raises:
            GateError: a side could not even make its plan, or the sides share no case.
        """
        order = random.Random(self.seed * 1000 + number)
        collected = {side: _Collected() for side in self.trees}
        started = time.monotonic()
        for index in range(pairs):
            sides = order.sample(sorted(self.trees), len(self.trees))
            for together in [[side] for side in sides] if self.alone else [sides]:
                self._round(index, together, collected, set(only), order)
            spent = time.monotonic() - started
            left = spent / (index + 1) * (pairs - index - 1)
            self.tell(f"stage {number}, round {index + 1} of {pairs}, {spent:.0f} s, about {left:.0f} s left")
        for side, rows in collected.items():
            self._store(side, number, pairs, rows, time.monotonic() - started)

    def _round(
        self,
        index: int,
        sides: Sequence[str],
        collected: dict[str, _Collected],
        only: set[str],
        order: random.Random,
    ) -> None:
        """One round of some sides, each in a new process."""
        with ExitStack() as stack:
            workers = {}
            for side in sides:
                workers[side] = Process(self.trees[side], self.pads.get(side, 0.0))
                stack.callback(workers[side].close)
                workers[side].tell({"do": "plan", "words": list(self.words)})
            cases: dict[str, dict[str, Any]] = {}
            for side, worker in workers.items():  # both import PyTorch at the same time
                try:
                    plan = worker.answer(START_S)
                except WorkerError as error:
                    raise GateError(Exit.USAGE, f"{side} ({self.trees[side]}): {error}") from error
                collected[side].env, collected[side].env_id = plan["env"], plan["env_id"]
                cases[side] = {case["case_id"]: case for case in plan["cases"]}
            for case in {i: c for known in cases.values() for i, c in known.items()}.values():
                if not only or case["case_id"] in only:
                    there = {
                        side: worker for side, worker in workers.items() if case["case_id"] in cases[side]
                    }
                    for side in self._case(index, case, there, collected, order):
                        del workers[side]

    def _case(
        self,
        index: int,
        case: Mapping[str, Any],
        workers: Mapping[str, Process],
        collected: dict[str, _Collected],
        order: random.Random,
    ) -> list[str]:
        """Measures one case in one round; returns the sides whose process was lost."""
        alive = dict(workers)
        control = Case.of(CONTROL_SUITE, {"what": "bf16_mm"})

        def ask(side: str, command: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
            try:
                return alive[side].ask(command, timeout_s)
            except WorkerError as error:
                collected[side].died(index, case, str(error))
                del alive[side]
                return None

        for side in order.sample(sorted(alive), len(alive)):
            if answer := ask(side, {"do": "prepare", "case": case["case_id"]}, PREPARE_S):
                collected[side].take(index, answer["rows"])
        for _ in range(self.blocks):
            for side in order.sample(sorted(alive), len(alive)):
                if answer := ask(side, {"do": "block"}, BLOCK_S):
                    collected[side].time(index, case["case_id"], answer, control)
        return [side for side in workers if side not in alive]

    def _store(self, side: str, number: int, pairs: int, rows: _Collected, seconds: float) -> None:
        folder = self.folder / side / f"stage{number}"
        gate = {
            "session": self.folder.name,
            "side": side,
            "stage": number,
            "pairs": pairs,
            "blocks": self.blocks,
            "seconds": round(seconds, 1),
            "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        }
        if self.pads.get(side):
            gate["pad"] = self.pads[side]
        writer = store.RunWriter(
            folder,
            run_id=f"{self.folder.name}-{side}-{number}",
            sweep="gate",
            env_id=rows.env_id,
            env=rows.env,
            about={"command": " ".join(["python -m harness gate", *self.words]), "gate": gate},
        )
        writer.append(row.measurement() for row in rows.rows.values())
        writer.close("finished")
