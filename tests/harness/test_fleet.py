"""Oracles: fleets made up here with a known fault in a known card, Python's statistics module, CPU runs for real.

No number in these rows was measured: `fleet` draws healthy cards from a seeded generator and then breaks one.
"""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from report_fixtures import H200, TIMING, figure, write_run

import harness.fleet
from harness import store
from harness.__main__ import main
from harness.case import Case
from harness.fleet.cards import cards, groups
from harness.fleet.judge import Group, judge, limits
from harness.fleet.rates import lines, rate
from harness.measurement import Measurement

ROOT = Path(harness.fleet.__file__).parents[2]
CASES = [Case.of("gemm", {"M": m, "K": 64, "N": 64}) for m in (1024, 2048, 4096)]
LONG = Case.of("gemm", {"M": 8192, "K": 64, "N": 64})  # on the cards that are told to have it
CASTS = [Case.of("cast", {"M": m, "K": 64}) for m in (1024, 2048)]
CHECK = Case.of("checksum", {"cube": 64, "data": "codes"})
BASE_MS = {"bf16": 2.0, "fp8_rowwise": 1.25}


def time(case: Case, arm: str, ms: float, clock: float = 1755.0, throttled: bool = False) -> Measurement:
    return Measurement(
        case.suite,
        case.case_id,
        arm,
        case.axes_json,
        "time_ms",
        "ok",
        baseline="" if arm == "bf16" else "bf16",
        regime="isolated",
        samples=(ms,) * 3,
        rounds=(0, 1, 2),
        sample_clock_mhz=(clock,) * 3,
        timing={**TIMING, "throttled": throttled},
    )


def card(folder: Path, name: str, slow: float = 1.0, slow_casts: float = 1.0, **more: object) -> None:
    """One invented card: times 1 % around the same middle, times `slow`."""
    draw = random.Random(name)
    clock, throttled = float(str(more.pop("clock", 1755.0))), bool(more.pop("throttled", False))
    checksum, run_id = str(more.pop("checksum", "c0ffee")), str(more.pop("run_id", f"run-{name}"))
    failed, extra = more.pop("failed", None), more.pop("extra", None)
    cases = []
    if extra is not None:
        cases.append([time(LONG, arm, 8 * ms * float(str(extra))) for arm, ms in BASE_MS.items()])
    for case in (*CASES, *CASTS):
        level = (slow_casts if case.suite == "cast" else slow) * case.integer("M") / 1024
        cases.append(
            [
                time(case, arm, ms * level * math.exp(draw.gauss(0, 0.01)), clock, throttled)
                for arm, ms in BASE_MS.items()
            ]
        )
    if failed:
        gone = cases[0][1]
        cases[0][1] = replace(
            gone, status="failed", samples=(), rounds=(), sample_clock_mhz=(), reason=str(failed)
        )
    cases.append([figure(CHECK, "fp8_rowwise", "mismatches", 0.0, resolved={"checksum": checksum})])
    env = H200 | {"gpu_uuid_hash": name * 3, "host_hash": "0123456789ab"} | more
    write_run(folder / name, cases, run_id=run_id, sweep="fleet", env=env)


def judged(folder: Path, tolerance: float = 0.05) -> list[Group]:
    return [judge(group, tolerance) for group in groups(cards(store.read(folder, all_attempts=True)))]


def names(count: int) -> list[str]:
    return [f"{i:04x}" for i in range(count)]


def test_healthy_cards_are_in_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(8):
        card(tmp_path, name)
    (group,) = judged(tmp_path)
    assert not group.outliers
    assert {(s.suite, s.arm, s.cards, s.cases) for s in group.spreads} == {
        (suite, arm, 8, count) for suite, count in (("gemm", 3), ("cast", 2)) for arm in BASE_MS
    }
    assert all(-0.04 < s.low <= 0 <= s.high < 0.04 for s in group.spreads)
    assert main(["fleet", str(tmp_path)]) == 0
    assert "no card out of line; 8 of 8 judged" in capsys.readouterr().out


def test_what_two_cards_measured_judges_none(tmp_path: Path) -> None:
    """One of the two took three times as long; which of them is at fault nobody can tell."""
    for name, extra in zip(names(4), (1.0, 3.0, None, None), strict=True):
        card(tmp_path, name, extra=extra)
    (group,) = judged(tmp_path)
    assert not group.outliers
    assert {s.cases for s in group.spreads if s.suite == "gemm"} == {3}
    assert all(s.high < 0.04 for s in group.spreads)


@pytest.mark.parametrize(
    ("fault", "suite", "kind", "why"),
    [
        ({"slow": 1.12, "clock": 1500.0, "throttled": True}, "gemm", "slow", "throttled in 6 of 6"),
        ({"slow": 1.12, "clock": 1500.0}, "gemm", "slow", "SM clock 85%"),
        ({"slow": 1.2, "power_limit_w": 350.0}, "gemm", "slow", "power_limit_w 350.0, most others 700.0"),
        ({"slow": 1.2}, "gemm", "slow", "at the others' clock and power limit"),
        ({"slow_casts": 1.3}, "cast", "slow", "memory"),
        ({"slow": 0.85, "driver": "999.1"}, "gemm", "fast", "driver 999.1"),
        ({"checksum": "badbad"}, "checksum", "corrupt", "5 of 6 cards give c0ffee"),
        ({"failed": "CUDA error: uncorrectable ECC"}, "gemm", "fails", "uncorrectable ECC"),
    ],
)
def test_a_planted_fault_is_found_where_it_is_with_its_cause(
    fault: dict[str, object],
    suite: str,
    kind: str,
    why: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in names(5):
        card(tmp_path, name)
    card(tmp_path, "beef", **fault)
    (group,) = judged(tmp_path)
    (outlier,) = group.outliers
    assert (outlier.card[:4], outlier.suite, outlier.kind) == ("beef", suite, kind)
    assert why in outlier.reason
    assert main(["fleet", str(tmp_path)]) == 1
    assert "1 card of 6 out of line: beef" in capsys.readouterr().out


def test_two_cards_that_disagree_are_both_suspect(tmp_path: Path) -> None:
    card(tmp_path, "aaaa", checksum="1")
    card(tmp_path, "bbbb", checksum="2")
    (group,) = judged(tmp_path)
    assert [(o.card[:4], o.kind) for o in group.outliers] == [("aaaa", "corrupt"), ("bbbb", "corrupt")]
    assert "no value has a majority" in group.outliers[0].reason
    assert "2 of this model" in group.why_not


def test_the_slowest_card_bounds_what_may_be_claimed(tmp_path: Path) -> None:
    """Oracle: three cards without noise, by hand: speedups 1.6, 1.6 and 1.6 / 1.02, times 1, 1 and 1.02."""
    for name, factor in {"aaaa": 1.0, "bbbb": 1.0, "cccc": 1.02}.items():
        rows = [[time(case, "bf16", 2.0), time(case, "fp8_rowwise", 1.25 * factor)] for case in CASES]
        env = H200 | {"gpu_uuid_hash": name * 3, "host_hash": "0123456789ab"}
        write_run(tmp_path / name, rows, run_id=name, env=env)
    (group,) = judged(tmp_path)
    (spread,) = [s for s in group.spreads if s.arm == "fp8_rowwise"]
    assert spread.slowest[:4] == "cccc"
    assert spread.high == pytest.approx(0.02)
    assert spread.speedup == pytest.approx(1.6)
    assert spread.slowest_speedup == pytest.approx(1.6 / 1.02)
    assert [s.speedup for s in group.spreads if s.arm == "bf16"] == [None]


def test_the_limit_is_the_tolerance_or_three_and_a_half_robust_deviations(tmp_path: Path) -> None:
    """Scores 0, 1, 2, 3 and 4 tenths: median 0.2, median absolute deviation 0.1, limit 3.5 x 1.4826 x 0.1 = 0.519."""
    for far, count in ((0.7, 0), (0.75, 1)):
        folder = tmp_path / str(far)
        for i, score in enumerate([0.0, 0.1, 0.2, 0.3, far]):
            env = H200 | {"gpu_uuid_hash": f"{i}" * 12, "host_hash": "0123456789ab"}
            write_run(folder / str(i), [[time(CASES[0], "bf16", math.exp(score))]], run_id=str(i), env=env)
        (group,) = judged(folder)
        assert len(group.outliers) == count


def test_what_differs_between_the_cards_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(3):
        card(tmp_path, name)
    card(tmp_path, "beef", driver="580.1", power_limit_w=600.0)
    (group,) = judged(tmp_path)
    assert set(group.differences) == {"driver", "power_limit_w"}
    assert [cards[0][:4] for cards in group.differences["power_limit_w"].values()][-1] == "beef"
    assert main(["fleet", str(tmp_path), "markdown=true"]) == 0
    assert "| power_limit_w | 600.0 | 1: beef" in capsys.readouterr().out.replace("\\_", "_")


def test_other_models_software_and_commits_are_not_set_side_by_side(tmp_path: Path) -> None:
    card(tmp_path, "aaaa")
    for name, more in {
        "bbbb": {"gpu": "NVIDIA L40S"},
        "cccc": {"torch": "2.11.0"},
        "dddd": {"git_commit": "f" * 40},
    }.items():
        card(tmp_path, name, slow=3.0, checksum=name, **more)
    found = judged(tmp_path)
    assert [len(group.cards) for group in found] == [1, 1, 1, 1]
    assert not any(group.outliers for group in found)


def test_cards_that_were_given_one_run_id_do_not_replace_each_other(tmp_path: Path) -> None:
    for name in names(4):
        card(tmp_path, name, run_id="night")
    (group,) = judged(tmp_path)
    assert len(group.cards) == 4
    assert {s.cards for s in group.spreads} == {4}


def test_the_newest_measurement_of_a_card_counts(tmp_path: Path) -> None:
    card(tmp_path / "old", "beef", slow=5.0)
    for name in (*names(4), "beef"):
        card(tmp_path / "new", name)
    (group,) = judged(tmp_path)
    assert len(group.cards) == 5
    assert not group.outliers


def test_json_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in names(4):
        card(tmp_path, name)
    card(tmp_path, "beef", slow=1.5)
    assert main(["fleet", str(tmp_path), "json=true"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [o["card"][:4] for o in found["outliers"]] == ["beef"]
    assert len(found["groups"][0]["cards"]) == 5


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nothing/here"],
        [".", "tolerance=0"],
        [".", "tolerance=x"],
        [".", "--fast"],
        [".", "speed=1"],
        ["."],
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fleet", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_it_needs_no_torch(tmp_path: Path) -> None:
    card(tmp_path, "aaaa")
    code = (
        "import sys; from harness.__main__ import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "fleet", str(tmp_path)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "can't tell" in done.stdout


@pytest.mark.slow
def test_real_runs_of_three_hosts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of sweep=fleet on this CPU under three invented host names; their checksums are real and agree."""
    monkeypatch.chdir(tmp_path)
    quick = ["rounds=3", "timing.min_seconds=0", "timing.min_samples=1", "timing.max_seconds=0.05"]
    for host in ("one", "two", "three"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        words = [
            "sweep=fleet",
            "device=cpu",
            "timing.warmup_min_seconds=0",
            "parts.ceilings.axes.what=[copy]",
            *quick,
        ]
        assert main([*words, f"run_id={host}", "--quiet"]) == 0
    capsys.readouterr()
    (group,) = judged(tmp_path / "results")
    assert len(group.cards) == 3
    assert group.checked == 6
    assert not [
        o for o in group.outliers if o.kind != "slow" and o.kind != "fast"
    ]  # times are a shared CPU's
    assert main(["fleet", "one", "two", "three", "tolerance=99"]) in (0, 1)
    assert "6 results compared bit by bit: all cards gave the same bits" in capsys.readouterr().out


def test_the_error_rates_of_the_page_are_those_of_the_rule() -> None:
    """Oracle: the same draws again."""
    page = (ROOT / "docs" / "fleet.md").read_text()
    assert "\n".join(lines()) in page


def test_a_rule_without_a_tolerance_would_cry_wolf() -> None:
    """What the tolerance is for: three cards of one spread often look as if one were far off."""
    assert rate(3, 0.01, 0.0) < 0.01
    scores = [[random.Random(i).gauss(0, 0.01) for i in range(3 * j, 3 * j + 3)] for j in range(2000)]
    middle, limit = limits(np.array(scores), 1e-9)
    assert (np.abs(np.array(scores) - middle[:, None]) > limit[:, None]).any(axis=1).mean() > 0.2
