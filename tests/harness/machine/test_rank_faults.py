"""Faults of ranks in a sweep. Oracle: what `toy_ranks` makes rank 1 do, the store's rows, and the system's processes."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from toy_ranks import FAULTS, TIMEOUT_S, WORLD, ToyRanks

from harness import store
from harness.engine.executor import Executor
from harness.engine.plan import make_plan
from harness.machine.rank_faults import error, late, raised
from harness.timing.rounds import TimingConfig

SAID = {
    "killed": "rank 1 of 3: was killed by SIGKILL",
    "hangs": f"rank 1 of 3 is at fault: not all ended within {TIMEOUT_S:g} s",
    "nan": "rank 1 of 3: loss is nan at step 1; the others' is finite there",
    "shapes": "the ranks' collectives differ: ",
}


def test_each_fault_is_a_row_that_names_the_rank_and_takes_nothing_else(tmp_path: Path) -> None:
    """A world larger than the layer's rows is none: it trains."""
    notes = tmp_path / "notes"
    notes.mkdir()
    config = {
        "name": "toy", "suite": "toy", "axes": {}, "shapes": [], "arms": [], "parts": {}, "model": None, "seed": 0,
        "device": "cpu",
    }  # fmt: skip
    plan = make_plan(config, {"toy": ToyRanks(str(notes))})
    writer = store.RunWriter(tmp_path / "run", run_id="r", sweep="toy", env_id="e", env={}, about={})
    outcome = Executor("cpu", TimingConfig()).run(plan, writer)
    writer.close(outcome.state)
    row = {r.arm: r for r in store.read(tmp_path / "run").itertuples()}
    assert outcome.state == "finished"
    assert {arm: r.status for arm, r in row.items()} == {
        "fine": "ok", "fine_again": "ok", **dict.fromkeys(FAULTS, "failed")
    }  # fmt: skip
    for arm, said in SAID.items():
        assert said in row[arm].reason, row[arm].reason
    assert "rank 1 runs ALLREDUCE of [5] Float" in row["shapes"].reason
    assert list(row["fine"].samples) == list(row["fine_again"].samples)  # before the faults and after them
    pids = [int(note.read_text()) for note in notes.iterdir()]
    assert len(pids) == 6 * WORLD
    ends = time.monotonic() + 60
    while (left := [pid for pid in pids if psutil.pid_exists(pid)]) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not left


def stack(*frames: str) -> str:
    lines = (f'  File "{place.split(":")[0]}", line 7 in {place.split(":")[1]}' for place in frames)
    return "\n".join(["Current thread 0x0 (most recent call first):", *lines])


LIB = "/venv/lib/python3.11/site-packages/torch/distributed"
WAITS = stack(f"{LIB}/distributed_c10d.py:all_reduce", f"{LIB}/c10d_logger.py:wrapper", "/my/train.py:step")
ELSEWHERE = stack(f"{LIB}/distributed_c10d.py:broadcast", "/my/train.py:other")
SLEEPS = stack("/my/train.py:sleep", "/my/train.py:step")


@pytest.mark.parametrize(
    ("stacks", "ended", "guilty"),
    [
        ({0: WAITS, 1: SLEEPS, 2: WAITS}, set(), 1),
        ({0: WAITS, 1: "", 2: WAITS}, set(), 1),
        ({0: WAITS, 2: WAITS}, {1}, 1),
        ({0: WAITS, 1: ELSEWHERE, 2: WAITS}, set(), 1),
        ({0: SLEEPS}, set(), 0),
        ({0: WAITS, 1: ELSEWHERE}, set(), None),  # which of two is the odd one?
        ({0: SLEEPS, 1: SLEEPS}, set(), None),
        ({0: WAITS, 1: WAITS}, set(), None),  # of the same collective: the network's fault
    ],
)
def test_the_odd_one_out_is_at_fault(stacks: dict[int, str], ended: set[int], guilty: int | None) -> None:
    found = late(stacks, ended, len(stacks) + len(ended), 5.0)
    assert found.rank == guilty
    assert (f"rank {guilty} of" in str(found)) == (guilty is not None)
    assert "within 5 s" in str(found)
    if 0 in stacks and stacks[0] == WAITS:
        assert "rank 0 waits in all_reduce at /my/train.py:7 in step" in str(found)


def test_the_words_of_the_rank_at_fault_come_first() -> None:
    """A row's reason holds the first 500 characters."""
    found = error([raised(1, ValueError("bad one"))], 2)
    assert str(found).startswith("rank 1 of 2: ValueError: bad one\n")
