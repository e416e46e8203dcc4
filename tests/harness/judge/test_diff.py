"""diff of two runs. Oracles: scipy's Welch interval; invented runs of which is known what was changed."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import scipy.stats
from report_cases import gpu_run
from report_fixtures import CPU, TIMING, frame, write_run
from stored import row

from harness.__main__ import main
from harness.judge.diff import CLOCK, CONTROL, HOST, KERNEL, Resolved, changes
from harness.store.case import Case
from harness.store.stats import unpaired

if TYPE_CHECKING:
    from pathlib import Path

    from harness.judge.diff import RunChanges, Timed
    from harness.store.measurement import Measurement

CASE = Case.of("train", {"model": "gpt2", "batch": 8})
OTHER = Case.of("train", {"model": "gpt2", "batch": 16})


def values(level: float, spread: float = 0.003, n: int = 8, seed: int = 0) -> tuple[float, ...]:
    rng = random.Random(f"{level}/{seed}")
    return tuple(level * math.exp(rng.gauss(0, spread)) for _ in range(n))


def timed(arm: str, ms: float, baseline: str = "", case: Case = CASE, **more: object) -> Measurement:
    samples = more.pop("samples", None) or values(ms)
    return row(case, arm, samples, baseline=baseline, **({"timing": TIMING} | more))


def kernels(arm: str, part: str, ms: float) -> Measurement:
    return row(CASE, arm, [ms], "kernel_time_ms", part=part)


def compared(tmp_path: Path, before: list[Measurement], after: list[Measurement]) -> RunChanges:
    return changes(frame(tmp_path / "a", before), frame(tmp_path / "b", after))


def only(found: RunChanges, arm: str) -> Timed:
    (one,) = (t for t in found.times if t.arm == arm)
    return one


def test_the_interval_is_welch_s() -> None:
    """scipy.stats.ttest_ind(equal_var=False) on logarithms; degrees of freedom are rounded down, so ours is no narrower."""
    a, b = values(1.0, 0.05, 9), values(1.2, 0.02, 6, seed=1)
    effect = unpaired(a, b)
    welch = scipy.stats.ttest_ind([math.log(x) for x in b], [math.log(x) for x in a], equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert effect.ratio == pytest.approx(math.exp(welch.statistic * welch._standard_error))
    assert effect.log_low <= interval.low
    assert effect.log_high >= interval.high
    assert effect.log_high - effect.log_low == pytest.approx(interval.high - interval.low, rel=0.03)
    alone = unpaired([1.0], [2.0])
    assert (alone.ratio, alone.low, alone.high, alone.direction) == (2.0, 0.0, math.inf, "unclear")


def test_a_difference_within_a_run_s_own_noise_is_none(tmp_path: Path) -> None:
    """The A/A control of the first run says that two equal arms may seem 8 % apart."""
    before = [
        timed("bf16_eager", 10.0),
        timed("bf16_eager:again", 10.8, "bf16_eager"),
        timed("a_eager", 8.0, "bf16_eager"),
    ]
    after = [timed("bf16_eager", 10.5), timed("a_eager", 9.0, "bf16_eager")]
    found = compared(tmp_path, before, after)
    assert only(found, "bf16_eager").verdict == "same"
    assert only(found, "a_eager").verdict == "slower", "12 % is more than 8"


def test_the_clock_is_blamed_where_cycles_are_equal_and_the_machine_where_the_baseline_moved_as_far(
    tmp_path: Path,
) -> None:
    """20 % longer at 1/1.2 of the clock; the same slow-down at the same clock is not the clock's."""
    fast, slow = ({"sample_clock_mhz": (mhz,) * 8} for mhz in (1800.0, 1500.0))
    for i, (after, cause) in enumerate(((slow, CLOCK), (fast, ""))):
        found = compared(
            tmp_path / str(i), [timed("a_eager", 10.0, **fast)], [timed("a_eager", 12.0, **after)]
        )
        assert only(found, "a_eager").cause == cause
    before = [timed("bf16_eager", 10.0), timed("a_eager", 8.0, "bf16_eager")]
    later = [timed("bf16_eager", 12.0), timed("a_eager", 9.6, "bf16_eager")]
    found = compared(tmp_path, before, later)
    assert {t.arm: t.cause for t in found.times} == {"a_eager": CONTROL, "bf16_eager": ""}


def test_two_times_of_an_arm_keep_their_own_rows(tmp_path: Path) -> None:
    """Its launches take twice as long at an equal clock, while its time is as many cycles as before."""
    clocks = ((1800.0,) * 8, (1500.0,) * 8)
    runs = []
    for ms, us, clock in ((10.0, 5.0, clocks[0]), (12.0, 10.0, clocks[1])):
        launch = replace(timed("a_eager", us), metric="launch_us", sample_clock_mhz=(1800.0,) * 8)
        runs.append([launch, timed("a_eager", ms, sample_clock_mhz=clock)])
    found = {t.metric: t for t in compared(tmp_path, *runs).times}
    assert found["time_ms"].cause == CLOCK
    assert found["launch_us"].cause == ""
    assert found["launch_us"].ratio == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("total", "cast", "gemm", "cause"),
    [
        (12.0, 4.0, 5.0, KERNEL),
        (12.0, 2.0, 5.0, HOST),
        (12.0, 1.0, 4.0, HOST),  # its kernels gained
        (8.0, 0.5, 4.5, KERNEL),  # what is gained is explained as what is lost
    ],
)
def test_where_a_profiled_step_s_time_went(
    tmp_path: Path, total: float, cast: float, gemm: float, cause: str
) -> None:
    before = [timed("a_eager", 10.0), kernels("a_eager", "cast", 2.0), kernels("a_eager", "fp8_gemm", 5.0)]
    after = [timed("a_eager", total), kernels("a_eager", "cast", cast), kernels("a_eager", "fp8_gemm", gemm)]
    found = compared(tmp_path, before, after)
    assert only(found, "a_eager").cause == cause
    moved = {"cast": cast - 2.0, "fp8_gemm": gemm - 5.0}
    assert {p.part: p.after - p.before for p in found.parts} == moved
    lines = [line for table in found.tables() for line in table.rows if len(line) == 6]
    assert {line[2].text: float(line[-1].text) for line in lines} == {
        part: by for part, by in moved.items() if by
    }


def test_what_ran_and_what_is_missing(tmp_path: Path) -> None:
    failed = row(CASE, "b_eager", reason="out of memory: 9 GiB")
    before = [
        timed("a_eager", 1.0, resolved={"kernels": ["x"], "recipe": "tensorwise", "first_loss": 1.0}),
        timed("b_eager", 1.0),
        timed("gone_eager", 1.0),
    ]
    after = [
        timed("a_eager", 1.0, resolved={"kernels": ["y"], "recipe": "tensorwise", "first_loss": 2.0}),
        failed,
        timed("new_eager", 1.0, case=OTHER),
    ]
    found = compared(tmp_path, before, after)
    assert found.resolved == (Resolved("train", "a_eager", "kernels", ["x"], ["y"], 1),), "a loss is a result"
    assert found.broken == (("train", CASE.case_id, "b_eager", "failed: out of memory: 9 GiB"),)
    assert found.only_before == (("train", CASE.case_id, "gone_eager"),)
    assert found.only_after == (("train", OTHER.case_id, "new_eager"),)


def test_other_figures_that_moved(tmp_path: Path) -> None:
    def memory(size: float) -> list[Measurement]:
        same = row(CASE, "a", [28.0], "sqnr_db")
        return [
            row(CASE, "a", [size], "peak_memory_bytes"),
            same,
        ]

    found = compared(tmp_path, memory(1e9), memory(2e9))
    assert found.figures == (("train", CASE.case_id, "a", "peak_memory_bytes", 1e9, 2e9),)


def test_the_command_shows_and_writes_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = gpu_run(tmp_path / "results" / "gemm" / "one")
    other = write_run(tmp_path / "results" / "gemm" / "two", [[timed("a_eager", 1.0)]], env=CPU, run_id="two")
    assert main(["diff", str(one), str(one)]) == 0
    text = capsys.readouterr().out
    assert "slower" not in text
    assert main(["diff", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert "its times decide nothing about a GPU" in " ".join(text.split())
    assert main(["diff", str(tmp_path / "results"), str(other)]) == 2, (
        "the last row of several runs would stand for all"
    )
    assert "2 runs: name one" in capsys.readouterr().err
    assert main(["diff", "one", "two", f"results_dir={tmp_path / 'results'}", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["device"] == ["cuda", "cpu"]
    assert (found["times"], found["cpu"]) == ([], True)


def test_a_page_has_both_runs_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the figures that were planted; text from outside is no markup."""
    steps = tuple(range(5))
    for name, ms, level in (("a", 10.0, 3.0), ("b", 12.0, 2.0)):
        curve = replace(
            timed("<b>base</b>", ms), metric="loss", regime="", timing={}, rounds=steps,
            samples=tuple(level - 0.1 * i for i in steps),
        )  # fmt: skip
        write_run(tmp_path / name, [[timed("<b>base</b>", ms), curve]], env=CPU)
    page = tmp_path / "page.html"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(page)]) == 0
    text = page.read_text()
    assert [each.split('"')[0] for each in text.split('<figure id="')[1:]] == ["f-curve-loss"]
    assert "slower" in text
    assert "<b>base" not in text
    assert str(tmp_path) not in text
    capsys.readouterr()
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path)]) == 2
    assert "cannot write" in capsys.readouterr().err
