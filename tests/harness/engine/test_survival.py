"""What a sweep survives, as tables. Oracles: each planned (case, arm) has one row, with its cause; exit codes; the process table."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import pandas as pd
import psutil
import pytest
from test_executor_faults import of_case, sweep
from toy import SWEEP, as_module
from unruly import FOUR, Unruly

from harness import store
from harness.__main__ import main
from harness.cli import run

ROOT = Path(__file__).resolve().parents[3]
GONE_S = 10.0  # until no process of a command that has ended is left

# What the arms of a case do: how often it is tried, and the cause of each that fails. Between two of them is a case of good arms.
HOSTILE: dict[str, tuple[dict[str, str], int, dict[str, str]]] = {
    "segmentation fault": ({"other": "segfault"}, 2, {"other": "died"}),
    "os._exit": ({"other": "leave"}, 2, {"other": "died"}),
    "SystemExit": ({"other": "exits"}, 1, {"other": "run"}),
    "BaseException": ({"other": "raise_base"}, 1, {"other": "run"}),
    "kills itself": ({"other": "die"}, 2, {"other": "died"}),
    "kills its group": ({"other": "kill_group"}, 2, {"other": "died"}),
    "killed once": ({"other": "die_once"}, 2, {}),
    "memory hog": ({"other": "hog"}, 1, {"other": "oom"}),
    "memory leak": ({"other": "leak"}, 1, {}),
    "100 MB of output": ({"other": "flood"}, 1, {}),
    "bytes that are no text": ({"other": "babble"}, 1, {}),
    "closed descriptors": ({"other": "close_everything"}, 2, {"other": "died"}),
    "working folder gone": ({"other": "lose_folder"}, 1, {}),
    "sys.path": ({"other": "clear_path"}, 1, {}),
    "an object": ({"other": "unreadable"}, 1, {}),
    "an object that does not pickle": ({"other": "unsendable"}, 1, {}),
    "a tensor": ({"other": "tensor"}, 1, {}),
    "words for a number": ({"other": "words"}, 1, {"other": "run"}),
    "an error that is no text": ({"other": "undecodable"}, 1, {"other": "build"}),
    "NaN": ({"other": "nan"}, 1, {"other": "build"}),
    "children in sessions of their own": ({"other": "forks"}, 1, {}),
    "busy children": ({"other": "timed burden", "far": "timed witness"}, 1, {}),
    "dies while it is timed": ({"other": "timed die"}, 2, {"other": "died"}),
    "two die": ({"other": "die", "far": "segfault"}, 2, {"other": "died", "far": "died"}),
    "the baseline dies": ({"base": "die"}, 2, {"base": "died"}),
    "device lost": ({"peer": "lose"}, 1, {"peer": "build"}),
    "device lost while it is timed": ({"peer": "timed lose"}, 1, {"peer": "run"}),
    "device spoilt": ({"peer": "timed spoil"}, 1, {"peer": "run"}),
    "device lost beside one that dies": ({"other": "lose", "peer": "die"}, 2, {"other": "build", "peer": "died"}),
    "stopped and continued": ({"other": "timed pause"}, 1, {}),
}  # fmt: skip
HANGS: dict[str, dict[str, str]] = {"endless loop": {"other": "spin"}, "waits for ever": {"other": "hang"}}
NUMBERS = {name: 2 * n for n, name in enumerate(HOSTILE, 1)}


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def soon_gone(pids: list[int]) -> bool:
    """Whether none of them is left within the time that they have."""
    return any(not any(map(alive, pids)) or time.sleep(0.05) for _ in range(int(GONE_S / 0.05)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def hostile(folder: Path) -> pd.DataFrame:
    """One sweep of all of them, whose processes live on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        acts = {NUMBERS[name]: acting for name, (acting, _, _) in HOSTILE.items()}
        outcome, frame = sweep(Unruly(ARMS=FOUR, acts=acts), 2 * len(HOSTILE) + 1)
    assert outcome.state == "finished"
    assert all(reason.isascii() for _, reason in outcome.reasons)
    return frame


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_arm_has_its_row_and_the_others_are_measured(
    name: str, hostile: pd.DataFrame, folder: Path
) -> None:
    _, tries, causes = HOSTILE[name]
    rows = of_case(hostile[hostile["metric"] == "time_ms"], NUMBERS[name]).set_index("arm")
    assert sorted(rows.index) == sorted(FOUR)
    assert {arm: rows.loc[arm, "cause"] for arm in rows.index[rows["status"] == "failed"]} == causes
    assert rows.loc[list(causes), "reason"].map(bool).all()
    assert set(rows["status"]) <= {"ok", "failed"}
    assert set(rows["tries"]) == {tries}
    assert rows.loc[rows["status"] == "ok", "rounds"].map(frozenset).nunique() <= 1
    after = of_case(hostile, NUMBERS[name] + 1)
    assert (set(after["status"]), set(after["tries"])) == ({"ok"}, {1})
    assert not (folder / "called").exists(), "an object was made anew in the parent"


def test_what_hostile_arms_have_started_is_gone_and_slows_nobody(hostile: pd.DataFrame, folder: Path) -> None:
    pids = [int(path.read_text()) for kind in ("forked", "burden") for path in folder.glob(f"{kind}-*")]
    assert len(pids) > 5
    assert soon_gone(pids)
    assert (folder / "witness").read_text() == "0"
    times = of_case(hostile[hostile["metric"] == "time_ms"], NUMBERS["busy children"]).set_index("arm")
    assert times.loc["base", "samples"].min() < 1.0  # of a closure that does nothing


@pytest.mark.parametrize(
    ("name", "last"), [("segmentation fault", "Segmentation fault"), ("closed descriptors", "last words")]
)
def test_a_crash_is_told_with_what_was_printed_last(name: str, last: str, hostile: pd.DataFrame) -> None:
    rows = of_case(hostile, NUMBERS[name]).set_index("arm")
    assert last in json.loads(rows.loc["other", "resolved"])["printed"]


def test_a_round_over_which_a_process_was_stopped_is_dropped_and_counted(hostile: pd.DataFrame) -> None:
    rows = of_case(hostile[hostile["metric"] == "time_ms"], NUMBERS["stopped and continued"])
    timings = rows["timing"].map(json.loads)
    assert set(timings.map(lambda timing: timing["stopped_rounds"])) == {1}
    assert max(map(max, rows["samples"])) < 250.0  # it was stopped for 300 ms
    assert set(rows["rounds"].map(lambda rounds: tuple(sorted(set(rounds))))) == {(0, 1)}


@pytest.mark.slow
def test_arms_that_never_end_fail_after_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart, since on a busy machine what works may be silent for as long. A process may take longer for its first case."""
    monkeypatch.chdir(tmp_path)
    acts = {2 * n: acting for n, acting in enumerate(HANGS.values(), 1)}
    _, frame = sweep(Unruly(ARMS=FOUR, acts=acts), 4, silence_s=5.0)
    failed = frame[frame["status"] == "failed"]
    assert failed[["arm", "cause", "tries"]].to_numpy().tolist() == [["other", "timeout", 1]] * len(acts)
    assert frame[frame["metric"] == "time_ms"].groupby("arm").size().to_dict() == dict.fromkeys(FOUR, 4)


# A sweep in a process of its own
CHILD = """
import signal, sys
from harness.__main__ import console
from harness.cli import run
from toy import as_module
from unruly import Unruly
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" hands it down as ignored
if __name__ == "__main__":
    run.SUITES["toy"] = as_module(Unruly())
    sys.exit(console())
"""
CASES = 40
WORDS = ["sweep=toy", "device=cpu", "run_id=r1", "report=false"]


@pytest.fixture
def here(
    enter_folder_with_sweep: Callable[[str, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    enter_folder_with_sweep("toy", SWEEP % list(range(1, CASES + 1)))
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setitem(run.SUITES, "toy", as_module(Unruly()))
    return tmp_path


def rows_of(where: Path) -> pd.DataFrame:
    return store.read(where / "results/toy/r1")


def strike(process: BaseProcess, who: str, how: signal.Signals, wait_s: float) -> list[int]:
    """Sends a signal to the command, or to one of its workers, some time after its first rows; all processes that there were."""
    deadline = time.monotonic() + 120
    while not list(Path("results").rglob("part-*")) and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(wait_s)
    pid = process.pid
    assert pid
    below: list[psutil.Process] = []
    workers: list[int] = []
    with suppress(psutil.NoSuchProcess):  # the command, or a worker, has just ended
        below = psutil.Process(pid).children(recursive=True)
        parents = {p.pid: p.ppid() for p in below}
        workers = [of for of, parent in parents.items() if parent != pid]
    for at in workers[:1] if who == "worker" else [pid]:
        with suppress(ProcessLookupError):
            os.kill(at, how)
            if how == signal.SIGSTOP:
                time.sleep(0.5)
                os.kill(at, signal.SIGCONT)
    return [p.pid for p in below]


NIGHTLY = pytest.mark.slow
SIGNALS = [
    ("parent", signal.SIGKILL, ()),
    ("worker", signal.SIGKILL, ()),
    ("parent", signal.SIGINT, NIGHTLY),
    ("parent", signal.SIGSTOP, NIGHTLY),
    ("without workers", signal.SIGTERM, NIGHTLY),
    ("worker", signal.SIGSTOP, NIGHTLY),
    *(("parent", getattr(signal, f"SIG{name}"), NIGHTLY) for name in ("TERM", "HUP", "QUIT")),
    *(("worker", getattr(signal, f"SIG{name}"), NIGHTLY) for name in ("TERM", "INT", "HUP", "QUIT")),
]


def is_survived(here: Path, who: str, how: signal.Signals, wait_s: float) -> None:
    """The stored rows are intact, nothing is left, and resume= completes the run."""
    isolate = "false" if who == "without workers" else "true"
    process = forked.start([str(here / "child.py"), *WORDS, f"isolate={isolate}"])
    try:
        pids = strike(process, who, how, wait_s)
        process.join(120)
    finally:
        code = process.exitcode
        process.kill()
        process.join()
    assert soon_gone(pids)
    kept = rows_of(here)
    assert not kept.duplicated(["case_id", "arm", "metric"]).any()
    ends = {signal.SIGKILL: -9, signal.SIGSTOP: 0}
    assert code in ({0, 1} if who == "worker" else {0, ends.get(how, 2)})
    assert main(["sweep=toy", "device=cpu", "resume=r1", "report=false", "isolate=false"]) in (0, 1)
    frame = rows_of(here)
    assert not frame.duplicated(["case_id", "arm", "metric"]).any()
    times = frame[frame["metric"] == "time_ms"]
    assert set(times.groupby("arm").size()) == {CASES}
    assert set(times["status"]) == {"ok"}
    count = frame.groupby("case_id").size()
    ended = kept.groupby("case_id").filter(
        lambda own: len(own) == count[own.name] and set(own["status"]) == {"ok"}
    )
    key = ["case_id", "arm", "metric", "created_at"]
    assert len(ended[key].merge(frame[key])) == len(ended), "a case that had ended was measured again"
    assert len(ended) >= len(kept) - 2 * count.max(), "more than the cases under way were not whole"


@pytest.mark.parametrize(
    ("who", "how"),
    [pytest.param(who, how, marks=marks, id=f"{who}-{how.name}") for who, how, marks in SIGNALS],
)
def test_a_signal_at_a_random_moment_loses_no_row(who: str, how: signal.Signals, here: Path) -> None:
    is_survived(here, who, how, random.Random(f"{who} {how}").uniform(0, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(20))
@pytest.mark.parametrize("who", ["parent", "worker"])
def test_the_command_and_its_workers_are_killed_at_many_moments(who: str, moment: int, here: Path) -> None:
    is_survived(here, who, signal.SIGKILL, random.Random(moment).uniform(0, 1.5))


ODD = "a 'b' \"c\"\nd"
ROOM = "mount -t tmpfs -o size=20k none small && "
# How the command is started (a shell's words; $RUN is the sweep), its exit code, and whether its rows are stored.
PLACES: dict[str, tuple[str, int, bool]] = {
    "stdout closed": ("$RUN isolate=true >&-", 0, True),
    "all closed": ("$RUN isolate=true <&- >&- 2>&-", 0, True),
    "the reader leaves": ("set -o pipefail; $RUN | head -1", 0, True),
    "/dev/full": ("$RUN > /dev/full", 2, True),
    "no HOME": ("env -u HOME $RUN", 0, True),
    "names": (f"$RUN results_dir={shlex.quote(ODD)}", 0, True),
    "ASCII": ("PYTHONIOENCODING=ascii $RUN results_dir=é", 0, True),
    "few files": ("ulimit -n 20; $RUN", 2, False),
    "little memory": ("ulimit -v 800000; $HARNESS sweep=quick", 2, False),  # torch itself may not load
    "small files": ("ulimit -f 1; $RUN", 2, False),
    "folder gone": ("mkdir gone; cd gone; rmdir ../gone; $HARNESS list sweeps", 2, False),
    "bytes": ("LC_ALL=POSIX PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 $RUN results_dir=$'\\xff'", 2, False),
    "no /dev/shm": ("mount -t tmpfs -o ro none /dev/shm; $RUN isolate=true", 0, True),
    "no space": (f"mkdir small; {ROOM}$RUN results_dir=small", 2, False),
    "read-only": ("mkdir ro; mount -t tmpfs -o ro none ro; $RUN results_dir=ro", 2, False),
    "the same run_id twice": ("$RUN; $RUN", 0, True),
    "three at once": (
        "for i in 1 2 3; do $RUN run_id=r$i & p[$i]=$!; done; for i in 1 2 3; do wait ${p[$i]} || exit; done",
        0,
        True,
    ),
}


def can_mount() -> bool:
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and not subprocess.run(tried, capture_output=True).returncode


MOUNTS = pytest.mark.skipif(not can_mount(), reason="needs a user namespace that may mount")
BY_DAY = {
    "/dev/full",
    "no HOME",
    "few files",
    "little memory",
    "folder gone",
    "bytes",
    "no space",
    "read-only",
    "three at once",
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[MOUNTS] * ("mount" in words) + [NIGHTLY] * (name not in BY_DAY))
        for name, (words, *_) in PLACES.items()
    ],
)
def test_a_bare_machine_is_used_or_refused_in_a_line(name: str, here: Path) -> None:
    command, code, is_stored = PLACES[name]
    words = shlex.join([sys.executable, "child.py", *WORDS, "axes.n=[1]", "quiet=true", "isolate=false"])
    shell = ["unshare", "-rm"] * ("mount" in command) + ["bash", "-c", command.replace("$RUN", words)]
    harness = shlex.join([f"PYTHONPATH={ROOT}", sys.executable, "-m", "harness"])
    shell[-1] = shell[-1].replace("$HARNESS", f"env {harness}")
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert [line[:7] for line in done.stderr.splitlines()] == ["error: "]
    stored = list(here.rglob("*.parquet"))
    assert bool(stored) == is_stored
    for path in {path.parent for path in stored}:
        assert set(store.read(path)["status"]) == {"ok"}
        assert store.read_about(path)["state"] == "finished"
