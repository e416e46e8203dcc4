"""What a reader sees of a sweep under way. Oracles: sums by hand, and what rich draws for a terminal of a known width."""

from __future__ import annotations

import io
import itertools
import re
from random import Random

import pytest
from rich.console import Console
from toy import ToySuite

from harness.engine.plan import PlannedCase, Task
from harness.engine.progress import Progress
from harness.engine.stages import Mark, Stage, StageKind, Steps
from harness.store.case import Case


def task(n: int = 1, arms: tuple[str, ...] = ("base", "other"), arm: str = "") -> Task:
    return Task(PlannedCase("p", ToySuite(), Case("toy", (("n", n), ("seed", 3)), 3), arms), arm)


def test_the_share_moves_with_each_stage_and_the_time_left_follows_from_it() -> None:
    """Two cases of two arms: an arm that is ready is an eighth of all; a second try takes nothing back."""
    now = [0.0]
    progress = Progress([task(1), task(2)], clock=lambda: now[0])
    assert progress.frame().left == ""
    moves: list[tuple[object, float]] = [
        (Mark.BEGUN, 0.0),
        (Stage(StageKind.BUILD, "base"), 0.0),
        (Stage(StageKind.CHECK, "base"), 0.025),  # nothing was compiled: most of it is still to come
        (Stage(StageKind.BUILD, "other"), 0.125),
        (Stage(StageKind.COMPILE, "other"), 0.15),
        (Stage(StageKind.CHECK, "other"), 0.225),
        (Stage(StageKind.BUILD, "base"), 0.225),
        (Stage(StageKind.WARM_UP), 0.25),
        (Stage(StageKind.TIME), 0.3),
        (Mark.ENDED, 0.5),
    ]
    for what, share in moves:
        now[0] = 80.0 * share
        progress.take(task(), what)
        assert progress.frame().share == pytest.approx(share), what
    assert progress.frame().left_s == pytest.approx(40.0)


def test_steps_of_a_run_move_it() -> None:
    run, now = task(arm="rowwise_compile"), [0.0]
    progress = Progress([run], clock=lambda: now[0])
    progress.take(run, Mark.BEGUN)
    now[0] = 10.0
    progress.take(run, Steps(25, 100))
    assert progress.frame().left_s == pytest.approx(30.0)
    assert progress.frame().text == "[1/1] toy rowwise_compile seed=3: step 25/100 of rowwise_compile"


@pytest.mark.parametrize("seed", range(20))
def test_the_time_left_is_that_of_the_same_arms_and_does_not_rise_all_the_way(seed: int) -> None:
    """Oracle: the drawn times themselves. Arms of very different times, the slow ones last in each case, as emulations are."""
    random, now = Random(seed), [0.0]
    pace = {"base": 1.0, "fp8": random.uniform(1.0, 3.0), "emulated": random.uniform(8.0, 20.0)}
    runs = [task(n, tuple(pace), arm) for n in range(8) for arm in pace]
    course = [random.lognormvariate(0.0, 0.1) * pace[run.arm] for run in runs]
    progress = Progress(runs, clock=lambda: now[0])
    errors, told = list[float](), list[float]()
    for i, (run, seconds) in enumerate(zip(runs, course, strict=True)):
        progress.take(run, Mark.BEGUN)
        if i >= len(pace):
            left, true = progress.frame().left_s, sum(course[i:])
            errors.append(abs(left - true) / true)
            told.append(left)
        progress.take(run, Steps(1, 100))
        now[0] += seconds
        progress.take(run, Mark.ENDED)
    assert max(errors[: len(errors) // 2]) < 0.25, "after one case every arm's own time is known"
    assert sum(late > early for early, late in itertools.pairwise(told)) <= len(told) / 4
    assert told[-1] < told[0] / 4


def test_two_lanes_halve_it_and_an_arm_that_never_ran_takes_what_its_suite_does() -> None:
    """Oracle: by hand, one of three runs is left, of 10 s as the first, and two lanes share it."""
    first, second, third = runs = [task(1, arm="base"), task(2, arm="base"), task(3, arm="fp8")]
    now = [0.0]
    progress = Progress(runs, clock=lambda: now[0])
    for run in (first, second):
        progress.take(run, Mark.BEGUN)
    progress.take(first, Steps(100, 100))
    now[0] = 10.0
    progress.take(first, Mark.ENDED)
    now[0] = 30.0
    progress.take(second, Mark.ENDED)  # without a step, and so without a time
    assert progress.frame().left_s == pytest.approx(5.0)
    progress.take(third, Mark.BEGUN)
    assert progress.frame().left_s == pytest.approx(5.0)


def test_a_run_that_takes_longer_than_those_before_it_tells_no_time_that_is_over() -> None:
    first, second = task(1, arm="base"), task(2, arm="base")
    now = [0.0]
    progress = Progress([first, second], clock=lambda: now[0])
    for run, at in ((first, 10.0), (second, 30.0)):
        progress.take(run, Mark.BEGUN)
        now[0] = at
        progress.take(run, Steps(50, 100))
        if run is first:
            progress.take(run, Mark.ENDED)
    assert progress.frame().left_s == pytest.approx(5.0), "half of a run of 10 s"


def test_runs_side_by_side_share_the_time_left() -> None:
    now = [0.0]
    progress = Progress([task(n) for n in range(4)], clock=lambda: now[0])
    for what in (Mark.BEGUN, Steps(1, 2)):
        for n in range(2):
            progress.take(task(n), what)
        now[0] += 10.0
    assert progress.frame().left_s == 60.0, "three runs of 40 s, two at a time"


@pytest.mark.parametrize("width", [60, 200])
def test_the_bar_of_a_terminal_fits_and_quiet_draws_none(width: int) -> None:
    for quiet in (False, True):
        out = io.StringIO()
        with Progress.on(
            Console(file=out, width=width, force_terminal=True), [task()], quiet=quiet
        ) as progress:
            progress.take(task(), Mark.BEGUN)
            progress.take(task(), Stage(StageKind.TIME))
        drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()
        assert all(len(line) <= width for line in drawn)
        assert any("60%" in line for line in drawn) is not quiet
        assert bool(out.getvalue()) is not quiet


def test_a_log_gets_plain_lines_at_intervals() -> None:
    """Sixty cases within a second: one line, without control characters."""
    out = io.StringIO()
    with Progress.on(Console(file=out, width=80), [task(n) for n in range(60)]) as progress:
        for n in range(60):
            for what in (Mark.BEGUN, Stage(StageKind.BUILD, "base"), Mark.ENDED):
                progress.take(task(n), what)
    assert out.getvalue().startswith("[1/60] toy[n=0")
    assert len(out.getvalue().splitlines()) == 1
    assert out.getvalue().removesuffix("\n").isprintable()
