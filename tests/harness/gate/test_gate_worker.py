"""Oracle: the protocol of the worker's docstring, on the toy suite in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    worker.plan(["sweep=toy", "device=cpu"])
    return worker


def first(worker: Worker) -> str:
    return next(iter(worker.cases))


def test_the_plan_names_cases_and_environment(toy: ToySuite) -> None:
    plan = Worker(ROOT).plan(["sweep=toy", "device=cpu"])
    assert [c["suite"] for c in plan["cases"]] == ["toy", "toy"]
    assert plan["env"]["device"] == "cpu"
    json.dumps(plan)


def test_a_tree_of_another_layout_is_refused_in_words(toy: ToySuite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "harness.engine.plan", None
    )  # Python then says that there is no such module
    with pytest.raises(
        RuntimeError, match=r"lacks the module harness\.engine\.plan: its harness has another layout"
    ):
        Worker(ROOT).plan(["sweep=toy", "device=cpu"])


@pytest.mark.parametrize(
    ("error", "cause"), [(MemoryError("full"), "oom"), (ValueError("wrong"), "build")], ids=["oom", "build"]
)
def test_an_arm_that_cannot_be_built_says_why(
    error: Exception, cause: str, worker: Worker, toy: ToySuite
) -> None:
    def build(case: Any) -> Workload:
        raise error

    toy.behaviour = {"other": build}
    rows = worker.prepare(first(worker))["rows"]
    assert {r["cause"] for r in rows if r["arm"] == "other"} == {cause}


def test_a_tree_that_was_not_imported_is_refused(toy: ToySuite, tmp_path: Path) -> None:
    """An editable install elsewhere would be measured under the name of the tree."""
    with pytest.raises(RuntimeError, match="was imported from"):
        Worker(tmp_path).plan(["sweep=toy"])


def test_prepare_checks_counts_and_makes_rows(toy: ToySuite, worker: Worker) -> None:
    toy.behaviour = {
        "other": lambda case: Workload(
            run=lambda: torch.ones(2) + 1, check=lambda: Numerics({"sqnr_db": 30.0}), flops={"e4m3": 8.0}
        )
    }
    answer = worker.prepare(first(worker))
    rows = {(r["arm"], r["metric"]): r for r in answer["rows"]}
    assert answer["arms"] == ["base", "other"]
    assert rows["other", "sqnr_db"]["samples"] == [30.0]
    assert rows["other", "time_ms"]["resolved"]["operator_calls"] == 2
    assert rows["other", "time_ms"]["flops"] == {"e4m3": 8.0}
    assert rows["base", "time_ms"]["resolved"] == {"timed": "nothing", "operator_calls": 0}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda case: Workload(run=int, check=lambda: Numerics({"sqnr_db": 3.0}, False, "3 < 20")),
            "numerics: 3 < 20",
        ),
        (lambda case: 1 / 0, "ZeroDivisionError"),
        (lambda case: Workload(run=lambda: [].pop(), check=lambda: Numerics({})), "IndexError"),
    ],
)
def test_what_is_wrong_gets_no_speed(toy: ToySuite, worker: Worker, build: Any, reason: str) -> None:
    toy.behaviour = {"other": build}
    answer = worker.prepare(first(worker))
    assert answer["arms"] == ["base"]
    failed = [r for r in answer["rows"] if r["arm"] == "other" and r["metric"] == "time_ms"]
    assert [r["status"] for r in failed] == ["failed"]
    assert reason in failed[0]["reason"]
    assert set(worker.block()["samples"]) == {"base", CONTROL}


def test_parts_and_what_has_no_figure_here_become_rows(toy: ToySuite, worker: Worker) -> None:
    numerics = Numerics(
        {"sqnr_db": 30.0},
        skipped={"peak_memory_bytes": "no peak on a CPU"},
        parts={("sqnr_db", "layers.0"): 28.0},
    )
    toy.behaviour = {"other": lambda case: Workload(run=int, check=lambda: numerics)}
    rows = [r for r in worker.prepare(first(worker))["rows"] if r["arm"] == "other"]
    assert {(r["metric"], r.get("part", ""), r["status"]) for r in rows} == {
        ("sqnr_db", "", "ok"), ("sqnr_db", "layers.0", "ok"), ("peak_memory_bytes", "", "skipped"), ("time_ms", "", "ok"),
    }  # fmt: skip


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

    def step(case: object) -> Workload:
        return Workload(run=run, check=lambda: Numerics({}), resident=resident)

    toy.behaviour = {"base": step, "other": step}
    assert worker.prepare(first(worker))["arms"] == ["base", "other"]
    prepared = held[1]
    block = worker.block()
    assert block["faults"] == {}
    assert set(block["samples"]) == {"base", "other", CONTROL}
    assert held[0] == 0
    assert held[1] > prepared
    assert block["timing"]["base"]["method"].endswith("_adjoining")
    assert not block["timing"][CONTROL]["method"].endswith("_adjoining")


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
    toy.behaviour = {"other": lambda case: Workload(run=run, check=lambda: Numerics({}), compiled=True)}
    (row,) = [r for r in worker.prepare(first(worker))["rows"] if r["arm"] == "other"]
    assert "nothing was compiled" in row["reason"]


def test_what_is_a_run_and_no_closure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"suite divergence is a run .* --baseline RUN --candidate RUN"):
        Worker(ROOT).plan(["sweep=divergence", "device=cpu"])


def test_what_this_device_lacks_is_skipped(toy: ToySuite) -> None:
    toy.refuses = {"other": Unsupported("device", "needs sm_89")}
    worker = Worker(ROOT)
    worker.plan(["sweep=toy", "device=cpu"])
    toy.refuses = {}
    (row,) = [r for r in worker.prepare(first(worker))["rows"] if r["arm"] == "other"]
    assert (row["status"], row["reason"]) == ("skipped", "needs sm_89")


def test_a_block_times_every_arm_and_the_control(worker: Worker) -> None:
    worker.prepare(first(worker))
    block = worker.block()
    assert set(block["samples"]) == {"base", "other", CONTROL}
    assert all(len(s) >= 1 and min(s) > 0 for s in block["samples"].values())
    assert block["timing"]["base"]["method"]
    assert block["faults"] == {}


def test_a_closure_that_fails_while_timed_is_a_fault(toy: ToySuite, worker: Worker) -> None:
    calls = iter(range(3))
    toy.behaviour = {"other": lambda case: Workload(run=lambda: next(calls), check=lambda: Numerics({}))}
    worker.prepare(first(worker))
    block = worker.block()
    assert "StopIteration" in block["faults"]["other"]
    assert "other" not in block["samples"]


def commands(monkeypatch: pytest.MonkeyPatch, *lines: dict[str, Any]) -> list[dict[str, Any]]:
    answers = io.StringIO()
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    serve(Worker(ROOT), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_serving_answers_each_command_and_survives_errors(
    toy: ToySuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = commands(
        monkeypatch, {"do": "plan", "words": ["sweep=tou"]}, {"do": "plan", "words": ["sweep=toy"]}, {"do": "quit"},
        {"do": "block"},
    )  # fmt: skip
    assert "unknown sweep 'tou'" in answers[0]["error"]
    assert "cases" in answers[1]
    assert len(answers) == 2
