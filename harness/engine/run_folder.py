"""The folder of a run: which one a command writes to, and whether it may."""

from __future__ import annotations

import hmac
import json
import re
import socket
import tempfile
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from harness import store
from harness.engine.settings import FREE, deciding
from harness.machine import raw_output, torchrun
from harness.machine.device_lock import holder
from harness.store import run_files, run_state
from harness.store.errors import UsageError
from harness.store.private import public, salt
from harness.store.run_files import LOCK

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.engine.settings import SweepConfig
    from harness.engine.shards import Shard


GLANCE_S = 0.25  # longer than another process looks at the lock
PATIENCE_S = 135.0  # until a server of files has forgotten a machine that died


@contextmanager
def held(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """The right to write into a folder, made where it is missing, until the block or this process ends.

    Args:
        folder: of a run or of one of its shards.
        patience_s: how long to wait for a holder that is no process of this machine.

    Raises:
        UsageError: another writer has it, or the folder cannot be written to.
    """
    path = folder / LOCK
    lock = FileLock(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(GLANCE_S)
        except Timeout:
            if holder(path) or not patience_s:
                raise
            raw_output.notify(f"waits up to {patience_s:g} s: {_refusal(path)}\n")
            lock.acquire(patience_s)
    except Timeout:
        raise _refusal(path) from None
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with results_dir=DIR"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):  # a full disk, or the folder itself is gone
            path.unlink(missing_ok=True)
        lock.release()


def refuse_live(folder: Path) -> None:
    """Refuses a folder that another writer has.

    Raises:
        UsageError: names its process.
    """
    path = folder / LOCK
    if path.exists():
        try:
            with FileLock(path).acquire(0):
                pass
        except Timeout:
            raise _refusal(path) from None
        except OSError:  # it cannot be written to, which is refused where that is tried
            return


def _refusal(path: Path) -> UsageError:
    by = holder(path)
    who = f"process {by} on {socket.gethostname()}" if by else "a process of another machine or container"
    return UsageError(
        f"run {path.parent.name} is being written by {who} ({path}); wait until it has ended, or give this run another run_id"
    )


ANEW = "start a new run (run_id=NAME in place of resume=, which a sweep may set itself)"
LAST = "last"  # as resume=: the newest run of the sweep, where there is none a new one
_OF_A_RUN = {"run_id", "sweep", "state", "started_at"}


def opening(run_id: str) -> str:
    """What a command says first of a run that it named itself, so that a run ended by a kill can be continued."""
    return f"run {run_id}: resume={run_id} continues it if it is ended early"


def chosen(config: SweepConfig, env: Mapping[str, Any], shard: Shard | None) -> tuple[str, Path, Path | None]:
    """Run id, the folder to write to (that of a shard lies within the run's), and the folder that a resumed run has.

    Args:
        config: of the command line.
        env: facts of the machine, for a new run id.
        shard: whose folder it is; None: that of a whole run.

    Raises:
        UsageError: there is no such run, it is another experiment, or the folder holds something else.
    """
    whole = of_run(config, env)
    for about in map(store.read_about, (whole, *run_files.shards(whole))):
        if about.get("sweep", config.name) != config.name:
            raise UsageError(f"run {whole.name} is of sweep {about['sweep']!r}, not {config.name!r}")
        refuse_other_settings(whole.name, about, deciding(config.plain()))
    folder = whole if shard is None else whole / shard.folder
    refuse_stranger(folder)
    # A command with run_id= that is given again, as schedulers do after a node failed, continues with its own rows.
    again = folder if config.run_id and (folder / run_files.ABOUT).exists() else None
    goes_on = config.resume and (config.resume != LAST or whole.exists())
    return whole.name, folder, whole if goes_on else again


def newest_first(folder: Path, pattern: str = "*/*", most: int = 1) -> tuple[list[Path], int]:
    """The newest runs among some folders of a results folder, by when they began; parts and shards belong to theirs.

    A file is no older than the run that it tells of, so that no more of them are read than may be among the newest.

    Returns:
        The runs, at most `most`, and how many folders are left that hold a run or look like one.
    """
    written: dict[Path, float] = {}
    for file in run_files.below(folder, run_files.ABOUT, pattern):
        run = store.run_folder(file)
        written[run] = max(written.get(run, 0.0), file.stat().st_mtime)
    began: dict[Path, str] = {}
    left = sorted((run for run in written if not written.keys() & set(run.parents)), key=written.__getitem__)
    while left and (len(began) < most or sorted(began.values())[-most] <= _at(written[left[-1]])):
        run = left.pop()
        if (about := run_state.about(run)).keys() >= _OF_A_RUN:
            began[run] = str(about["started_at"])
    newest = sorted(began, key=began.__getitem__, reverse=True)
    return newest[:most], len(newest[most:]) + len(left)


def _at(seconds: float) -> str:
    """Seconds since 1970 as `started_at` has them, a second later: file systems round."""
    return datetime.fromtimestamp(seconds + 1, UTC).isoformat()


def of_run(config: SweepConfig, env: Mapping[str, Any]) -> Path:
    """The folder of the run of a command line, new or to be continued.

    Raises:
        UsageError: `resume=` names no run, or contradicts `run_id=`.
    """
    if config.resume and config.run_id:
        raise UsageError("resume= names the run already: leave run_id= out")
    if config.resume == LAST:
        if runs := newest_first(Path(config.results_dir) / config.name, "*")[0]:
            return runs[0]
    elif config.resume:
        folder = store.find_run(config.resume, config.results_dir)
        # One whose shards were started apart has a _run.json in each of them alone.
        if not any(map(is_run, [folder, *run_files.shards(folder)])):
            raise UsageError(
                f"resume={config.resume}: {folder} is no run: it holds no _run.json that names run, sweep and state; "
                "expected a run id, or a folder results/<sweep>/<run_id>"
            )
        return folder
    model = config.model or config.axes.get("model")
    run_id = checked_run_id(config.run_id or store.new_run_id(env, config.name, model))
    return Path(config.results_dir) / config.name / run_id


def mark(results_dir: Path, run_id: str, config: dict[str, Any]) -> str:
    """What only this results folder can say of a run and its settings as they are stored."""
    content = json.dumps([run_id, config], sort_keys=True, default=str)
    return hmac.new(salt(results_dir), content.encode(), "sha256").hexdigest()


def refuse_stranger(folder: Path) -> None:
    """Refuses a folder whose _run.json is that of no run: it would be overwritten.

    Raises:
        UsageError: names the file.
    """
    about = folder / run_files.ABOUT
    if about.exists() and not is_run(folder):
        raise UsageError(
            f"{about} is damaged, or another program's: it names no run, sweep and state; move it away, or "
            "choose another run_id or results_dir"
        )


def is_run(folder: Path) -> bool:
    """Whether a folder holds the _run.json of a run."""
    about = store.read_about(folder)
    return all(isinstance(about.get(key), str) for key in ("run_id", "sweep", "state"))


@contextmanager
def owned(folder: Path, shard: Shard | None) -> Iterator[None]:
    """The folder as this command's alone: no other one writes the same cases meanwhile.

    That of a shard or of ranks is waited for where another machine's writer may have died: a scheduler starts it again at once.

    Raises:
        UsageError: another command writes to this folder; or this is one shard of a run that is measured as a whole, or
            the other way round.
    """
    for other in [folder.parent] if shard is not None else run_files.shards(folder):
        refuse_live(other)
    is_scheduled = shard is not None or torchrun.started() > 1
    with held(folder, patience_s=PATIENCE_S if is_scheduled else 0.0):
        yield


def checked_run_id(name: str) -> str:
    """A run id that can name a folder; refused otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UsageError(f"run_id={name}: expected letters, digits, '.', '_' and '-': it names a folder")
    return name


def refuse_other_settings(run_id: str, about: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A run holds one experiment, and its command must stay the one that made it.

    Args:
        run_id: of the run.
        about: what its `_run.json` says.
        now: what `deciding` says of the command that would continue it.

    Raises:
        UsageError: names each key that differs, with both values.
    """
    if not (stored := about.get("config")):
        return
    then, now = public(deciding(stored)), public(now)
    differs = [f"{k}={now.get(k)} (it has {then.get(k)})" for k in now | then if now.get(k) != then.get(k)]
    if differs:
        raise UsageError(
            f"{', '.join(differs)} would change what {run_id} measures: repeat its command with resume={run_id} added: "
            f"{about.get('command', '')}; or, where the sweep itself has changed, {ANEW}; free are {', '.join(sorted(FREE))}"
        )


def refuse_unwritable(folder: Path, key: str) -> None:
    """Makes a folder of the command line where it is missing.

    Raises:
        UsageError: it cannot be written to; names the key that chooses another.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder} ({error.strerror}); choose another folder with {key}=DIR"
        ) from error
