"""Which folder a command may write to. Oracle: the bytes of what lay there before, and a second process that writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_holder import hold
from toy import ToySuite, offered

from harness import store
from harness.__main__ import main
from harness.engine import run_folder
from harness.store.errors import UsageError

WORDS = ["sweep=toy", "device=cpu"]


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToySuite:
    return offered([1, 2], tmp_path, monkeypatch)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command is refused with; no file was written or changed."""
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main([*WORDS, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
    return line


@pytest.mark.parametrize(
    "content",
    [
        None,
        "[]",
        '{"name": "another program"}',
        '{"run_id": 1, "sweep": "toy", "state": "finished"}',
    ],
)
def test_only_a_run_is_resumed(content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("project").mkdir()
    if content is not None:
        Path("project/_run.json").write_text(content)
    assert "resume=project: project is no run: " in refused(capsys, "resume=project")
    assert "is no run: " in refused(capsys, "resume=project", "dry_run=true")


def test_resume_last_continues_the_newest_run_or_starts_one() -> None:
    """Oracle: the folders, and the rows of the run that was begun last, not of the one whose name sorts last."""
    runs = Path("results/toy")
    assert main([*WORDS, "resume=last", "run_id=zz", "report=false"]) == 2
    assert main([*WORDS, "run_id=zz", "report=false"]) == 0
    assert main([*WORDS, "run_id=aa", "report=false", "budget_s=0"]) == 0
    assert main([*WORDS, "resume=last", "report=false"]) == 0
    assert {path.name for path in runs.iterdir()} == {"aa", "zz"}
    assert "budget" not in set(store.read(runs / "aa")["cause"])
    assert main([*WORDS, "resume=last", "report=false", "results_dir=elsewhere"]) == 0
    assert len(list(Path("elsewhere/toy").iterdir())) == 1


@pytest.mark.parametrize("words", [["run_id=r1"], ["run_id=r1", "shard=0/1"]])
def test_a_strangers_run_json_is_not_overwritten(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path("results/toy/r1") / ("shard-0-of-1" if len(words) > 1 else "")
    folder.mkdir(parents=True)
    (folder / "_run.json").write_text('{"name": "another program"}')
    assert "_run.json is damaged, or another program's" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        ("results/toy/r1", ["run_id=r1"]),
        ("results/toy/r1", ["run_id=r1", "shard=0/2"]),
        ("results/toy/r1/shard-1-of-2", ["run_id=r1"]),
    ],
)
def test_a_second_live_writer_is_refused_and_a_dead_one_forgotten(
    folder: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with hold(folder) as writer:
        try:
            line = refused(capsys, *words)
            assert f"is being written by process {writer.pid} on " in line
            assert main([*WORDS, "run_id=r2"]) == 0
        finally:
            writer.kill()
    assert Path(folder, run_folder.LOCK).exists()
    assert main([*WORDS, *words]) == 0
    own = Path("results/toy/r1", "shard-0-of-2" if words[1:] else "", run_folder.LOCK)
    assert not own.exists()  # those of other folders stay as they are


def test_a_lock_whose_holder_is_gone_or_unknown_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of an earlier version, or of a killed writer, holds no lock; a holder that is no process here is waited for."""
    (tmp_path / run_folder.LOCK).write_text('{"pid": 1, "host": "another", "hostname": "node7"}')
    with hold(str(tmp_path)) as writer:
        with (
            pytest.raises(UsageError, match=f"process {writer.pid} on "),
            run_folder.held(tmp_path, patience_s=60),
        ):
            pass
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, "holder", lambda path: None)
            told = pytest.raises(UsageError, match="a process of another machine or container")
            with told, run_folder.held(tmp_path, patience_s=0.1):
                pass
        assert capsys.readouterr().err.startswith("waits up to 0.1 s: run ")
        writer.kill()
    with run_folder.held(tmp_path):
        assert (tmp_path / run_folder.LOCK).exists()
    assert not (tmp_path / run_folder.LOCK).exists(), "no trace of a machine is left in a finished run"


def test_a_command_of_ranks_waits_for_the_lock_of_a_node_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job starts within the time in which the lock of its first start may still look alive."""
    seen: list[float] = []

    @contextlib.contextmanager
    def held(folder: Path, patience_s: float) -> Iterator[None]:
        seen.append(patience_s)
        yield

    monkeypatch.setattr(run_folder, "held", held)
    for world in ("", "2"):
        for name, value in {"RANK": "0", "WORLD_SIZE": world, "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        with run_folder.owned(tmp_path, None):
            pass
    assert seen == [0.0, run_folder.PATIENCE_S]
