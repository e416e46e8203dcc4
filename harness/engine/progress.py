"""How far a sweep is: a bar with the time left on a terminal, lines in a log.

Units are the cases that are timed, and the runs of trial suites. The time left is the sum of what each stage that is to come
costs (`harness.engine.stages`), so it moves within a case: with each arm that is built, compiled and checked.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.engine.stages import LATE, Costs, Frame, Item, Stage, StageKind, Work, item_of
from harness.machine.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from harness.engine.plan import PlannedCase
    from harness.engine.tasks import Task
    from harness.store.case import Case

LOG_S = 30.0  # between two lines about what is under way
BEGIN_S = 1.0  # between two lines where one unit after the other begins
REFRESH_HZ = 2.0  # of the bar: drawing takes a core from what is measured


Show = Callable[[Frame, bool], None]  # what there is, and whether a unit begins


@dataclass(slots=True)
class _Open:
    """A unit under way."""

    todo: Counter[Item]
    whole_s: float  # as expected when it began
    now: Item | None = None
    count: int = 0  # pieces of `now`: arms that are timed together
    since: float = 0.0
    first_step: tuple[int, float] = (
        0,
        0.0,
    )  # steps done, when: what lies before the first step is no step's time
    steps: tuple[int, int] = field(default=(0, 0))


class Progress:
    """Count and show cases, stages and steps.

    Args:
        units: all tasks that will be done.
        costs: of their stages.
        show: takes what there is to show.
        places: cases that are timed at once.
        lanes: runs of trial suites at once.
        clock: seconds.
    """

    def __init__(
        self,
        units: Sequence[Task],
        costs: Costs,
        show: Show = lambda frame, begins: None,
        places: int = 1,
        lanes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._costs, self._show, self._clock = len(units), costs, show, clock
        self._at_once = {False: max(places, 1), True: max(lanes, 1)}
        self._waiting = Counter[tuple[Item, bool]]()
        for unit in units:
            self._waiting.update(
                {(item, bool(unit.arm)): n for item, n in _work(unit.planned, unit.arm).items()}
            )
        self._open: dict[tuple[Case, str], _Open] = {}
        self._begun = self._ended = 0
        self._share = 0.0
        self._started = clock()
        self._where = self._stage = ""
        self._lock = threading.RLock()  # the bar is drawn by a thread of its own

    @classmethod
    @contextmanager
    def on(
        cls,
        console: Console,
        units: Sequence[Task],
        costs: Costs,
        note: Show = lambda frame, begins: None,
        quiet: bool = False,
        places: int = 1,
        lanes: int = 1,
    ) -> Iterator[Progress]:
        """A bar where the console is a terminal; else a line for units that start, and one every 30 s.

        Args:
            console: where it is shown.
            units: all tasks that will be done.
            costs: of their stages.
            note: always gets what the console shows.
            quiet: show nothing.
            places: cases that are timed at once.
            lanes: runs of trial suites at once.
        """
        if quiet:
            yield cls(units, costs, note, places, lanes)
        elif not console.is_terminal or console.is_dumb_terminal:
            log = _Log(console)

            def both(frame: Frame, begins: bool) -> None:
                log(frame, begins)
                note(frame, begins)

            yield cls(units, costs, both, places, lanes)
        else:
            progress = cls(units, costs, note, places, lanes)
            with Live(
                Display(progress.frame),
                console=console,
                transient=True,
                refresh_per_second=REFRESH_HZ,
                redirect_stderr=False,
            ):
                yield progress

    def case(self, planned: PlannedCase) -> None:
        """A case that is timed begins."""
        self._begin(planned, "", f"{planned.case}")

    def step(self, task: Task, done: int, total: int) -> None:
        """A run begins (0 of 0), or has made some of its steps."""
        with self._lock:
            begins = (task.case, task.arm) not in self._open
            if begins:
                seed = next((f" seed={value}" for name, value in task.case.axes if name == "seed"), "")
                self._begin(task.planned, task.arm, f"{task.case.suite} {task.arm}{seed}")
            unit = self._open[task.case, task.arm]
            if unit.steps[0] == 0 < done:
                unit.first_step = done, self._clock()
            unit.steps = done, total
            self._stage = f"step {done}/{total} of {task.arm}" if total else f"starting {task.arm}"
            if not begins:
                self._show(self.frame(), False)

    def stage(self, task: Task, stage: Stage) -> None:
        """A stage of a case that is timed begins."""
        with self._lock:
            unit = self._open.get((task.case, task.arm))
            if unit is not None and stage.kind is StageKind.BUILD:
                self._next(unit, item_of(task.case.suite, Work.READY, stage.arm), 1)
            elif unit is not None and stage.kind is StageKind.WARM_UP:
                item = Item(task.case.suite, Work.TIME)
                self._next(unit, item, max(unit.todo[item], 1))
            self._stage = str(stage)
            self._show(self.frame(), False)

    def end(self, task: Task) -> None:
        """The rows of a unit are stored."""
        with self._lock:
            unit = self._open.pop((task.case, task.arm), None)
            if unit is None:
                return
            self._ended += 1
            if (
                unit.now is not None and unit.now.work is not Work.READY
            ):  # one that ended in between was cut short
                self._costs.learn(unit.now, (self._clock() - unit.since) / max(unit.count, 1))
            self._stage = ""

    def frame(self) -> Frame:
        """What there is to show now."""
        with self._lock:
            now = self._clock()
            partial = sum(
                1 - min(self._left(u, now) / u.whole_s, 1.0) for u in self._open.values() if u.whole_s
            )
            # A cost that proves higher than expected takes nothing back.
            self._share = max(self._share, min((self._ended + partial) / max(self._total, 1), 1.0))
            return Frame(self._where, self._stage, self._share, now - self._started, self._left_s(now))

    def _begin(self, planned: PlannedCase, arm: str, text: str) -> None:
        with self._lock:
            self._begun += 1
            todo = _work(planned, arm)
            self._waiting -= Counter({(item, bool(arm)): n for item, n in todo.items()})
            unit = _Open(todo, sum(n * self._costs.expected(item) for item, n in todo.items()))
            self._open[planned.case, arm] = unit
            if arm:
                self._next(unit, item_of(planned.case.suite, Work.RUN, arm), 1)
            self._where, self._stage = f"[{self._begun}/{self._total}] {text}", ""
            self._show(self.frame(), True)

    def _next(self, unit: _Open, item: Item, count: int) -> None:
        """Another piece of a unit begins; what the one before has taken is learned."""
        now = self._clock()
        if unit.now is not None:
            self._costs.learn(unit.now, (now - unit.since) / max(unit.count, 1))
        unit.now, unit.count, unit.since = item, count, now
        unit.todo -= Counter({item: count})

    def _left(self, unit: _Open, now: float) -> float:
        """Seconds of a unit under way that are to come."""
        left = sum(n * self._costs.expected(item) for item, n in unit.todo.items())
        if unit.now is None:
            return left
        (done, total), (first, when), age = unit.steps, unit.first_step, now - unit.since
        if 0 < first < done:
            return left + (now - when) / (done - first) * (total - done)
        return left + max(unit.count * self._costs.expected(unit.now) - age, LATE * age)

    def _left_s(self, now: float) -> float:
        """Seconds until the end: timed cases and runs of trial suites follow one another, each so many at once."""
        whole = 0.0
        for is_run, at_once in self._at_once.items():
            waiting = sum(
                n * self._costs.expected(i) for (i, run), n in self._waiting.items() if run is is_run
            )
            under_way = [
                self._left(unit, now) for (_, arm), unit in self._open.items() if bool(arm) is is_run
            ]
            whole += max((waiting + sum(under_way)) / at_once, max(under_way, default=0.0))
        return whole


def _work(planned: PlannedCase, arm: str) -> Counter[Item]:
    """The pieces of work of a unit."""
    suite = planned.case.suite
    if arm:
        return Counter([item_of(suite, Work.RUN, arm)])
    ready = Counter(item_of(suite, Work.READY, name) for name in planned.runnable)
    return ready + Counter({Item(suite, Work.TIME): len(planned.runnable)})


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
        grid.add_row(
            ProgressBar(total=1.0, completed=frame.bar),
            f"{100 * frame.bar:.0f}%",
            clock_time(frame.elapsed_s),
            f"about {clock_time(frame.left_s)} left",
        )
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

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last = float("-inf")

    def __call__(self, frame: Frame, begins: bool) -> None:
        now = self._clock()
        if now - self._last < (BEGIN_S if begins else LOG_S):
            return
        self._last = now
        left = f", {100 * frame.bar:.0f} % of the time is over, about {frame.left_s:.0f} s left"
        self._console.print(
            printable(frame.text) + (left if frame.elapsed_s >= 1 else ""),
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
