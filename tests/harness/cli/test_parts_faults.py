"""Faults of a sweep of sweeps: lost devices, late refutations, refusals, kills. Oracle: the promise that a part that was not
measured is neither lost nor called done; on invented rows, and for real where the plan or the store decides."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from parts_slots import BOTH, MINE, Slots, checked, cut, ended, refused, said, stores, timed

import harness
from harness import store
from harness.cli import parts as whole_module
from harness.cli.config import load
from harness.cli.parts import Whole
from harness.cli.sweep import run_sweep
from harness.engine import places, run_folder, watch
from harness.engine.parts import TRIES
from harness.engine.plan import make_plan
from harness.engine.resume import refuse
from harness.machine import device_lock, environment
from harness.store.cause import Cause
from harness.store.errors import UsageError
from harness.suites import SUITES


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slots:
    return Slots(tmp_path, monkeypatch)


@pytest.mark.parametrize("cause", [Cause.DEVICE_LOST, Cause.DIED, Cause.INTERRUPTED, Cause.BUDGET])
def test_what_may_have_passed_is_measured_again(slots: Slots, cause: Cause) -> None:
    """A row that resume= would measure is left; one that a later attempt has measured is not."""
    whole = slots.slot(
        checks=stores(checked()),
        steps=stores(timed("bf16_eager"), timed("tensorwise_eager", "failed", cause), exit_code=1),
    )
    mine = slots.about("steps")
    assert (mine["done"], mine["cause"], mine["retryable"]) == (False, str(cause), True)
    assert whole.state["steps"].open
    slots.slot(checks=stores(checked()), steps=BOTH)
    assert slots.begun == ["checks", "steps", "steps"]
    mine = slots.about("steps")
    assert (mine["done"], mine["ok"], mine["cause"]) == (True, True, "")
    assert mine["statuses"] == {"ok": 2}


def test_a_kernel_that_is_refuted_in_a_later_slot_leaves_the_run_resumable(slots: Slots) -> None:
    """Oracle: the rules by which a run folder refuses other settings, which judge the words of both slots."""
    slots.slot(checks=refused, steps=cut)
    slots.slot(
        checks=stores(checked("failed", Cause.NUMERICS), exit_code=1), steps=stores(timed("bf16_eager"))
    )
    mine = slots.about("steps")
    assert list(mine["left_out"]) == ["tensorwise_eager"]
    assert (mine["done"], mine["ok"], mine["exit"], mine["tries"]) == (True, True, 0, 2)
    (run,) = (slots.folder / "train").iterdir()
    assert list(store.read(run)["arm"]) == ["bf16_eager"], "rounds of the refuted arm stand no longer"


def test_an_arm_that_is_left_out_is_not_planned_and_must_be_one() -> None:
    words = ["sweep=cast", "arms=[eager,copy,read]", "axes.M=8", "axes.K=16"]

    def arms(*more: str) -> set[tuple[str, ...]]:
        plan = make_plan(load([*words, *more], lambda device: "cpu").config, SUITES)
        return {case.arms for case in plan.cases}

    assert arms("without=[read]") == {("eager", "copy")}
    with pytest.raises(UsageError, match=r"arm 'reed' .*nearest: read"):
        arms("without=[reed]")
    with pytest.raises(UsageError, match="leaves no arm of part cast"):
        arms("without=[eager,copy,read]")


def test_a_check_that_is_made_again_ends_no_part(slots: Slots) -> None:
    """All arms are left out because the device was lost: no verdict on them."""
    (slots.root / "sweeps" / "mine.yaml").write_text(MINE.replace("bf16_eager, ", ""))
    lost = stores(checked("failed", Cause.DEVICE_LOST), exit_code=1)
    slots.slot(checks=lost, steps=BOTH)
    assert slots.begun == ["checks"]
    mine = slots.about("steps")
    assert (mine["done"], mine["tries"], mine["cause"]) == (False, 0, "numerics")
    slots.slot(checks=stores(checked()), steps=stores(timed("tensorwise_eager")))
    assert slots.about("steps")["ok"]


def test_a_part_that_was_given_up_is_no_success(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut off in each of its slots: exit 1, and the run is not called finished."""
    for _ in range(TRIES):
        whole = slots.slot(checks=stores(checked()), steps=cut)
    code, text = ended(whole, monkeypatch, capsys)
    assert "steps            exit 124" in text
    assert f"given up after {TRIES} tries, budget" in text
    assert code == 1
    about = store.read_about(slots.folder)
    assert about["state"] == "interrupted"
    assert "resume=" not in text, "another slot would start nothing"
    for name in ("checks", "steps"):  # a part that still has a try is no failure yet
        whole.state[name].tries = 1
    code, text = ended(whole, monkeypatch, capsys)
    assert (code, "left: steps; resume=r continues" in text) == (0, True)


def test_a_refusal_is_no_try(slots: Slots) -> None:
    for _ in range(TRIES + 1):
        whole = slots.slot(checks=stores(checked()), steps=refused)
    mine = slots.about("steps")
    assert (mine["tries"], mine["exit"], mine["cause"], mine["retryable"]) == (0, 2, "refused", True)
    assert whole.line(whole.parts[1]).split(", ")[2].startswith("not started")
    slots.slot(checks=stores(checked()), steps=BOTH)
    assert slots.about("steps")["ok"]


def test_a_part_that_takes_the_process_down_is_given_up_after_its_tries(slots: Slots) -> None:
    """SystemExit stands for SIGKILL: nothing after it runs but what stood in _run.json before."""

    def dies(words: Sequence[str], writer: store.RunWriter) -> int:
        told.append(json.loads((slots.folder / "_run.json").read_text())["parts"]["checks"])
        raise SystemExit

    told: list[dict[str, Any]] = []
    for _ in range(TRIES):
        with pytest.raises(SystemExit):
            slots.slot(checks=dies, steps=BOTH)
    assert [mine["tries"] for mine in told] == [1, 2, 3]
    assert {mine["cause"] for mine in told} == {"interrupted"}
    slots.slot(checks=dies, steps=BOTH)
    assert slots.begun == ["checks"] * TRIES + ["steps"]


def test_an_interrupted_part_says_so(slots: Slots) -> None:
    def interrupted(words: Sequence[str], writer: store.RunWriter) -> int:
        cut(words, writer)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slots.slot(checks=interrupted, steps=BOTH)
    mine = slots.about("checks")
    assert (mine["done"], mine["cause"], mine["tries"], mine["statuses"]) == (
        False, "interrupted", 1, {"partial": 2},
    )  # fmt: skip
    assert slots.about("steps")["cause"] == "interrupted", "and those after it, why they were not started"
    assert all(part["reason"] for part in store.read_about(slots.folder)["parts"].values())


def test_a_sweep_of_sweeps_beside_another_one_is_refused_as_a_whole(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Oracle: flock(2) of another open file; its own parts pass, and take the lock with them when they are done."""
    monkeypatch.setenv(device_lock.FOLDER_VARIABLE, str(tmp_path / "locks"))
    monkeypatch.setattr(places, "chosen", lambda *_: [places.Gpu(0, "u1")])
    words = ["sweep=mine", "device=cpu", "report=false", "run_id=r2"]
    with device_lock.held(["u1"]), device_lock.held(["u1", "u2"]):
        pass
    file = os.open(tmp_path / "locks" / "gpu-u1.lock", os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="GPU u1 is in use by another sweep"):
        run_sweep(words)
    assert not any((tmp_path / "results").rglob("_run.json"))
    os.close(file)
    within = []

    def parts_within(whole: Whole) -> list[str]:
        with device_lock.held(["u1"]):
            taken = os.open(tmp_path / "locks" / "gpu-u1.lock", os.O_RDONLY)
            with pytest.raises(BlockingIOError):
                fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(taken)
        within.append(watch.look(whole.folder)[0])
        return []

    monkeypatch.setattr(Whole, "slot", parts_within)
    assert run_sweep(words) == 0
    assert [part.state for part in within] == ["running"]


def test_watch_says_what_has_become_of_the_parts(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what the script of the second part sees while it is under way, and the end."""
    seen = []
    scripts = {"r3-checks": stores(checked())}

    def second(words: Sequence[str], writer: store.RunWriter) -> int:
        seen.append(watch.look(slots.root / "results" / "mine" / "r3")[0])
        return BOTH(words, writer)

    scripts["r3-steps"] = second
    monkeypatch.setattr(
        whole_module, "_isolated", lambda run, words: slots.run(words, scripts[said(words, "run_id")])
    )
    assert run_sweep(["sweep=mine", "device=cpu", "report=false", "run_id=r3"]) == 0
    (part,) = seen
    assert (part.state, part.total, part.share) == ("running", 2, 0.5)
    assert part.text == "steps is under way; done: checks"
    capsys.readouterr()
    assert watch.main(["r3", "--once"]) == 0
    told = capsys.readouterr().out
    assert "finished" in told
    assert "100 %" in told


def test_advice_to_start_anew_can_be_followed() -> None:
    """Oracle: the configuration of the command that the message names, where the sweep itself sets resume=."""
    with pytest.raises(UsageError, match=r"start a new run \(run_id=NAME in place of resume="):
        refuse("r", ["code of commit a -> commit b"])
    assert load(["sweep=gpu"], lambda device: "cpu").config["resume"] == "last"
    config = load(["sweep=gpu", "run_id=anew"], lambda device: "cpu").config
    assert run_folder.of_run(config, None).name == "anew"


def test_dry_run_imports_no_torch(tmp_path: Path) -> None:
    """Oracle: an interpreter of its own."""
    root = Path(harness.__file__).parents[1]
    program = "import sys; from harness.cli.gpu import main; main(['dry_run=true']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, stdout=subprocess.DEVNULL)


def test_messages_name_both_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    why = whole_module._no_text({"data_path": None})
    assert "text=input.txt" in why
    assert "data_path=input.txt" in why
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device=cpu rehearses it"):
        environment.device_kind("cuda")
