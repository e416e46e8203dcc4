"""Order of the parts of a GPU session: a pure function of the parts and their states.

A slot goes through the parts in order. One that is done, skipped or cut off `TRIES` times is not run, and one that the
slot has no time for makes room for the next. What was cut off comes up again in the next slot, at its place in the order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from harness.cli.gpu.gpu_stages import STAGES, TRIES, Stage

RESERVE_S = 5.0  # of a slot, for packing what there is
REHEARSED_S = 240.0  # that a part of a rehearsal may take: a CPU may be busy

State = Mapping[str, Mapping[str, Any]]  # name of a part -> done, seconds, tries, ...


@dataclass(frozen=True, slots=True)
class Turn:
    """A part that starts now, and the seconds after which it is cut off."""

    stage: Stage
    seconds: float


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a timetable: seconds since the slot began."""

    slot: int
    begins: float
    ends: float
    stage: Stage
    cut: bool


def is_open(stage: Stage, state: State) -> bool:
    """Whether there is something left to do, and a try to do it in."""
    entry = state.get(stage.name, {})
    return not entry.get("done") and int(entry.get("tries", 0)) < TRIES


def next_turn(
    state: State, left_s: float, had: Collection[str], skipped: Collection[str] = (), device: str = "cuda"
) -> Turn | None:
    """The next part of a slot; None where there is none that it has time for.

    Args:
        state: of the session.
        left_s: of the slot.
        had: names of the parts that this slot has started.
        skipped: of those that cannot be had here.
        device: "cuda", or "cpu" for a rehearsal, in which every part is small.
    """
    room = left_s - RESERVE_S
    for stage in STAGES:
        if stage.name in had or stage.name in skipped or not is_open(stage, state):
            continue
        least = stage.least_s if device == "cuda" else 20.0
        if room >= least:
            return Turn(stage, min(room, stage.budget_s if device == "cuda" else REHEARSED_S))
    return None


def timetable(minutes: float, factor: float = 1.0, skipped: Collection[str] = ()) -> list[Line]:
    """What a session would do, slot by slot, if every part took `factor` times its estimate.

    Args:
        minutes: of each slot.
        factor: above `PATIENCE` every part is cut off.
        skipped: names of parts that are not run.
    """
    state: dict[str, dict[str, Any]] = {}
    lines: list[Line] = []
    slot = 0
    while any(is_open(stage, state) for stage in STAGES if stage.name not in skipped):
        slot += 1
        now, had = 0.0, list[str]()
        while (turn := next_turn(state, 60 * minutes - now, had, skipped)) is not None:
            stage = turn.stage
            had.append(stage.name)
            took = min(factor * stage.seconds, turn.seconds)
            cut = factor * stage.seconds > turn.seconds
            entry = state.setdefault(stage.name, {"tries": 0})
            entry.update(done=not cut, tries=entry["tries"] + 1)
            lines.append(Line(slot, now, now + took, stage, cut))
            now += took
        if not had:  # what is left needs longer slots
            break
    return lines


def describe(minutes: float, skipped: Mapping[str, str]) -> list[str]:
    """The lines that `dry_run=true` prints; `skipped`: reasons by name of part."""
    said = ["slot  begins  seconds  at most  part"]
    lines = timetable(minutes, skipped=skipped)
    for line in lines:
        stage = line.stage
        seconds = line.ends - line.begins
        said.append(
            f"{line.slot:>4}  {_clock(line.begins):>6}  {seconds:>7.0f}  {stage.budget_s:>7.0f}  {stage.name:<17}{stage.about}"
            + (" (cut off)" if line.cut else "")
        )
    for name, why in skipped.items():
        said.append(f"   -       -        -        -  {name:<17}skipped: {why}")
    planned = {line.stage.name for line in lines} | skipped.keys()
    if lacking := [stage.name for stage in STAGES if stage.name not in planned]:
        said.append(f"{', '.join(lacking)} would never begin: slots of {minutes:g} minutes are too short")
    slow = timetable(minutes, 1.3, skipped)
    first = [line.stage.name for line in slow if line.slot == 1 and not line.cut]
    said.append(
        f"were everything 1.3 times as long, the first slot would end with: {', '.join(first) or 'nothing'}"
    )
    said.append("nothing was measured (dry_run=true)")
    return said


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
