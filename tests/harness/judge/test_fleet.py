"""Cards side by side. Oracles: fleets with a known fault in a known card (fleet_fixtures); other draws; a flipped bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from fleet_fixtures import CASES, CHECK, card, env, failed, judged, names, time
from report_fixtures import absent, figure, write_run

import harness.judge.fleet
from harness.__main__ import main
from harness.cli.config import load
from harness.engine.plan import PlannedCase, make_plan
from harness.engine.rows import row
from harness.judge.fleet import PEAKS, Fleet, Score, refuse_another_card
from harness.store.case import Case
from harness.store.errors import Cause, UsageError
from harness.suites import SUITES, checksum

ROOT = Path(harness.judge.fleet.__file__).parents[2]
LONG = Case.of("gemm", {"M": 8192, "K": 64, "N": 64})  # on the cards that are told to have it
LARGE = Case.of("gemm", {"M": 16384, "K": 4096, "N": 14336})
ECC = "CUDA error: uncorrectable ECC"
Names = list[tuple[str, str]]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    for name in names(5):
        card(folder, name)
    return folder


def outliers(*folders: Path) -> Names:
    """Cards and kinds of those out of line."""
    return [(score.card[:4], score.kind) for score in Fleet(judged(*folders), (), ()).outliers]


# Times


def test_healthy_cards_are_alike(healthy: Path) -> None:
    scores = judged(healthy)
    assert {score.kind for score in scores} == {""}
    assert all(abs(score.off) < 0.04 for score in scores)
    assert main(["fleet", str(healthy)]) == 0


@pytest.mark.parametrize(
    ("unread", "missing", "known", "code"),
    [
        ((), (), 5, "in_line"),
        ((), (), 4, "alike"),  # of one it is not known whether it is slow
        ((), (), 0, "alike"),
        (("part-1: no Parquet",), (), 5, "unread"),
        (("part-1: no Parquet",), ("b",), 5, "missing"),
    ],
)
def test_the_word_on_a_healthy_fleet_is_no_larger_than_what_was_judged(
    healthy: Path, unread: tuple[str, ...], missing: tuple[str, ...], known: int, code: str
) -> None:
    scores = judged(healthy)
    cards = sorted({score.card for score in scores})[:known]
    levels = [Score("5 cards", card, PEAKS, "", "", "93 %", 0.07) for card in cards]
    fleet = Fleet([*scores, *levels], unread, missing)
    assert fleet.code == code
    assert (fleet.tone == "good") == (code in ("in_line", "alike"))


def test_cards_whose_results_alone_were_compared_have_no_good_word(tmp_path: Path) -> None:
    """Oracle: rows of the suite checksum, whose time no two cards have."""
    for name in names(3):
        rows = [[figure(CHECK, "rowwise_eager", "mismatches", 0.0, resolved={"checksum": "c0ffee"})]]
        write_run(tmp_path / name, rows, run_id=name, sweep="fleet", env=env(name))
    fleet = Fleet(judged(tmp_path), (), ())
    assert (fleet.code, fleet.tone) == ("not_judged", "")
    assert [len(cards) for cards in fleet.found.values()] == [3]


@pytest.mark.parametrize(
    ("fault", "suite", "kind", "why"),
    [
        ({"slow": 1.12}, "gemm", "slow", "of 6 cards"),
        ({"slow_casts": 1.3}, "cast", "slow", ""),
        ({"slow": 0.85, "driver": "999.1"}, "gemm", "fast", ""),
        ({"checksum": "badbad"}, "checksum", "corrupt", "badbad"),
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
    assert len({score["card"] for score in said["scores"]}) == 6


def test_median_and_spread_of_each_card(tmp_path: Path) -> None:
    """Oracle: by hand. Three arms of one case; one card takes 2 % longer, another 4 % in one arm alone."""
    times = {"aaaa": (1.0, 1.0, 1.0), "bbbb": (1.0, 1.04, 1.0), "cccc": (1.02, 1.02, 1.02)}
    for name, factors in times.items():
        arms = zip(("bf16_eager", "tensorwise_eager", "rowwise_eager"), factors, strict=True)
        rows = [[time(CASES[0], arm, 2.0 * factor) for arm, factor in arms]]
        write_run(tmp_path / name, rows, run_id=name, env=env(name))
    found = {score.card[:4]: (score.off, score.spread) for score in judged(tmp_path)}
    # Middle of the second arm: 1.02, over which the cards lie at 1/1.02, 1.04/1.02 and 1
    assert found["aaaa"] == pytest.approx((0.0, 0.02))
    assert found["bbbb"] == pytest.approx((0.0, 1.04 / 1.02 - 1))
    assert found["cccc"] == pytest.approx((0.02, 0.02))


def test_slow_memory_alone_is_found_by_the_cases_of_the_sweep(tmp_path: Path) -> None:
    """Its copy takes a quarter longer and its products as long as the others'."""
    plan = make_plan(load(["sweep=fleet"], lambda asked: "cuda").config, SUITES)
    for name in (*names(4), "beef"):
        slow = {"ceilings": 1.25} if name == "beef" else {}
        rows = [[time(c.case, a, slow.get(c.case.suite, 1.0)) for a in c.arms] for c in plan.cases]
        write_run(tmp_path / name, rows, run_id=name, sweep="fleet", env=env(name))
    found = Fleet(judged(tmp_path), (), ()).outliers
    assert [(score.card[:4], score.suite, score.kind) for score in found] == [("beef", "ceilings", "slow")]


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
    groups = {score.card[:4]: score.alike for score in judged(tmp_path)}
    assert len({groups[name] for name in names(3)}) == 1 < len({*groups.values()}) == 2
    fleet = Fleet(judged(tmp_path), (), ())
    assert {code: [card[:4] for card in cards] for code, cards in fleet.found.items()} == {
        "not_judged": ["beef"]
    }


def test_one_code_of_two_commits_is_one_code(tmp_path: Path) -> None:
    """A commit that changes no code (a page, a log) changes no time; and MIG that can't be asked for is off."""
    for name in names(3):
        card(tmp_path, name, code="aaaa", mig=False)
    card(tmp_path, "beef", slow=1.3, code="aaaa", mig=None, git_commit="f" * 40)
    assert outliers(tmp_path) == [("beef", "slow")]


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


def test_what_a_later_run_left_out_does_not_replace_what_was_measured(healthy: Path, tmp_path: Path) -> None:
    card(tmp_path / "first", "beef", slow=2.0)
    later = [[absent(case, "bf16", "skipped", "budget_s") for case in CASES]]
    write_run(tmp_path / "second", later, run_id="later", sweep="fleet", env=env("beef"))
    assert outliers(healthy, tmp_path) == [("beef", "slow")]


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


def test_a_run_is_continued_by_the_same_card_whatever_its_host_is_called(tmp_path: Path) -> None:
    run = write_run(tmp_path, [[time(CASES[0], "bf16_eager", 1.0)]], sweep="fleet", env=env("beef"))
    refuse_another_card(["checksum"], run, env("beef", host_hash="0" * 12))
    refuse_another_card(["gemm"], run, env("cafe"))
    with pytest.raises(UsageError):
        refuse_another_card(["checksum"], run, env("cafe"))


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
    assert main(["fleet", str(healthy), str(tmp_path), "json=true"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["code"] == "not_judged"
    lacking = [score for score in said["scores"] if score["kind"] == "lacking"]
    assert {score["card"][:4] for score in lacking} == {"beef"}
    assert {"gemm rowwise_eager isolated", "checksum rowwise_eager bits"} <= {
        score["reason"] for score in lacking
    }
    assert {score["off"] for score in lacking} == {None}


@pytest.mark.parametrize(
    ("slow", "kinds"), [(1.0, []), (1.08, []), (1.1, ["fast", "slow"]), (2.0, ["fast", "slow"])]
)
def test_of_two_cards_that_lie_9_percent_apart_nobody_can_tell_which_is_at_fault(
    slow: float, kinds: list[str], tmp_path: Path
) -> None:
    card(tmp_path, "aaaa")
    card(tmp_path, "bbbb", slow=slow)
    assert sorted(kind for _, kind in outliers(tmp_path)) == kinds


@pytest.mark.parametrize(("ms", "kinds"), [(2.6, []), (4.6, []), (4.9, ["low"]), (7.8, ["low"])])
def test_a_card_alone_is_compared_with_the_peak_table(ms: float, kinds: list[str], tmp_path: Path) -> None:
    """Oracle: harness.advise has 811 TFLOP/s of an H200's long bf16 products: 1.92 TFLOP take 2.37 ms, half of it is 4.74."""
    product = time(LARGE, "bf16_eager", ms)
    write_run(tmp_path, [[product]], sweep="fleet", env=env("beef"))
    assert [kind for _, kind in outliers(tmp_path)] == kinds
    assert Fleet(judged(tmp_path), (), ()).code == ("out" if kinds else "not_judged")


def test_the_ends_of_a_ramp_are_out_of_line(tmp_path: Path) -> None:
    """Eight cards, each 2.5 % slower than the one before: the ends lie 8 % from the middle, the others within the limit."""
    for i, name in enumerate(names(8)):
        card(tmp_path, name, slow=1 + 0.025 * i)
    assert outliers(tmp_path) == [("0000", "fast"), ("0007", "slow")]


def test_a_checksum_that_fails_on_every_card_is_told_of_each(tmp_path: Path) -> None:
    for name in names(3):
        planned = PlannedCase("checksum", checksum, CHECK, ("rowwise_eager",))
        broken = row(
            planned, "rowwise_eager", "failed", reason="RuntimeError: no kernel image", cause=Cause.RUN
        )
        write_run(tmp_path / name, [[broken]], run_id=f"run-{name}", sweep="fleet", env=env(name))
    assert outliers(tmp_path) == [(name, "fails") for name in names(3)]


def test_what_fails_on_every_card_is_nobodys_fault_and_not_judged(tmp_path: Path) -> None:
    """It may be the arm or its software; a good word would say that it was judged."""
    for name in names(3):
        card(tmp_path, name, fails="RuntimeError: no kernel image")
    fleet = Fleet(judged(tmp_path), (), ())
    assert (fleet.code, fleet.outliers) == ("not_judged", [])


@pytest.mark.parametrize("count", [2, 4])
def test_where_no_value_has_a_majority_nobody_is_trusted(count: int, tmp_path: Path) -> None:
    for i, name in enumerate(names(count)):
        card(tmp_path, name, checksum=("c0ffee", "badbad")[i % 2])
    assert outliers(tmp_path) == [(name, "corrupt") for name in names(count)]


def test_a_card_that_gave_two_values_contradicts_itself_whatever_the_others_gave(tmp_path: Path) -> None:
    """Oracle: one value and the other in different runs of the same two cards."""
    for name in names(2):
        for value in ("c0ffee", "badbad"):
            card(tmp_path / value, name, checksum=value, run_id=value)
    assert {kind for _, kind in outliers(tmp_path)} == {"corrupt"}
