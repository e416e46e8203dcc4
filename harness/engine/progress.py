"""How far a sweep is: a bar with the time left on a terminal, lines in a log.

Units are the cases that are timed, and the runs of trial suites. A unit counts as far as it is: an arm that is ready is half of
its share of a case, the timing is the other half. The time left is what the rest takes by the units of the same suite and arm that
have ended; before there is one, by how far the units under way are.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from statistics import fmean
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column

from harness.engine.stages import Frame, Mark, Stage, StageKind, Steps
from harness.machine.terminal import printable
from harness.store.text import done

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from harness.engine.plan import Task
    from harness.store.case import Case

LOG_S = 30.0  # between two lines about what is under way
BEGIN_S = 1.0  # between two lines where one unit after the other begins
BAR = 14  # columns of the terminal
REFRESH_HZ = 2.0  # of the bar: drawing takes a core from what is measured
# How much of an arm's first half, and of the case, is done when a stage of it begins
_OF_ARM = {StageKind.BUILD: 0.0, StageKind.COMPILE: 0.2, StageKind.CHECK: 0.8}
_OF_CASE = {StageKind.WARM_UP: 0.5, StageKind.TIME: 0.6, StageKind.SUSTAIN: 0.8}


Show = Callable[[Frame, bool], None]  # what there is, and whether a unit begins


class Progress:
    """Count and show cases, stages and steps.

    Args:
        units: that will be done.
        show: takes what there is to show.
        clock: seconds.
    """

    def __init__(
        self,
        units: Sequence[Task],
        show: Show = lambda frame, begins: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._show, self._clock = len(units), show, clock
        self._waiting = Counter(map(_kind, units))
        self._since: dict[tuple[Case, str], float] = {}  # when each began
        self._took: list[
            tuple[tuple[str, str], float]
        ] = []  # kind and seconds of each that ended after it had moved
        self._lanes = 1
        self._open: dict[tuple[Case, str], float] = {}  # how much of each is done
        self._begun = self._ended = 0
        self._started = clock()
        self._where = self._stage = ""
        self._lock = threading.RLock()  # lanes are threads

    @classmethod
    @contextmanager
    def on(
        cls,
        console: Console,
        units: Sequence[Task],
        note: Show = lambda frame, begins: None,
        quiet: bool = False,
    ) -> Iterator[Progress]:
        """A bar where the console is a terminal; else a line for units that start, and one every 30 s.

        Args:
            console: where it is shown.
            units: that will be done.
            note: always gets what the console shows.
            quiet: show nothing.
        """
        last, bar, shown = float("-inf"), None, TaskID(0)
        if console.is_terminal and not console.is_dumb_terminal and not quiet:
            words = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
            left = TextColumn("{task.fields[left]}", markup=False)
            columns = words, BarColumn(BAR), TaskProgressColumn(), TimeElapsedColumn(), left
            bar = Bar(
                *columns, console=console, transient=True, expand=True, redirect_stderr=False,
                refresh_per_second=REFRESH_HZ,
            )  # fmt: skip
            shown = bar.add_task("", total=1.0, left="")

        def show(frame: Frame, begins: bool) -> None:
            nonlocal last
            note(frame, begins)
            if bar is not None:
                text = printable(" ".join(filter(None, (frame.stage, frame.where))))
                bar.update(shown, completed=frame.share, description=text, left=frame.left)
                return
            now = time.monotonic()
            if quiet or now - last < (BEGIN_S if begins else LOG_S):
                return
            last, text = now, printable(frame.text)
            if frame.left and frame.elapsed_s >= 1:
                text += f", {done(frame.share)} is done, {frame.left}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        with bar or nullcontext():
            yield cls(units, show)

    def take(self, task: Task, what: object) -> None:
        """Something happens to a case or run."""
        key = task.case, task.arm
        with self._lock:
            if what is Mark.BEGUN:
                self._begun += 1
                seed = next((f" seed={value}" for name, value in task.case.axes if name == "seed"), "")
                text = f"{task.case.suite} {task.arm}{seed}" if task.arm else f"{task.case}"
                self._where, self._stage = f"[{self._begun}/{self._total}] {text}", ""
                self._open[key], self._since[key] = 0.0, self._clock()
                self._waiting[_kind(task)] -= 1
                self._lanes = max(self._lanes, len(self._open))
            elif what is Mark.ENDED:
                share = self._open.pop(key, None)
                self._ended += share is not None
                if share:
                    self._took.append((_kind(task), self._clock() - self._since[key]))
                self._stage = ""
                return
            elif isinstance(what, Steps):
                self._move(key, what.done / max(what.total, 1))
                self._stage = f"step {what.done}/{what.total} of {task.arm}"
            elif isinstance(what, Stage):
                arms = task.planned.runnable
                if what.kind in _OF_ARM:
                    share, at = _OF_ARM[what.kind], arms.index(what.arm)
                    if self._open[key] < (at + _OF_ARM[StageKind.COMPILE]) / (2 * len(arms)):
                        share = min(
                            share, _OF_ARM[StageKind.COMPILE]
                        )  # nothing was compiled, and the check is what takes long
                    self._move(key, (at + share) / (2 * len(arms)))
                else:
                    self._move(key, _OF_CASE[what.kind])
                self._stage = str(what)
            self._show(self.frame(), what is Mark.BEGUN)

    def _move(self, key: tuple[Case, str], share: float) -> None:
        self._open[key] = max(self._open.get(key, 0.0), share)  # a second try takes nothing back

    def frame(self) -> Frame:
        """What there is to show now."""
        with self._lock:
            share = min((self._ended + sum(self._open.values())) / max(self._total, 1), 1.0)
            return Frame(self._where, self._stage, share, self._clock() - self._started, self._left_s())

    def _left_s(self) -> float:
        due: dict[tuple[str, str], float] = {**self._waiting}
        now = self._clock()
        for (case, arm), share in self._open.items():
            due[case.suite, arm] += 1 - share
        known = self._took or [
            ((case.suite, arm), (now - self._since[case, arm]) / share)
            for (case, arm), share in self._open.items()
            if share
        ]

        def usual(kind: tuple[str, str]) -> float:
            """Mean seconds of the units of a suite and arm, else of its suite; NaN where nothing says."""
            own = [seconds for of, seconds in known if of == kind]
            own = own or [seconds for of, seconds in known if of[0] == kind[0]]
            return fmean(own or [math.nan])

        return sum(count * usual(kind) for kind, count in due.items() if count) / self._lanes


def _kind(task: Task) -> tuple[str, str]:
    return task.case.suite, task.arm
