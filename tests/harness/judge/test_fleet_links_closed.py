"""Links that were not judged, or were found wrong once, are never called in line. Oracle: what the test breaks; counts of hosts."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
from link_fixtures import case, hosts, operation, sent, without, write, wrong_bytes
from test_fleet_links import fleet, named

from harness.__main__ import main
from harness.judge.fleet.nvlinks import NO_NVLINK
from harness.machine.links import HOSTS, SEND, End, Members
from harness.store.cause import Cause
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from pathlib import Path

KIB = [1024]
Capture = pytest.CaptureFixture[str]
Rows = list[list[Measurement]]


def rank_0_alone(ends: list[End]) -> list[End]:
    """GPU 0 of the first host, with GPUs of three other hosts."""
    others = [replace(end, rank=rank, nvlinked=()) for rank, end in enumerate(hosts(4, 8)[8::8], 1)]
    return [ends[0], *others]


@pytest.mark.parametrize("order", ["lost first", "lost last"])
def test_lost_nvlink_is_remembered_where_another_run_has_other_gpus(
    tmp_path: Path, capsys: Capture, order: str
) -> None:
    """A run between hosts has one GPU of each: it says nothing about NVLink, and takes nothing back."""
    within = without(hosts(1, 8), *((0, i) for i in range(1, 8)))
    runs = [sent(within, lambda a, b, turn: 10.0 if 0 in (a, b) else 1.0, kibs=KIB)]
    runs.insert(0 if order == "lost last" else 1, sent(rank_0_alone(within), kibs=KIB))
    for number, rows in enumerate(runs):
        write(tmp_path, rows, run_id=f"links-{number}")
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, {(NO_NVLINK, "rank 0")})


def test_nvlink_lost_in_a_smaller_run_is_named_after_a_whole_one(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, sent(hosts(1, 8), kibs=KIB), run_id="links-1")
    four = [replace(e, nvlinked=tuple(g for g in e.nvlinked or () if g < "gpu04")) for e in hosts(1, 8)[:4]]
    lost = without(four, (0, 1), (0, 2), (0, 3))
    write(tmp_path, sent(lost, lambda a, b, turn: 10.0 if 0 in (a, b) else 1.0, kibs=KIB), run_id="links-2")
    code, said = fleet(tmp_path, capsys)
    assert (code, named(said)) == (1, {(NO_NVLINK, "rank 0")})


def test_nvlink_that_is_back_is_in_line(tmp_path: Path, capsys: Capture) -> None:
    """Whole, lost, and whole again: the newest of three runs counts, though the first of them looked the same."""
    lost = without(hosts(1, 8), *((0, i) for i in range(1, 8)))
    for number, ends in enumerate((hosts(1, 8), lost, hosts(1, 8))):
        write(tmp_path, sent(ends, kibs=KIB), run_id=f"links-{number}")
    assert fleet(tmp_path, capsys)[0] == 0


def test_ranks_in_networks_of_their_own_are_on_one_host(tmp_path: Path, capsys: Capture) -> None:
    """Two hosts of three containers each: nine links and one way, which is twenty times as slow as it should be."""
    ends = [replace(end, network=f"net{end.rank}") for end in hosts(2, 3)]
    write(tmp_path, sent(ends, lambda a, b, turn: 20.0 if a // 3 != b // 3 else 1.0, kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    (group,) = [g for g in said["groups"] if g["link"] == HOSTS]
    assert (group["links"], group["judged"]) == (9, 0)
    assert "9 links between 1 pair of hosts" in group["why_not"]
    assert said["verdict"].startswith("can't tell")


def test_a_host_is_the_same_after_it_started_again(tmp_path: Path, capsys: Capture) -> None:
    """Two machines, measured three times with a start of one between each: one way between two hosts."""
    for number, boots in enumerate([(1, 1), (2, 1), (2, 2)]):
        ends = [
            replace(
                end, gpu="", nvlinked=None, device="cpu", host=f"h{end.rank}.{boot}", machine=f"m{end.rank}"
            )
            for end, boot in zip(hosts(2), boots, strict=True)
        ]
        write(tmp_path, sent(ends, lambda a, b, turn: 20.0, kibs=KIB), run_id=f"links-{number}")
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    assert said["verdict"].startswith("can't tell: no link could be judged")
    assert "between 1 pair of hosts" in said["groups"][0]["why_not"]


def test_hosts_of_rows_before_the_machine_was_kept_are_told_by_their_starts(
    tmp_path: Path, capsys: Capture
) -> None:
    write(tmp_path, sent([replace(end, machine="") for end in hosts(4)], kibs=KIB))
    code, said = fleet(tmp_path, capsys)
    assert (code, said["groups"][0]["judged"]) == (0, 6)


def test_a_file_that_cannot_be_read_is_no_link_in_line(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, sent(hosts(4), kibs=KIB))
    broken = write(tmp_path, sent(hosts(4), kibs=KIB), run_id="links-2")
    next(broken.rglob("*.parquet")).write_bytes(b"no Parquet")
    code, said = fleet(tmp_path, capsys)
    assert code == 2
    assert said["verdict"].startswith("can't tell of all links: 1 file could not be read")
    for words in ([], ["markdown=true"]):
        assert main(["fleet", str(tmp_path), *words]) == 2
        assert "can't tell of all links" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("state", ["interrupted", "failed", "running"])
def test_a_run_that_did_not_end_is_named(tmp_path: Path, capsys: Capture, state: str) -> None:
    """One of two sizes was measured: each pair of it is there, and nothing in the rows says that another is missing."""
    write(tmp_path, sent(hosts(4), kibs=KIB), state=state)
    code, said = fleet(tmp_path, capsys)
    assert code == 2
    assert said["verdict"].startswith(f"can't tell of all links: run links-1 is {state}")


def test_a_run_of_which_nothing_says_that_it_ended_is_not_in_line(tmp_path: Path, capsys: Capture) -> None:
    folder = write(tmp_path, sent(hosts(4), kibs=KIB))
    next(folder.rglob("_run.json")).unlink()
    code, said = fleet(tmp_path, capsys)
    assert code == 2
    assert "nothing says that run links-1 has ended" in said["verdict"]


def test_a_run_without_messages_is_named_beside_one_with_them(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path, sent(hosts(4), kibs=KIB))
    rows = operation("all_reduce", 1024, Members((0, 1, 2, 3)), hosts(4), [1e-3] * 3)
    write(tmp_path, [rows], run_id="links-2")
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    assert said["verdict"].startswith("can't tell of all links")
    assert "run links-2 has no message (arm send)" in said["verdict"]


def test_wrong_bytes_are_in_the_report_after_a_later_attempt_was_fine(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, [[wrong_bytes(hosts(4))]])
    write(tmp_path, sent(hosts(4), kibs=[64]))  # attempt 2
    assert fleet(tmp_path, capsys)[0] == 1
    assert main(["report", str(folder)]) == 0
    page = (tmp_path / "reports" / "links-1.html").read_text()
    assert "5 elements arrived wrong" in page


def unmeasured(status: Any, cause: Cause, reason: str) -> list[list[Measurement]]:
    which = case(64)
    return [[
        Measurement("links", which.case_id, arm, which.axes_json, "link_s", status, reason=reason, cause=cause)
        for arm in (SEND, "all_reduce")
    ]]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (unmeasured("failed", Cause.DIED, "rank 1 died"), "rank 1 died"),
        (unmeasured("skipped", Cause.UNSUPPORTED, "one rank, which has no link"), "one rank, which has no link"),
        (sent([replace(end, network=f"n{end.rank}") for end in hosts(2, 10)], kibs=KIB), "can&#x27;t tell"),
    ],
    ids=["all failed", "one rank", "20 ranks"],
)  # fmt: skip
def test_a_report_keeps_links_that_have_words_and_no_table(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, rows: Rows, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path, rows)
    assert main(["report", str(folder)]) == 0
    page = (tmp_path / "reports" / "links-1.html").read_text()
    section = page[page.index("Links between ranks</") :]
    assert words in section.replace("&#39;", "&#x27;")


def test_fewer_rounds_than_asked_are_said(tmp_path: Path, capsys: Capture) -> None:
    """A slow pair costs rounds: three of nine were made when the time for the operation was up."""
    rows = [
        [replace(one, samples=one.samples[:3], rounds=one.rounds[:3]) for one in some]
        for some in sent(hosts(4), kibs=KIB)
    ]
    write(tmp_path, rows)
    code, said = fleet(tmp_path, capsys)
    assert code == 0
    assert said["fewer_rounds"] == ["run links-1, send of 1 MiB: 3 of 9"]
    assert said["verdict"].startswith("can't tell of all links: fewer rounds than asked of 1 operation")
    assert main(["fleet", str(tmp_path), "markdown=true"]) == 0
    assert "Fewer rounds than asked" in capsys.readouterr().out


def test_a_slow_link_in_few_rounds_is_named(tmp_path: Path, capsys: Capture) -> None:
    slow = sent(hosts(4), lambda a, b, turn: 10.0 if {a, b} == {1, 2} else 1.0, kibs=KIB)
    rows = [[replace(one, samples=one.samples[:1], rounds=one.rounds[:1]) for one in some] for some in slow]
    write(tmp_path, rows)
    code, said = fleet(tmp_path, capsys)
    assert (code, len(said["fewer_rounds"])) == (1, 1)


WRONG: dict[str, Any] = {
    "null": None, "true": True, "a text": "x", "a number": 1.5, "below 0": -1, "NaN": float("nan"), "huge": 10**400, "nested": [[[[]]]],
    "an object": {"a": {}},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", ["bytes", "backend", "ends", *(f.name for f in fields(End))])
def test_a_field_of_another_kind_is_named(tmp_path: Path, capsys: Capture, field: str, wrong: str) -> None:
    """Only one of two runs has it; the other is whole. Whatever fits the field is another fleet, and no less judged."""
    write(tmp_path, sent(hosts(4), kibs=KIB))
    value, rows = WRONG[wrong], sent(hosts(4), kibs=KIB)
    for one in (one for some in rows for one in some):
        resolved = {**one.resolved, "ends": [dict(end) for end in one.resolved["ends"]]}
        (resolved if field in resolved else resolved["ends"][1])[field] = value
        object.__setattr__(one, "resolved", resolved)
    write(tmp_path, rows, run_id="links-2")
    texts = {"a text", "NaN"}  # the store writes NaN as a text
    fits = {
        "bytes": {"huge"},
        **dict.fromkeys(("backend", "host", "network", "device", "gpu", "model", "machine"), texts),
        "node": {"huge"},
        "nvlinked": {"null"},
        "paths": {"null"},
    }
    code, said = fleet(tmp_path, capsys)
    if wrong in fits.get(field, ()):
        assert code in (0, 1)
        return
    assert code == 2
    assert said["verdict"].startswith("can't tell of all links: run links-2, send: ")
    assert any(field in problem for problem in said["problems"])
