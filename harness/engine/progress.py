"""How far a sweep is: a bar with the time left on a terminal, lines in a log.

Units are the cases that are timed, and each run of a trial suite, whose steps count as parts of a unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from harness.engine.plan import PlannedCase
    from harness.engine.tasks import Task
    from harness.store.case import Case

Show = Callable[[str, float, bool], None]  # a line, the share of units that are done, whether a unit begins

LOG_S = 30.0  # between two lines about runs under way


class Progress:
    """Count and show cases and steps.

    Args:
        total: units in all.
        show: takes a line of text and the share of units that are done, counting steps.
    """

    def __init__(self, total: int, show: Show) -> None:
        self._total, self._show = total, show
        self._begun = 0
        self._shares: dict[tuple[Case, str], float] = {}  # of each run that has started

    @classmethod
    @contextmanager
    def on(
        cls, console: Console, total: int, note: Show = lambda text, share, begins: None, quiet: bool = False
    ) -> Iterator[Progress]:
        """A bar where the console is a terminal; else a line for each unit that starts, and one every 30 s.

        Args:
            console: where it is shown.
            total: units in all.
            note: always gets what the console shows.
            quiet: show nothing.
        """

        def both(show: Show) -> Show:
            def tell(text: str, share: float, begins: bool) -> None:
                show(text, share, begins)
                note(text, share, begins)

            return tell

        if quiet:
            yield cls(total, note)
            return
        if not console.is_terminal:
            yield cls(total, both(_Log(console)))
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        with Bar(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def show(text: str, share: float, begins: bool) -> None:
                bar.update(task, completed=share, description=text[:70])

            yield cls(total, both(show))

    def case(self, planned: PlannedCase) -> None:
        """A case that is timed begins; the one before it is done."""
        self._begun += 1
        done = (self._begun - 1) / max(self._total, 1)
        self._show(f"[{self._begun}/{self._total}] {planned.case}", done, True)

    def step(self, task: Task, done: int, total: int) -> None:
        """A run begins (0 of 0), or has made some of its steps."""
        key = task.case, task.arm
        begins = key not in self._shares
        if begins:
            self._begun += 1
        self._shares[key] = done / total if total else 0.0
        timed = self._begun - len(self._shares)
        share = (timed + sum(self._shares.values())) / max(self._total, 1)
        steps = f" step {done}/{total}" if total else ""
        seed = next((f" seed={value}" for name, value in task.case.axes if name == "seed"), "")
        self._show(f"[{self._begun}/{self._total}] {task.case.suite} {task.arm}{seed}{steps}", share, begins)


class _Log:
    """Lines for a file: whenever a unit begins, and of runs under way now and then, with the time left."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._started = self._last = clock()

    def __call__(self, text: str, share: float, begins: bool) -> None:
        now = self._clock()
        if not begins and now - self._last < LOG_S:
            return
        self._last = now
        left = (now - self._started) * (1 - share) / share if share > 0 else None
        ending = f", {100 * share:.0f} % done, {left:.0f} s left" if left is not None and not begins else ""
        self._console.print(text + ending, highlight=False, markup=False, soft_wrap=True)
