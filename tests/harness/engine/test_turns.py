"""A sweep that asks for its turns. Oracle: answers that lie ready in the pipe, on the toy suite in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import ToySuite, offered

from harness import store
from harness.__main__ import main
from harness.engine import control, turns
from harness.store.case import Case
from harness.suites.common import timed
from harness.timing import compiling
from harness.timing.workload import Numerics, Workload

CASE = Case.of("toy", {"n": 1}).case_id
BLOCKS = [True, True, False]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    monkeypatch.setattr(turns, "LEAD_IN_S", {"cpu": 0.001})
    return offered([1, 2], tmp_path, monkeypatch)


def measured(*answers: object, gone: bool = False) -> tuple[int, list[dict[str, Any]], Any]:
    """Exit code, what the sweep asked, and its rows by arm and metric, where these answers lie ready."""
    ours, theirs = Pipe()
    for answer in answers:
        ours.send_bytes(json.dumps(answer).encode())
    words = [
        "device=cpu",
        "report=false",
        "control=false",
        "results_dir=r",
        f"turns={os.dup(theirs.fileno())}",
    ]
    theirs.close()
    copy = Connection(os.dup(ours.fileno()))
    ours.close()
    if gone:
        copy.close()
    code = main(["sweep=toy", *words])
    asked: list[dict[str, Any]] = []
    while not gone and copy.poll():
        try:
            asked.append(json.loads(copy.recv_bytes()))
        except EOFError:
            break
    rows = store.read("r").set_index(["case_id", "arm", "metric"]) if Path("r").exists() else None
    return code, asked, rows


def test_it_asks_for_each_case_and_each_block_and_stores_what_any_sweep_does(toy: ToySuite) -> None:
    toy.behaviour = {
        "other": lambda case: Workload(
            run=lambda: torch.ones(2) + 1, check=lambda: Numerics({"sqnr_db": 30.0}), flops={"e4m3": 8.0}
        )
    }
    code, asked, rows = measured(CASE, *BLOCKS, control.CASE.case_id, *BLOCKS, None)
    assert code == 0
    assert [next(iter(question)) for question in asked] == ["version", *["block"] * 3] * 2 + ["version"]
    assert [question["block"] for question in asked if "block" in question] == [0, 1, 2] * 2
    assert Path(asked[0]["root"], "harness/engine/turns.py").samefile(turns.__file__)
    assert [case["suite"] for case in asked[0]["cases"]] == ["control", "toy", "toy"]
    assert asked[0]["cases"][1]["arms"] == {"base": "", "other": "base"}
    assert set(rows.index.get_level_values(0)) == {
        CASE,
        control.CASE.case_id,
    }  # the other case was not wanted
    timed = rows.loc[CASE, "other", "time_ms"]
    assert (set(timed["rounds"]), timed["status"]) == ({0, 1}, "ok")
    assert json.loads(timed["resolved"])["operator_calls"] == 2
    assert rows.loc[CASE, "other", "sqnr_db"]["value"] == 30.0


def test_what_makes_the_operands_of_a_call_is_no_operator_of_it(toy: ToySuite) -> None:
    """Oracle: one addition. The first call of a rotation draws its operands."""
    work = timed(torch.add, [torch.ones(4)] * 2, lambda: Numerics({}), lambda *_: "")
    toy.behaviour = {"other": lambda case: work}
    _, _, rows = measured(CASE, *BLOCKS, None)
    assert json.loads(rows.loc[CASE, "other", "time_ms"]["resolved"])["operator_calls"] == 1


def test_a_gate_that_is_gone_interrupts_it(toy: ToySuite) -> None:
    code, _, rows = measured(gone=True)
    assert (code, len(rows)) == (2, 0)


def test_a_suite_of_runs_takes_no_turns(toy: ToySuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ToySuite, "build")
    monkeypatch.setattr(ToySuite, "trial", lambda *_: None, raising=False)
    assert measured()[0] == 2


def test_what_fails_in_a_block_has_failed(toy: ToySuite) -> None:
    calls = iter(range(3))
    toy.behaviour = {"other": lambda case: Workload(run=lambda: next(calls), check=lambda: Numerics({}))}
    _, _, rows = measured(CASE, *BLOCKS, None)
    assert "StopIteration" in rows.loc[CASE, "other", "time_ms"]["reason"]
    assert rows.loc[CASE, "base", "time_ms"]["status"] == "ok"


def test_it_compiles_with_empty_caches(toy: ToySuite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the side that compiles second would find on disk what the first one left there."""
    cold = [False]

    @contextmanager
    def empty() -> Iterator[None]:
        cold[0] = True
        yield
        cold[0] = False

    def run() -> None:
        assert cold[0]

    monkeypatch.setattr(compiling, "empty_caches", empty)
    monkeypatch.setattr(compiling, "prime", lambda device: None)
    toy.behaviour = {"other": lambda case: Workload(run=run, check=lambda: Numerics({}), compiled=True)}
    _, _, rows = measured(CASE, False, None)
    assert "nothing was compiled" in rows.loc[CASE, "other", "time_ms"]["reason"]
