"""Oracles: which processes live and what they have, as the kernel tells; the plan, each case of which ends in rows once."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from toy import ToySuite, offered

from harness import store
from harness.__main__ import main
from harness.cli import launch, run
from harness.engine import shards, side_by_side

ROOT = Path(launch.__file__).parents[2]
# A shard of a launcher that keeps its processes, as joblib does: it works, and then waits for more.
SHARD = r"""
import os, sys, time
from harness.engine import side_by_side
from harness.machine.processes import interruptible

side_by_side.exit_with(sys.argv[1])
try:
    with interruptible(), side_by_side.shard_turn(sys.argv[1]) as wanted:
        os.write(1, b"wanted\n" if wanted else b"unwanted\n")  # whole, whenever the signal comes
        try:
            if wanted:
                print(side_by_side.acquire_place(sys.argv[1], 2), flush=True)
                time.sleep(600)
        except KeyboardInterrupt:  # within its turn: a process whose command died exits after that
            print("interrupted", flush=True)
except KeyboardInterrupt:  # the signal came before it had looked
    print("interrupted", flush=True)
time.sleep(600)
"""
COMMAND = """
import time
from harness.engine import side_by_side
with side_by_side.lead() as lead:
    print(lead.folder, flush=True)
    time.sleep(600)
"""
# Work on one shard after the other of a sweep, whose words are not looked at: each says which GPU it sees.
GPUS = """
import os, sys, types
from omegaconf import OmegaConf
from harness.cli import launch, shard_job

def run_sweep(words):
    print(words[-1], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
    sys.stdin.readline()
    return 0

sys.modules["harness.cli.sweep"] = types.ModuleType("harness.cli.sweep")
sys.modules["harness.cli.sweep"].run_sweep = run_sweep
for shard in sys.argv[2:]:
    job = launch.ShardJob(words="[]", shard=shard, folder=".", lead=sys.argv[1], places=2, gpus=["5", "7"])
    shard_job.run(OmegaConf.structured(job))
"""
HUNG_S = 600.0  # what a machine at a load of 20 does in less; a hang takes longer
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs, which end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def program(code: str, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, *map(str, words)]
        # One that is killed leaves its folder.
        env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        # Without a buffer here, which `select` could not look into.
        started.append(
            subprocess.Popen(command, env=env, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        return started[-1]

    yield program
    for process in started:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


# Places


def test_a_place_has_one_process_and_the_next_when_that_has_died(start: Start) -> None:
    with side_by_side.lead() as lead:
        first = start(SHARD, lead.folder)
        assert [line(first), line(first)] == ["wanted", "0"]
        second, third = start(SHARD, lead.folder), start(SHARD, lead.folder)
        assert [line(second), line(third)] == ["wanted", "wanted"]
        (had,), _, _ = select.select([second.stdout, third.stdout], [], [], 60)
        assert had.readline().strip() == b"1"
        waits = third if had is second.stdout else second
        assert select.select([waits.stdout], [], [], 2 * side_by_side.LOOK_S)[0] == []
        first.kill()
        assert line(waits) == "0"


def test_more_shards_than_gpus_share_none_and_a_process_keeps_its_own(start: Start) -> None:
    """0/8 and 4/8 of two GPUs at once; CUDA reads the variable once, so that the next shard of a process has the same."""
    with side_by_side.lead() as lead:
        one, other = start(GPUS, lead.folder, "0/8", "2/8"), start(GPUS, lead.folder, "4/8")
        said = [line(one).split(), line(other).split()]
        assert [words[0] for words in said] == ["shard=0/8", "shard=4/8"]
        assert {words[1] for words in said} == {"5", "7"}
        assert one.stdin is not None
        one.stdin.write(b"\n")
        assert line(one).split() == ["shard=2/8", said[0][1]]


@pytest.mark.parametrize(
    ("name", "more", "places", "at_once"),
    [
        ("joblib", [], 2, ["hydra.launcher.n_jobs=2"]),
        ("joblib", ["hydra.launcher.n_jobs=-1"], 2, ["hydra.launcher.n_jobs=2"]),
        ("joblib", ["hydra.launcher.n_jobs=7"], 2, ["hydra.launcher.n_jobs=2"]),
        ("joblib", ["hydra.launcher.n_jobs=1"], 1, ["hydra.launcher.n_jobs=1"]),
        ("submitit_local", [], 2, []),
        ("basic", [], 0, []),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_more_shards_at_once_than_there_are_gpus_or_cores(
    device: str, name: str, more: list[str], places: int, at_once: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    seen: list[tuple[launch.ShardJob, list[str]]] = []
    offered([1, 2], tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "_chosen_launcher", lambda words: name)
    monkeypatch.setattr(launch, "_device", lambda asked: device)
    monkeypatch.setattr(launch, "_gpus", lambda: ["5", "7"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 4})
    monkeypatch.setattr(launch, "_launch", lambda job, _, own, folder: seen.append((job, own)) or "")
    assert main(["-m", "sweep=toy", "shard=0/8,3/8,5/8", *more]) == 2
    ((job, own),) = seen
    assert (job.places, own) == (places, at_once)
    assert bool(job.lead) == bool(places)
    assert (job.cores, job.gpus) == (
        ([], []) if not places else ([3, 4], []) if device == "cpu" else ([], ["5", "7"])
    )


def test_places_divide_the_cores() -> None:
    assert [shards.cores_of(i, 2, [4, 5, 6]) for i in range(2)] == [[4], [5]]
    assert shards.cores_of(0, 1, [4, 5]) == [4, 5]


@pytest.mark.parametrize("value", ["x", "0", "-2", "1.5", ""])
def test_what_is_no_number_of_processes_is_refused(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offered([1, 2], tmp_path, monkeypatch)
    monkeypatch.setattr(launch, "_chosen_launcher", lambda words: "joblib")
    assert main(["-m", "sweep=toy", "device=cpu", "shard=0/2,1/2", f"hydra.launcher.n_jobs={value}"]) == 2
    assert f"hydra.launcher.n_jobs={value}: " in capsys.readouterr().err
    assert not Path("results").exists()


# Ends


def test_shards_are_interrupted_by_their_command_and_later_ones_do_nothing(start: Start) -> None:
    with side_by_side.lead() as lead:
        at_work = start(SHARD, lead.folder)
        assert [line(at_work), line(at_work)] == ["wanted", "0"]
        at_work.send_signal(signal.SIGINT)  # as a terminal does; the command hears it too
        assert select.select([at_work.stdout], [], [], 0.5)[0] == []
        lead.end()
        assert line(at_work) == "interrupted"
        at_work.send_signal(signal.SIGTERM)  # as a scheduler does, to every process
        # The signal that it sends itself may come before it has looked.
        assert line(start(SHARD, lead.folder)) in ("unwanted", "interrupted")
        assert at_work.poll() is None  # what started it has yet to hear how it ended


def test_a_killed_command_takes_its_shards_with_it(start: Start) -> None:
    command = start(COMMAND)
    folder = line(command)
    at_work = start(SHARD, folder)
    assert [line(at_work), line(at_work)] == ["wanted", "0"]
    command.kill()
    assert line(at_work) == "interrupted"
    assert at_work.wait(60) == 1


def stop(process: subprocess.Popen[str], how: signal.Signals, begun: Callable[[], bool]) -> str:
    """Signals a command once it has begun, as a terminal or a scheduler does; what it said, once all of it has ended."""
    with process:  # on whatever way it is left, the process is waited for and its pipes are closed
        try:
            deadline = time.monotonic() + HUNG_S
            while not begun():
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
            if how == signal.SIGINT:
                os.killpg(process.pid, how)
            else:
                process.send_signal(how)
            out, err = process.communicate(timeout=HUNG_S)
        finally:
            process.kill()
    assert process.returncode == 2, err
    _, alive = psutil.wait_procs(children, timeout=HUNG_S)
    assert not alive
    assert store.read_about(next(Path("results").glob("*/r1")))["state"] == "interrupted"
    assert "resume=r1" in err
    assert Path(out.splitlines()[-1].split()[-1]).exists()
    return out


# Shard 0 of 2 has cases 1 and 4, the second of which never ends.
ENDLESS = """
import signal, sys
from harness.cli import run
from harness.__main__ import main
from unruly import Unruly

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's "&" hands it down as ignored
run.SUITES["toy"] = Unruly(acts={4: "hang"})
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("how", "isolate"),
    [(signal.SIGTERM, "true"), pytest.param(signal.SIGINT, "false", marks=pytest.mark.slow)],
)
def test_shards_in_turn_end_with_the_one_that_is_interrupted(
    how: signal.Signals, isolate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered([1, 2, 3, 4], tmp_path, monkeypatch)
    words = ["sweep=toy", "device=cpu"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parents[1]}"}
    command = [
        sys.executable,
        "-c",
        ENDLESS,
        "-m",
        *words,
        f"isolate={isolate}",
        "shard=0/2,1/2",
        "run_id=r1",
    ]
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    out = stop(process, how, Path("hanging").exists)
    assert "0 of 2 shards finished" in out
    folder = Path("results/toy/r1")
    assert [store.read_about(part)["state"] for part in folder.glob("shard-*")] == ["interrupted"]
    kept = store.read(folder)
    assert kept["case_id"].nunique() == 1
    monkeypatch.setitem(run.SUITES, "toy", ToySuite())
    assert main([*words, "resume=r1"]) == 0
    once(folder, 4, kept["attempt"].unique().tolist())


MANY = """\
# Do shards end?
suite: gemm
arms: [tensorwise_eager, rowwise_eager]
axes: {role: [output], M: [16, 32, 48, 64, 80, 96, 112, 128], K: [16, 32, 48], N: [32]}
timing: {min_rounds: 3, max_rounds: 100, min_samples: 1, min_seconds: 0.0, warmup_min_iterations: 1,
         warmup_min_seconds: 0.0, warmup_max_seconds: 0.1}
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_shards_of_joblib_end_with_their_command_and_can_be_resumed(
    how: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "many.yaml").write_text(MANY)
    monkeypatch.chdir(tmp_path)
    words = ["sweep=many", "device=cpu"]
    slowly = ["timing.min_seconds=0.5", "timing.max_seconds=0.5", "timing.rel_half_width=0.0001"]
    spread = ["-m", *words, *slowly, "shard=0/3,1/3,2/3", "hydra/launcher=joblib", "run_id=r1"]
    code = (
        "import signal, sys; from harness.__main__ import main; "
        "signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *spread], env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    folder = Path("results/many/r1")

    def begun() -> bool:
        notes = [json.loads(note.read_text()) for note in folder.glob("shard-*/_progress.json")]
        return any(note["statuses"].get("ok", 0) for note in notes)

    stop(process, how, begun)
    states = {store.read_about(part)["state"] for part in folder.glob("shard-*-of-3")}
    assert states == {"interrupted"}
    kept = store.read(folder)
    assert 1 <= kept["case_id"].nunique() < 24
    assert main([*words, "resume=r1"]) == 0
    once(folder, 24, kept["attempt"].unique().tolist())


def once(folder: Path, cases: int, kept: list[object]) -> None:
    """Every case has its rows once, those that were kept among them."""
    frame = store.read(folder)
    assert frame["case_id"].nunique() == cases
    assert set(frame["status"]) == {"ok"}
    assert not frame.duplicated(["case_id", "arm", "metric", "regime", "part"]).any()
    assert set(kept) <= set(frame["attempt"])
