"""Oracles: Graham's bound for LPT against the best division found by trying all; the whole plan; exit codes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToySuite, offered

from harness.__main__ import main
from harness.engine.plan import PlannedCase, SweepPlan
from harness.engine.shards import Shard, deal, parse, share
from harness.store import run_state
from harness.store.case import Case
from harness.store.errors import UsageError


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    return offered([1, 2, 3, 4, 50], tmp_path, monkeypatch)


def plan_of(sizes: list[int]) -> SweepPlan:
    suite = ToySuite()
    cases = [Case.of("toy", {"n": n, "K": i}) for i, n in enumerate(sizes)]
    return SweepPlan(tuple(PlannedCase("toy", suite, case, ("base", "other")) for case in cases), {})


# Which shard


@pytest.mark.parametrize("text", ["5/4", "4/4", "x", "1", "-1/4", "0/0", "1/2/3", "", "0.5/2", "0 / 4"])
def test_what_is_no_shard_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert f"shard={text}" in str(caught.value)


# Dealing


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 3))
def test_no_share_is_heavier_than_grahams_bound_allows(sizes: list[int], count: int) -> None:
    owners = deal([float(size) for size in sizes], count)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == i) for i in range(count)]
    best = min(
        max(sum(s for s, o in zip(sizes, way, strict=True) if o == i) for i in range(count))
        for way in itertools.product(range(count), repeat=len(sizes))
    )
    assert max(loads) <= (4 / 3 - 1 / (3 * count)) * best + 1e-9


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 6))
def test_shards_divide_a_plan_and_keep_its_order(sizes: list[int], count: int) -> None:
    plan = plan_of(sizes)
    parts = [share(plan, Shard(i, count)) for i in range(count)]
    ids = [[c.case.case_id for c in part.cases] for part in parts]
    whole = [c.case.case_id for c in plan.cases]
    assert sorted(itertools.chain(*ids)) == sorted(whole)
    for own, part in zip(ids, parts, strict=True):
        assert own == [name for name in whole if name in set(own)]
        assert len(part.cases) + len(part.elsewhere) == len(whole)
    assert parts == [share(plan, Shard(i, count)) for i in range(count)]


# Running


def test_a_shard_of_other_settings_does_not_join(toy: ToySuite, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=toy", "device=cpu", "shard=0/2", "run_id=r1"]) == 0
    assert main(["sweep=toy", "device=cpu", "shard=1/2", "run_id=r1", "seed=7"]) == 2
    assert "seed=7" in capsys.readouterr().err
    assert not Path("results/toy/r1/shard-1-of-2").exists()


def about(folder: Path, state: str, **more: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_run.json").write_text(json.dumps({"state": state, "started_at": "2026", **more}))


OWN = {
    "alone": {"command": "python -m harness x"},
    "alone, whatever its words": {"made_by": "sweep", "command": "python -m harness -m x"},
}


@pytest.mark.parametrize(
    ("own", "shards", "state"),
    [
        ("", {"0-of-2": "finished"}, "running"),
        ("", {"0-of-2": "finished", "1-of-2": "finished"}, "finished"),
        ("", {"0-of-2": "finished", "1-of-2": "interrupted"}, "interrupted"),
        ("alone, whatever its words", {"0-of-2": "interrupted"}, "finished"),
        ("alone", {"0-of-2": "interrupted"}, "finished"),  # resume= without shards did the rest
        ("", {"0-of-2": "interrupted", "0-of-3": "finished"}, "interrupted"),
        ("", {"0-of-2": "interrupted", "0-of-1": "finished"}, "finished"),  # spread again
        ("", {"0-of-2": "finished", "0-of-3": "finished", "1-of-3": "finished"}, "running"),
        ("", {"mine": "finished"}, None),
    ],
)
def test_the_state_of_a_run_is_that_of_its_shards(
    own: str, shards: dict[str, str], state: str | None, tmp_path: Path
) -> None:
    if own:
        about(tmp_path, "finished", **OWN[own])
    for name, its in shards.items():
        about(tmp_path / f"shard-{name}", its)
    assert run_state.about(tmp_path).get("state") == state
