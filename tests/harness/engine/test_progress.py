"""How far a sweep is. Oracles: rich on a terminal of 80 columns, and simulated sweeps whose end is known."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

import pytest
from rich.console import Console
from toy import ToySuite

from harness.engine.plan import PlannedCase
from harness.engine.progress import Display, Progress
from harness.engine.stages import Costs, Frame, Stage, StageKind
from harness.engine.tasks import Task
from harness.store.case import Case
from harness.timing.workload import ArmInfo

ARMS = ("bf16_eager", "bf16_compile", "rowwise_eager", "rowwise_compile")
READY_S = {"bf16_eager": 0.5, "bf16_compile": 12.0, "rowwise_eager": 1.0, "rowwise_compile": 20.0}
TIME_S = 8.0
LONG = "linear[K=14336 M=16384 N=14336 layer=mlp.down_proj model=llama3_405b shape_set=from_model]"
CLOCK = r"\d+:\d\d:\d\d"


@dataclass
class Simulated:
    """A sweep of timed cases whose stages take as long as they are told to; keeps the time left at each moment."""

    cases: int
    now: float = 0.0
    seen: list[tuple[float, Frame]] = field(default_factory=list)

    def run(self) -> None:
        suite = ToySuite(ARMS={name: ArmInfo("an arm") for name in ARMS})
        planned = [PlannedCase("p", suite, Case("toy", (("n", i),), 0), ARMS) for i in range(self.cases)]
        progress = Progress([Task(each) for each in planned], Costs(2.0), clock=lambda: self.now)
        self.look(progress)
        for each in planned:
            task = Task(each)
            progress.case(each)
            for arm in ARMS:
                progress.stage(task, Stage(StageKind.BUILD, arm))
                self.spend(progress, 0.1)
                if arm.endswith("compile"):
                    progress.stage(task, Stage(StageKind.COMPILE, arm))
                self.spend(progress, READY_S[arm] - 0.1)
            progress.stage(task, Stage(StageKind.WARM_UP))
            self.spend(progress, 1.0)
            progress.stage(task, Stage(StageKind.TIME))
            self.spend(progress, TIME_S - 1.0)
            progress.end(task)
            self.look(progress)

    def spend(self, progress: Progress, seconds: float) -> None:
        ends = self.now + seconds
        while self.now < ends - 1e-9:
            self.now = min(self.now + 0.5, ends)
            self.look(progress)

    def look(self, progress: Progress) -> None:
        self.seen.append((self.now, progress.frame()))


def test_the_time_left_is_right_once_a_case_is_done() -> None:
    """Every case takes 41.5 s, of which 32 are two compilations: after the first, the end is known within a tenth."""
    sweep = Simulated(cases=6)
    sweep.run()
    case_s = sum(READY_S.values()) + TIME_S
    assert sweep.now == pytest.approx(6 * case_s)
    later = [(now, frame) for now, frame in sweep.seen if now >= case_s]
    for now, frame in later:
        assert abs(now + frame.left_s - sweep.now) <= 0.1 * sweep.now, (now, frame)


def test_the_bar_never_stands_still_and_the_first_case_moves_it() -> None:
    """In the first case, which takes 41.5 s, the bar moves and the time left is within a factor of three of the truth."""
    sweep = Simulated(cases=1)
    sweep.run()
    bars = [frame.bar for _, frame in sweep.seen]
    assert bars[0] == 0.0
    assert bars[-1] == 1.0
    pairs = zip(bars, bars[20:], strict=False)  # 10 s apart
    assert all(after > before for before, after in pairs)
    for now, frame in sweep.seen:
        left = sweep.now - now
        if left > 10:
            assert left / 3 <= frame.left_s <= 3 * left, (now, frame)


def test_steps_of_a_run_give_its_time_left() -> None:
    """A first step of 30 s, which compiles, and 99 of 1 s: at the eleventh 89 s are left."""
    now = [0.0]
    planned = PlannedCase("p", ToySuite(), Case("toy", (("n", 1), ("seed", 3)), 3), ("rowwise_compile",))
    task = Task(planned, "rowwise_compile")
    progress = Progress([task], Costs(2.0), clock=lambda: now[0])
    progress.step(task, 0, 0)
    for done in range(1, 12):
        now[0] = 30.0 + done - 1
        progress.step(task, done, 100)
    assert progress.frame().left_s == pytest.approx(89.0)
    assert progress.frame().text == "[1/1] toy rowwise_compile seed=3: step 11/100 of rowwise_compile"


@pytest.mark.parametrize(("width", "elapsed_s"), [(80, 0.0), (60, 90_000.0), (200, 65.0)])
def test_each_frame_fits_and_holds_bar_elapsed_and_time_left(width: int, elapsed_s: float) -> None:
    """Rich draws for a terminal of so many columns; nothing wraps, the case is cut with an ellipsis."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="standard")
    frame = Frame(f"[3/12] {LONG}", "compiling rowwise_with_gw_hp_compile", 0.2, elapsed_s, 135.0)
    console.print(Display(lambda: frame))
    first, second = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert len(first) <= width
    assert len(second) <= width
    assert re.search(rf"━{{5,}}.* \d+% +{CLOCK} +about 0:02:15 left$", first), first
    assert second.startswith("compiling rowwise_with_gw_hp_compile [3/12] linear[K")
    assert ("…" in second) == (width < 200)


def test_the_bar_of_a_real_terminal_shows_the_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """`Progress.on` a console that says it is a terminal: what it writes holds bar, times and stage; quiet writes nothing."""
    planned = PlannedCase("p", ToySuite(), Case("toy", (("n", 1),), 0), ("base",))
    for quiet in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=80, force_terminal=True)
        with Progress.on(console, [Task(planned)], Costs(1.0), quiet=quiet) as progress:
            progress.case(planned)
            progress.stage(Task(planned), Stage(StageKind.BUILD, "base"))
        if quiet:
            assert out.getvalue() == ""
        else:
            assert "building base" in out.getvalue()
            assert "about 0:00:0" in out.getvalue()


def test_a_log_gets_plain_lines_at_intervals() -> None:
    """Sixty cases within a second: one line, without control characters."""
    out = io.StringIO()
    cases = [PlannedCase("p", ToySuite(), Case("toy", (("n", n),), 0), ("base",)) for n in range(60)]
    with Progress.on(Console(file=out, width=80), [Task(c) for c in cases], Costs(1.0)) as progress:
        for planned in cases:
            progress.case(planned)
            progress.stage(Task(planned), Stage(StageKind.BUILD, "base"))
            progress.end(Task(planned))
    assert out.getvalue().startswith("[1/60] toy[n=0]")
    assert len(out.getvalue().splitlines()) == 1
    assert out.getvalue().removesuffix("\n").isprintable()
