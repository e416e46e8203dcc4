"""Cards side by side. Oracles: fleets with a known fault in a known card (fleet_fixtures); other draws; a flipped bit."""

from __future__ import annotations

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from fleet_fixtures import CASES, CHECK, card, env, failed, judged, names, time
from report_fixtures import write_run

import harness.judge.fleet
from harness.__main__ import main
from harness.engine.plan import PlannedCase
from harness.engine.rows import row
from harness.judge.fleet import Fleet
from harness.judge.fleet.judge import Group
from harness.store.case import Case
from harness.store.errors import Cause
from harness.suites import checksum

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


# What is compared


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


def kinds(*groups: Group) -> set[tuple[str, str]]:
    return {(o.suite, o.kind) for group in groups for o in group.outliers}


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
