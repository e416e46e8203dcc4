"""Headline, comparisons, training steps and MFU. Oracles: the stored rows, arithmetic, and the command line itself."""

from __future__ import annotations

import re

import pytest
from curves_for_tests import whole_suite
from report_cases import cpu_run, gpu_run, linear_cases, train_cases
from report_fixtures import H100, Invented, write_run
from report_pages import machine, run_of, table

from harness.report import compared, write_report
from harness.report.headline import headline, headline_rows
from harness.report.runs import load
from harness.store import stats
from harness.store.case import Case


def made(found):
    return headline(found, headline_rows(found))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cases = [*train_cases(Invented()), *linear_cases(Invented(), 690.0), whole_suite()]
    return machine(write_run(tmp_path_factory.mktemp("trained"), cases, sweep="train"))


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
