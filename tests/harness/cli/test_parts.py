"""Oracle: the contract of a sweep of sweeps - slots, order, needs, what a cut part keeps - on a fake machine and a fake clock,
and real sweeps of a user's own folder."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import CPU, Invented, frame, linear_cases

from harness import store
from harness.cli import parts as whole_module
from harness.cli.config import load
from harness.cli.gpu import main as gpu
from harness.cli.parts import REHEARSAL, Whole, predicted_layers
from harness.cli.sweep import run_sweep
from harness.engine import parts as schedule
from harness.engine.parts import CUT, PATIENCE, TRIES, Part, Progress, parts_of
from harness.judge.smoke import KERNELS, LAYERS
from harness.report import summary
from harness.store.cause import Cause
from harness.store.compare import against, rows_of
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.training.data import shakespeare

SLOT_S = 510
BUILT = 0.5  # of a part's time, before the first round
STEP_MS = {"bf16_eager": 155.0, "tensorwise_eager": 120.0, "bf16_compile": 140.0, "tensorwise_compile": 100.0}
PARTS = parts_of(load(["sweep=gpu"], lambda device: device).config, whole_module.NEEDS)
PART = {part.name: part for part in PARTS}


@pytest.fixture(autouse=True)
def _any_text_will_do(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "the_text_is" not in request.node.name:
        monkeypatch.setattr(whole_module, "corpus", lambda name, path: None)


class Machine:
    """A GPU on which every part takes `factor` times its estimate, and its rounds come one by one.

    Args:
        factor: of every part's time.
        broken: kernels and recipes that fail when they are checked.
        dies: what the sweep of the part `eager` raises after its first round.
        raises: parts whose sweep raises before it has stored anything.
    """

    def __init__(
        self,
        factor: float = 1.0,
        broken: Sequence[str] = (),
        dies: type[BaseException] | None = None,
        raises: Sequence[str] = (),
    ) -> None:
        self.factor, self.broken, self.dies, self.raises = factor, broken, dies, raises
        self.now = 0.0
        self.begun: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.timeouts: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def measure(self, words: Sequence[str], timeout_s: float) -> int:
        part = PART[said(words, "run_id").removeprefix("r-")]
        self.begun.append(part.name)
        self.words[part.name], self.timeouts[part.name] = list(words), timeout_s
        if part.name in self.raises:
            raise RuntimeError("a fault of the harness")
        ends, total = self.now + timeout_s, self.factor * (part.estimate_s or 0)
        folder = Path(said(words, "results_dir")) / part.sweep / said(words, "run_id")
        made = store.RunWriter(folder, run_id=folder.name, sweep=part.sweep, env_id="e", env={}, about={})
        wanted = int(said(words, "rounds") or 1)
        whole = part.overrides.get("rounds", 1)  # a part that is tried again has fewer rounds, and takes less
        arms = said(words, "arms").strip("[]").split(",") if said(words, "arms") else ["a"]
        if left_out := said(words, "without"):
            arms = [arm for arm in arms if arm not in left_out.strip("[]").split(",")]
        done = self.now + total * (BUILT + (1 - BUILT) * wanted / whole)
        begins = self.now + total * BUILT
        round_s = (done - begins) / wanted
        finished = max(0, min(wanted, int((ends - begins) / round_s + 1e-9)))
        if self.dies is not None and part.name == "eager":
            finished = 1
        whole_case = finished == wanted
        if finished:
            (made.append if whole_case else made.checkpoint)(self.rows(part, arms, finished, whole_case))
        if self.dies is not None and part.name == "eager":
            raised, self.dies = self.dies, None
            raise raised
        self.now = done if whole_case else ends
        made.close("finished" if whole_case else "interrupted")
        return 0 if whole_case else CUT

    def rows(self, part: Part, arms: Sequence[str], count: int, whole: bool) -> list[Measurement]:
        if part.name == "smoke":
            return self.smoke()
        suite = {"train": "train", "cast": "cast"}.get(part.sweep, "codes")
        found = []
        for arm in arms:
            ms = STEP_MS.get(arm, {"copy": 0.09, "fused": 0.08}.get(arm, 1.0))
            samples = tuple(ms * (1 + 0.001 * math.sin(i + len(arm))) for i in range(count))
            moved = {"copy": 4.0, "read": 2.0}.get(arm, 3.0) * 16384 * 4096
            axes = {"model": "llama3_8b", "layers": 4} if suite == "train" else {"M": 16384, "K": 4096}
            found.append(Measurement(
                suite, "c1", arm, json.dumps(axes), "time_ms", "ok" if whole else "partial",
                reason="" if whole else f"partial: {count} of at least {part.overrides.get('rounds')} rounds, cut", regime="isolated",
                samples=samples, rounds=tuple(range(count)), bytes_moved=moved, flops={"bf16": 1e15},
            ))  # fmt: skip
        return found

    def smoke(self) -> list[Measurement]:
        found = []
        for name in ("amax", "cast", "cast_both"):
            bad = name in self.broken
            found.append(Measurement(
                KERNELS, name, "bf16", json.dumps({"kernel": name}), "mismatches", "failed" if bad else "ok",
                reason="7 of 8 elements differ" if bad else "", samples=() if bad else (0.0,),
            ))  # fmt: skip
        for name, operators in (("tensorwise", ("amax", "cast_both")), ("rowwise", ("cast_rowwise_both",))):
            bad = name in self.broken
            found.append(Measurement(
                LAYERS, "l", name, "{}", "sqnr_db", "failed" if bad else "ok",
                reason="FP8 NOT verified" if bad else "", samples=() if bad else (28.0,),
                resolved={"operators": operators},
            ))  # fmt: skip
        return found


def said(words: Sequence[str], key: str) -> str:
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def session(
    tmp_path: Path, machine: Machine, device: str = "cuda", text: str = "input.txt", budget: float = SLOT_S
) -> Whole:
    """What a command that is given again finds: all that it knows of the slots before stands in `_run.json`."""
    folder = tmp_path / "results" / "gpu" / "r"
    words = ["sweep=gpu", f"device={device}", f"reports_dir={tmp_path / 'out'}", f"budget_s={budget}"]
    if text:
        words.append(f"data_path={tmp_path / text}")
    about = {"parts": store.read_about(folder).get("parts", {})}
    writer = store.RunWriter(folder, run_id="r", sweep="gpu", env_id="e", env={}, about=about)

    def measure(words: Sequence[str], seconds: float) -> int:
        return whole_module._isolated(lambda words: machine.measure(words, seconds), words)

    return Whole(load(words, lambda asked: asked), folder, writer, measure, machine.clock)


def ratio(tmp_path: Path, suite: str, arm: str, other: str) -> dict[str, Any]:
    """Ratio of two arms in the gathered rows, finished rounds of cut cases included."""
    rows = store.read(tmp_path / "out" / "r.parquet")
    found = rows_of(against(rows[rows["suite"] == suite], arm, other, partial=True))
    return next(r for r in found if not math.isnan(r["speedup"]))


def done_but(whole: Whole, *names: str) -> None:
    """A sweep that has all but these parts behind it."""
    whole.state |= {p.name: Progress(done=True, ok=True, tries=1) for p in PARTS if p.name not in names}


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


def scheduled(**needs: Sequence[str]) -> list[Part]:
    return [Part(name, "cast", needs=tuple(of), estimate_s=10.0) for name, of in needs.items()]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Progress(done=True, ok=True, tries=1), None),
        (Progress(done=True, tries=1, cause=Cause.NUMERICS), Cause.NUMERICS),
        (Progress(tries=TRIES, cause=Cause.BUDGET), Cause.BUDGET),
        (Progress(tries=1, cause=Cause.DIED), Cause.BUDGET),  # it waits, and may be started in the next slot
    ],
)
def test_a_part_whose_need_failed_is_skipped_with_its_cause(first: Progress, second: Cause | None) -> None:
    parts = scheduled(a=(), b=("a",))
    state = {"a": first, "b": Progress()}
    begun = []

    def measure(part: Part, mine: Progress, seconds: float) -> None:
        begun.append(part.name)
        mine.tries += 1
        if part.name == "b":
            mine.done = mine.ok = True

    schedule.run_slot(parts, state, math.inf, {}, measure, lambda: 0.0)
    assert ("b" in begun) == (second is None)
    assert state["b"].cause == (second or Cause.NONE)


def config_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, Any]:
    (tmp_path / "sweeps").mkdir(exist_ok=True)
    (tmp_path / "sweeps" / "mine.yaml").write_text(f"# Mine?\n{text}")
    monkeypatch.chdir(tmp_path)
    return load(["sweep=mine"], lambda device: "cpu").config


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("parts: {a: {sweep: cast, needs: [b]}, b: {sweep: cast, needs: [a]}}", "a, b need each other"),
        ("parts: {a: {sweep: cast, needs: [c]}}", "need 'c'"),
        ("parts: {a: {sweep: cast, checked_by: [c]}}", "part 'c'"),
        ("parts: {a: {sweep: cast}, b: {suite: cast}}", "part b names no sweep"),
        ("parts: {a: {sweep: cast, axes: {M: [8]}}}", "part a is a sweep: write parts.a.overrides"),
    ],
)
def test_parts_that_cannot_be_are_refused(
    text: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=refused):
        parts_of(config_of(tmp_path, monkeypatch, text), ())


def test_the_lowest_priority_is_first_then_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "parts: {a: {sweep: cast, priority: 2}, b: {sweep: cast}, c: {sweep: gemm, priority: 2}, d: {sweep: gemm}}"
    assert [part.name for part in parts_of(config_of(tmp_path, monkeypatch, text), ())] == [
        "b",
        "d",
        "a",
        "c",
    ]


def test_a_part_that_has_no_room_makes_room_for_the_next() -> None:
    parts = [Part("long", "cast", estimate_s=100.0), Part("short", "cast", estimate_s=10.0)]
    lines = schedule.timetable(parts, 60.0)
    assert [(line.slot, line.part.name) for line in lines] == [(1, "short")]
    lines = schedule.timetable(parts, 110.0)
    assert [(line.slot, line.part.name) for line in lines] == [(1, "long"), (2, "short")]


QUICK = """timing.min_seconds: 0.01, timing.max_seconds: 0.05, timing.min_samples: 3, timing.block_ms: 2,
    timing.warmup_min_seconds: 0.01, timing.warmup_max_seconds: 0.05, rounds: 3, isolate: false"""
TWO = f"""
parts:
  products:
    sweep: gemm
    overrides: {{axes: {{M: 32, K: 32, N: 32, role: output}}, arms: [bf16, tensorwise_eager], {QUICK}}}
  never: {{sweep: cast, needs: [gpu]}}
  wrong: {{sweep: cast, priority: 1, overrides: {{axes.nonsense: 3}}}}
  after: {{sweep: cast, priority: 2, needs: [wrong]}}
  casts:
    sweep: cast
    priority: -1
    overrides: {{axes.M: 64, axes.K: 64, axes.dtype: e4m3fn, axes.granularity: tensorwise, axes.src: bf16, arms: [eager, copy],
      {QUICK}}}
"""


def test_a_users_own_sweep_of_two_parts_for_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: what the file says. Of five parts two are measured, one is refused, one needs that one, one needs a GPU."""
    config_of(tmp_path, monkeypatch, TWO)
    words = ["sweep=mine", "device=cpu", "seed=7", "quiet=true", "resume=last"]
    assert run_sweep(words) == 1
    (folder,) = (tmp_path / "results" / "mine").iterdir()
    about = store.read_about(folder)
    assert about["state"] == "interrupted"  # the part that is refused may be mended, however often
    mine = about["parts"]
    assert {name: (p["ok"], p["cause"]) for name, p in mine.items()} == {
        "casts": (True, ""),
        "products": (True, ""),
        "never": (False, "missing"),
        "wrong": (False, "refused"),
        "after": (False, "budget"),  # it waits
    }
    rows = store.read(folder)
    assert set(rows["sweep"]) == {"cast", "gemm"}
    assert set(rows["seed"]) == {7}
    first = rows.groupby("sweep")["created_at"].min()
    assert first["cast"] < first["gemm"], "the lower number is started first"
    assert (tmp_path / "reports" / f"{folder.name}.html").exists()
    assert "unknown axis" in capsys.readouterr().err
    assert [run_sweep(words) for _ in range(TRIES - 1)] == [1, 1]
    assert [path.name for path in (tmp_path / "results" / "mine").iterdir()] == [folder.name], (
        "one run, slot after slot"
    )
    again = store.read_about(folder)
    assert again["parts"]["casts"]["tries"] == 1, "what is done is not run again"
    assert (again["parts"]["wrong"]["tries"], again["parts"]["wrong"]["retryable"]) == (0, True)
    assert again["parts"]["after"]["cause"] == "budget", "it waits for the part that it needs"
    assert again["state"] == "interrupted"
    assert len(store.read(folder)) == len(rows)


def test_dry_run_of_a_users_own_sweep_prints_its_timetable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config_of(tmp_path, monkeypatch, TWO)
    assert run_sweep(["sweep=mine", "device=cpu", "dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[4] for line in lines[1:6]] == ["casts", "products", "wrong", "after", "never"]
    assert "skipped: needs a GPU" in lines[5]
    assert not (tmp_path / "results").exists()


SWEEP = """# Takes a while
suite: cast
axes: {dtype: [e4m3fn], granularity: [tensorwise], src: [bf16], M: [64], K: [64]}
arms: [eager, copy]
isolate: false
rounds: 500
report: false
timing: {min_samples: 1, min_seconds: 0.0, block_ms: 20, max_block_samples: 100000, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1, max_seconds: 60, checkpoint_s: 0}
"""


# An interrupt may come while a file is opened; what was written then is no part of the store.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_sweep_that_runs_too_long_is_cut_off_and_keeps_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "long.yaml").write_text(SWEEP)
    monkeypatch.chdir(tmp_path)
    words = ["sweep=long", "device=cpu", "run_id=r1", "quiet=true"]
    run = tmp_path / "results" / "long" / "r1"

    class Deadline(threading.Timer):
        """Comes when two rounds are stored, however long that takes."""

        def run(self) -> None:
            while not self.finished.is_set():
                if any(run.glob("*.parquet")) and store.read(run)["rounds"].map(len).max() > 1:
                    self.function()
                    return
                time.sleep(0.01)

    with monkeypatch.context() as patched:
        patched.setattr(schedule.threading, "Timer", Deadline)
        assert schedule.within(4.0, lambda: run_sweep(words)) == CUT
    times = store.read(tmp_path / "results" / "long" / "r1")
    times = times[times["metric"] == "time_ms"]
    assert set(times["status"]) == {"partial"}


def told_by(results: Path) -> dict[tuple[str, str, str], int]:
    """Rounds of every case and arm that the store has, by run."""
    found: dict[tuple[str, str, str], int] = {}
    if not any(results.rglob("*.parquet")):
        return found
    rows = store.read(results)
    for r in rows_of(
        rows[rows["metric"].isin(["time_ms", "launch_us"]) & rows["status"].isin(["ok", "partial"])]
    ):
        key = r["run_id"], r["case_id"], r["arm"]
        found[key] = max(found.get(key, 0), len(set(r["rounds"])))
    return found


@pytest.mark.slow
def test_the_rehearsal_killed_at_ten_random_moments(tmp_path: Path) -> None:
    """Oracle: what the store held just before each kill is still there after it, and at the end everything is done."""
    words = [sys.executable, "-m", "harness", "gpu", "device=cpu", "minutes=60", f"results_dir={tmp_path}"]
    moments = random.Random(20261122)
    for _ in range(10):
        with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            before = told_by(tmp_path)
            goal = sum(before.values()) + moments.randrange(1, 60)  # rounds of all arms
            while sum(before.values()) < goal and process.poll() is None:
                time.sleep(0.1)
                before = told_by(tmp_path)
            time.sleep(moments.uniform(0, 0.5))  # in the midst of the next one
            before = told_by(tmp_path)
            while process.poll() is None and any(
                mine["tries"] == TRIES and not mine["done"]
                for path in (tmp_path / "gpu").glob("*/_run.json")
                for mine in store.read_about(path.parent)["parts"].values()
            ):
                time.sleep(0.1)  # a part that is killed in its last try is given up
                before = told_by(tmp_path)
            process.kill()
        after = told_by(tmp_path)
        assert all(after.get(key, 0) >= rounds for key, rounds in before.items())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    (folder,) = (path.parent for path in (tmp_path / "gpu").glob("*/_run.json"))
    state = store.read_about(folder)["parts"]
    assert all(state[part.name]["done"] for part in PARTS if "text" not in part.needs)
    assert "partial" not in set(store.read(folder)["status"])


@pytest.mark.slow
def test_the_rehearsal_for_real(tmp_path: Path) -> None:
    """Oracle: what the command promises: every part, three files, twenty lines between two that say what it is."""
    words = [sys.executable, "-m", "harness", "gpu", "device=cpu", "minutes=60", f"results_dir={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert REHEARSAL in lines
    assert lines[-1] == REHEARSAL
    (folder,) = (path for path in (tmp_path / "gpu").iterdir() if path.is_dir())
    files = sorted(path.name for path in (tmp_path / "gpu").iterdir() if path.is_file())
    assert files == [f"{folder.name}{ending}" for ending in (".html", ".md", ".parquet")]
    for name, mine in store.read_about(folder)["parts"].items():
        assert mine["done"] or (mine["cause"] == "missing" and "text" in PART[name].needs), mine
    first = next(i for i, line in enumerate(lines) if line.startswith("tests: "))
    assert 8 <= len(lines[first:-1]) <= 20
    assert "Measured on a CPU" in (tmp_path / "gpu" / f"{folder.name}.md").read_text()
