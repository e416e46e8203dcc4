"""Oracle: the protocol of the worker's docstring, on the toy suite in this process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import ToySuite

from harness import suites
from harness.gate import worker as module
from harness.gate.worker import CONTROL, Worker, serve
from harness.timing import compiling
from harness.timing.workload import Numerics, Unsupported, Workload

ROOT = Path(module.__file__).resolve().parent.parent.parent
WORDS = ["sweep=toy", "device=cpu"]
SWEEP = """\
# Does the toy pay?
suite: toy
axes: {n: [1, 2]}
timing: {min_samples: 1, block_ms: 0.2, max_block_samples: 5, warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "toy.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "LEAD_IN_S", {"cpu": 0.001})
    suite = ToySuite()
    monkeypatch.setitem(suites.SUITES, "toy", suite)
    return suite


@pytest.fixture
def worker(toy: ToySuite) -> Worker:
    worker = Worker(ROOT)
    worker.plan(WORDS)
    return worker


def prepared(
    worker: Worker, toy: ToySuite, build: Any, arm: str = "other"
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of one arm that is built so, and the arms that can be timed."""
    toy.behaviour = {arm: build}
    answer = worker.prepare(next(iter(worker.cases)))
    return [row for row in answer["rows"] if row["arm"] == arm], answer["arms"]


def test_serving_answers_each_command_and_survives_errors(toy: ToySuite) -> None:
    lines = [
        {"do": "plan", "words": ["sweep=tou"]},
        {"do": "plan", "words": WORDS},
        {"do": "quit"},
        {"do": "block"},
    ]
    ours, theirs = Pipe()
    for line in lines:
        ours.send_bytes(json.dumps(line).encode())
    serve(Worker(ROOT), theirs)
    refused, plan = (json.loads(ours.recv_bytes()) for _ in range(2))
    assert not ours.poll()
    assert "unknown sweep 'tou'" in refused["error"]
    assert [c["suite"] for c in plan["cases"]] == ["toy", "toy"]
    assert plan["env"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("another layout", r"lacks the module harness\.engine\.plan"),
        (
            "imported from elsewhere",
            "was imported from",
        ),  # an editable install would be measured under the tree's name
        ("no closure", "suite toy is a run"),
    ],
)
def test_a_tree_that_cannot_be_measured_is_refused(
    toy: ToySuite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, said: str
) -> None:
    if how == "another layout":
        monkeypatch.setitem(
            sys.modules, "harness.engine.plan", None
        )  # Python then says that there is no such module
    if how == "no closure":
        monkeypatch.delattr(ToySuite, "build")
    with pytest.raises(RuntimeError, match=said):
        Worker(tmp_path if "elsewhere" in how else ROOT).plan(WORDS)


def test_prepare_checks_counts_and_makes_rows(toy: ToySuite, worker: Worker) -> None:
    numerics = Numerics(
        {"sqnr_db": 30.0},
        skipped={"peak_memory_bytes": "no peak on a CPU"},
        parts={("sqnr_db", "layers.0"): 28.0},
    )
    build = lambda case: Workload(run=lambda: torch.ones(2) + 1, check=lambda: numerics, flops={"e4m3": 8.0})  # noqa: E731
    rows, arms = prepared(worker, toy, build)
    assert arms == ["base", "other"]
    assert {(r["metric"], r.get("part", ""), r["status"]): r.get("samples") for r in rows} == {
        ("sqnr_db", "", "ok"): [30.0], ("sqnr_db", "layers.0", "ok"): [28.0],
        ("peak_memory_bytes", "", "skipped"): None, ("time_ms", "", "ok"): None,
    }  # fmt: skip
    (timed,) = (r for r in rows if r["metric"] == "time_ms")
    assert (timed["resolved"]["operator_calls"], timed["flops"]) == (2, {"e4m3": 8.0})


def raises(error: Exception) -> Any:
    def build(case: Any) -> Workload:
        raise error

    return build


@pytest.mark.parametrize(
    ("build", "reason", "cause"),
    [
        (
            lambda case: Workload(run=int, check=lambda: Numerics({"sqnr_db": 3.0}, False, "3 < 20")),
            "3 < 20",
            "numerics",
        ),
        (raises(MemoryError("full")), "full", "oom"),
        (raises(ValueError("wrong")), "ValueError", "build"),
        (lambda case: Workload(run=lambda: [].pop(), check=lambda: Numerics({})), "IndexError", "build"),
    ],
)
def test_what_is_wrong_gets_no_speed(
    toy: ToySuite, worker: Worker, build: Any, reason: str, cause: str
) -> None:
    rows, arms = prepared(worker, toy, build)
    assert arms == ["base"]
    (failed,) = [r for r in rows if r["metric"] == "time_ms"]
    assert (failed["status"], failed["cause"], reason in failed["reason"]) == ("failed", cause, True)
    assert set(worker.block()) == {"base", CONTROL}


def test_what_this_device_lacks_is_skipped(toy: ToySuite) -> None:
    toy.refuses = {"other": Unsupported("device", "needs sm_89")}
    worker = Worker(ROOT)
    worker.plan(WORDS)
    toy.refuses = {}
    (row,) = [r for r in worker.prepare(next(iter(worker.cases)))["rows"] if r["arm"] == "other"]
    assert (row["status"], row["reason"]) == ("skipped", "needs sm_89")


def test_a_whole_step_runs_only_where_its_memory_is(toy: ToySuite, worker: Worker) -> None:
    """Counting and timing alike: `run` outside of its context would have no model to step."""
    held = [0, 0]  # now, ever

    @contextmanager
    def resident() -> Iterator[None]:
        held[0] += 1
        held[1] += 1
        yield
        held[0] -= 1

    def run() -> torch.Tensor:
        assert held[0] == 1
        return torch.ones(2)

    _, arms = prepared(
        worker, toy, lambda case: Workload(run=run, check=lambda: Numerics({}), resident=resident)
    )
    assert arms == ["base", "other"]
    counted = held[1]
    block = worker.block()
    assert set(block) == {"base", "other", CONTROL}
    assert all(min(said["samples"]) > 0 for said in block.values())
    assert held[0] == 0
    assert held[1] > counted
    assert block["other"]["timing"]["method"].endswith("_adjoining")
    assert not block[CONTROL]["timing"]["method"].endswith("_adjoining")


def test_each_process_compiles_with_empty_caches(
    toy: ToySuite, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    rows, _ = prepared(worker, toy, lambda case: Workload(run=run, check=lambda: Numerics({}), compiled=True))
    assert "nothing was compiled" in rows[0]["reason"]


def test_a_closure_that_fails_while_timed_is_a_fault(toy: ToySuite, worker: Worker) -> None:
    calls = iter(range(3))
    prepared(worker, toy, lambda case: Workload(run=lambda: next(calls), check=lambda: Numerics({})))
    block = worker.block()
    assert "StopIteration" in block["other"]["fault"]
    assert {name for name, said in block.items() if "samples" in said} == {"base", CONTROL}
