"""Oracle: each way of seeming fast, brought by an installed package, gets no speed and the cause that was seen; an honest twin does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ways import GPU_WAYS, WAYS, Way

from harness import store
from harness.engine import arm_process
from harness.engine.arm_process import _Held
from harness.store.case import Case
from harness.store.errors import Cause
from harness.suites import gemm
from harness.timing.timers import CpuTimer
from harness.timing.workload import Numerics, Workload

SIZES = ["axes.M=64", "axes.K=128", "device=cpu"]
GEMM = ["sweep=gemm", "shapes=[]"]
SWEEPS = {  # by the part of a peer that they time
    "gemm": [*GEMM, "axes.N=64", *SIZES],
    "linear": ["sweep=linear", "shapes=[]", "axes.N=64", *SIZES],
    "cast": ["sweep=cast", "axes.dtype=[e4m3fn]", "axes.granularity=[tensorwise]", "axes.src=[bf16]", *SIZES],
}
BRIEF = ["timing.min_seconds=0.02", "timing.max_seconds=0.05", "report=false"]


Answers = dict[str, dict[str, tuple[str, str]]]  # part -> way -> status and cause of its time


def measured(folder: Path, ways: dict[str, Way], sweeps: dict[str, list[str]]) -> Answers:
    """All parts by one process: the package's arms are read as the suites are imported."""
    names = {
        part: [f"honest_{part}", *(name for name, way in ways.items() if way.part == part)] for part in sweeps
    }
    package = folder / "site" / "cheats-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cheats\nVersion: 1.0\n")
    points = "\n".join(f"{name} = ways:{name}" for of_part in names.values() for name in of_part)
    (package / "entry_points.txt").write_text(f"[fp8_harness.peers]\n{points}\n")
    ends = {
        part: ("_eager", "eager") if part == "cast" else ("_tensorwise_eager", "bf16_eager") for part in names
    }
    commands = []
    for part, (tail, base) in ends.items():
        arms = f"arms=[{','.join([base, *(name + tail for name in names[part])])}]"
        commands.append([*sweeps[part], arms, *BRIEF, f"results_dir={folder}/results"])
    path = os.pathsep.join(
        [str(package.parent), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    code = f"from harness.__main__ import main\nassert [main(words) for words in {commands}] == {[1] * len(commands)}"
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answers: Answers = {}
    for part, (tail, _) in ends.items():
        (run,) = (folder / "results" / part).iterdir()
        frame = store.read(run)
        times = frame[(frame["metric"] == "time_ms") & frame["arm"].str.removesuffix(tail).isin(names[part])]
        ways_of_arms = times["arm"].str.removesuffix(tail)
        answers[part] = dict(
            zip(ways_of_arms, zip(times["status"], times["cause"], strict=True), strict=True)
        )
    return answers


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return measured(tmp_path_factory.mktemp("cheats"), WAYS, SWEEPS)


@pytest.mark.parametrize("part", SWEEPS)
def test_no_way_gets_a_speed(part: str, on_the_cpu: Answers) -> None:
    none_gets_a_speed(on_the_cpu[part], part, WAYS)


@pytest.mark.gpu
def test_no_way_gets_a_speed_on_a_gpu(tmp_path: Path) -> None:
    """The products take longer than a host needs to see that the device is idle."""
    words = [*GEMM, "axes.M=8192", "axes.K=8192", "axes.N=8192", "device=cuda"]
    none_gets_a_speed(measured(tmp_path, GPU_WAYS, {"gemm": words})["gemm"], "gemm", GPU_WAYS)


def none_gets_a_speed(found: dict[str, tuple[str, str]], part: str, ways: dict[str, Way]) -> None:
    """Each way has failed, by one of its causes; the honest twin has not."""
    assert found.pop(f"honest_{part}") == ("ok", "")
    wanted = {name: way.causes for name, way in ways.items() if way.part == part}
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(wanted, "failed")
    assert not {name: cause for name, (_, cause) in found.items() if cause not in wanted[name]}


def small_gemm() -> Workload:
    names = {"shape_set": "custom", "layer": "custom", "role": "output", "data": "randn"}
    return gemm.build(Case.of("gemm", {**names, "M": 16, "K": 16, "N": 16}, 0), "bf16_eager", "cpu")


def test_an_output_is_kept_of_any_number_of_calls_and_none_is_no_proof() -> None:
    """Oracle: none; more samples than operand sets were made for lost the output that was to be compared."""
    held = _Held(small_gemm(), CpuTimer(), "cpu")
    for calls in range(1, 8):
        for n in (1, 65, 100):
            assert len(held.take("run", held.timer.block, n, calls)) == n
            assert held.outputs["run"] is not None
    assert held.unproven() == ("", Cause.NONE)
    held.fastest_ms = 0.0
    assert held._look()[1] is Cause.TOO_FAST
    held.outputs["run"] = None
    assert held.unproven()[1] is Cause.UNPROVEN


class SideStream(CpuTimer):
    """A device that works on for `busy_s` after each call, of which the events of the current stream say `sample_ms`."""

    method = "cuda_events"

    def __init__(self, busy_s: float, sample_ms: float) -> None:
        super().__init__()
        self.busy_s, self.sample_ms, self.calls = busy_s, sample_ms, 0

    def block(self, fn: Callable[[], object], n: int, calls: int = 1, probe: Any = None) -> list[float]:
        super().block(fn, n, calls, probe)
        return [self.sample_ms] * n

    def synchronize(self) -> None:
        self.calls += 1
        if self.busy_s and self.calls % 2 == 0:  # the one before a call finds it idle
            time.sleep(self.busy_s)


@pytest.mark.parametrize(
    ("busy_s", "sample_ms", "cause"),
    [
        (0.02, 0.2, Cause.DEFERRED),
        (0.02, 20.0, Cause.NONE),
        (0.0, 0.2, Cause.NONE),
    ],
)
def test_work_that_the_clocks_stream_does_not_see_is_no_speed(
    busy_s: float, sample_ms: float, cause: Cause, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: how long the device is busy, which the fake one is told."""
    held = _Held(replace(small_gemm(), flops={}), SideStream(busy_s, sample_ms), "cpu")
    monkeypatch.setitem(arm_process._held, "arm", held)
    for _ in range(3):
        arm_process.sample(print, "arm", "run", "block", 2, 1, 0, on_host=False, rotating=False, split=False)
    assert held.unproven()[1] is cause


def test_no_step_is_taken_only_to_look_where_a_call_ends_before_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Oracle: the count of calls. A call of an arm on ranks of GPUs is a whole step of all of them."""
    called: list[int] = []
    timer = CpuTimer()
    timer.method = "cuda_events_ranks"
    held = _Held(Workload(run=lambda: called.append(1), check=lambda: Numerics({})), timer, "cpu")
    monkeypatch.setitem(arm_process._held, "arm", held)
    arm_process.sample(print, "arm", "run", "block", 2, 1, 1, on_host=False, rotating=False, split=False)
    assert len(called) == 3
