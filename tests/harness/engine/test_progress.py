"""What a reader sees of a sweep under way. Oracles: sums by hand, and what rich draws for a terminal of a known width."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from toy import ToySuite

from harness.engine.plan import PlannedCase, Task
from harness.engine.progress import Progress
from harness.engine.stages import Mark, Stage, StageKind, Steps
from harness.store.case import Case

CLOCK = r"\d+:\d\d:\d\d"


def task(n: int = 1, arms: tuple[str, ...] = ("base", "other"), arm: str = "") -> Task:
    return Task(PlannedCase("p", ToySuite(), Case("toy", (("n", n), ("seed", 3)), 3), arms), arm)


def test_the_share_moves_with_each_stage_and_the_time_left_follows_from_it() -> None:
    """Two cases of two arms: an arm that is ready is an eighth of all; a second try takes nothing back."""
    now = [0.0]
    progress = Progress(2, clock=lambda: now[0])
    assert progress.frame().left_s is None
    moves: list[tuple[object, float]] = [
        (Mark.BEGUN, 0.0),
        (Stage(StageKind.BUILD, "base"), 0.0),
        (Stage(StageKind.BUILD, "other"), 0.125),
        (Stage(StageKind.CHECK, "other"), 0.225),
        (Stage(StageKind.BUILD, "base"), 0.225),
        (Stage(StageKind.WARM_UP), 0.25),
        (Stage(StageKind.TIME), 0.3),
        (Mark.ENDED, 0.5),
    ]
    for what, share in moves:
        progress.take(task(), what)
        assert progress.frame().share == pytest.approx(share), what
    now[0] = 40.0
    assert progress.frame().left_s == pytest.approx(40.0)


def test_steps_of_a_run_move_it() -> None:
    run, now = task(arm="rowwise_compile"), [0.0]
    progress = Progress(1, clock=lambda: now[0])
    progress.take(run, Mark.BEGUN)
    now[0] = 10.0
    progress.take(run, Steps(25, 100))
    assert progress.frame().left_s == pytest.approx(30.0)
    assert progress.frame().text == "[1/1] toy rowwise_compile seed=3: step 25/100 of rowwise_compile"


@pytest.mark.parametrize("width", [60, 200])
def test_the_bar_of_a_terminal_fits_and_quiet_draws_none(width: int) -> None:
    for quiet in (False, True):
        out = io.StringIO()
        with Progress.on(Console(file=out, width=width, force_terminal=True), 1, quiet=quiet) as progress:
            progress.take(task(), Mark.BEGUN)
            progress.take(task(), Stage(StageKind.TIME))
        drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()
        assert all(len(line) <= width for line in drawn)
        assert any("60%" in line for line in drawn) is not quiet
        assert bool(out.getvalue()) is not quiet


def test_a_log_gets_plain_lines_at_intervals() -> None:
    """Sixty cases within a second: one line, without control characters."""
    out = io.StringIO()
    with Progress.on(Console(file=out, width=80), 60) as progress:
        for n in range(60):
            for what in (Mark.BEGUN, Stage(StageKind.BUILD, "base"), Mark.ENDED):
                progress.take(task(n), what)
    assert out.getvalue().startswith("[1/60] toy[n=0")
    assert len(out.getvalue().splitlines()) == 1
    assert out.getvalue().removesuffix("\n").isprintable()
