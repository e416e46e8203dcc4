"""Oracle: the contract of a sweep of sweeps - slots, order, needs, what a cut part keeps - on a fake machine and a fake clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parts_machine import PART, PARTS, SLOT_S, Machine, done_but, ratio, said, session
from report_cases import linear_cases
from report_fixtures import CPU, Invented, frame

from harness import store
from harness.cli import parts as whole_module
from harness.cli.gpu import main as gpu
from harness.cli.parts import predicted_layers
from harness.cli.sweep import run_sweep
from harness.engine.parts import CUT, PATIENCE, TRIES
from harness.report import summary
from harness.store.errors import UsageError
from harness.training.data import shakespeare


@pytest.fixture(autouse=True)
def _any_text_will_do(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "the_text_is" not in request.node.name:
        monkeypatch.setattr(whole_module, "corpus", lambda name, path: None)


HEADLINE = (
    ("train", "tensorwise_eager", "bf16_eager", 155 / 120),
    ("cast", "fused", "copy", 0.09 / 0.08),
    ("train", "tensorwise_compile", "bf16_compile", 1.4),
)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_first_slot_yields_the_headline_though_all_takes_longer(tmp_path: Path, factor: float) -> None:
    """Eager and compiled tensorwise over bf16, and a cast's share of a copy: whole, with intervals."""
    machine = Machine(factor)
    session(tmp_path, machine).slot()
    assert machine.now <= SLOT_S
    assert machine.begun[:5] == ["start", "smoke", "eager", "casts", "compiled"]
    for suite, arm, other, expected in HEADLINE:
        found = ratio(tmp_path, suite, arm, other)
        assert found["speedup"] == pytest.approx(expected, rel=0.01)
        assert found["low"] < found["speedup"] < found["high"]
        assert not found["cut_off"]


def test_a_part_that_is_cut_keeps_its_rounds_and_is_tried_again_with_fewer(tmp_path: Path) -> None:
    """Even then the first slot has the figures, from fewer rounds, said to be so; the second makes them whole."""
    machine = Machine(1.6)
    made = session(tmp_path, machine)
    assert "eager" in made.slot()
    assert machine.timeouts["eager"] == pytest.approx(PATIENCE * (PART["eager"].estimate_s or 0))
    first = ratio(tmp_path, "train", "tensorwise_eager", "bf16_eager")
    assert first["speedup"] == pytest.approx(155 / 120, rel=0.01)
    assert first["verdict"] == "unclear"
    assert first["cut_off"]
    mine = store.read_about(made.folder)["parts"]["eager"]
    assert (mine["done"], mine["cause"], mine["retryable"], mine["exit"]) == (False, "budget", True, CUT)
    assert mine["statuses"] == {"partial": 3}
    run_id, rounds = said(machine.words["eager"], "run_id"), int(said(machine.words["eager"], "rounds"))
    machine.begun.clear()
    session(tmp_path, machine).slot()
    assert machine.begun[0] in ("start", "eager")
    assert said(machine.words["eager"], "run_id") == run_id
    assert int(said(machine.words["eager"], "rounds")) < rounds
    kept = store.read(tmp_path / "out" / "r.parquet")
    kept = kept[kept["run_id"] == run_id]
    assert kept.groupby("case_id")["attempt"].nunique().eq(1).all(), "rounds of two attempts are never mixed"


def test_a_part_that_never_ends_is_given_up_after_its_tries_and_keeps_what_it_has(tmp_path: Path) -> None:
    machine = Machine(factor=3.0)
    made = session(tmp_path, machine)
    for _ in range(20):
        if not (left := made.slot()):
            break
    assert left == []
    assert all(machine.begun.count(part.name) == TRIES for part in PARTS)
    mine = store.read_about(made.folder)["parts"]["eager"]
    assert (mine["tries"], mine["done"], mine["cause"], mine["retryable"]) == (TRIES, False, "budget", False)


def test_slots_run_all_parts_in_order_and_gather_their_rows_in_one_file(tmp_path: Path) -> None:
    """Oracle: the rows of the parts' own folders, which the one file holds once, read beside them or alone."""
    machine = Machine()
    slots = 1
    while left := session(tmp_path, machine).slot():
        about = store.read_about(tmp_path / "results" / "gpu" / "r")["parts"]
        assert all(about[name]["cause"] == "budget" for name in left), (
            "what does not fit waits for the next slot"
        )
        assert all(about[name]["retryable"] for name in left)
        slots += 1
    assert sorted(machine.begun) == sorted(PART)
    assert slots <= 5
    alone = store.read(tmp_path / "out" / "r.parquet")
    own = store.read(tmp_path / "results")
    assert len(alone) == len(own) == len(store.read(tmp_path)) > 40
    assert set(alone["sweep"]) == {part.sweep for part in PARTS}


def test_gathering_that_is_killed_leaves_the_file_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the bytes of before, where the writer ends after half a file. Read beside a running sweep, too."""
    made = session(tmp_path, Machine())
    made.slot()
    target = tmp_path / "out" / "r.parquet"
    before = target.read_bytes()

    def half(table: object, file: Any, **_: object) -> None:
        file.write(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.store.parquet.pq.write_table", half)
    with pytest.raises(KeyboardInterrupt):
        made.gather()
    assert target.read_bytes() == before


def test_an_arm_has_90_seconds_to_be_built_and_every_round_is_stored(tmp_path: Path) -> None:
    machine = Machine()
    session(tmp_path, machine).slot()
    for name in ("eager", "casts", "compiled"):
        assert said(machine.words[name], "case_timeout_s") == "90"
        assert said(machine.words[name], "timing.checkpoint_s") == "0"
        assert said(machine.words[name], "report") == "false"


@pytest.mark.parametrize(
    ("broken", "eager", "casts"),
    [
        ("cast_both", "[tensorwise_eager]", "[fused_both]"),
        ("tensorwise", "[tensorwise_eager]", ""),
        ("rowwise", "", ""),
    ],
)
def test_what_fails_its_check_is_named_and_left_out_and_the_sweep_goes_on(
    tmp_path: Path, broken: str, eager: str, casts: str
) -> None:
    machine = Machine(broken=[broken])
    made = session(tmp_path, machine)
    made.slot()
    assert said(machine.words["eager"], "without") == eager
    assert said(machine.words["casts"], "without") == casts
    whole = "[bf16_eager,tensorwise_eager,torchao_tensorwise_eager]"
    assert said(machine.words["eager"], "arms") == whole, "those that the run is made with"
    lines = summary.lines(store.read(made.folder))
    assert any(line.startswith("smoke: FAILED and left out: ") and broken in line for line in lines)
    about = store.read_about(made.folder)["parts"]
    assert (about["smoke"]["done"], about["smoke"]["ok"]) == (True, False)
    assert ("tensorwise_eager" in about["eager"]["left_out"]) == (broken != "rowwise")


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_slot_loses_no_round(tmp_path: Path, ending: type[BaseException]) -> None:
    """SystemExit stands for a kill: whatever was known before the part began must do."""
    machine = Machine(dies=ending)
    with pytest.raises(ending):
        session(tmp_path, machine).slot()
    kept = store.read(tmp_path / "out" / "r.parquet")
    kept = kept[kept["suite"] == "train"]
    assert {len(r) for r in kept["rounds"]} == {1}
    assert set(kept["status"]) == {"partial"}
    first = said(machine.words["eager"], "run_id")
    machine.begun.clear()
    session(tmp_path, machine).slot()
    assert machine.begun[0] == "eager"
    assert said(machine.words["eager"], "run_id") == first
    assert set(store.read(tmp_path / "out" / "r.parquet")["status"]) == {"ok"}


def test_a_part_that_breaks_costs_that_part_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(raises=["eager"])
    made = session(tmp_path, machine)
    assert "eager" in made.slot()
    assert machine.begun[:4] == ["start", "smoke", "eager", "casts"]
    assert made.state["casts"].ok
    mine = store.read_about(made.folder)["parts"]["eager"]
    assert (mine["exit"], mine["cause"], mine["retryable"]) == (7, "error", True)
    assert "internal error" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_advised_is_advised_by_the_ceilings_measured_here(tmp_path: Path, device: str) -> None:
    """A CPU is advised nothing, so it is given no rates."""
    machine = Machine()
    made = session(tmp_path, machine, device=device)
    done_but(made, "ceilings", "gpt2_advised")
    made.slot()
    (run,) = (made.folder / "ceilings").iterdir()
    found = [word for word in machine.words["gpt2_advised"] if word.startswith("ceilings=")]
    assert found == ([f"ceilings={run}"] if device == "cuda" else [])


def test_without_the_text_the_loss_is_skipped_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = Machine()
    made = session(tmp_path, machine, text="")
    done_but(made, "nanogpt_char")
    assert made.slot() == []
    mine = store.read_about(made.folder)["parts"]["nanogpt_char"]
    assert (mine["cause"], mine["tries"]) == ("missing", 0)
    assert "nanogpt_char" not in machine.begun
    again = session(tmp_path, machine)
    assert again.slot() == []  # and is run once there is one
    assert said(machine.words["nanogpt_char"], "data_path") == str(tmp_path / "input.txt")


def test_a_rehearsal_is_the_same_sweep_on_a_cpu(tmp_path: Path) -> None:
    machine = Machine(factor=0.1)
    assert session(tmp_path, machine, device="cpu", budget=1800).slot() == []
    assert sorted(machine.begun) == sorted(PART)
    assert all("device=cpu" in words for words in machine.words.values())


def test_the_timetable_needs_no_gpu_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the parts themselves, added up by hand; `gpu` and `sweep=gpu` are one command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert gpu(["dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert run_sweep(["sweep=gpu", "dry_run=true"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert not list(tmp_path.iterdir())
    assert lines[1].split()[:5] == ["1", "0:00", "40", "56", "start"]
    assert lines[3].split()[:5] == ["1", "1:10", "80", "112", "eager"]
    assert all(any(f" {name} " in line for line in lines) for name in PART)
    assert lines[-1] == "nothing was measured (dry_run=true)"
    assert "first slot would end with: start, smoke, eager, casts, compiled" in lines[-2]
    assert gpu(["dry_run=true", "minutes=1"]) == 0
    assert "would never begin: slots of 60 s are too short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "refused"),
    [
        ("minutes=0", "minutes=0: expected a finite number above 0"),
        ("minutes=inf", "minutes=inf"),
        ("minutes=nan", "minutes=nan"),
        ("minutes=ten", "minutes='ten'"),
        ("minute=3", r"unknown key 'minute' \(nearest: minutes\)"),
        ("dry_run", "'dry_run' is not key=value; write dry_run=true"),
        ("report", "'report' is not key=value; write report=true"),
        ("minutes", "'minutes' is not key=value; write minutes=VALUE"),
        ("dryrun", r"unknown key 'dryrun' \(nearest: dry_run\)"),
        ("dryrun=true", r"unknown key 'dryrun' \(nearest: dry_run\)"),
        ("dry_run=maybe", "dry_run=maybe: expected true or false"),
        ("device=tpu", "device='tpu'"),
        ("axes.M=8", "write parts.NAME.overrides.axes.M=8"),
        ("shard=0/2", "write parts.NAME.overrides.shard=0/2"),
        ("parts.eager.suite=cast", "part eager is a sweep"),
    ],
)
def test_a_word_that_means_nothing_is_refused(
    word: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word] if word.startswith("device=") else ["device=cpu", word]
    with pytest.raises(UsageError, match=refused):
        gpu(words)
    assert not list(tmp_path.iterdir())


def test_the_text_is_the_one_that_is_named_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert whole_module._text({"data_path": None}) == ""
    other = tmp_path / "other.txt"
    other.write_text("To be")
    with pytest.raises(UsageError, match="is not nanoGPT's text: 5 bytes"):
        whole_module._text({"data_path": str(other)})
    with pytest.raises(UsageError, match="no file"):
        whole_module._text({"data_path": str(tmp_path / "missing.txt")})
    shakespeare.kept().parent.mkdir(parents=True)
    shakespeare.kept().write_text("To be")
    assert whole_module._text({"data_path": None}) == str(shakespeare.kept())


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"sees no GPU; use device=cpu"):
        gpu([])
    assert not list(tmp_path.iterdir())


def test_layers_are_predicted_where_the_peak_is_known(tmp_path: Path) -> None:
    """Oracle: the rows: each FP8 layer of ours, isolated, has a prediction, and those of a CPU have none."""
    invented = Invented()
    rows = [row for case in linear_cases(invented, 700.0) for row in case]
    known = predicted_layers(frame(tmp_path / "gpu", rows))
    ours = {
        (r.case_id, r.arm) for r in rows if r.metric == "time_ms" and r.status == "ok" and "bf16" not in r.arm
    }
    assert len(known) == len({(check.case, check.arm) for check in known}) > 0
    assert len(known) <= len(ours)
    assert all(0.3 < check.predicted / check.measured < 3 for check in known)
    assert predicted_layers(frame(tmp_path / "cpu", rows, env=CPU)) == []
