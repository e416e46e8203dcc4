"""How far a sweep is: a bar with the time left on a terminal, lines in a log.

Units are the cases that are timed, and the runs of trial suites. A unit counts as far as it is: an arm that is ready is half of
its share of a case, the timing is the other half. The time left is what the rest takes at the speed so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column

from harness.engine.stages import Frame, Mark, Stage, StageKind, Steps
from harness.machine.terminal import printable
from harness.store.text import done

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        total: tasks that will be done.
        show: takes what there is to show.
        clock: seconds.
    """

    def __init__(
        self,
        total: int,
        show: Show = lambda frame, begins: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._show, self._clock = total, show, clock
        self._open: dict[tuple[Case, str], float] = {}  # how much of each is done
        self._begun = self._ended = 0
        self._started = clock()
        self._where = self._stage = ""
        self._lock = threading.RLock()  # lanes are threads

    @classmethod
    @contextmanager
    def on(
        cls, console: Console, total: int, note: Show = lambda frame, begins: None, quiet: bool = False
    ) -> Iterator[Progress]:
        """A bar where the console is a terminal; else a line for units that start, and one every 30 s.

        Args:
            console: where it is shown.
            total: tasks that will be done.
            note: always gets what the console shows.
            quiet: show nothing.
        """
        last, bar, shown = float("-inf"), None, TaskID(0)
        if console.is_terminal and not console.is_dumb_terminal and not quiet:
            words = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
            columns = words, BarColumn(BAR), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
            bar = Bar(
                *columns, console=console, transient=True, expand=True, redirect_stderr=False,
                refresh_per_second=REFRESH_HZ,
            )  # fmt: skip
            shown = bar.add_task("", total=1.0)

        def show(frame: Frame, begins: bool) -> None:
            nonlocal last
            note(frame, begins)
            if bar is not None:
                text = printable(" ".join(filter(None, (frame.stage, frame.where))))
                bar.update(shown, completed=frame.share, description=text)
                return
            now = time.monotonic()
            if quiet or now - last < (BEGIN_S if begins else LOG_S):
                return
            last, text = now, printable(frame.text)
            if frame.left_s and frame.elapsed_s >= 1:
                text += f", {done(frame.share)} is done, about {frame.left_s:.0f} s left"
            console.print(text, highlight=False, markup=False, soft_wrap=True)

        with bar or nullcontext():
            yield cls(total, show)

    def take(self, task: Task, what: object) -> None:
        """Something happens to a case or run."""
        key = task.case, task.arm
        with self._lock:
            if what is Mark.BEGUN:
                self._begun += 1
                seed = next((f" seed={value}" for name, value in task.case.axes if name == "seed"), "")
                text = f"{task.case.suite} {task.arm}{seed}" if task.arm else f"{task.case}"
                self._where, self._stage = f"[{self._begun}/{self._total}] {text}", ""
                self._open[key] = 0.0
            elif what is Mark.ENDED:
                self._ended += self._open.pop(key, None) is not None
                self._stage = ""
                return
            elif isinstance(what, Steps):
                self._move(key, what.done / max(what.total, 1))
                self._stage = f"step {what.done}/{what.total} of {task.arm}"
            elif isinstance(what, Stage):
                arms = task.planned.runnable
                if what.kind in _OF_ARM:
                    self._move(key, (arms.index(what.arm) + _OF_ARM[what.kind]) / (2 * len(arms)))
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
            return Frame(self._where, self._stage, share, self._clock() - self._started)
