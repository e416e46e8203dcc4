"""Situations of the report, and of what reads single runs: diff, import, the store, MFU, findings."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from curves_for_tests import control, rows_of_runs, shifted
from report_cases import cpu_run, gemm_cases, linear_cases, tiny_run
from report_fixtures import Invented, absent, write_run
from situations import Place, exit_code, situation
from stored import row

from harness import store
from harness.__main__ import main
from harness.judge import diagnosis, verdict
from harness.judge.diff import changes
from harness.machine.hardware import named
from harness.machine.mfu import utilization
from harness.report import verdicts
from harness.report.headline import COLUMNS, headline_rows
from harness.report.records import SQNR, arm_records
from harness.report.render import render
from harness.report.runs import load
from harness.report.standings import checks, standings
from harness.report.table import arm_cell
from harness.store.case import Case

if TYPE_CHECKING:
    from harness.report.runs import Machine
    from harness.store.measurement import Measurement

of_report = partial(situation, "report", positive="yes", instead="can't tell")


def machine(place: Place, rows: list[list[Measurement]] | None = None) -> Machine:
    """The machine of the stored rows; those of a run on a GPU."""
    if rows is not None:
        write_run(place.folder / "run", rows)
    (found,) = load([place.folder / "run"], Path()).machines
    return found


def products() -> list[list[Measurement]]:
    return gemm_cases(Invented(), 720.0)[:3]


def failed_ones() -> list[list[Measurement]]:
    return [[absent(Case.of("gemm", {"M": 64, "K": 64, "N": 64}), "bf16", "failed", "boom")]]


@of_report(what="every row has failed", word="Is FP8 faster here?")
def failed_rows_faster(place: Place, planted: bool) -> object:
    return verdicts.is_faster(machine(place, failed_ones() if planted else products())).verdict


@of_report(what="every row has failed: nothing was checked", word="Is it numerically sound?")
def failed_rows_sound(place: Place, planted: bool) -> object:
    return verdicts.is_sound(machine(place, failed_ones() if planted else products())).verdict


@of_report(what="times of a CPU", word="Is FP8 faster here?")
def times_of_a_cpu(place: Place, planted: bool) -> object:
    if planted:
        cpu_run(place.folder / "run")
    return verdicts.is_faster(machine(place, None if planted else products())).verdict


def timed(condition: str, arm: str = "") -> list[list[Measurement]]:
    """Layers; times of this arm, "" for every one, were taken under a condition."""
    return [
        [replace(r, timing={**r.timing, condition: True}) if r.arm == arm or not arm else r for r in case]
        for case in linear_cases(Invented(), 690.0)
    ]


@of_report(what="the baseline of every layer was throttled, FP8 was not", word="Is FP8 faster here?")
def one_side_throttled(place: Place, planted: bool) -> object:
    rows = timed("throttled", "bf16_compile" if planted else "")
    return verdicts.is_faster(machine(place, rows)).verdict


@of_report(what="another process computed beside every layer", word="Is FP8 faster here?")
def beside_another_process(place: Place, planted: bool) -> object:
    return verdicts.is_faster(machine(place, timed("contended" if planted else "none"))).verdict


def unchecked(cases: int) -> list[list[Measurement]]:
    """Products with their SQNR, and layers of which so many have none."""
    rows = linear_cases(Invented(), 690.0)
    bare = [[r for r in case if r.metric not in SQNR] for case in rows]
    return [*products(), *bare[:cases], *rows[cases:]]


of_soundness = partial(situation, "report", positive="yes", instead="partly", word="Is it numerically sound?")


@of_soundness(what="one layer has no SQNR")
def one_layer_unchecked(place: Place, planted: bool) -> object:
    return verdicts.is_sound(machine(place, unchecked(1 if planted else 0))).verdict


@of_soundness(what="single products have an SQNR and no layer has")
def layers_unchecked(place: Place, planted: bool) -> object:
    return verdicts.is_sound(machine(place, unchecked(5 if planted else 0))).verdict


@situation(
    "report", "only products have an SQNR", word="its recipe passed its checks", positive=True, instead=False
)
def recipe_of_unchecked_layers(place: Place, planted: bool) -> object:
    found = machine(place, unchecked(5 if planted else 0))
    return not checks(found, standings(found)[0]).results


def step(share: float) -> list[list[Measurement]]:
    """A training step at a share of the H200's FP8 peak, without a clock."""
    flops = {"e4m3": 1e15}
    ms = 1e3 * 1e15 / (share * named("h200").tflops["fp8"] * 1e12)
    arms = {"bf16_eager": {"ms": 2 * ms, "flops": {"bf16": 1e15}}}
    arms["rowwise_eager"] = {"ms": ms, "flops": flops, "baseline": "bf16_eager"}
    return [Invented(clock_mhz=None).times(Case.of("train", {"model": "gpt2"}), arms)]


def step_in(compute: str) -> list[list[Measurement]]:
    """A training step whose control computes so, the control measured twice."""
    arms = {"bf16_eager": {"ms": 2.0, "resolved": {"compute": compute}}}
    arms["bf16_eager:again"] = {"ms": 2.0, "baseline": "bf16_eager"}
    arms["rowwise_eager"] = {"ms": 1.0, "flops": {"e4m3": 1e12}, "baseline": "bf16_eager"}
    return [Invented().times(Case.of("train", {"model": "gpt2", "compute": compute}), arms)]


in_fp32 = partial(situation, "report", "the arm named bf16_eager computes in float32")


@in_fp32(word="Is FP8 faster here?", positive="yes", instead="can't tell")
def faster_than_float32(place: Place, planted: bool) -> object:
    rows = step_in("fp32" if planted else "bf16_autocast")
    return verdicts.is_faster(machine(place, rows)).verdict


@in_fp32(
    word="the page is titled FP8 against bf16, the arm has no note",
    positive=[True, ""],
    instead=[False, "in fp32"],
)
def titled_against_bf16(place: Place, planted: bool) -> object:
    write_run(place.folder / "run", step_in("fp32" if planted else "bf16_autocast"))
    material = load([place.folder / "run"], Path())
    (record,) = [r for r in arm_records(material.machines[0], "train") if r["arm"] == "bf16_eager"]
    return ["# FP8 against bf16:" in render(material, True).markdown, arm_cell(record).note]


over_peak = partial(
    situation, "report", "a step at 1.5 times the peak, no clock stored", positive=True, instead=False
)


@over_peak(word="the headline has its MFU")
def headline_above_the_peak(place: Place, planted: bool) -> object:
    (row,) = headline_rows(machine(place, step(1.5 if planted else 0.6)))
    return row[[column.title for column in COLUMNS].index("mixed MFU")].order is not None


@over_peak(word="the share of the peak has no flag")
def share_above_the_peak(place: Place, planted: bool) -> object:
    found = arm_records(machine(place, step(1.5 if planted else 0.6)), "train")
    return not any(r["over_peak"] for r in found)


@situation(
    "report",
    "FP8 passes and no broken arm shows that a fault would fail",
    word="Does it train the same? On the page, in the terminal",
    positive=["yes", "yes"],
    instead=["partly", "partly"],
)
def no_negative_control(place: Place, planted: bool) -> object:
    base = control()
    rows = rows_of_runs("base", base) + rows_of_runs("tensorwise", shifted(base))
    if not planted:
        broken = shifted(base, lambda t: 0.6 * t / (t + 30), ratio=0.6)
        rows += rows_of_runs("negative_control", broken)
    found = machine(place, [rows])
    told = verdict.StoredVerdicts(verdict.judge(found.frame)).lines()[0]
    return [verdicts.answers(found)[-1].verdict, told.removeprefix("trains the same: ").partition(";")[0]]


def layers(count: int | None) -> list[list[Measurement]]:
    """Layers whose FP8 arms ran so many FP8 GEMMs; None: as many as they should."""
    rows = linear_cases(Invented(), 690.0)
    if count is None:
        return rows
    return [
        [
            replace(r, resolved={**r.resolved, "fp8_gemms": count}) if "fp8_gemms" in r.resolved else r
            for r in case
        ]
        for case in rows
    ]


@situation(
    "report",
    "the profiler saw no FP8 GEMM in FP8's arms",
    word="Did FP8 really run?",
    positive="yes",
    instead="no",
)
def no_fp8_gemm(place: Place, planted: bool) -> object:
    found = verdicts.did_fp8_run(machine(place, layers(0 if planted else None)))
    return found.verdict


@exit_code("report", "the folder is empty", instead=2)
def empty_folder(place: Place, planted: bool) -> object:
    (place.folder / "run").mkdir()
    if not planted:
        tiny_run(place.folder / "run")
    return main(["report", "run", "-o", "page.html"])


@situation(
    "report",
    "FP8 at 1.2 times the peak of its own dtype",
    word="Utilization.flags",
    positive=[],
    instead=["over_peak"],
)
def above_the_peak(_: Place, planted: bool) -> object:
    h200 = named("h200")
    share = 1.2 if planted else 0.6
    flops = share * h200.peak_tflops("e4m3") * 1e12
    found = utilization({"e4m3": flops}, 1.0, h200, formula="causal", recomputed={}, clock_mhz=1500.0)
    return [flag for flag in found.flags if flag == "over_peak"]


@situation("report", "the GPU's peak is not known", word="MFU has a value", positive=True, instead=False)
def unknown_peak(_: Place, planted: bool) -> object:
    device = None if planted else named("h200")
    return utilization({"bf16": 1e14}, 1.0, device, formula="causal").mfu_mixed is not None


def times(arm: str, rounds: int, seed: int = 0) -> Measurement:
    case = Case.of("gemm", {"M": 64, "K": 64, "N": 64})
    return row(case, arm, [1 + 1e-4 * ((7 * i + seed) % 5) for i in range(rounds)])


@situation("diff", "one round each", word="Timed.verdict", positive="same", instead="unclear")
def diff_of_one_round(place: Place, planted: bool) -> object:
    frames = []
    for seed, name in enumerate("ab"):
        write_run(place.folder / name, [[times("fp8", 1 if planted else 10, seed)]], run_id=name)
        frames.append(store.read(place.folder / name))
    (found,) = changes(*frames).times
    return found.verdict


@exit_code("diff", "a part of a run is damaged", instead=2)
def diff_of_damaged(place: Place, planted: bool) -> object:
    for name in "ab":
        tiny_run(place.folder / name)
    if planted:
        (place.folder / "b" / "rows-2.parquet").write_bytes(b"junk")
    return main(["diff", "a", "b"])


@exit_code("import", "the benchmark file holds no benchmark", instead=2)
def import_of_nothing(place: Place, planted: bool) -> object:
    tests = [] if planted else [{"fullname": "t.py::x", "stats": {"data": [1.0]}}]
    (place.folder / "x.json").write_text(json.dumps({"benchmarks": tests}))
    return main(["import", "x.json"])


@situation("the store", "a measurement is NaN", word="it is taken", positive=True, instead=False)
def stored_nan(_: Place, planted: bool) -> object:
    try:
        replace(times("fp8", 3), samples=(1.0, float("nan") if planted else 1.0, 1.0))
    except ValueError:
        return False
    return True


@situation("findings", "FP8's losses are the control's", word="no finding", positive=True, instead=False)
def finding_of_equal_losses(place: Place, planted: bool) -> object:
    base = control()
    rows = rows_of_runs("base", base) + rows_of_runs("tensorwise", base if planted else shifted(base))
    write_run(place.folder / "run", [rows])
    return not diagnosis.findings(store.read(place.folder))
