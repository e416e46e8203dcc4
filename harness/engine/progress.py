"""How far a sweep is: a bar with the time left on a terminal, lines in a log.

Units are the cases that are timed, and the runs of trial suites. A unit counts as far as it is: an arm that is ready is half of
its share of a case, the timing is the other half. The time left is what the rest takes at the speed so far.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.engine.stages import Frame, Mark, Stage, StageKind, Steps
from harness.machine.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, ConsoleOptions, RenderResult

    from harness.engine.tasks import Task
    from harness.store.case import Case

LOG_S = 30.0  # between two lines about what is under way
BEGIN_S = 1.0  # between two lines where one unit after the other begins
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
        self._lock = threading.RLock()  # the bar is drawn by a thread of its own

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
        is_bar = console.is_terminal and not console.is_dumb_terminal
        log = _Log(console)

        def show(frame: Frame, begins: bool) -> None:
            if not quiet and not is_bar:
                log(frame, begins)
            note(frame, begins)

        progress = cls(total, show)
        if quiet or not is_bar:
            yield progress
            return
        bar = Display(progress.frame)
        with Live(bar, console=console, transient=True, refresh_per_second=REFRESH_HZ, redirect_stderr=False):
            yield progress

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


class Display:
    """Two lines for a terminal of any width: bar and times, which are always whole, and the stage with its case, cut to fit."""

    def __init__(self, frame: Callable[[], Frame]) -> None:
        self._frame = frame

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        frame = self._frame()
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1)
        for _ in range(3):
            grid.add_column(no_wrap=True, justify="right")
        left = "" if frame.left_s is None else f"about {clock_time(frame.left_s)} left"
        bar = ProgressBar(total=1.0, completed=frame.share)
        grid.add_row(bar, f"{100 * frame.share:.0f}%", clock_time(frame.elapsed_s), left)
        yield grid
        words = " ".join(filter(None, (frame.stage, frame.where)))
        yield Text(printable(words), no_wrap=True, overflow="ellipsis")


def clock_time(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock_time(65), clock_time(100_000)
    ('0:01:05', '27:46:40')
    """
    whole = round(max(seconds, 0.0))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class _Log:
    """Lines for a file: when a unit begins, and of what is under way now and then, with the time left."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, float("-inf")

    def __call__(self, frame: Frame, begins: bool) -> None:
        now = time.monotonic()
        if now - self._last < (BEGIN_S if begins else LOG_S):
            return
        self._last = now
        left = f", {100 * frame.share:.0f} % is done, about {frame.left_s:.0f} s left" if frame.left_s else ""
        text = printable(frame.text) + (left if frame.elapsed_s >= 1 else "")
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
