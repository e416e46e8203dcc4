"""Files of a run while they are written. Oracle: what lies in the folder after a kill -9, beside a live writer, on a full disk."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from stored import row

from harness import store
from harness.engine import runlog
from harness.store import run_files

if TYPE_CHECKING:
    from collections.abc import Iterator

ROWS = [row("c", "a", [1.0], resolved={"n": "x" * 5000})]
OPEN = """
import sys, time
from pathlib import Path
from harness.store import run_files
with run_files.written(Path(sys.argv[1]) / "part-1.parquet") as file:
    file.write(b"PAR1")
    file.flush()
    print("half", flush=True)
    time.sleep(600)
"""
APPEND = """
import sys, time
from pathlib import Path
from harness import store
from harness.store.measurement import Measurement
run = store.RunWriter(Path(sys.argv[1]), run_id="r1", sweep="w", env_id="e", env={}, about={})
print("half", flush=True)
for i in range(10**6):
    run.append([Measurement("s", f"c{i}", "a", "{}", "time_ms", "ok", samples=(1.0,))])
    run.record(at=i)
"""
FULL = """
import resource, signal, sys
from pathlib import Path
from harness import store
from harness.store.measurement import Measurement
run = store.RunWriter(Path(sys.argv[1]), run_id="r1", sweep="w", env_id="e", env={}, about={})
rows = lambda size: [Measurement("s", f"c{size}", "a", "{}", "time_ms", "ok", samples=tuple(map(float, range(1, size))))]
run.append(rows(10))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    run.append(rows(10**5))
except OSError as error:
    print(error.errno, flush=True)
"""


@contextmanager
def half_written(folder: Path, program: str = OPEN) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "half\n"
            yield process
        finally:
            process.kill()


def writer(folder: Path) -> store.RunWriter:
    return store.RunWriter(folder, run_id="r1", sweep="w", env_id="e", env={}, about={})


def test_what_a_killed_writer_left_goes_and_what_a_live_one_writes_stays(tmp_path: Path) -> None:
    with half_written(tmp_path) as killed, half_written(tmp_path):
        assert len(list(tmp_path.glob("_*.tmp"))) == 2
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        run = writer(tmp_path)
        run.append(ROWS)
        run.close("finished")
        assert len(list(tmp_path.glob("_*.tmp"))) == 1
    writer(tmp_path).close("finished")
    assert not list(tmp_path.glob("_*.tmp"))
    assert len(store.read(tmp_path)) == 1


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_a_run_that_is_killed_again_and_again_is_readable_and_closes_clean(
    tmp_path: Path, parts: int
) -> None:
    """Two writers at once in one folder, both killed in the middle of what they do."""
    for _ in range(2):
        with half_written(tmp_path, APPEND) as one, half_written(tmp_path, APPEND) as other:
            while len(list(tmp_path.glob("part-*"))) < parts:
                time.sleep(0.01)
                assert one.poll() is other.poll() is None
    frame = store.open_run(tmp_path, all_attempts=True)
    assert frame.attrs["problems"] == []
    assert len(frame) >= parts
    assert store.read_about(tmp_path)["run_id"] == "r1"
    writer(tmp_path).close("finished")
    assert {path.suffix for path in tmp_path.iterdir()} == {".parquet", ".json"}


def test_a_file_that_may_not_grow_leaves_earlier_rows_and_nothing_half_written(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout == f"{27}\n"  # EFBIG
    assert store.read(tmp_path)["case_id"].tolist() == ["c10"]
    assert not list(tmp_path.glob("_*.tmp"))


def test_a_writer_whose_file_is_removed_before_it_is_locked_opens_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command tidies the folder between the two."""
    real, removed = fcntl.flock, list[bool]()

    def flock(file: Any, how: int) -> None:
        if not removed and how == fcntl.LOCK_EX:
            removed.append(True)
            run_files.remove_abandoned(tmp_path)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_files.written(tmp_path / "x.json") as file:
        file.write(b"{}")
    assert removed
    assert (tmp_path / "x.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("kind", ["a pipe", "a link"])
def test_a_log_is_written_into_no_pipe_and_through_no_link(kind: str, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("")
    log = tmp_path / run_files.LOG
    os.mkfifo(log) if kind == "a pipe" else log.symlink_to(theirs)
    with runlog.log_to(tmp_path, 10):
        runlog._log.error("said")
    assert theirs.read_text() == ""
