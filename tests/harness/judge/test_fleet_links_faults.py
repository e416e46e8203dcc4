"""Links that are lost, wrong or not there. Oracle: what the test breaks, and the count of GPUs, pairs and hosts by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from link_fixtures import ROUNDS, hosts, operation, sent, without, write, wrong_bytes
from test_fleet_links import fleet, named

from harness.__main__ import main
from harness.judge.fleet.link_group import SLOW, SLOW_DIRECTION, SLOW_END
from harness.judge.fleet.links import CORRUPT
from harness.judge.fleet.nvlinks import NO_NVLINK
from harness.machine.links import HOSTS, PCIE, SEND, Members
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from pathlib import Path

KIB = [1024]
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(3, i) for i in range(8) if i != 3], {(NO_NVLINK, "rank 3")}),
        ([(3, 5)], {(NO_NVLINK, "rank 3", "rank 5")}),
    ],
)
def test_lost_nvlink_is_out_of_line_by_itself(
    tmp_path: Path, capsys: Capture, pairs: list[tuple[int, int]], expected: set[Any]
) -> None:
    """All PCIe links of one GPU are alike, and ten times as slow as NVLink: among themselves none of them is slow."""
    slow = {frozenset(pair) for pair in pairs}
    rows = sent(without(hosts(1, 8), *pairs), lambda a, b, turn: 10.0 if {a, b} in slow else 1.0, kibs=KIB)
    write(tmp_path, rows)
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, expected)


def test_a_host_without_nvlink_is_named_beside_two_with_it(tmp_path: Path, capsys: Capture) -> None:
    ends = without(hosts(3, 2), (4, 5))
    write(tmp_path, sent(ends, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, {(NO_NVLINK, "rank 4"), (NO_NVLINK, "rank 5")})


@pytest.mark.parametrize("lost", [(0, 1, 2, 3), "unread"])
def test_where_nvlink_may_be_lost_nothing_is_in_line(tmp_path: Path, capsys: Capture, lost: Any) -> None:
    """Half of the GPUs without it, or one of which NVML says nothing: nobody can tell, and the times are alike."""
    if lost == "unread":
        ends = [replace(end, nvlinked=None) if end.rank == 3 else end for end in hosts(1, 8)]
    else:
        ends = without(hosts(1, 8), *((a, b) for a in lost for b in range(8) if a != b))
    write(tmp_path, sent(ends, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])
    assert said["verdict"].startswith("can't tell")
    assert "cannot tell whether NVLink is lost" in said["verdict"]


def test_gpus_that_are_bridged_in_pairs_are_healthy(tmp_path: Path, capsys: Capture) -> None:
    pairs = [(a, b) for a in range(4) for b in range(a) if a // 2 != b // 2]
    write(tmp_path, sent(without(hosts(1, 4), *pairs), kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])


def test_gpus_of_two_hosts_share_one_way(tmp_path: Path, capsys: Capture) -> None:
    """Four links and one way between the hosts: that it is slow shows in all of them alike."""
    write(tmp_path, sent(hosts(2, 2), lambda a, b, turn: 20.0 if a // 2 != b // 2 else 0.1, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    (group,) = [g for g in said["groups"] if g["link"] == HOSTS]
    assert (group["links"], group["judged"]) == (4, 0)
    assert "4 links between 1 pair of hosts" in group["why_not"]
    assert said["verdict"].startswith("can't tell: no link could be judged")


def test_directions_are_compared_without_a_third_host(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, sent(hosts(2), lambda a, b, turn: 10.0 if a == 0 else 1.0, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, {(SLOW_DIRECTION, "rank 0", "rank 1")})


@pytest.mark.parametrize("later", [False, True])
def test_wrong_bytes_are_an_outlier_that_no_later_run_takes_back(
    tmp_path: Path, capsys: Capture, later: bool
) -> None:
    write(tmp_path, [[wrong_bytes(hosts(4))]])
    if later:
        write(tmp_path, sent(hosts(4)), run_id="links-2")
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, {(CORRUPT, "rank 1", "rank 2")})


Rows = list[list[Measurement]]


def changed(**fields: Any) -> Callable[[Rows], Rows]:
    return lambda rows: [[replace(row, **fields) for row in own] for own in rows]


def without_pair(rows: Rows) -> Rows:
    return [own for own in rows if own[0].part not in ("0>1", "1>0")]


def one_way(rows: Rows) -> Rows:
    return [own for own in rows if own[0].part != "1>2"]


def first_part(part: str) -> Callable[[Rows], Rows]:
    return lambda rows: [[replace(row, part=part) for row in rows[0]], *rows[1:]]


def first_seconds(value: float) -> Callable[[Rows], Rows]:
    return lambda rows: [[replace(rows[0][0], samples=(value,) * ROUNDS), *rows[0][1:]], *rows[1:]]


def newer(rows: Rows) -> Rows:
    ends = [{**end.as_dict(), "lanes": 16} for end in hosts(4)]
    return changed(resolved={"bytes": 1, "backend": "nccl", "calls": 1, "ends": ends})(rows)


@pytest.mark.parametrize(
    ("how", "said_of_it"),
    [
        (without_pair, "no message of ranks 0 > 1; 1 > 0"),
        (one_way, "no message of ranks 1 > 2"),
        (lambda rows: [own[:1] for own in rows], "no message of ranks 0 > 1"),
        (changed(resolved={"bytes": 65536, "backend": "nccl"}), "resolved.ends, which says who the ranks are, is missing"),
        (changed(resolved={}), "resolved.ends"),
        (newer, "lanes"),
        (first_part(""), "part=''"),
        (first_part("0>9"), "part='0>9'"),
        (first_part("0-1"), "part='0-1'"),
        (first_seconds(0.0), "no finite number above 0"),
        (first_seconds(-1.0), "no finite number above 0"),
        (first_seconds(math.inf), "no finite number above 0"),
    ],
)  # fmt: skip
def test_what_is_not_there_or_cannot_be_read_is_named(
    tmp_path: Path, capsys: Capture, how: Callable[[Rows], Rows], said_of_it: str
) -> None:
    write(tmp_path, how(sent(hosts(4), kibs=KIB)))
    code, said = fleet(tmp_path, capsys)
    assert code == 2
    assert said["verdict"].startswith("can't tell")
    assert any(said_of_it in problem for problem in said["problems"])
    assert main(["fleet", str(tmp_path)]) == 2
    assert "Not as it should be" in capsys.readouterr().out


@pytest.mark.parametrize("known", [False, True])
def test_pcie_links_by_way_of_a_switch_are_faster_and_no_outlier(
    tmp_path: Path, capsys: Capture, known: bool
) -> None:
    """Eight GPUs, two on each switch; where NVML says so they are kinds of their own, else nobody can tell."""
    ends = [replace(end, nvlinked=()) for end in hosts(1, 8)]
    if known:
        words = {True: "one switch", False: "across sockets"}
        ends = [
            replace(e, paths=tuple((o.gpu, words[o.rank // 2 == e.rank // 2]) for o in ends if o is not e))
            for e in ends
        ]
    write(tmp_path, sent(ends, lambda a, b, turn: 1.0 if a // 2 == b // 2 else 1.7, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])
    judged = {g["link"]: (g["links"], g["judged"]) for g in said["groups"]}
    if known:
        assert judged == {f"{PCIE}, one switch": (4, 4), f"{PCIE}, across sockets": (24, 24)}
    else:
        assert judged == {PCIE: (28, 0)}
        assert said["verdict"].startswith("can't tell")


def test_slow_links_of_another_sort_are_not_faulty(tmp_path: Path, capsys: Capture) -> None:
    """Six GPUs on one socket and two on the other: 12 of 28 links cross."""
    ends = [replace(end, nvlinked=()) for end in hosts(1, 8)]
    write(tmp_path, sent(ends, lambda a, b, turn: 1.7 if (a < 6) != (b < 6) else 1.0, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["outliers"]) == (0, [])
    assert "can't tell" in said["verdict"]


def test_a_slow_way_of_one_host_of_three_is_named_by_its_gpus(tmp_path: Path, capsys: Capture) -> None:
    times = lambda a, b, turn: 0.1 if a // 3 == b // 3 else 3.0 if 0 in (a // 3, b // 3) else 1.0  # noqa: E731
    write(tmp_path, sent(hosts(3, 3), times, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, {(SLOW_END, f"rank {rank}") for rank in range(3)})


def test_a_slow_way_between_two_of_three_hosts_is_no_other_sort(tmp_path: Path, capsys: Capture) -> None:
    """9 of 27 links, and all of those hosts."""
    times = lambda a, b, turn: 0.1 if a // 3 == b // 3 else 5.0 if {a // 3, b // 3} == {0, 1} else 1.0  # noqa: E731
    write(tmp_path, sent(hosts(3, 3), times, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert code == 1
    assert {o["what"] for o in said["outliers"]} == {SLOW}
    assert len(said["outliers"]) == 9


def test_a_rank_twice_in_a_collective_is_refused(tmp_path: Path, capsys: Capture) -> None:
    rows = sent(hosts(4), kibs=KIB)
    odd = [
        replace(row, part="1-1")
        for row in operation("all_reduce", 1024, Members((0, 1)), hosts(4), [1e-3] * 3)
    ]
    write(tmp_path, [*rows, odd])
    code, said = fleet(tmp_path, capsys)
    assert code == 2
    assert "part='1-1'" in said["problems"][0]
    assert SEND not in said["problems"][0]


def test_a_report_of_unreadable_rows_says_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, changed(resolved={})(sent(hosts(3), kibs=KIB)), run_id="old")
    assert main(["report", str(tmp_path / "old")]) == 0
    page = (tmp_path / "reports" / "old.html").read_text()
    assert "resolved.ends, which says who the ranks are, is missing" in page
