"""Situations of the gate: rows that cannot show that nothing regressed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from command_repo import FAKE, FEW, commit, fake_repository, gate, make_repository, package
from command_situations import SITUATIONS as COMMANDED
from curves_for_tests import control, rows_of_runs, shifted
from gate_fixtures import (
    ENV,
    POLICY,
    Times,
    control_row,
    failed_row,
    run,
    slowed,
    time_row,
    value_row,
    write,
)
from situations import Place, exit_code, situation

from harness.__main__ import main
from harness.gate import trees as work_trees
from harness.gate.command import VARIABLE, run_shell
from harness.gate.options import GateError
from harness.machine.environment import env_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from command_situations import Planted

    from harness.store.measurement import Measurement

of_gate = partial(exit_code, "gate")


def code(folder: Path, before: Sequence[Measurement], after: Sequence[Measurement], **more: Any) -> int:
    """Exit code of a gate over two sides."""
    try:
        return int(run(folder, before, after, **more).code)
    except GateError as error:
        return int(error.code)


def sound() -> tuple[list[Measurement], list[Measurement]]:
    before, after = slowed(1.0)
    return list(before), list(after)


def stored() -> tuple[list[Measurement], list[Measurement]]:
    """Two runs that were not measured together: figures, since no time of such runs is OK."""
    return [value_row(1, "sqnr_db", 28.5)], [value_row(1, "sqnr_db", 28.51)]


@of_gate(what="baseline and candidate are the same run", instead=2)
def one_run_twice(place: Place, planted: bool) -> object:
    for name, rows in zip("ab", stored(), strict=True):
        write(place.folder / name, rows, session="")
    return main(["gate", "--baseline", "a", "--candidate", "a" if planted else "b"])


@of_gate(what="the candidate is a copy of the baseline's folder", instead=2)
def copied_run(place: Place, planted: bool) -> object:
    before, after = stored()
    write(place.folder / "a", before, session="")
    if planted:
        shutil.copytree("a", "b")
    else:
        write(place.folder / "b", after, session="")
    return main(["gate", "--baseline", "a", "--candidate", "b"])


def benchmark_files(place: Place) -> tuple[list[str], list[str]]:
    """Eight pytest-benchmark files a side."""
    draw = np.random.default_rng(0)
    names: tuple[list[str], list[str]] = [], []
    for side, list_ in zip("ab", names, strict=True):
        for i in range(8):
            data = list(1e-3 * (1 + 0.003 * draw.standard_normal(20)))
            path = place.folder / f"{side}{i}.json"
            path.write_text(json.dumps({"benchmarks": [{"fullname": "t.py::x", "stats": {"data": data}}]}))
            list_.append(path.name)
    return names


@of_gate(what="pytest-benchmark files of one side stand on both", instead=2)
def files_on_both_sides(place: Place, planted: bool) -> object:
    before, after = benchmark_files(place)
    return main(["gate", "--baseline", *before, "--candidate", *(before if planted else after)])


@of_gate(what="eight copies of one pytest-benchmark file stand for eight processes", instead=2)
def copied_files(place: Place, planted: bool) -> object:
    before, after = benchmark_files(place)
    for name in after[1:] if planted else ():
        shutil.copy(after[0], name)
    return main(["gate", "--baseline", *before, "--candidate", *after])


@of_gate(what="the baseline is of another GPU", instead=3)
def another_gpu(place: Place, planted: bool) -> object:
    env = {**ENV, "gpu": "NVIDIA H100 80GB HBM3"} if planted else ENV
    assert (env_id(env) != env_id(ENV)) is planted
    return code(place.folder, *stored(), envs=(env, ENV), session="")


@of_gate(what="the baseline holds failed rows alone", instead=5)
def failed_baseline(place: Place, planted: bool) -> object:
    before, after = sound()
    return code(place.folder, [failed_row(1, "boom")] if planted else before, after)


@of_gate(what="every arm fails on both sides", instead=5)
def failed_on_both(place: Place, planted: bool) -> object:
    before, after = sound()
    return code(place.folder, *(([failed_row(1, "boom")],) * 2 if planted else (before, after)))


@of_gate(what="no case is common to both sides", instead=5)
def nothing_in_common(place: Place, planted: bool) -> object:
    before, after = sound()
    return code(place.folder, before, [time_row(2, Times()())] if planted else after)


@of_gate(what="every time is 0: the timer stood still", instead=6)
def times_of_zero(place: Place, planted: bool) -> object:
    before, after = sound()
    return code(place.folder, *(([time_row(1, [0.0] * 10)],) * 2 if planted else (before, after)))


@of_gate(what="the candidate's clock went backwards: negative times", instead=1)
def clock_backwards(place: Place, planted: bool) -> object:
    before, after = sound()
    return code(place.folder, before, [time_row(1, [-1.0] * 10)] if planted else after)


@of_gate(what="two rounds were measured", instead=6)
def two_rounds(place: Place, planted: bool) -> object:
    rows = [time_row(1, Times(seed=s, rounds=2 if planted else 10)()) for s in (0, 0)]
    times = Times(rounds=2 if planted else 10)
    return code(place.folder, [rows[0]], [time_row(1, times())])


@of_gate(what="rounds scatter by 40 %", instead=6)
def noisy(place: Place, planted: bool) -> object:
    before, after = slowed(1.0, spread=0.4 if planted else 0.005)
    return code(place.folder, before, after)


@of_gate(what="the control case moved by 10 %: the machine changed", instead=3)
def control_moved(place: Place, planted: bool) -> object:
    before, after = sound()
    steady = Times(seed=3)
    return code(
        place.folder,
        [*before, control_row(steady())],
        [*after, control_row(steady(1.1 if planted else 1.0))],
    )


@of_gate(what="each side was timed by a clock of its own", instead=6)
def two_clocks(place: Place, planted: bool) -> object:
    for name, rows in zip("ab", sound(), strict=True):
        write(place.folder / name, rows, alone="clocks" if planted else "sweeps")
    return main(["gate", "--baseline", "a", "--candidate", "b"])


@of_gate(what="the candidate lacks a case", instead=1)
def lost_case(place: Place, planted: bool) -> object:
    before, after = sound()
    second = [time_row(2, Times(seed=5)())]
    return code(place.folder, before + second, after + ([] if planted else second))


@of_gate(what="as fast as before, 6 dB less exact", instead=4)
def less_exact(place: Place, planted: bool) -> object:
    before, after = sound()
    return code(
        place.folder,
        [*before, value_row(1, "sqnr_db", 28.5)],
        [*after, value_row(1, "sqnr_db", 22.5 if planted else 28.5)],
    )


@of_gate(what="half of the layers are no longer converted", instead=1)
def fewer_layers(place: Place, planted: bool) -> object:
    rows = [[time_row(1, Times()(), resolved={"fp8_layers": layers})] for layers in (8, 4 if planted else 8)]
    return code(place.folder, *rows)


@of_gate(what="the policy ignores every metric", instead=5)
def policy_ignores_all(place: Place, planted: bool) -> object:
    rules = {name: replace(rule, rule="ignore") for name, rule in POLICY.metrics.items()}
    units = {name: replace(rule, rule="ignore") for name, rule in POLICY.units.items()}
    policy = replace(POLICY, metrics=rules, units=units) if planted else POLICY
    return code(place.folder, *sound(), policy=policy)


@of_gate(what="a training run of the candidate diverges", instead=4)
def loss_fails(place: Place, planted: bool) -> object:
    base = control()
    sides = [
        rows_of_runs("base", base) + rows_of_runs("tensorwise", shifted(base, gap))
        for gap in (0.0, 0.5 if planted else 0.0)
    ]
    before, after = sound()
    return code(place.folder, before + sides[0], after + sides[1])


@of_gate(what="a part of the candidate is no Parquet file", instead=2)
def damaged_part(place: Place, planted: bool) -> object:
    for name, rows in zip("ab", stored(), strict=True):
        write(place.folder / name, rows, session="")
    if planted:
        (place.folder / "b" / "stage1" / "rows-2.parquet").write_bytes(b"junk")
    return main(["gate", "--baseline", "a", "--candidate", "b"])


of_trees = partial(
    situation, "gate --against", word="the same code: nothing to measure", positive=True, instead=False
)
of_command = partial(exit_code, "gate --command")


@of_trees(what="a measured file has an uncommitted change")
def uncommitted_change(place: Place, planted: bool) -> object:
    root = make_repository(place.folder / "repo", {"harness/a.py": "a = 1\n"})
    with work_trees.work_tree(root, "main") as tree:
        if planted:
            (root / "harness" / "a.py").write_text("a = 2\n")
        return not work_trees.differing(
            *(work_trees.walk(side, work_trees.MEASURED) for side in (root, tree))
        )


@of_gate(what="each sample is one tick of a clock of 15.6 ms", instead=6)
def coarse_clock(place: Place, planted: bool) -> object:
    return code(place.folder, *(([time_row(1, [15.6] * 10)],) * 2 if planted else sound()))


def ended(place: Place, line: str) -> object:
    """Kind of the fault of a shell line; "" where it worked."""
    env = {**os.environ, VARIABLE: str(place.folder)}
    _, fault = run_shell(line, place.folder, 60.0, place.folder / "output", env)
    return ("ENDED" if fault.ended else "FAILED") if fault else ""


of_line = partial(situation, "gate --command", word="Fault is none", positive="")


@of_line(what="the benchmark crashes, and its output goes through `cat`", instead="FAILED")
def crash_in_a_pipe(place: Place, planted: bool) -> object:
    return ended(place, f"(echo times; exit {3 * planted}) | cat")


@of_line(what="the line ends before the work that it began in the background", instead="ENDED")
def work_left_behind(place: Place, planted: bool) -> object:
    return ended(place, "setsid sleep 60 & " + ("" if planted else "kill $!"))


def gated(place: Place, change: dict[str, str], *words: str, command: str = FAKE) -> int:
    """Exit code of a gate on a change of a small repository."""
    root = fake_repository(place.folder / "repo")
    commit(root, change)
    return gate(root, "--command", command, *FEW, *words)[0]


CODE = "src/pkg/__init__.py"
SAME = {CODE: package(a=0.01, b=0.02) + "\n# the same, anew\n"}


@of_command(what="the candidate's set-up writes into the work tree of the baseline", instead=3)
def set_up_of_the_other_tree(place: Place, planted: bool) -> object:
    sleep = "for tree in $(git worktree list --porcelain | sed -n 's/^worktree //p'); do echo '# slow' >> $tree/bench/program.py; done"
    return gated(place, SAME, "--setup", sleep if planted else "true")


def planted_in(case: Planted, place: Place, planted: bool) -> object:
    return case.gate(place.folder, planted=planted)[0]


for name, case in COMMANDED.items():
    run_case = partial(planted_in, case)
    run_case.__name__ = name  # type: ignore[attr-defined]
    of_command(what=case.what, instead=case.code)(run_case)
