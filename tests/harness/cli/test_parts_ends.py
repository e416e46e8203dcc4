"""What a sweep of sweeps says of its parts at the end of a slot. Oracle: the rows that they have stored."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from parts_slots import BOTH, Script, Slots, checked, cut, ended, refused, stores, timed

from harness import store
from harness.cli.sweep import run_sweep
from harness.engine.parts import CUT
from harness.store.cause import Cause
from harness.store.errors import UsageError


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slots:
    return Slots(tmp_path, monkeypatch)


def interrupted(words: Sequence[str], writer: store.RunWriter) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize("waits", [False, True])
def test_a_part_that_stored_a_failure_and_was_cut_off_has_failed(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], waits: bool
) -> None:
    """Also where its sweep ended by itself, and has no time left for some rows."""
    rows = [timed("bf16_eager", "skipped", Cause.BUDGET) if waits else timed("bf16_eager")]
    failed = timed("tensorwise_eager", "failed", Cause.NUMERICS)
    whole = slots.slot(checks=stores(checked()), steps=stores(*rows, failed, exit_code=0 if waits else CUT))
    mine = slots.about("steps")
    assert (mine["done"], mine["ok"], mine["cause"]) == (False, False, "numerics")
    assert "is failed numerics" in mine["reason"]
    assert waits or "cut off" in mine["reason"]
    assert ended(whole, monkeypatch, capsys)[0] == 1


def test_a_part_of_which_all_was_skipped_is_not_ok(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slots.root / "sweeps" / "mine.yaml").write_text(
        "# Mine?\nparts:\n  checks: {sweep: smoke}\n  steps: {sweep: train, needs: [checks]}\n"
    )
    whole = slots.slot(checks=stores(checked("skipped", Cause.MISSING)), steps=BOTH)
    mine = slots.about("checks")
    assert (mine["done"], mine["ok"], mine["cause"], mine["reason"]) == (True, False, "missing", "missing")
    assert slots.begun == ["checks"], "what needs it is not started"
    assert slots.about("steps")["cause"] == "missing"
    code, text = ended(whole, monkeypatch, capsys)
    assert code == 0, "all ok or skipped"
    assert "done, missing: missing (1 skipped)" in text


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (refused, "has no result"),
        (stores(checked("skipped", Cause.MISSING)), "has no result"),
        (stores(checked(), exit_code=CUT), "is unfinished"),
    ],
)
def test_a_part_whose_check_has_no_result_is_unchecked(
    check: Script,
    reason: str,
    slots: Slots,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = slots.slot(checks=check, steps=BOTH)
    assert slots.about("steps")["unchecked"] == {"checks": reason}
    assert f"unchecked: checks {reason}" in ended(whole, monkeypatch, capsys)[1]


def test_a_part_whose_check_has_passed_or_failed_is_checked(slots: Slots) -> None:
    slots.slot(
        checks=stores(checked("failed", Cause.NUMERICS), exit_code=1), steps=stores(timed("bf16_eager"))
    )
    assert slots.about("steps")["unchecked"] == {}
    assert list(slots.about("steps")["left_out"]) == ["tensorwise_eager"]


def test_after_an_interrupt_what_is_done_is_not_left(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (slots.root / "sweeps" / "mine.yaml").write_text(
        "# Mine?\nparts:\n  checks: {sweep: smoke}\n  steps: {sweep: train}\n  after: {sweep: train}\n"
    )
    with pytest.raises(KeyboardInterrupt):
        slots.slot(checks=stores(checked()), steps=interrupted, after=BOTH)
    mine = slots.about("after")
    assert (mine["cause"], mine["retryable"]) == ("interrupted", True)
    assert "no time" not in mine["reason"]
    whole = slots.whole()

    def slot() -> list[str]:
        raise KeyboardInterrupt

    code, text = ended(whole, monkeypatch, capsys, slot)
    assert code == 2
    assert "left: steps, after; resume=r continues" in text


def test_a_refusal_is_remembered_until_the_part_is_started_again(slots: Slots) -> None:
    slots.slot(checks=refused, steps=BOTH)
    assert slots.about("checks")["cause"] == "refused"
    whole = slots.whole()
    whole.config["budget_s"] = 0.0
    whole.slot()
    assert slots.about("checks")["cause"] == "refused"


def test_a_slot_that_could_start_nothing_says_so(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slots.slot(checks=stores(checked()), steps=BOTH)
    code, text = ended(slots.whole(), monkeypatch, capsys)
    assert code == 0
    assert "nothing was started: run r is complete; run_id=NAME starts a new one" in text
    slots.slot()
    assert slots.begun == ["checks", "steps"]


def test_a_slot_that_starts_something_does_not_say_that_nothing_was_started(
    slots: Slots, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = slots.slot(checks=stores(checked()), steps=cut)
    assert "nothing was started" not in ended(whole, monkeypatch, capsys)[1]


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("a: {sweep: cats}", "part a: unknown sweep 'cats' (nearest: cast)"),
        ("a: {sweep: cast, overrides: {roundz: 3}}", "part a: unknown key 'roundz' (nearest: rounds)"),
        ("a: {sweep: cast, overrides: {axes.MM: 3}}", "part a: unknown axis 'MM' (nearest: M)"),
        ("a: {sweep: cast, small: {timing.nonsense: 3}}", "part a: unknown key 'timing.nonsense'"),
        (
            "a: {sweep: cast, overrides: {rounds: three}}",
            "part a: rounds=three: expected an integer, or null",
        ),
        ("b: {sweep: cast}, a: {sweep: cast, budget_s: -5}", "parts.a.budget_s=-5: expected a finite number"),
        ("b: {sweep: cast}, a: {sweep: cast, runs: {ceiling: b}}", "part a: unknown key 'ceiling'"),
    ],
)
@pytest.mark.parametrize("words", [["dry_run=true"], []])
def test_a_part_that_no_sweep_would_take_is_refused_before_anything_starts(
    slots: Slots, text: str, refusal: str, words: list[str]
) -> None:
    (slots.root / "sweeps" / "mine.yaml").write_text(f"# Mine?\nparts: {{{text}}}\n")
    before = set(slots.root.rglob("*"))
    with pytest.raises(UsageError, match=re.escape(refusal)):
        run_sweep(["sweep=mine", "device=cpu", "report=false", *words])
    assert set(slots.root.rglob("*")) == before


def test_dry_run_names_what_it_has_not_checked(slots: Slots, capsys: pytest.CaptureFixture[str]) -> None:
    """Suites know what their axes take, and need torch."""
    (slots.root / "sweeps" / "mine.yaml").write_text(
        "# Mine?\nparts: {a: {sweep: cast, overrides: {axes.dtype: no}}}\n"
    )
    assert run_sweep(["sweep=mine", "device=cpu", "dry_run=true"]) == 0
    assert "not checked here: values of axes, arms, shapes and models of the parts" in capsys.readouterr().out


def resumed(slots: Slots, before: str, after: str) -> int:
    def write(text: str) -> None:
        (slots.root / "sweeps" / "mine.yaml").write_text(f"# Mine?\nresume: last\nparts: {{{text}}}\n")

    words = ["sweep=mine", "device=cpu", "report=false", "budget_s=0", "quiet=true"]
    write(before)
    run_sweep(words)
    write(after)
    return run_sweep(words)


@pytest.mark.parametrize(
    "key", ["about: new", "priority: 3", "estimate_s: 9", "budget_s: 9", "last_start_s: 1", "needs: [gpu]"]
)
def test_the_plan_of_a_part_may_change_between_slots(slots: Slots, key: str) -> None:
    assert resumed(slots, "a: {sweep: cast}", f"a: {{sweep: cast, {key}}}") == 0
    assert len(list((slots.root / "results" / "mine").iterdir())) == 1


@pytest.mark.parametrize(
    ("after", "named"),
    [
        ("a: {sweep: gemm}", "parts.a.sweep"),
        ("a: {sweep: cast, overrides: {rounds: 3}}", "parts.a.overrides"),
        ("a: {sweep: cast, small: {rounds: 3}}", "parts.a.small"),
        ("a: {sweep: cast}, b: {sweep: cast}", "parts.b"),
        ("b: {sweep: cast}", "parts.a and parts.b"),
    ],
)
def test_another_experiment_is_refused_by_part_and_key_with_a_way_out(
    slots: Slots, after: str, named: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        resumed(slots, "a: {sweep: cast}", after)
    assert f"was made with another {named};" in str(refusal.value)
    assert "run_id=NAME" in str(refusal.value)
