"""Links of a fleet. Oracle: which link the test makes slow, by how much, in how many rounds; and the rate that is promised."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from link_fixtures import ROUNDS, case, hosts, sent, write

from harness.__main__ import main
from harness.judge.fleet import link_alarms
from harness.judge.fleet.limit import RATE, TOLERANCE_SDS
from harness.judge.fleet.link_alarms import rate
from harness.judge.fleet.link_group import SLOW, SLOW_END
from harness.judge.fleet.link_rule import TOLERANCE
from harness.machine.links import HOSTS, NVLINK
from harness.store.cause import Cause
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def fleet(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["fleet", str(folder), "json=true", *words])
    return code, json.loads(capsys.readouterr().out)["links"]


def named(said: dict[str, Any]) -> set[tuple[str, ...]]:
    return {(o["what"], *(name.split(" (")[0] for name in o["names"])) for o in said["outliers"]}


def between(pairs: Sequence[tuple[int, int]], factor: float) -> Callable[[int, int, int], float]:
    return lambda a, b, turn: factor if (a, b) in pairs else 1.0


def test_healthy_links_are_judged_and_in_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, sent(hosts(4)))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])
    assert said["verdict"].startswith(
        "no link out of line; judged 6 of 6, a link is found that takes 31 % longer"
    )
    (group,) = said["groups"]
    assert (group["link"], group["links"], group["ends"], group["judged"]) == (HOSTS, 6, 4, 6)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_link_at_a_tenth_in_one_direction_is_named_with_both_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    write(tmp_path, sent(hosts(count), between([(2, 1)], 10.0)))
    code, said = fleet(tmp_path, capsys)
    assert code == 1
    assert named(said) == {(SLOW, "rank 2", "rank 1")}
    assert said["outliers"][0]["names"][0] == "rank 2 (cuda:0 gpu20, node 2, host host2)"
    assert said["outliers"][0]["off"] == pytest.approx(9.0, rel=0.1)


@pytest.mark.parametrize("count", [3, 4, 8])
def test_a_slow_network_card_is_an_end_and_not_all_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """With three hosts it slows two links of three, of four half of them: the healthy ones are no fast outliers."""
    slow = [(a, b) for a in range(count) for b in range(count) if 1 in (a, b)]
    write(tmp_path, sent(hosts(count), between(slow, 2.0)))
    code, said = fleet(tmp_path, capsys)
    assert code == 1
    assert named(said) == {(SLOW_END, "rank 1")}


def test_links_are_compared_within_their_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three hosts with three GPUs each: NVLink is ten times as fast as the network, and neither is out of line."""
    ends = hosts(3, per_host=3)
    within = [(a, b) for a in range(9) for b in range(9) if a // 3 == b // 3]
    write(tmp_path, sent(ends, between(within, 0.1)))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])
    assert {(g["link"], g["links"], g["judged"]) for g in said["groups"]} == {(NVLINK, 9, 9), (HOSTS, 27, 27)}


def test_one_link_of_a_kind_cannot_be_judged_and_other_machines_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, sent(hosts(2), between([(0, 1), (1, 0)], 10.0)))
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    assert said["verdict"].startswith(
        "can't tell: no link could be judged (cannot tell: one link of this kind"
    )
    assert "their two directions are compared" in said["verdict"]
    assert "give fleet the runs of other machines" in said["verdict"]
    for i in range(1, 4):
        others = [replaced(end, f"other{i}") for end in hosts(2)]
        write(tmp_path, sent(others, seed=i), run_id=f"links-{i + 1}")
    code, said = fleet(tmp_path, capsys)
    assert code == 1
    assert {(what, frozenset(ends)) for what, *ends in named(said)} == {
        (SLOW, frozenset({"rank 0", "rank 1"}))
    }


def replaced(end: Any, name: str) -> Any:
    named = {field: name + getattr(end, field) for field in ("host", "machine", "gpu", "network")}
    return replace(end, **named)


def test_a_burst_in_some_rounds_condemns_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even where it is in most of them, so that the median is ten times the others'."""

    def burst(a: int, b: int, turn: int) -> float:
        return 10.0 if (a, b) == (0, 2) and turn < ROUNDS - 2 else 1.0

    write(tmp_path, sent(hosts(4), burst))
    assert fleet(tmp_path, capsys)[0] == 0


def test_links_that_differ_too_much_are_not_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, sent(hosts(4), spread=1.5, kibs=[64]))
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    assert "can't tell: no link could be judged" in said["verdict"]
    assert "differ so much" in said["verdict"]


def test_two_slow_ends_of_four_cannot_be_told_from_one_fast_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = [(a, b) for a in range(4) for b in range(4) if {a, b} & {0, 1}]
    write(tmp_path, sent(hosts(4), between(slow, 10.0)))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])
    assert said["verdict"].startswith(
        "can't tell: no link could be judged (cannot tell at 64 KiB: 1 of 6 links are faster"
    )


@pytest.mark.parametrize(
    ("status", "cause", "reason", "expected"),
    [
        ("skipped", Cause.UNSUPPORTED, "not judged: one rank, which has no link", 0),
        ("failed", Cause.RUN, "rank 1 of 4: was killed by SIGKILL", 2),
        ("skipped", Cause.BUDGET, "the time was spent", 2),
    ],
)
def test_without_a_time_nothing_is_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: Any, cause: Cause, reason: str, expected: int
) -> None:
    """What was not asked of a machine lacks nothing where other links were judged; what failed does."""
    which = case(64)
    row = Measurement(
        "links", which.case_id, "send", which.axes_json, "link_s", status, reason=reason, cause=cause
    )
    write(tmp_path, [[row]])
    code, said = fleet(tmp_path, capsys)
    assert code == expected
    assert said["verdict"] == f"can't tell: no link could be judged (send: {reason})"
    write(tmp_path, sent(hosts(4)), run_id="links-2")  # other runs are judged, and that one is still named
    code, said = fleet(tmp_path, capsys)
    assert code == expected
    start = (
        "can't tell of all links: 1 operation without a time"
        if expected
        else "no link out of line; judged 6 of 6"
    )
    assert said["verdict"].startswith(start)
    assert "1 operation" in said["verdict"]
    assert said["not_measured"] == [f"send: {reason}"]


def test_a_page_has_the_tables_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, sent(hosts(4), between([(2, 1)], 10.0)))
    for words in (["markdown=true"], []):
        assert main(["fleet", str(tmp_path), *words]) == 1
        out = " ".join(capsys.readouterr().out.split())
        assert "Links out of line" in out
        assert "Messages of 1 MiB" in out
        assert "links out of line: slow link rank 2" in out
        assert "card" not in out  # no card was measured


@pytest.mark.parametrize("text", ["0", "100", "x"])
def test_a_tolerance_of_links_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert main(["fleet", str(tmp_path), f"link_tolerance={text}"]) == 2
    assert f"link_tolerance={text}: expected percent between 0 and 100" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [3, 4, 8])
def test_the_rate_of_false_alarms_is_kept_by_links_that_spread_as_the_tolerance_says(ends: int) -> None:
    """400 healthy fleets, judged at two sizes; oracle: the promised rate, with three standard errors of it."""
    draws = 400
    alarms = rate(ends, math.log1p(TOLERANCE) / TOLERANCE_SDS, draws=draws)
    assert alarms <= RATE + 3 * math.sqrt(RATE * (1 - RATE) / draws)
    assert rate(ends, 0.05, 9.0, draws=50) > 0.9


@pytest.mark.parametrize("end", [False, True])
def test_the_simulation_slows_what_it_says_and_nothing_else(end: bool) -> None:
    """Links without noise, one or all of an end twice as slow; oracle: that is far beyond the tolerance, so always found."""
    assert rate(4, 0.0, 1.0, end=end, draws=3) == 1.0
    assert rate(4, 0.0, 0.0, end=end, draws=3) == 0.0
    assert rate(4, 0.0, TOLERANCE / 2, end=end, draws=3) == 0.0


def test_the_table_of_alarms_asks_what_its_heads_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the heads, read again, where each cell shows by how much it was slowed, below 0 where that is an end."""
    monkeypatch.setattr(
        link_alarms, "rate", lambda ends, spread, slower=0.0, *, end=False: -slower if end else slower
    )
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in link_alarms.lines())
    asked = []
    for head in heads[4:]:
        found = re.fullmatch(r"one (link|end) (\d+)% slower", head)
        assert found
        asked.append(f"{'-' if found[1] == 'end' else ''}{found[2]}.0 %")
    assert heads[3] == "false alarm"
    assert len(asked) == 4
    assert all(row[3:] == ["0.0 %", *asked] for row in rows)
    page = (Path(__file__).parents[3] / "docs" / "fleet-links.md").read_text()
    table = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition("| ends | links |")[2].split("\n\n")[0].splitlines()[2:]
    ]
    assert [row[:3] for row in rows] == [row[:3] for row in table]
    assert f"| {' | '.join(heads)} |" in page
