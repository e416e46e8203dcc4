"""A sweep made of other sweeps: which part is started when, what has become of each, and how long it may take.

Parts are started by priority, those with the same one in the order of the file. A part that the time budget of the sweep has
no room for makes room for the next one, and waits with the cause `budget`. resume= is the next slot: it starts the parts that
are left, `TRIES` times each. A part whose need failed is skipped with the cause of that failure.
"""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.machine.processes import interruptible
from harness.store.cause import RETRYABLE, Cause
from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

PATIENCE = 1.4  # a part without a budget may take so many times its estimate
TRIES = 3  # slots in which a part is started
LEAST_ROUNDS = 3  # an interval needs them
RESERVE_S = 5.0  # of a slot, to store what there is
REHEARSED_S = 240.0  # of a part of a rehearsal: a CPU may be busy
START_LEAST_S = 20.0  # a part whose time is not known is not started in less, except as the first of a slot
SECONDS = ("estimate_s", "budget_s", "last_start_s")  # keys of a part
CUT = 124  # exit code of a part that was cut off, as timeout(1) has it


@dataclass(frozen=True, slots=True)
class Part:
    """One part, see `harness.cli.config.PartConfig`; overrides are flat: `axes.M`, not a mapping in a mapping."""

    name: str
    sweep: str
    about: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict, hash=False)
    small: Mapping[str, Any] = field(default_factory=dict, hash=False)
    priority: int = 0
    estimate_s: float | None = None
    budget_s: float | None = None
    last_start_s: float = 0.0
    needs: tuple[str, ...] = ()
    checked_by: tuple[str, ...] = ()
    kernels: Mapping[str, Sequence[str]] = field(default_factory=dict, hash=False)
    runs: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def most_s(self) -> float:
        """It is cut off after so many seconds."""
        if self.budget_s is not None:
            return self.budget_s
        return math.inf if self.estimate_s is None else PATIENCE * self.estimate_s

    @property
    def least_s(self) -> float:
        """It is started only where so much is left of the slot: what its first rounds take."""
        return min(0.95 * (self.estimate_s or 0.0), self.most_s)

    def words(self, tries: int = 0, without: Collection[str] = (), rehearsed: bool = False) -> list[str]:
        """The command line of its sweep; its rounds are halved with each slot in which it was started before (`tries`)."""
        chosen = {"sweep": self.sweep, **self.overrides}
        if isinstance(rounds := chosen.get("rounds"), int):
            chosen["rounds"] = max(min(LEAST_ROUNDS, rounds), rounds >> tries)
        chosen |= self.small if rehearsed else {}
        chosen |= (
            {"without": sorted(without)} if without else {}
        )  # `arms` stay those that the run was made with
        return [f"{key}={_word(value)}" for key, value in chosen.items()]


@dataclass(slots=True)
class Progress:
    """What has become of a part; stored in `_run.json` of the sweep.

    Attributes:
        done: nothing is left to measure.
        ok: done, something was measured, and nothing failed. Where `unchecked` is not empty, its arms may be wrong.
        tries: slots in which it was started, also those that were killed; a refusal is none.
        seconds: that it has taken.
        exit: code of its sweep the last time; None where it was not started, or interrupted.
        cause: why it is not ok.
        reason: the same in words, for people.
        left_out: arms that were not measured, with the reason.
        unchecked: parts of `checked_by` without a whole result when it was started last, with the reason.
        statuses: its rows by status.
    """

    done: bool = False
    ok: bool = False
    tries: int = 0
    seconds: float = 0.0
    exit: int | None = None
    cause: Cause = Cause.NONE
    reason: str = ""
    left_out: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Whether there is something left to do, and a try to do it in."""
        return not self.done and self.tries < TRIES

    def as_json_dict(self) -> dict[str, Any]:
        """For `_run.json`, with the column `retryable` of a row: resume= would start it again."""
        waits = self.open and (self.tries > 0 or self.exit is not None or self.cause in RETRYABLE)
        return {**dataclasses.asdict(self), "cause": str(self.cause), "retryable": waits}

    @classmethod
    def of_json(cls, stored: Mapping[str, Any]) -> Progress:
        """What `as_json_dict` made."""
        known = {f.name: stored[f.name] for f in dataclasses.fields(cls) if f.name in stored}
        return cls(**{**known, "cause": Cause(known.get("cause", ""))})


State = dict[str, Progress]


class Line(NamedTuple):
    """One line of a timetable: seconds since the slot began."""

    slot: int
    begins: float
    ends: float
    part: Part
    cut: bool


def parts_of(config: Mapping[str, Any], resources: Collection[str]) -> list[Part]:
    """The parts of a composed configuration in the order in which they are started; none where its parts are suites.

    Raises:
        UsageError: some parts are sweeps and others suites, or a part names one that there is not, or that needs it in turn,
            or its seconds are no such number.
    """
    named: dict[str, Any] = config["parts"]
    if not any(part["sweep"] for part in named.values()):
        return []
    known = {f.name for f in dataclasses.fields(Part)} - {"name", "overrides", "small"}
    found = []
    for name, part in named.items():
        if not part["sweep"]:
            raise UsageError(f"part {name} names no sweep, and others do: write parts.{name}.sweep=NAME")
        if any(part[key] not in ("???", None, [], {}) for key in ("suite", "axes", "shapes", "arms")):
            raise UsageError(
                f"part {name} is a sweep: write parts.{name}.overrides.axes.NAME=VALUE, and so on"
            )
        for key in SECONDS:
            seconds = part[key]
            if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
                raise UsageError(
                    f"parts.{name}.{key}={seconds:g}: expected a finite number of seconds from 0"
                )
        own: dict[str, Any] = {
            key: tuple(part[key]) if isinstance(part[key], list) else part[key] for key in known
        }
        own |= {key: _flat({**_flat(config[key]), **_flat(part[key])}) for key in ("overrides", "small")}
        found.append(Part(name, **own))
    for part in found:
        for other in (*part.checked_by, *part.runs.values()):
            if other not in named:
                raise unknown("part", other, named)
        for need in part.needs:
            if need not in named and need not in resources:
                raise unknown("need", need, (*named, *resources))
    left = {part.name: {need for need in part.needs if need in named} for part in found}
    while ready := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in ready}
    if left:
        raise UsageError(f"parts {', '.join(left)} need each other: none can be the first")
    return sorted(found, key=lambda part: part.priority)


def barred(part: Part, state: State, missing: Mapping[str, str]) -> tuple[Cause, str] | None:
    """Why a part can never be started as things are; None where it can, or must still wait for one that it needs.

    `missing` is what cannot be had here, by name of the need, with the reason.
    """
    for need in part.needs:
        if need in missing:
            return Cause.MISSING, missing[need]
        other = state.get(need)
        if other is not None and not other.ok and not other.open:
            return other.cause, f"part {need}, which it needs, is not ok: {other.cause}"
    return None


def next_part(
    parts: Sequence[Part], state: State, left_s: float, had: Collection[str], missing: Mapping[str, str],
    rehearsed: bool = False,
) -> tuple[Part, float] | None:  # fmt: skip
    """The part to start now, and the seconds after which it is cut off; None where there is none that the slot has time for.

    `had` are those that this slot has started; where parts are `rehearsed` in their small sizes, no estimate counts.
    """
    room = left_s - RESERVE_S
    for part in parts:
        waits = any(need in state and not state[need].ok for need in part.needs)
        if part.name in had or waits or not state[part.name].open or barred(part, state, missing):
            continue
        least = part.least_s if part.estimate_s is not None else max(part.least_s, START_LEAST_S)
        is_first = not had and part.estimate_s is None and not rehearsed and room > 0
        if room >= (START_LEAST_S if rehearsed else least) or is_first:
            return part, min(room, REHEARSED_S if rehearsed else part.most_s)
    return None


def run_slot(
    parts: Sequence[Part], state: State, slot_s: float, missing: Mapping[str, str],
    measure: Callable[[Part, Progress, float], None], clock: Callable[[], float], rehearsed: bool = False,
) -> None:  # fmt: skip
    """Starts parts until the time is spent, and says in the state of each that is left why.

    `measure` runs a part for at most so many seconds, and says in its progress what came of it.
    """
    ends, had, is_interrupted = clock() + slot_s, list[str](), False
    try:
        while turn := next_part(parts, state, ends - clock(), had, missing, rehearsed):
            part, seconds = turn
            had.append(part.name)
            measure(part, state[part.name], seconds)
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        for part in parts:
            mine = state[part.name]
            if mine.tries or mine.done or part.name in had:
                continue
            if why := barred(part, state, missing):
                mine.cause, mine.reason = why
            elif mine.cause is not Cause.REFUSED:  # it says more than that there was no time since
                mine.cause, mine.reason = _waits(part, state, is_interrupted)


def _waits(part: Part, state: State, is_interrupted: bool) -> tuple[Cause, str]:
    for need in part.needs:
        if need in state and not state[need].ok:
            return Cause.BUDGET, f"part {need}, which it needs, is not done yet"
    if is_interrupted:
        return Cause.INTERRUPTED, "the slot was interrupted before its turn; resume=RUN_ID starts it"
    return Cause.BUDGET, "the slot had no time for it; resume=RUN_ID starts it"


def timetable(
    parts: Sequence[Part], slot_s: float, factor: float = 1.0, missing: Mapping[str, str] | None = None
) -> list[Line]:
    """What would be done, slot by slot, if every part took `factor` times its estimate."""
    state: State = {part.name: Progress() for part in parts}
    lines: list[Line] = []
    slot, now = 0, 0.0

    def pretend(part: Part, mine: Progress, seconds: float) -> None:
        nonlocal now
        wanted = factor * (part.estimate_s or 0.0)
        cut = wanted > seconds
        lines.append(Line(slot, now, now + min(wanted, seconds), part, cut))
        now = lines[-1].ends
        mine.tries, mine.done, mine.ok = mine.tries + 1, not cut, not cut
        mine.cause = Cause.BUDGET if cut else Cause.NONE

    def clock() -> float:
        return now

    before = -1
    while before < len(lines):
        before, slot, now = len(lines), slot + 1, 0.0
        run_slot(parts, state, slot_s, missing or {}, pretend, clock)
    return lines


def describe(parts: Sequence[Part], slot_s: float, missing: Mapping[str, str]) -> Iterator[str]:
    """The lines that `dry_run=true` prints."""
    yield "slot  begins  seconds  at most  part"
    lines = timetable(parts, slot_s, 1.0, missing)
    for line in lines:
        part, seconds = line.part, line.ends - line.begins
        clock = f"{int(line.begins) // 60}:{int(line.begins) % 60:02d}"
        cut = " (cut off)" if line.cut else ""
        yield f"{line.slot:>4}  {clock:>6}  {seconds:>7.0f}  {part.most_s:>7.0f}  {part.name:<17}{part.about}{cut}"
    started = {line.part.name for line in lines}
    for part in parts:
        if part.name not in started:
            why = barred(part, {}, missing)
            text = f"skipped: {why[1]}" if why else f"would never begin: slots of {slot_s:g} s are too short"
            yield f"   -       -        -        -  {part.name:<17}{text}"
    yield "not checked here: values of axes, arms, shapes and models of the parts; each part checks its own when it starts"
    slow = [line for line in timetable(parts, slot_s, 1.3, missing) if line.slot == 1 and not line.cut]
    held = ", ".join(line.part.name for line in slow) or "nothing"
    yield f"were everything 1.3 times as long, the first slot would end with: {held}"
    yield "nothing was measured (dry_run=true)"


def within(seconds: float, work: Callable[[], int]) -> int:
    """Does work in this process and returns its exit code; `CUT` where it was interrupted because it took too long.

    Raises:
        KeyboardInterrupt: this process was told to end meanwhile.
    """
    over, lock = False, threading.Lock()
    code: int | None = None
    with interruptible() as interrupts:
        interrupts.forget()

        def end() -> None:
            with lock:
                if not over and not interrupts.heard:
                    interrupts.cut_off()

        deadline = threading.Timer(min(max(seconds, 0.0), threading.TIMEOUT_MAX), end)
        deadline.daemon = True
        cut_at_its_end = False  # the work was done already
        try:
            try:
                deadline.start()
                code = work()
            finally:
                with lock:
                    over = True
        except KeyboardInterrupt:
            if not interrupts.cut:
                raise
            cut_at_its_end = code is not None
        finally:
            over = True
            deadline.cancel()
        cut, heard = interrupts.cut, interrupts.heard
        interrupts.forget()
        if heard:  # the sweep has recorded how it ended; so must the whole
            raise KeyboardInterrupt
    return CUT if code is None or (cut and not cut_at_its_end) else code


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """
    >>> _flat({"axes": {"M": 8}, "axes.K": 4})
    {'axes.M': 8, 'axes.K': 4}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _word(value: object) -> str:
    """A value as the command line has it.

    >>> _word([1, True, None, "a b"]), _word("bf16_eager")
    ("[1,true,null,'a b']", 'bf16_eager')
    """
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_word, value))}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value)
    if re.fullmatch(r"[\w./+-]+", text):
        return text
    # Hydra takes a backslash as it is, except in front of a quote, the closing one included.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"
