"""resume= and texts. Oracles: the sha256 of the files, by hashlib, and the refusals in words."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from report_cases import ceiling_cases
from report_fixtures import Invented, write_run

from harness import store
from harness.advise import training
from harness.engine.plan import SweepPlan, make_plan
from harness.engine.resume import changes, refuse, stored_cases
from harness.engine.rows import row
from harness.engine.settings import SweepConfig
from harness.machine.environment import env_id
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.suites import divergence, train

TEXT = b"The same text, wherever it lies. " * 20


def planned(path: Path | None, data: str = "bytes") -> SweepPlan:
    config: dict[str, Any] = {
        "name": "divergence", "suite": "divergence", "shapes": [], "arms": ["base"], "parts": {}, "model": None,
        "axes": {"steps": 10, "seq": 16, "batch": 4, "eval_batches": 1, "compute": "fp32"}, "seed": 0,
        "device": "cpu", "data": data, "data_path": str(path) if path else None,
    }  # fmt: skip
    return make_plan(SweepConfig.of(config), {"divergence": divergence})


def written(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "text").write_bytes(content)
    return folder / "text"


def stored(folder: Path, plan: SweepPlan, sha256: str) -> Path:
    """A run that holds the loss of every case of a plan."""
    run = folder / "run"
    writer = store.RunWriter(run, run_id="r", sweep="divergence", env_id="e", env={}, about={})
    for c in plan.cases:
        writer.append([row(c, "base", "ok", resolved={"data_sha256": sha256}, samples=(1.0,))])
    writer.close("finished")
    return run


def test_another_text_at_the_same_place_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a", TEXT)
    plan = planned(path)
    first = hashlib.sha256(TEXT).hexdigest()
    run = stored(tmp_path, plan, first)
    other = written(tmp_path / "b", TEXT[::-1])
    message = (
        rf"read a text with sha256 {first[:16]}\.\.\., data=bytes is now one with .* in place of resume="
    )
    with pytest.raises(UsageError, match=message):
        stored_cases(run, planned(other))


def advised(ceilings: Path | None) -> SweepPlan:
    """One training step whose filter is advised, by those ceilings."""
    config: dict[str, Any] = {
        "name": "train", "suite": "train", "shapes": [], "arms": ["bf16_eager", "tensorwise_eager"], "parts": {},
        "model": None, "axes": {"compute": "bf16", "convert": "advised"}, "seed": 0, "device": "cpu",
        "ceilings": str(ceilings) if ceilings else None,
    }  # fmt: skip
    return make_plan(SweepConfig.of(config), {"train": train})


def test_ceilings_of_an_advised_filter_are_known_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rates elsewhere go on with the run; others, and none, are refused."""
    monkeypatch.setattr(training, "machine_here", lambda device, run: "no GPU here")
    one, same, other = (
        write_run(tmp_path / name, ceiling_cases(Invented(seed), 4200.0, 740.0))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    plan, run = advised(one), tmp_path / "run"
    sha256 = training.content(str(one))
    writer = store.RunWriter(run, run_id="r", sweep="train", env_id="e", env={}, about={})
    resolved = {"advice": {"ceilings_sha256": sha256}}
    done = plan.cases[0]
    writer.append([row(done, "bf16_eager", "ok", samples=(1.0,))])
    writer.append([row(done, "tensorwise_eager", "ok", resolved=resolved, samples=(1.0,))])
    writer.close("finished")
    for again in (one, same):
        assert stored_cases(run, advised(again)) == {done.case.case_id}
    for wrong in (other, None):
        with pytest.raises(
            UsageError,
            match=rf"by ceilings with sha256 {sha256[:16]}\.\.\., now they are .*in place of resume=",
        ):
            stored_cases(run, advised(wrong))


def conditions(**env: Any) -> list[tuple[str, dict[str, Any]]]:
    facts = {
        "device": "cpu",
        "torch": "2.11",
        "git_commit": "a" * 40,
        "git_dirty": False,
        "code": "c1",
        "extensions": "e1",
    } | env
    return [(env_id(facts), facts)]


@pytest.mark.parametrize(
    ("now", "changed"),
    [
        ({}, []),
        ({"torch": "2.13"}, ["torch 2.11 -> 2.13"]),
        ({"driver": "580"}, ["driver None -> 580"]),
        ({"host_hash": "x"}, []),  # a time does not depend on it
        ({"git_commit": "b" * 40}, []),  # a commit that changed no code
        ({"code": "c2", "git_dirty": True}, [f"code of commit {'a' * 12} -> commit {'a' * 12} with uncommitted changes"]),
        ({"code": None, "git_commit": "b" * 40}, [f"code of commit {'a' * 12} -> commit {'b' * 12}"]),
        ({"code": None}, []),
        ({"extensions": "e2"}, ["code of extensions e1 -> e2"]),
        ({"extensions": None}, ["code of extensions e1 -> None"]),
        (
            {"code": "c2", "git_commit": "b" * 40, "torch": "2.13"},
            [f"code of commit {'a' * 12} -> commit {'b' * 12}", "torch 2.11 -> 2.13"],
        ),
    ],
)  # fmt: skip
def test_what_has_changed_since_a_run_is_named(
    now: dict[str, Any], changed: list[str], tmp_path: Path
) -> None:
    ((before, facts),) = conditions()
    writer = store.RunWriter(tmp_path / "r", run_id="r", sweep="w", env_id=before, env=facts, about={})
    writer.append([Measurement("s", "c", "a", "{}", "time_ms", "ok", samples=(1.0,))])
    found = changes(tmp_path / "r", conditions(**now))
    assert found == changed
    if not changed:
        return refuse("r", found)
    with pytest.raises(UsageError, match=r"under other conditions: .*; start a new run .*resume_anyway=true"):
        refuse("r", found)
    return None
