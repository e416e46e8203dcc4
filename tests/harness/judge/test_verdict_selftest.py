"""Self-test of the verdict. Oracles: the law of each simulated quantity, exact power, and the bounds' own arithmetic."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest

from harness.__main__ import main as command_line
from harness.judge.verdict import error_rates, selftest
from harness.judge.verdict.power import tost_power
from harness.judge.verdict.result import MARGIN
from harness.judge.verdict.scenarios import PLANTED, ROWS, Bound, Row
from harness.judge.verdict.selftest import Measured, broken_promises, from_json, measure, outcomes
from harness.judge.verdict.simulated import BETWEEN, END, STEPS, Scenario, draw

FEW = 150  # draws of a row; the command takes more


def rates(scenario, draws=FEW):
    return measure(Row("test", scenario), draws).rates


# Simulated curves


@pytest.mark.parametrize("tails", ["normal", "t3"])
def test_the_simulated_gaps_have_the_asked_spread_and_share_their_constant(tails):
    """Oracle: half of the variance is shared, so the gaps of many seeds correlate by 0.5, each with an sd of M/4."""
    candidate, base = draw(Scenario("many", seeds=4000, tails=tails), 100, np.random.default_rng(5))
    late = [(candidate[s].loss.values - base[s].loss.values)[80:].mean() for s in base]
    ends = [candidate[s].heldout.values[0] - base[s].heldout.values[0] for s in base]
    # The sample sd of t with 3 degrees of freedom scatters widely: its fourth moment is infinite.
    loose = {"normal": 0.04, "t3": 0.2}[tails]
    assert np.corrcoef(late, ends)[0, 1] == pytest.approx(BETWEEN, abs=loose)
    assert np.std(late) == pytest.approx(MARGIN * END / 4, rel=loose)
    assert np.std(ends) == pytest.approx(MARGIN * END / 4, rel=loose)


def test_a_correlation_across_seeds_moves_all_of_them():
    """Oracle: half of the variance is common, so means over many seeds keep half of it, instead of 1 / seeds."""
    generator = np.random.default_rng(1)
    means, sds = [], []
    for _ in range(400):
        candidate, base = draw(Scenario("x", seeds=20, sd=1.0, across=0.5), 100, generator)
        ends = np.array([candidate[s].heldout.values[0] - base[s].heldout.values[0] for s in base])
        means.append(ends.mean() / (MARGIN * END))
        sds.append(ends.std(ddof=1) / (MARGIN * END))
    assert np.var(means) == pytest.approx(0.5 + 0.5 * (BETWEEN + 1 - BETWEEN) / 20, rel=0.2)
    assert np.mean(np.square(sds)) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("clumping", [0.0, 2.0])
def test_spikes_follow_their_law_in_both_arms(clumping):
    """Oracle: a Poisson count is 0 with exp(-rate); mixed with a gamma law of variance v it is (1 + v rate)^(-1/v)."""
    scenario = Scenario("x", seeds=1500, sd=0.0, spikes=(1.0, 1.0), clumping=clumping)
    runs = draw(scenario, STEPS, np.random.default_rng(3))
    calm = draw(dataclasses.replace(scenario, spikes=(0.0, 0.0)), STEPS, np.random.default_rng(3))
    expected = math.exp(-1) if not clumping else (1 + clumping) ** (-1 / clumping)
    for spiking, quiet in zip(runs, calm, strict=True):
        without = np.mean(
            [np.array_equal(spiking[s].loss.values, quiet[s].loss.values) for s in range(scenario.seeds)]
        )
        assert without == pytest.approx(expected, abs=0.045)  # 3.5 standard errors


def test_every_fault_has_its_honest_twin():
    """A twin is the fault with the candidate's figure in both arms, or without copies."""
    names = ("drift", "divergence", "bump", "one_spike", "nan")
    scenarios = [row.scenario for row in PLANTED]
    twins = [dataclasses.replace(s, name="") for s in scenarios]
    for scenario in scenarios:
        for name in names:
            figure = getattr(scenario, name)
            if figure[0] and not figure[1]:
                assert dataclasses.replace(scenario, name="", **{name: (figure[0], figure[0])}) in twins
        if scenario.copies == "runs":
            assert dataclasses.replace(scenario, name="", copies="") in twins


# Error rates, on fewer draws than the command takes


@pytest.mark.parametrize("row", PLANTED, ids=lambda row: row.scenario.name.replace(" ", "-"))
def test_planted_faults_and_twins_keep_their_promises(row):
    assert not broken_promises([measure(row, FEW)])


@pytest.mark.parametrize(("seeds", "sd"), [(3, 0.25), (5, 0.6), (8, 0.8), (20, 0.8)])
def test_half_of_l4_passes_as_often_as_the_exact_power_says(seeds, sd):
    """Oracle: `tost_power`; 4 standard errors."""
    found = rates(Scenario("x", seeds=seeds, sd=sd))
    expected = tost_power(sd, 1.0, seeds)
    scatter = 4 * math.sqrt(expected * (1 - expected) / FEW) + 0.01
    for half in ("L4 PASS", "L4h PASS"):
        assert found[half] == pytest.approx(expected, abs=scatter)


@pytest.mark.parametrize("tails", ["normal", "t3"])
@pytest.mark.parametrize("seeds", [3, 20])
def test_at_one_margin_the_verdict_passes_in_one_case_of_twenty_at_most(seeds, tails):
    found = rates(Scenario("x", seeds=seeds, sd=0.6, offset=1.0, tails=tails))
    assert Bound("PASS", 0.05).is_kept(found["PASS"], FEW)
    assert Bound("L4 PASS", 0.05).is_kept(found["L4 PASS"], FEW)


@pytest.mark.parametrize("clumping", [0.0, 2.0])
@pytest.mark.parametrize("seeds", [5, 20])
def test_two_arms_of_one_spiking_law_hardly_ever_fail(seeds, clumping):
    """Gates on gradient norms have rates of their own."""
    scenario = Scenario("x", seeds=seeds, spikes=(2.0, 2.0), clumping=clumping)
    failed = Counter(
        any(g.status == "FAIL" and g.gate != "L6" for g in v.gates) for v in outcomes(scenario, 100)
    )
    assert Bound("FAIL", 0.01).is_kept(failed[True] / 100, 100)


def test_a_heavy_spread_of_the_gap_does_not_fail_a_correct_arm():
    """An interval of 90 % would miss both 0 and the margin in nearly one case of ten."""
    found = rates(Scenario("x", sd=20.0))
    assert found["L4 FAIL"] <= 0.04
    assert found["PASS"] == 0


# Bounds and output


def counted(group="equivalence", seeds=5, bounds=(), offset=0.0, draws=1000, **found):
    scenario = Scenario("x", seeds=seeds, offset=offset)
    return Measured(Row(group, scenario, bounds), draws, Counter(found))


def test_bounds_allow_for_the_scatter_of_the_draws_and_no_more():
    """Oracle: 5 % of 1,000 draws scatter by 0.69 %, 3.1 of which are 2.14 %."""
    most, least = Bound("PASS", 0.05), Bound("FAIL", 0.95, at_least=True)
    assert [most.is_kept(rate, 1000) for rate in (0.0, 0.071, 0.072)] == [True, True, False]
    assert [least.is_kept(rate, 1000) for rate in (1.0, 0.929, 0.928)] == [True, True, False]


def test_a_missed_bound_is_named_also_that_of_one_half():
    bounds = (Bound("PASS", 0.05), Bound("L4h PASS", 0.05))
    good = counted(offset=1.0, bounds=bounds, **{"PASS": 0.01, "L4h PASS": 0.05})
    bad = counted(offset=1.0, bounds=bounds, **{"PASS": 0.01, "L4h PASS": 0.08})
    assert broken_promises([good]) == []
    (said,) = broken_promises([good, bad])
    assert "L4h PASS 8.0 %" in said


def test_a_pass_rate_that_falls_with_the_seeds_is_named():
    """The earlier rules: 38 % with 5 seeds and 4 % with 60."""
    assert broken_promises([counted(PASS=0.38), counted(seeds=20, PASS=0.99)]) == []
    assert broken_promises([counted(PASS=1.0), counted(seeds=20, PASS=0.998)]) == []
    (said,) = broken_promises([counted(PASS=0.38), counted(seeds=60, PASS=0.04)])
    assert "below the 38.0 %" in said


def test_the_rows_are_told_apart_by_their_key():
    keys = [Measured(row, 1, Counter()).key for row in ROWS]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def three_rows(monkeypatch):
    rows = [
        r for r in ROWS if r.scenario.name in ("no gap", "gap of two margins", "copies of one pair of runs")
    ]
    monkeypatch.setattr(selftest, "ROWS", rows)


def test_the_command_prints_its_table_and_writes_files_that_it_can_read(capsys, tmp_path, three_rows):
    files = {name: tmp_path / "new" / name for name in ("after.json", "after.md", "page.md")}
    before = tmp_path / "before.json"
    before.write_text(
        json.dumps([{"group": "planted", "name": "no gap", "seeds": 5, "sd": 0.25, "rates": {"PASS": 0.39}}])
    )
    words = ["verdict-selftest", "--draws", "100", "--before", str(before)]
    for option, name in (("--json", "after.json"), ("--table", "after.md"), ("--markdown", "page.md")):
        words += [option, str(files[name])]
    assert command_line(words) == 0
    printed = capsys.readouterr().out
    assert "| planted | gap of two margins | 0.25 | 5 | 0.0 | 100.0 | 0.0 |" in printed
    assert "0 promises missed" in printed
    assert files["after.md"].read_text() == printed
    read = from_json(files["after.json"].read_text())
    assert read["planted", "gap of two margins", 5, 0.25]["FAIL"] == 1.0
    page = files["page.md"].read_text()
    assert "| no gap | 100.0 (39) |" in page
    assert "All are kept." in page


def test_a_missed_promise_is_exit_code_1_and_printed(capsys, monkeypatch):
    impossible = Row("planted", Scenario("no gap"), (Bound("FAIL", 1.0, at_least=True),))
    monkeypatch.setattr(selftest, "ROWS", [impossible])
    assert command_line(["verdict-selftest", "--draws", "100"]) == 1
    assert "1 promises missed:\n- planted, no gap" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--draws", "0"],
        ["--draws", "99"],
        ["--steps", "20"],
        ["--draws", "many"],
        ["--drws", "3"],
        ["--before", "/nowhere.json"],
    ],
)
def test_the_self_test_refuses_bad_options_in_one_line(capsys, words):
    assert command_line(["verdict-selftest", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_page_says_how_many_seeds_are_enough():
    """Oracle: `tost_power` at the number of the table and one below."""
    page = error_rates.page([counted(group="planted")], {}, [], STEPS)
    (line,) = [line for line in page.splitlines() if line.startswith("| 0 |")]
    for sd, seeds in zip(error_rates.SPREADS, map(int, line.split("|")[2:-1]), strict=True):
        assert tost_power(sd, 1.0, seeds) >= 0.8
        assert seeds == 3 or tost_power(sd, 1.0, seeds - 1) < 0.8
