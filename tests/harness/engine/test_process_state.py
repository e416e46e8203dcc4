"""What an arm changes for its process. Oracle: what the other arms of the case read while they are built, checked and timed."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from leaky import FOR_GOOD, LEAKS, Leaky
from patching import Patching, detour
from test_executor_faults import of_case, sweep
from torch.nn import functional

from harness.engine import arm_process

NUMBERS = {name: n for n, name in enumerate([*LEAKS, *FOR_GOOD], 1)}


@pytest.fixture(
    scope="module",
    params=["timed", *(pytest.param(when, marks=pytest.mark.slow) for when in ("build", "check"))],
)
def leaked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """A case a leak; the processes live through all of them."""
    folder = tmp_path_factory.mktemp("leaks")
    outcome, frame = sweep(Leaky(when=request.param), len(NUMBERS), folder)
    assert outcome.state == "finished"
    return frame


@pytest.mark.parametrize("leak", NUMBERS)
def test_what_one_arm_sets_no_other_arm_sees(leak: str, leaked: pd.DataFrame) -> None:
    rows = of_case(leaked, NUMBERS[leak]).query("metric == 'time_ms'").set_index("arm")
    assert rows.loc[["base", "last"], "status"].tolist() == ["ok", "ok"]
    base, last = (json.loads(rows.loc[arm, "resolved"]) for arm in ("base", "last"))
    usual = base["seen"]["build"]
    assert base["seen"] == last["seen"] == {"build": usual, "check": usual, "timed": usual}


def of_arms(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, dict[str, int]]]:
    rows = frame[frame["metric"] == "time_ms"].set_index("arm")
    return rows, {arm: json.loads(text)["seen"] for arm, text in rows["resolved"].items() if "seen" in text}


@pytest.mark.parametrize("changed", ["torch.nn.functional.linear", "operators"])
def test_where_an_import_has_changed_torch_no_arm_gets_a_number(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted as an extension's import would: before any arm is built."""
    monkeypatch.setattr(arm_process, "_seen", [])
    own = torch.library.Library("aten", "IMPL")
    if changed == "operators":
        own.impl("frac", torch.clone, "PrivateUse1")
    else:
        monkeypatch.setattr(functional, "linear", detour)
    _, frame = sweep(Patching(), 1, tmp_path, places=())
    own._destroy()
    assert (set(frame["status"]), frame["samples"].map(len).sum()) == ({"failed"}, 0)
    assert frame["reason"].str.contains(f"{changed} of PyTorch changed").all()


@pytest.mark.slow
def test_an_arm_that_hangs_with_the_interpreter_locked_fails_alone_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows, _ = of_arms(sweep(Patching(fate="hang"), 1, silence_s=5.0)[1])
    assert rows["status"].to_dict() == {"base": "ok", "last": "ok", "peer": "failed"}
    assert rows.loc["peer", "reason"].startswith("no sign of life for 5 s since timing began in arm peer")
    [hung] = (int(path.name.removeprefix("hangs-")) for path in Path.cwd().glob("hangs-*"))
    assert not Path(f"/proc/{hung}/exe").exists()
