"""What an arm changes for its process. Oracle: what the other arms of the case read while they are built, checked and timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from leaky import FOR_GOOD, LEAKS, Leaky
from test_executor_faults import of_case, plan, sweep

from harness.engine.process_state import OwnStates, differences, take

NUMBERS = {name: n for n, name in enumerate([*LEAKS, *FOR_GOOD], 1)}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(
    scope="module",
    params=["timed", *(pytest.param(when, marks=pytest.mark.slow) for when in ("build", "check"))],
)
def leaked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """A case a leak, in worker processes."""
    folder = tmp_path_factory.mktemp("leaks")
    outcome, frame = sweep(Leaky(when=request.param), len(LEAKS), folder)
    assert outcome.state == "finished"
    return frame


def resolved(frame: pd.DataFrame, leak: str, arm: str) -> dict[str, object]:
    rows = of_case(frame, NUMBERS[leak]).query("metric == 'time_ms'").set_index("arm")
    return json.loads(rows.loc[arm, "resolved"]) | {"status": rows.loc[arm, "status"]}


@pytest.mark.parametrize("leak", LEAKS)
def test_what_one_arm_sets_no_other_arm_sees_and_its_row_names_it(leak: str, leaked: pd.DataFrame) -> None:
    base, last = (resolved(leaked, leak, arm) for arm in ("base", "last"))
    assert base["seen"] == last["seen"]
    assert [base["status"], last["status"]] == ["ok", "ok"]
    usual = base["seen"]["build"]  # type: ignore[index]
    assert base["seen"] == {"build": usual, "check": usual, "timed": usual}
    assert "process_state" not in base | last
    other = resolved(leaked, leak, "other")
    assert other["status"] == "ok"
    assert other["seen"]["build"] == usual  # type: ignore[index]
    assert usual != other["seen"]["timed"]  # type: ignore[index]  # it keeps what it has set, for itself
    assert LEAKS[leak][2] <= set(other.get("process_state", {}))  # type: ignore[call-overload]
    assert LEAKS[leak][2] or "process_state" not in other


def test_nothing_is_left_of_an_arm_and_it_finds_its_own_again() -> None:
    states, before = OwnStates(), take()
    for leak, (plant, read, _) in LEAKS.items():
        usual = read()
        with states.of(leak):
            plant()
            set_to = read()
        assert read() == usual != set_to, leak
        with states.of(leak):
            assert read() == set_to, leak
        assert differences(before, take()) == {}


def test_what_cannot_be_put_back_moves_its_arm_into_a_process_of_its_own(tmp_path: Path) -> None:
    """It is found in a timed block; the others are timed in another process that never saw it."""
    suite, number = Leaky(when="timed"), NUMBERS["inference"]
    other_cases = {c.case.case_id for c in plan(suite, number).cases if c.case.integer("n") != number}
    outcome, frame = sweep(suite, number, tmp_path, done=other_cases)
    assert outcome.state == "finished"
    base, other, last = (resolved(frame, "inference", arm) for arm in ("base", "other", "last"))
    assert [base["status"], other["status"], last["status"]] == ["ok"] * 3
    assert base["seen"] == last["seen"] == {key: [False] for key in ("build", "check", "timed")}
    assert True in other["seen"]["timed"]  # type: ignore[index]
    assert base["process"] == last["process"] != other["process"]
    assert other["own_process"] == {
        "why": "changed", "settings": {"inference_mode": ["False", "True"]}, "process": other["process"],
    }  # fmt: skip


EACH = """
import os, sys
sys.path.insert(0, sys.argv[1])
from leaky import FOR_GOOD
from harness.engine import replaced
from harness.engine.process_state import OwnStates
print(replaced.before_arms())
for name, (leak, read, named) in FOR_GOOD.items():
    states = OwnStates()
    before = read()
    with states.of("guilty"):
        leak()
    print(name, read() != before, states.culprit, sorted(states.left) == sorted(named), flush=True)
os._exit(0)  # a profiler that was never stopped takes the interpreter with it
"""


def test_each_change_that_cannot_be_put_back_is_found_and_named() -> None:
    """In one process of its own, which is spoiled by each of them."""
    folder = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", EACH, folder], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", *(f"{name} True guilty True" for name in FOR_GOOD)]


FIRST_USES = """
import importlib.util
from harness.engine import replaced
from harness.engine.process_state import OwnStates
from harness.timing.compiling import compile_unavailable
import torch
from torch.nn.attention.flex_attention import create_block_mask
x = torch.ones(2, 2, requires_grad=True)

def with_inductor(**how):
    if compile_unavailable("cpu") is None:
        torch.compile(lambda y: (y @ y).relu().sum(), **how)(x).backward()

def load_in_a_process():
    from torch.utils.data import DataLoader
    list(DataLoader(range(4), num_workers=1))

states = OwnStates()
for use in (
    lambda: torch.vmap(torch.nn.functional.mse_loss)(x, x),
    lambda: torch.func.grad(lambda y: y.sum())(x),
    lambda: create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu"),
    lambda: __import__("torch.distributed.tensor"),
    lambda: torch.compile(lambda y: (y @ y).relu(), backend="aot_eager")(x).sum().backward(),
    lambda: torch.export.export(torch.nn.Linear(2, 2), (x.detach(),)),
    lambda: __import__("torch.ao.quantization"),
    with_inductor,
    lambda: with_inductor(mode="max-autotune"),
    lambda: with_inductor(dynamic=True),
    lambda: importlib.util.find_spec("torchao") and __import__("torchao.float8"),
    load_in_a_process,
):
    with states.of("arm"):
        use()
    print(replaced.before_arms(), states.changed, states.culprit)
"""


@pytest.mark.slow
def test_what_torch_does_at_a_first_use_is_no_change() -> None:
    """In a process of its own, where all of it is used for the first time."""
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, check=True)
    assert done.stdout == " {} \n" * 12
