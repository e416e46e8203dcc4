"""Cards side by side. Oracles: fleets with a known fault in a known card (fleet_fixtures); other draws; a flipped bit."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fleet_fixtures import CASES, CHECK, card, env, failed, judged, names, time
from report_fixtures import write_run

import harness.judge.fleet
from harness.__main__ import main
from harness.cli.config import load
from harness.engine.plan import PlannedCase, make_plan
from harness.engine.rows import row
from harness.judge.fleet import Fleet
from harness.store.case import Case
from harness.store.errors import Cause
from harness.suites import SUITES, checksum

if TYPE_CHECKING:
    from harness.judge.fleet.judge import CardGroup

ROOT = Path(harness.judge.fleet.__file__).parents[3]
LONG = Case.of("gemm", {"M": 8192, "K": 64, "N": 64})  # on the cards that are told to have it
ECC = "CUDA error: uncorrectable ECC"
Names = list[tuple[str, str]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    for name in names(5):
        card(folder, name)
    return folder


def outliers(*folders: Path) -> Names:
    """Cards and kinds of the one group."""
    (group,) = judged(*folders)
    return [(o.card[:4], o.kind) for o in group.outliers]


# Times


def test_healthy_cards_are_in_line(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = judged(healthy)
    assert not group.outliers
    assert all(-0.04 < s.low <= 0 <= s.high < 0.04 for s in group.spreads)
    assert main(["fleet", str(healthy)]) == 0
    assert "judged by times 5 of 5, by results 5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("unread", "missing", "levels", "code"),
    [
        ((), (), {"a": 0.9}, "in_line"),
        ((), (), {}, "alike"),  # of no level it is known whether it is slow
        (("part-1: no Parquet",), (), {"a": 0.9}, "unread"),
        ((), ("b",), {"a": 0.9}, "missing"),
    ],
)
def test_the_word_on_a_healthy_fleet_is_no_larger_than_what_was_judged(
    healthy: Path, unread: tuple[str, ...], missing: tuple[str, ...], levels: dict[str, float], code: str
) -> None:
    groups = [replace(group, levels=levels) for group in judged(healthy)]
    fleet = Fleet(groups, unread, missing)
    assert fleet.code == code
    assert (fleet.tone == "good") == (code in ("in_line", "alike"))
    assert fleet.lines()[0].startswith("missing: b;") == (code == "missing"), "what decides comes first"


def test_a_fleet_of_which_nothing_was_judged_is_not_called_well(healthy: Path) -> None:
    (group,) = judged(healthy)
    none = replace(group, judged_by_times=[], judged_by_results=[], lacking={})
    assert Fleet([none]).code == "not_judged"


@pytest.mark.parametrize(
    ("fault", "suite", "kind", "why"),
    [
        ({"slow": 1.12, "clock": 1500.0}, "gemm", "slow", "SM clock 85%"),
        ({"slow": 1.2}, "gemm", "slow", "SM clock 100%"),
        ({"slow": 1.2, "clock": math.nan}, "gemm", "slow", "no clock was read"),
        ({"slow_casts": 1.3}, "cast", "slow", "SM clock 100%"),
        ({"slow": 0.85, "driver": "999.1"}, "gemm", "fast", ""),
        ({"checksum": "badbad"}, "checksum", "corrupt", "5 of 6 cards give c0ffee"),
        ({"fails": ECC}, "gemm", "fails", ECC),
        ({"extra": [failed(CASES[0], ECC, "sustained")]}, "gemm", "fails", ECC),
    ],
)
def test_a_planted_fault_is_found_where_it_is_with_its_cause(
    fault: dict[str, object],
    suite: str,
    kind: str,
    why: str,
    healthy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    card(tmp_path, "beef", **fault)
    assert main(["fleet", str(healthy), str(tmp_path), "json=true"]) == 1
    said = json.loads(capsys.readouterr().out)
    (outlier,) = said["outliers"]
    assert (outlier["card"][:4], outlier["suite"], outlier["kind"]) == ("beef", suite, kind)
    assert why in outlier["reason"]
    assert len(said["groups"][0]["cards"]) == 6


def test_the_slowest_card_bounds_what_may_be_claimed(tmp_path: Path) -> None:
    """Oracle: three cards without noise, by hand: speedups 1.6, 1.6 and 1.6 / 1.02, times 1, 1 and 1.02."""
    for name, factor in {"aaaa": 1.0, "bbbb": 1.0, "cccc": 1.02}.items():
        rows = [[time(case, "bf16_eager", 2.0), time(case, "rowwise_eager", 1.25 * factor)] for case in CASES]
        write_run(tmp_path / name, rows, run_id=name, env=env(name))
    (group,) = judged(tmp_path)
    (spread,) = [s for s in group.spreads if s.arm == "rowwise_eager"]
    assert spread.slowest[:4] == "cccc"
    found = (spread.low, spread.high, spread.speedup, spread.slowest_speedup)
    assert found == pytest.approx((0.0, 0.02, 1.6, 1.6 / 1.02))
    assert [s.speedup for s in group.spreads if s.arm == "bf16_eager"] == [None]


def test_slow_memory_alone_is_found_by_the_cases_of_the_sweep(tmp_path: Path) -> None:
    """Its copy takes a quarter longer and its products as long as the others'."""
    plan = make_plan(load(["sweep=fleet"], lambda asked: "cuda").config, SUITES)
    for name in (*names(4), "beef"):
        slow = {"ceilings": 1.25} if name == "beef" else {}
        rows = [[time(c.case, a, slow.get(c.case.suite, 1.0)) for a in c.arms] for c in plan.cases]
        write_run(tmp_path / name, rows, run_id=name, sweep="fleet", env=env(name))
    (group,) = judged(tmp_path)
    assert [(o.card[:4], o.suite, o.kind) for o in group.outliers] == [("beef", "ceilings", "slow")]


# What is compared


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"gpu": "NVIDIA L40S"}),
        ({}, {"torch": "2.11.0"}),
        ({}, {"git_commit": "f" * 40}),  # of before the code was hashed
        ({"code": "aaaa"}, {"code": "bbbb"}),  # two trees with uncommitted changes
        ({"gpu_sm_count": 132}, {"gpu_sm_count": 114}),
        ({"mig": False}, {"mig": True}),
    ],
)
def test_other_models_software_and_code_are_not_set_side_by_side(
    one: dict[str, object], other: dict[str, object], tmp_path: Path
) -> None:
    for name in names(3):
        card(tmp_path, name, **one)
    card(tmp_path, "beef", slow=3.0, checksum="badbad", **other)
    found = judged(tmp_path)
    assert [len(group.cards) for group in found] == [3, 1]
    assert not any(group.outliers for group in found)


def test_one_code_of_two_commits_is_one_code(tmp_path: Path) -> None:
    """A commit that changes no code (a page, a log) changes no time; and MIG that can't be asked for is off."""
    for name in names(3):
        card(tmp_path, name, code="aaaa", mig=False)
    card(tmp_path, "beef", slow=1.3, code="aaaa", mig=None, git_commit="f" * 40)
    (group,) = judged(tmp_path)
    assert [o.card[:4] for o in group.outliers] == ["beef"]
    assert set(group.differences) == {"git_commit"}


@pytest.mark.parametrize(
    ("first", "second", "kinds"),
    [
        ({"slow": 5.0}, {}, []),
        ({"fails": ECC}, {}, []),  # forgotten once its case has run
        ({"checksum": "badbad"}, {}, ["corrupt"]),  # wrong once is wrong
        ({}, {"checksum": "badbad"}, ["corrupt"]),
    ],
)
def test_the_newest_time_of_a_card_counts_and_every_result(
    first: dict[str, object], second: dict[str, object], kinds: list[str], healthy: Path, tmp_path: Path
) -> None:
    card(tmp_path / "first", "beef", **first)
    card(tmp_path / "second", "beef", **second)
    assert [kind for _, kind in outliers(healthy, tmp_path)] == kinds


# Results


@pytest.mark.parametrize(
    ("cause", "well", "kind"),
    [(Cause.NUMERICS, 0, "corrupt"), (Cause.NUMERICS, 1, "corrupt"), (Cause.NUMERICS, 3, "corrupt"), (Cause.RUN, 3, "fails")],
)  # fmt: skip
def test_a_failed_row_of_the_suite_is_wrong_bits_or_another_failure(
    cause: Cause, well: int, kind: str, tmp_path: Path
) -> None:
    """A card that contradicts itself (tests/harness/suites: a flipped bit) needs no other to be found out."""
    planned = PlannedCase("checksum", checksum, CHECK, ("bf16_eager",))
    for name in (*names(well), "beef"):
        rows = [row(planned, "bf16_eager", "ok", samples=(1.0,), regime="isolated")]
        if name == "beef":
            rows = [row(planned, "bf16_eager", "failed", reason="why", cause=cause)]
        write_run(tmp_path / name, [rows], run_id=name, sweep="fleet", env=env(name))
    assert outliers(tmp_path) == [("beef", kind)]


# How far a score may lie


# The command, and the sweep


@pytest.mark.parametrize("words", [[], ["."], [".", "tolerance=0"], [".", "tolerance=x"]])
def test_bad_input_is_one_line_and_exit_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_shards_of_a_comparison_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each case would be on one card, and `fleet` would have nothing to compare."""
    monkeypatch.chdir(tmp_path)
    assert main(["sweep=fleet", "shard=0/2", "device=cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "devices=0, devices=1, ..." in line
    assert not list(tmp_path.iterdir())


def test_one_run_id_on_two_machines_is_refused_and_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A results folder that both see: the second must not say "nothing new"."""
    monkeypatch.chdir(tmp_path)
    words = [
        *(
            "sweep=fleet",
            "device=cpu",
            "rounds=1",
            "control=false",
            "isolate=false",
            "--quiet",
            "report=false",
        ),
        *("timing.min_seconds=0", "timing.min_samples=1", "timing.warmup_min_seconds=0", "~parts.ceilings"),
        *("parts.checksum.axes.cube=[16]", "parts.checksum.axes.data=[codes]", "~parts.gemm"),
    ]
    for host, more, code in (
        ("one", "run_id=night", 0),
        ("two", "run_id=night", 2),
        ("two", "resume=night", 2),
    ):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert main([*words, more]) == code
        assert ("run_id of its own" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize("index", [0, 7])
def test_the_sbatch_example_gives_each_card_of_a_fleet_all_cases(index: int, tmp_path: Path) -> None:
    """Oracle: the words that reach Python. A job that starts again may be on another card, and starts afresh."""
    echoed = tmp_path / "python"
    echoed.write_text('#!/bin/bash\necho "$@"\n')
    echoed.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SWEEP": "fleet",
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_ARRAY_JOB_ID": "9",
        "SLURM_ARRAY_TASK_COUNT": "8",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    script = ROOT / "docs" / "examples" / "sweep.sbatch"
    for again in ({}, {"SLURM_RESTART_COUNT": "1"}):
        said = subprocess.run(
            ["bash", str(script)], env=variables | again, capture_output=True, text=True, check=True
        ).stdout
        *_, last = said.split()
        assert last == f"run_id=slurm-9-{index}-{1 if again else 0}"
        assert "sweep=fleet" in said
        assert "shard" not in said


def test_a_card_without_a_measurement_in_common_is_named(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [[time(LONG, "bf16_eager", 99.0)]]
    write_run(tmp_path / "beef", alone, run_id="beef", sweep="fleet", env=env("beef"))
    assert main(["fleet", str(healthy), str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "compared bit by bit on 5 cards: the same bits." in said
    assert "times 5 of 6, by results 5; not by times: beefbeef@" in said


def kinds(*groups: CardGroup) -> set[tuple[str, str]]:
    return {(o.suite, o.kind) for group in groups for o in group.outliers}


def test_of_two_cards_one_twice_as_slow_is_not_in_line_with_the_other(tmp_path: Path) -> None:
    """Which of them is at fault nobody can tell; that they are alike is false."""
    card(tmp_path, "aaaa")
    card(tmp_path, "bbbb", slow=2.0)
    (group,) = judged(tmp_path)
    assert kinds(group) == {("gemm", "spread")}
    assert {len(group.judged_by_times), *(s.cards for s in group.spreads)} == {2}


def test_two_cards_that_are_well_have_nothing_said_of_them(tmp_path: Path) -> None:
    for name in names(2):
        card(tmp_path, name)
    assert kinds(*judged(tmp_path)) == set()


def test_a_ramp_of_14_percent_over_eight_cards_is_a_spread(tmp_path: Path) -> None:
    """None is 5 % of the middle away from it beyond what eight cards are: fastest and slowest are too far apart."""
    for i, name in enumerate(names(8)):
        card(tmp_path, name, slow=1 + 0.02 * i)
    assert ("gemm", "spread") in kinds(*judged(tmp_path))


def test_cards_that_all_run_at_half_the_clock_are_low(tmp_path: Path) -> None:
    for name in names(3):
        card(tmp_path, name, slow=2.0, slow_casts=2.0, clock=877.0)
    assert kinds(*judged(tmp_path)) == {("", "low")}


def test_a_checksum_that_fails_on_every_card_is_told_of_each(tmp_path: Path) -> None:
    for name in names(3):
        planned = PlannedCase("checksum", checksum, CHECK, ("rowwise_eager",))
        broken = row(
            planned, "rowwise_eager", "failed", reason="RuntimeError: no kernel image", cause=Cause.RUN
        )
        write_run(tmp_path / name, [[broken]], run_id=f"run-{name}", sweep="fleet", env=env(name))
    (group,) = judged(tmp_path)
    assert {(o.card, o.kind) for o in group.outliers} == {(card, "fails") for card in group.cards}
    assert len(group.cards) == 3
