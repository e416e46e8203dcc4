"""Oracle: the contract of the GPU session - slots, order, what a cut part keeps - on a fake machine and a fake clock."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.cli.gpu.gpu_commands import CUT
from harness.cli.gpu.gpu_session import REHEARSAL, STAGES, Session, predicted_layers
from harness.cli.gpu.gpu_stages import PATIENCE, TRIES, Stage
from report_fixtures import CPU, Invented, frame, linear_cases

from harness import store
from harness.cli.gpu import gpu_commands, gpu_session, gpu_smoke
from harness.store.compare import against, rows_of
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.training.data import shakespeare

SLOT = 8.5
BUILT = 0.5  # of a part's time, before the first round
STEP_MS = {"bf16_eager": 155.0, "tensorwise_eager": 120.0, "bf16_compile": 140.0, "tensorwise_compile": 100.0}


@pytest.fixture(autouse=True)
def _quick_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of what is packed has the page for real."""
    if "packs" in request.node.name:
        return

    def written(runs: Sequence[Path], html: Path) -> SimpleNamespace:
        markdown = html.with_suffix(".md")
        for page in (html, markdown):
            page.write_text(f"{len(runs)} runs\n")
        return SimpleNamespace(html=html, markdown=markdown)

    monkeypatch.setattr(gpu_session, "write_report", written)


class Machine:
    """A GPU on which every part takes `factor` times its estimate, and its rounds come one by one.

    Args:
        results: where the session keeps its runs.
        factor: of every part's time.
        broken: kernels and recipes that fail when they are checked.
        dies: what the second part's sweep raises after its first round.
    """

    def __init__(
        self,
        results: Path,
        factor: float = 1.0,
        broken: Sequence[str] = (),
        dies: type[BaseException] | None = None,
    ) -> None:
        self.results, self.factor, self.broken, self.dies = results, factor, broken, dies
        self.now = 0.0
        self.begun: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.timeouts: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def run(self, command: Sequence[str], timeout_s: float) -> tuple[int, str]:
        stage = next(stage for stage in STAGES if stage.name == "tests")
        assert "pytest" in command
        self.begun.append("tests")
        took = min(self.factor * stage.seconds, timeout_s)
        self.now += took
        return (CUT if took < self.factor * stage.seconds else 0), "3 passed"

    def stage_of(self, words: Sequence[str]) -> Stage:
        """Told apart by what stands in no other part's words."""
        state = json.loads((self.results / "gpu-session.json").read_text())
        run_id = said(words, "run_id")
        return next(s for s in STAGES if state.get(s.name, {}).get("run_id") == run_id)

    def sweep(self, words: Sequence[str], timeout_s: float) -> tuple[int, str]:
        stage = self.stage_of(words)
        self.begun.append(stage.name)
        self.words[stage.name], self.timeouts[stage.name] = list(words), timeout_s
        ends, total = self.now + timeout_s, self.factor * stage.seconds
        folder = self.results / stage.sweep / said(words, "run_id")
        made = store.RunWriter(folder, run_id=folder.name, sweep=stage.sweep, env_id="e", env={}, about={})
        wanted = int(said(words, "rounds") or 1)
        whole = stage.rounds or 1  # a part that is tried again has fewer rounds, and takes less
        arms = said(words, "arms").strip("[]").split(",") if said(words, "arms") else ["a"]
        done = self.now + total * (BUILT + (1 - BUILT) * wanted / whole)
        begins = self.now + total * BUILT
        round_s = (done - begins) / wanted
        finished = max(0, min(wanted, int((ends - begins) / round_s + 1e-9)))
        if self.dies is not None and stage.name == "eager":
            finished = 1
        whole_case = finished == wanted
        if finished:
            (made.append if whole_case else made.checkpoint)(self.rows(stage, arms, finished, whole_case))
        if self.dies is not None and stage.name == "eager":
            raised, self.dies = self.dies, None
            raise raised
        self.now = done if whole_case else ends
        made.close("finished" if whole_case else "interrupted")
        return (0 if whole_case else CUT), ""

    def rows(self, stage: Stage, arms: Sequence[str], count: int, whole: bool) -> list[Measurement]:
        if stage.name == "smoke":
            return self.smoke()
        suite = {"train": "train", "cast": "cast"}.get(stage.sweep, "codes")
        found = []
        for arm in arms:
            ms = STEP_MS.get(arm, {"copy": 0.09, "fused": 0.08}.get(arm, 1.0))
            samples = tuple(ms * (1 + 0.001 * math.sin(i + len(arm))) for i in range(count))
            moved = {"copy": 4.0, "read": 2.0}.get(arm, 3.0) * 16384 * 4096
            axes = {"model": "llama3_8b", "layers": 4} if suite == "train" else {"M": 16384, "K": 4096}
            found.append(Measurement(
                suite, "c1", arm, json.dumps(axes), "time_ms", "ok" if whole else "partial",
                reason="" if whole else f"partial: {count} of at least {stage.rounds} rounds, cut", regime="isolated",
                samples=samples, rounds=tuple(range(count)), bytes_moved=moved, flops={"bf16": 1e15},
            ))  # fmt: skip
        return found

    def smoke(self) -> list[Measurement]:
        found = []
        for name in ("amax", "cast", "cast_both"):
            bad = name in self.broken
            found.append(Measurement(
                gpu_smoke.KERNELS, name, "bf16", json.dumps({"kernel": name}), "mismatches", "failed" if bad else "ok",
                reason="7 of 8 elements differ" if bad else "", samples=() if bad else (0.0,),
            ))  # fmt: skip
        for name, operators in (("tensorwise", ("amax", "cast_both")), ("rowwise", ("cast_rowwise_both",))):
            bad = name in self.broken
            found.append(Measurement(
                gpu_smoke.LAYERS, "l", name, "{}", "sqnr_db", "failed" if bad else "ok",
                reason="FP8 NOT verified" if bad else "", samples=() if bad else (28.0,),
                resolved={"operators": operators},
            ))  # fmt: skip
        return found


def said(words: Sequence[str], key: str) -> str:
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def session(tmp_path: Path, machine: Machine, **more: Any) -> Session:
    settings = {"text": tmp_path / "input.txt"} | more
    return Session(
        tmp_path / "results",
        tmp_path / "out",
        runner=machine.run,
        sweeper=machine.sweep,
        clock=machine.clock,
        **settings,
    )


def ratio(tmp_path: Path, suite: str, arm: str, other: str) -> dict[str, Any]:
    """Ratio of two arms in the packed rows, finished rounds of cut cases included."""
    rows = store.read(list((tmp_path / "out").glob("*.parquet")))
    found = rows_of(against(rows[rows["suite"] == suite], arm, other, partial=True))
    return next(r for r in found if not math.isnan(r["speedup"]))


def done_but(*names: str) -> dict[str, Any]:
    """The state of a session that has all but these parts behind it."""
    return {s.name: {"done": True, "seconds": 1.0, "tries": 1} for s in STAGES if s.name not in names}


HEADLINE = (
    ("train", "tensorwise_eager", "bf16_eager", 155 / 120),
    ("cast", "fused", "copy", 0.09 / 0.08),
    ("train", "tensorwise_compile", "bf16_compile", 1.4),
)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_first_slot_yields_the_headline_though_all_takes_longer(tmp_path: Path, factor: float) -> None:
    """Eager and compiled tensorwise over bf16, and a cast's share of a copy: whole, with intervals."""
    machine = Machine(tmp_path / "results", factor)
    session(tmp_path, machine).slot(SLOT)
    assert machine.now <= 60 * SLOT
    assert machine.begun[:5] == ["start", "smoke", "eager", "casts", "compiled"]
    for suite, arm, other, expected in HEADLINE:
        found = ratio(tmp_path, suite, arm, other)
        assert found["speedup"] == pytest.approx(expected, rel=0.01)
        assert found["low"] < found["speedup"] < found["high"]
        assert not found["cut_off"]


@pytest.mark.parametrize("factor", [1.6, pytest.param(1.75, marks=pytest.mark.slow)])
def test_a_part_that_is_cut_keeps_its_rounds_and_is_tried_again_with_fewer(
    tmp_path: Path, factor: float
) -> None:
    """Even then the first slot has the figures, from fewer rounds, said to be so; the second makes them whole."""
    machine = Machine(tmp_path / "results", factor)
    made = session(tmp_path, machine)
    assert "eager" in made.slot(SLOT)
    stage = next(s for s in STAGES if s.name == "eager")
    assert machine.timeouts["eager"] == pytest.approx(PATIENCE * stage.seconds)
    first = ratio(tmp_path, "train", "tensorwise_eager", "bf16_eager")
    assert first["speedup"] == pytest.approx(155 / 120, rel=0.01)
    assert first["verdict"] == "unclear"
    assert first["cut_off"]
    assert made.told(stage).startswith("unfinished: 0 cases and arms whole, ")
    run_id, rounds = said(machine.words["eager"], "run_id"), int(said(machine.words["eager"], "rounds"))
    machine.begun.clear()
    session(tmp_path, machine).slot(SLOT)
    assert machine.begun[0] == "start" or machine.begun[0] == "eager"
    assert said(machine.words["eager"], "run_id") == run_id
    assert int(said(machine.words["eager"], "rounds")) < rounds
    kept = store.read(tmp_path / "out" / "train.parquet")
    kept = kept[kept["run_id"] == run_id]
    assert kept.groupby("case_id")["attempt"].nunique().eq(1).all(), "rounds of two attempts are never mixed"


def test_a_part_that_never_ends_is_given_up_after_its_tries_and_keeps_what_it_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "results", factor=3.0)
    made = session(tmp_path, machine)
    for _ in range(20):
        if not (left := made.slot(SLOT)):
            break
    assert left == []
    assert all(machine.begun.count(stage.name) == TRIES for stage in STAGES if stage.name != "tests")
    eager = next(s for s in STAGES if s.name == "eager")
    assert made.told(eager).startswith(f"cut off {TRIES} times: ")


def test_slots_run_all_parts_in_order_and_pack_at_most_eight_files(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "results")
    made = session(tmp_path, machine)
    slots = 1
    while made.slot(SLOT):
        slots += 1
    assert sorted(machine.begun) == sorted(stage.name for stage in STAGES)
    assert slots <= 5
    files = made.pack()
    assert {f.name for f in files} == {
        "kernels.parquet", "layers.parquet", "loss.parquet", "smoke.parquet", "train.parquet", "report.html", "report.md",
        "tests.txt",
    }  # fmt: skip
    assert len(files) <= 8
    assert (tmp_path / "out" / "tests.txt").read_text() == "3 passed"


def test_packing_that_is_killed_leaves_the_files_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the bytes of before, where the writer ends after half a file. Read beside a running session, too."""
    made = session(tmp_path, Machine(tmp_path / "results"))
    made.slot(SLOT)
    packed = {path: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")}
    assert packed

    def half(table: object, path: Path) -> None:
        Path(path).write_bytes(b"PAR1 half")
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.cli.gpu.gpu_session.pq.write_table", half)
    with pytest.raises(KeyboardInterrupt):
        made.pack_rows()
    assert {path: path.read_bytes() for path in (tmp_path / "out").glob("*.parquet")} == packed


def test_an_arm_has_90_seconds_to_be_built_and_every_round_is_stored(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "results")
    session(tmp_path, machine).slot(SLOT)
    for name in ("eager", "casts", "compiled"):
        assert said(machine.words[name], "case_timeout_s") == "90"
        assert said(machine.words[name], "timing.checkpoint_s") == "0"
        assert said(machine.words[name], "report") == "false"


@pytest.mark.parametrize(
    ("broken", "eager", "casts"),
    [
        ("cast_both", "bf16_eager,torchao_tensorwise_eager", "fused,torchao_compile,copy,read"),
        ("tensorwise", "bf16_eager,torchao_tensorwise_eager", "fused,fused_both,torchao_compile,copy,read"),
        (
            "rowwise",
            "bf16_eager,tensorwise_eager,torchao_tensorwise_eager",
            "fused,fused_both,torchao_compile,copy,read",
        ),
    ],
)
def test_what_fails_its_check_is_named_and_left_out_and_the_session_goes_on(
    tmp_path: Path, broken: str, eager: str, casts: str
) -> None:
    machine = Machine(tmp_path / "results", broken=[broken])
    made = session(tmp_path, machine)
    made.slot(SLOT)
    assert said(machine.words["eager"], "arms") == f"[{eager}]"
    assert said(machine.words["casts"], "arms") == f"[{casts}]"
    lines = made.summary()
    assert any(line.startswith("smoke: FAILED and left out: ") and broken in line for line in lines)
    stage = next(s for s in STAGES if s.name == "eager")
    if broken != "rowwise":
        assert "tensorwise_eager left out" in made.told(stage)
        assert broken in made.told(stage)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_slot_loses_no_round(tmp_path: Path, ending: type[BaseException]) -> None:
    """SystemExit stands for a kill: whatever the session knew before the sweep began must do."""
    machine = Machine(tmp_path / "results", dies=ending)
    with pytest.raises(ending):
        session(tmp_path, machine).slot(SLOT)
    kept = store.read(tmp_path / "out" / "train.parquet")
    assert {len(r) for r in kept["rounds"]} == {1}
    assert set(kept["status"]) == {"partial"}
    first = said(machine.words["eager"], "run_id")
    machine.begun.clear()
    session(tmp_path, machine).slot(SLOT)
    assert machine.begun[0] == "eager"
    assert said(machine.words["eager"], "run_id") == first
    assert set(store.read(tmp_path / "out" / "train.parquet")["status"]) == {"ok"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_what_is_advised_is_advised_by_the_ceilings_measured_here(tmp_path: Path, device: str) -> None:
    """A CPU is advised nothing, so it is given no rates."""
    machine = Machine(tmp_path / "results")
    made = session(tmp_path, machine, device=device)
    made.state = done_but("ceilings", "gpt2_advised")
    made.slot(SLOT)
    (run,) = (tmp_path / "results" / "ceilings").iterdir()
    found = [word for word in machine.words["gpt2_advised"] if word.startswith("ceilings=")]
    assert found == ([f"ceilings={run}"] if device == "cuda" else [])


def test_without_the_text_the_loss_is_skipped_and_says_what_it_wants(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "results")
    made = session(tmp_path, machine, text=None)
    made.state = done_but("nanogpt_char")
    assert made.slot(SLOT) == []
    made._save()
    stage = next(stage for stage in STAGES if stage.reads_text)
    assert made.told(stage).startswith("skipped: no text here")
    assert "text=input.txt" in made.told(stage)
    assert stage.name not in machine.begun
    assert session(tmp_path, machine).slot(SLOT) == []  # and is run once there is one
    assert said(machine.words[stage.name], "data_path") == str(tmp_path / "input.txt")


def test_a_rehearsal_is_the_same_session_on_a_cpu(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "results", factor=0.1)
    assert session(tmp_path, machine, device="cpu").slot(30) == []
    assert sorted(machine.begun) == sorted(stage.name for stage in STAGES)
    assert all("device=cpu" in words for words in machine.words.values())


def test_the_timetable_needs_no_gpu_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the parts themselves, added up by hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert gpu_session.main(["dry_run=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not list(tmp_path.iterdir())
    assert lines[1].split()[:5] == ["1", "0:00", "40", "56", "start"]
    assert lines[3].split()[:5] == ["1", "1:10", "80", "112", "eager"]
    assert all(any(f" {stage.name} " in line for line in lines) for stage in STAGES)
    assert lines[-1] == "nothing was measured (dry_run=true)"
    assert "first slot would end with: start, smoke, eager, casts, compiled" in lines[-2]
    assert gpu_session.main(["dry_run=true", "minutes=1"]) == 0
    assert "would never begin: slots of 1 minutes are too short" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("minutes=0", r"minutes=0: expected a finite number above 0, such as 8.5"),
        ("minutes=inf", r"minutes=inf: expected a finite number"),
        ("minutes=nan", r"minutes=nan: expected a finite number"),
        ("minutes=ten", r"minutes='ten' is no number"),
        ("dry_run=yes", r"dry_run='yes': expected true or false"),
        ("dryrun=true", r"unknown key 'dryrun' \(nearest: dry_run\)"),
    ],
)
def test_a_word_that_means_nothing_is_refused(word: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        gpu_session.main([word])


def test_a_file_over_the_limit_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path / "results")
    made = session(tmp_path, machine)
    made.slot(SLOT)
    monkeypatch.setattr(gpu_session, "MAX_FILE_BYTES", 10)
    with pytest.raises(UsageError, match=r".parquet is .* over 16 MiB"):
        made.pack()


def test_the_text_is_the_one_that_is_named_or_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gpu_session.text_of("") is None
    other = tmp_path / "other.txt"
    other.write_text("To be")
    with pytest.raises(UsageError, match="is not nanoGPT's text: 5 bytes"):
        gpu_session.text_of(str(other))
    with pytest.raises(UsageError, match="no file"):
        gpu_session.text_of(str(tmp_path / "missing.txt"))
    shakespeare.kept().parent.mkdir(parents=True)
    shakespeare.kept().write_text("To be")
    assert gpu_session.text_of("") == shakespeare.kept()


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"sees no GPU.*device=cpu is a rehearsal"):
        gpu_session.main([])
    with pytest.raises(UsageError, match=r"unknown key 'minute' \(nearest: minutes\)"):
        gpu_session.main(["minute=3"])
    with pytest.raises(UsageError, match="device='tpu': expected cuda, or cpu for a rehearsal"):
        gpu_session.main(["device=tpu"])


def test_a_command_that_runs_too_long_is_stopped() -> None:
    code, _ = gpu_commands.run_command([sys.executable, "-c", "import time; time.sleep(600)"], 0.3)
    assert code == 124


def test_a_command_ends_when_the_session_is_killed(tmp_path: Path) -> None:
    """Oracle: the kernel's list of processes. What the command wrote before is all that is left of it."""
    pid = tmp_path / "pid"
    command = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    session = f"import sys; from harness.cli.gpu.gpu_commands import run_command; run_command([sys.executable, '-c', {command!r}], 600)"
    with subprocess.Popen([sys.executable, "-c", session]) as parent:
        _until(lambda: pid.exists() and pid.read_text() != "")
        parent.kill()
    _until(lambda: not Path(f"/proc/{pid.read_text()}").exists())


def _until(true: Callable[[], bool]) -> None:
    for _ in range(600):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("waited for a minute")


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
        patched.setattr(gpu_commands.threading, "Timer", Deadline)
        code, _ = gpu_commands.run_words(words, 4.0)
    assert code == CUT
    times = store.read(tmp_path / "results" / "long" / "r1")
    times = times[times["metric"] == "time_ms"]
    assert set(times["status"]) == {"partial"}
    code, _ = gpu_commands.run_words(["sweep=nonsense"], 60.0)
    assert code == 2


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
            process.kill()
        after = told_by(tmp_path)
        assert all(after.get(key, 0) >= rounds for key, rounds in before.items())
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    state = json.loads((tmp_path / "gpu-session.json").read_text())
    assert all(state[stage.name]["done"] for stage in STAGES if not stage.reads_text)
    rows = store.read(tmp_path)
    assert "partial" not in set(rows["status"])


@pytest.mark.slow
def test_the_rehearsal_for_real(tmp_path: Path) -> None:
    """Oracle: what the command promises: every part, eight files, twenty lines between two that say what it is."""
    words = [sys.executable, "-m", "harness", "gpu", "device=cpu", "minutes=60", f"results_dir={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert lines[0] == lines[-1] == REHEARSAL
    files = sorted(path.name for path in (tmp_path / "gpu").iterdir())
    assert len(files) <= 8
    first = next(i for i, line in enumerate(lines) if line.startswith("tests: "))
    summary = lines[first:-1]
    assert 8 <= len(summary) <= 20
    told = {line.split()[0]: line for line in lines[:first] if line.startswith(tuple(s.name for s in STAGES))}
    for stage in STAGES:
        assert told[stage.name].endswith("done") or (stage.reads_text and "skipped" in told[stage.name])
    assert "Measured on a CPU" in (tmp_path / "gpu" / "report.md").read_text()
