"""Headline, comparisons, training steps and MFU. Oracles: the stored rows, arithmetic, and the command line itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from report_cases import cpu_run, gpu_run, linear_cases
from report_fixtures import H100, H200, TIMING, Invented, figure, write_run
from report_pages import run_of, table

from harness.machine import mfu
from harness.report import compared, records, steps, write_report
from harness.report.headline import headline, headline_rows
from harness.report.runs import load
from harness.store import stats
from harness.store.case import Case


def made(found):
    return headline(found, headline_rows(found))


# Headline


def test_speed_exactness_and_proof_stand_in_one_row(gpu_machine, cpu_machine):
    """Layers decide where no step was measured; the best arm first. A CPU has recipes and no speed."""
    rows = table(made(gpu_machine))
    assert [r["FP8 arm"] for r in rows][:2] == ["tensorwise_compile", "rowwise_compile"]
    assert ("measured" in rows[0]) is (len({r[-1] for r in headline_rows(gpu_machine)}) > 1)
    gains = [float(r["speedup over bf16"].rstrip("x")) for r in rows]
    assert gains == sorted(gains, reverse=True)
    assert rows[0]["FP8 GEMMs"] == "15 of 15"
    assert 24.0 < float(rows[0]["worst SQNR (dB)"]) < 25.0
    assert not {"loss", "mixed MFU"} & rows[0].keys()
    rows = table(made(cpu_machine))
    assert [r["FP8 arm"] for r in rows] == ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert not any(re.search(r"\dx", text) for r in rows for text in r.values())


def test_a_result_below_its_bound_is_marked_beside_its_speed(tmp_path):
    case = Case.of("linear", {"M": 16, "K": 32, "N": 48})
    proof = {"fp8_gemms": 2, "fp8_gemms_expected": 3}
    fp8 = {"ms": 1.0, "flops": {"e4m3": 1.0}, "baseline": "bf16_eager", "resolved": proof}
    arms = {"bf16_eager": {"ms": 2.0, "flops": {"bf16": 1.0}}, "rowwise_eager": fp8}
    low = figure(case, "rowwise_eager", "sqnr_db", 20.0, resolved={"sqnr_bound_db": {"sqnr_db": 28.3}})
    shown = made(run_of(tmp_path, [*Invented().times(case, arms), low]))
    cells = {c.text: c.style for c in shown.rows[0]}
    assert (cells["20.0"], cells["2 of 3"]) == ("bad", "bad")
    without = run_of(tmp_path / "none", Invented().times(case, {"bf16_eager": {"ms": 1.0}}))
    assert made(without) is None


# Several machines


def test_gains_of_two_gpus_stand_side_by_side(tmp_path):
    """Oracle: each machine's own ratios over the shared cases; a CPU has a column of exactness and none of speed."""
    other = {"seed": 3, "env": H100, "run_id": "20260103T030405Z-0123456-bbbb"}
    runs = [gpu_run(tmp_path / "a"), gpu_run(tmp_path / "b", **other), cpu_run(tmp_path / "c")]
    material = load(runs, tmp_path)
    gains, exact = compared.across_machines(material)
    assert [c.title for c in gains.columns][-2:] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert [c.title for c in exact.columns][-1].startswith("CPU: ")
    own = {(r["suite"], r["arm"], r["regime"]): r for r in table(gains)}[
        "linear", "tensorwise_compile", "isolated"
    ]
    assert own["shared cases"] == "5"
    for m in material.machines[:2]:
        own_pairs = [p for p in m.pairs if (p["arm"], p["regime"]) == ("tensorwise_compile", "isolated")]
        mean = stats.geometric_mean([p["speedup"] for p in own_pairs]).value
        assert float(own[m.name].rstrip("x")) == pytest.approx(mean, rel=5e-3)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (("cpu_governor", "driver", "power_limit_w", "git_commit"), "power limit w 60{0}.0, driver {0}"),
        (("driver", "git_commit"), "driver {0}"),
    ],
)
def test_machines_of_one_name_are_told_apart_by_what_a_time_depends_on(tmp_path, fields, told):
    """Oracle: `differences`, which names those fields first; a commit tells no machine apart."""
    envs = [
        H200 | {name: 600.0 + i if name == "power_limit_w" else str(i) for name in fields} for i in (0, 1)
    ]
    runs = [
        write_run(
            tmp_path / str(i), linear_cases(Invented(), 690.0)[:1], env=env, env_id=str(i), run_id=f"r{i}"
        )
        for i, env in enumerate(envs)
    ]
    shown = compared.names(load(runs, tmp_path).machines)
    assert sorted(shown) == [f"NVIDIA H200, {told.format(i)}" for i in (0, 1)]


def test_gains_that_decide_nothing_stand_beside_none(tmp_path):
    """Oracle: `DISTURBED`: a ratio that was taken beside another process is no gain of that machine."""
    beside = {"timing": dict(TIMING) | {"contended": True}}
    runs = []
    for env, more in ((H200, {}), (H100, beside)):
        cases = linear_cases(Invented(**more), 690.0)
        run_id = f"20260103T030405Z-0123456-{env['driver'][:3]}0"
        runs.append(write_run(tmp_path / run_id, cases, env=env, run_id=run_id))
    assert [t.key for t in compared.across_machines(load(runs, tmp_path))] == ["machines-exactness"]


# Steps


# MFU


def counted(ms, model="gpt2", causal=1e14, **resolved):
    """A step of 1e14 bf16 and 2e14 FP8 FLOPs, beside bf16."""
    resolved |= {
        "tokens_per_step": 8192,
        "flops_formula_id": "palm",
        "flops_causal": {"bf16": causal, "e4m3": 2e14},
    }
    fp8 = {"ms": ms, "flops": {"bf16": 1e14, "e4m3": 2e14}, "baseline": "bf16_eager", "resolved": resolved}
    invented = Invented(spread=0.0)
    invented.random.gauss = lambda mean, sd: mean
    arms = {"bf16_eager": {"ms": 1.5 * ms, "flops": {"bf16": 3e14}}, "tensorwise_eager": fp8}
    return invented.times(Case.of("train", {"model": model}), arms)


def test_mfu_by_hand_with_every_denominator(tmp_path):
    """By hand: 0.2 s; 1e14 bf16 and 2e14 FP8 FLOPs against 989 and 1979 TFLOP/s; a fifth of bf16 is masked attention."""
    found = [
        r
        for r in table(steps.mfu_table(run_of(tmp_path, counted(200.0, causal=0.8e14))))
        if "tensorwise" in r["arm"]
    ]
    palm, causal = found
    assert (palm["FLOPs"], causal["FLOPs"], palm["of achievable"]) == ("palm", "causal", "N/A")
    by_hand = {
        "tokens/s/GPU": 8192 / 0.2,
        "model TFLOP/s": 1500,
        "mixed MFU": 100 * (1e14 / 989e12 + 2e14 / 1979e12) / 0.2,
        "MFU of bf16 peak": 100 * 3e14 / 989e12 / 0.2,
        "MFU of FP8 peak": 100 * 3e14 / 1979e12 / 0.2,
    }
    shown = {title: float(palm[title].removesuffix(" %").replace(",", "")) for title in by_hand}
    assert shown == pytest.approx(by_hand, rel=5e-3)
    mixed = 100 * (0.8e14 / 989e12 + 2e14 / 1979e12) / 0.2
    assert float(causal["mixed MFU"].removesuffix(" %")) == pytest.approx(mixed, rel=5e-3)


@pytest.mark.parametrize(
    ("ms", "flags", "passed"),
    [
        (300.0, [[], []], ""),
        (195.0, [["masked_counted"], []], "masked_counted"),
        (150.0, [["masked_counted"], ["over_peak"]], "over_peak"),
    ],
)
def test_a_step_is_impossible_in_its_own_table_where_mfu_says_so(tmp_path, ms, flags, passed):
    """By hand: 202 ms at the peaks with the masked half of attention, 182 without."""
    rows = [replace(r, sample_clock_mhz=(1980.0,) * 40) for r in counted(ms, causal=0.8e14)]
    found = run_of(tmp_path, rows)
    (record,) = [r for r in records.arm_records(found, "train") if r["arm"] == "tensorwise_eager"]
    assert [used.doubts for used in mfu.of_row(record, found.device)] == flags
    assert record["over_peak"] == passed


def test_both_sides_of_a_step_stand_in_its_row(tmp_path):
    """By hand: 8,192 tokens in 400 ms and, in bf16, in 600 ms; 3e14 FLOPs of bf16 in 600 ms are 51 % of 989 TFLOP/s."""
    rows = [replace(r, resolved={**r.resolved, "tokens_per_step": 8192}) for r in counted(400.0)]
    case = Case.of("train", {"model": "gpt2"})
    energy = [
        figure(case, r.arm, "joules_per_token", 0.007 if r.arm == "bf16_eager" else 0.005) for r in rows
    ]
    shown = made(run_of(tmp_path, [*rows, *energy]))
    (cells,) = shown.rows
    seen = {c.title: (cell.text, cell.note) for c, cell in zip(shown.columns, cells, strict=True)}
    assert seen["time (ms)"] == ("400.0", "bf16_eager 600.0")
    assert seen["tokens/s"] == ("20,480", "bf16_eager 13,653")
    assert seen["mJ/token"] == ("5.00", "bf16_eager 7.00")
    assert seen["mixed MFU"] == ("51 %", "bf16_eager 51 %, causal")


def test_the_headline_takes_the_median_of_mfu_and_marks_an_impossible_one(tmp_path):
    """By hand: 1e14 bf16 and 2e14 FP8 FLOPs take 202.2 ms at the peaks; in 300, 400 and 20 ms: 67, 51 and 1,011 %.

    A case of which no layer was converted, as advised, ran in bf16 and is none of them.
    """
    cells = []
    for times in ((300.0, 400.0), (300.0, 400.0, 20.0)):
        cases = [counted(ms, f"model{ms}") for ms in times]
        shown = made(run_of(tmp_path / str(len(times)), *cases, counted(900.0, "advised", fp8_layers=0)))
        cells.append(shown.rows[0][[c.title for c in shown.columns].index("mixed MFU")])
    sound, impossible = cells
    assert (sound.order, sound.style) == (pytest.approx((0.2022 / 0.3 + 0.2022 / 0.4) / 2, rel=1e-2), "")
    assert re.fullmatch(r"51 % to 6\d %, range over 2 cases, bf16_eager \d\d %, causal", sound.note)
    assert (impossible.order, impossible.style, impossible.note) == (None, "bad", "over peak")
    assert "over peak" in impossible.note


@pytest.mark.parametrize("trains", [True, False])
def test_the_mfu_page_says_what_is_missing(tmp_path, trains):
    rows = counted(200.0) if trains else linear_cases(Invented(), 690.0)[0]
    page = write_report([write_run(tmp_path / "run", [rows])], tmp_path / "r.html", focus="mfu")
    assert ("No training step has been measured on NVIDIA H200" in page.html.read_text()) is not trains
