"""Store: append-only Parquet, one folder a run.

    results/<sweep>/<run_id>/part-*.parquet    one small closed file a case, while the run lasts
    results/<sweep>/<run_id>/rows-*.parquet    the same rows, some hundreds of parts in one file
    results/<sweep>/<run_id>/_run.json         command, configuration, state of the run
    results/<sweep>/<run_id>/shard-0-of-4/     the same, of one shard of a sweep that was spread (harness.engine.shards)

A part is written under a temporary name, flushed to disk and renamed, so a reader never sees half a file and a
killed run loses at most the case under way. The compacted file names the parts that it replaces, so a kill
between the rename and the removal of the parts does not count a row twice. Merging the results of two
machines is copying folders: names of files are unique, so one that turns up twice is a copy and is read once.

A case under way is snapshot between its rounds (`RunWriter.checkpoint`): a part whose times have the status `partial`,
replaced by the next snapshot and at last by the rows of the whole case. It stays where the run is cut off.

What was measured again counts as its last attempt has it. An attempt that came to nothing for a reason that may pass
(the column `retryable`: a spent budget, a killed process) takes no measured row's place. Of attempts that were all cut off, the one
with the most rounds counts; rounds of two attempts are never mixed.
"""

from __future__ import annotations

import glob
import json
import re
import secrets
import time
import warnings
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.store import run_files
from harness.store.errors import UsageError
from harness.store.measurement import Measurement, to_json
from harness.store.private import of_run, public
from harness.store.reading import REPLACES, next_attempt, read_parts
from harness.store.reading import open_run as open_run
from harness.store.reading import read as read  # its public place
from harness.store.run_files import read_about as read_about
from harness.store.schema import SCHEMA as SCHEMA
from harness.store.schema import fault_of_text, rows_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


GATHERED = 500  # parts that are gathered into one file at a time: what that takes does not grow with the run


def new_run_id(env: Mapping[str, Any], *of: object) -> str:
    """`<UTC time>-<of>-<device>-<commit>-<random>`: sorts by time, says what ran where, as folders and pages are named by it.

    Args:
        env: facts of the machine; absent ones leave their word out.
        of: the sweep, and its model where it is one; one that is given by its code is left out.
    """
    device = str(env.get("gpu") or env.get("device") or "").removeprefix("NVIDIA ")
    # Of a path its last name, unless that is a user's home: the id of a run is published
    named = [
        public(word).removesuffix("/config.json").rpartition("/")[2]
        for word in (*of, device)
        if _is_name(word)
    ]
    words = [re.sub(r"[^a-z0-9]+", "_", word.lower())[:24].strip("_") for word in named]
    stamp, commit = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ"), (env.get("git_commit") or "nogit")[:7]
    return "-".join([stamp, *filter(None, words), commit, secrets.token_hex(4)])


def _is_name(word: object) -> bool:
    return isinstance(word, str) and not word.startswith("{")


class RunWriter:
    """Appends the rows of one run; every `append` is durable when it returns.

    Args:
        folder: the folder of the run; made if missing.
        run_id: identifies the run; shards of one sweep share it.
        sweep: name of the sweep.
        env_id: short hash of what makes two environments comparable.
        env: the environment fingerprint, stored with each row.
        about: command and configuration for `_run.json`.

    Raises:
        UsageError: the folder can't be written to.
    """

    def __init__(
        self,
        folder: Path,
        *,
        run_id: str,
        sweep: str,
        env_id: str,
        env: Mapping[str, object],
        about: Mapping[str, object],
        made_at: str = "",
    ) -> None:
        self.folder, self._made_at = folder, made_at
        self._constant = {"run_id": run_id, "sweep": sweep}
        self._about = {**about, "run_id": run_id, "sweep": sweep, "state": "running"}
        self._about["started_at"] = made_at or _now()
        # As they were written: to read them back takes as long as to write them
        self._parts: dict[str, pa.Table] = {}
        self._replaced: list[str] = []  # parts that are to be removed
        self._snapshots: dict[str, str] = {}  # case id -> the part with its last snapshot
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._constant |= self._env(env_id, env)
            held, *_ = read_parts([run_folder(folder / run_files.ABOUT)], ("attempt",))
            self._attempt = next_attempt(
                max((n for part in held for n in part.rows["attempt"].to_pylist()), default=0)
            )
            previous = read_about(folder)
            if previous:
                self._about["started_at"] = previous.get("started_at", self._about["started_at"])
            self._write_about()
        except OSError as error:
            raise UsageError(
                f"cannot write to {folder} ({error.strerror}); choose another folder with results_dir=DIR"
            ) from error

    def append(
        self, measurements: Iterable[Measurement], env: tuple[str, Mapping[str, object]] | None = None
    ) -> list[Measurement]:
        """Writes one closed part holding the given rows; OSError where the disk refuses (nothing is left over).

        Args:
            measurements: the rows.
            env: env_id and environment of these rows where they are not the writer's own (another GPU).

        Returns:
            The rows as `read` will return them: one that cannot be stored has failed for that reason.
        """
        return self._append(measurements, env)[0]

    def checkpoint(
        self, measurements: Iterable[Measurement], env: tuple[str, Mapping[str, object]] | None = None
    ) -> None:
        """Append the rows so far of one case; its next snapshot or its final rows take their place."""
        rows, name = self._append(measurements, env)
        self._snapshots |= dict.fromkeys((m.case_id for m in rows), name)

    def _append(
        self, measurements: Iterable[Measurement], env: tuple[str, Mapping[str, object]] | None
    ) -> tuple[list[Measurement], str]:
        """Writes a part in the place of the snapshots of its cases; the rows and its name, "" where there are none."""
        own = {**self._constant, "attempt": self._attempt, "created_at": self._made_at or _now()}
        if env is not None:
            own |= self._env(*env)
        given = list(measurements)
        if not given:
            return [], ""
        rows, table = rows_of(given, own)
        cases = {m.case_id for m in rows} & self._snapshots.keys()
        outdated = sorted({self._snapshots[case] for case in cases})
        if outdated:
            table = table.replace_schema_metadata({REPLACES: json.dumps(outdated).encode()})
        name = f"part-{time.time_ns():020d}-{secrets.token_hex(3)}.parquet"
        self._parts[name] = _write_durably(table, self.folder / name)
        for case in cases:
            del self._snapshots[case]
        for old in outdated:
            del self._parts[old]
            with suppress(OSError):  # one that stays is known to be replaced
                (self.folder / old).unlink(missing_ok=True)
            if (self.folder / old).exists():
                self._replaced.append(old)
        if len(self._parts) >= GATHERED:
            self._compact()
        return rows, name

    def _env(self, env_id: str, env: Mapping[str, object]) -> dict[str, str]:
        text = to_json(of_run(env, run_folder(self.folder / run_files.ABOUT)))
        if fault := fault_of_text("env", text):
            raise UsageError(f"the environment cannot be stored: {fault}")
        return {"env_id": env_id, "env": text}

    def record(self, **about: object) -> None:
        """Adds to what `_run.json` says; OSError where the disk refuses."""
        self._about |= about
        self._write_about()

    def close(self, state: str) -> None:
        """Gathers the parts that this writer has left into one file, and records how the run ended.

        Args:
            state: "finished", "interrupted", or "failed" (with what is stored so far intact).
        """
        self._about.update(state=state, ended_at=_now())
        try:
            self._write_about()
            self._snapshots.clear()  # of cases that were cut off: they are all that there will be
            self._compact()
            run_files.remove_abandoned(self.folder)
        except OSError as error:
            # The parts stay as they are and read the same; only the tidying is lost.
            warnings.warn(f"{self.folder}: closed without compacting ({error})", RuntimeWarning, stacklevel=2)

    def _compact(self) -> None:
        under_way = set(self._snapshots.values())
        closed = [name for name in self._parts if name not in under_way]
        if len(closed) >= 2:
            table = pa.concat_tables([self._parts[name] for name in closed])
            replaced = json.dumps([*closed, *self._replaced]).encode()
            table = table.replace_schema_metadata({REPLACES: replaced})
            # Named after its first part: where this is cut short and done again, the second file replaces the first.
            _write_durably(table, self.folder / closed[0].replace("part-", "rows-"))
            self._replaced += closed
            self._parts = {name: part for name, part in self._parts.items() if name in under_way}
        for name in self._replaced:
            with suppress(OSError):  # a part that stays is known to be replaced
                (self.folder / name).unlink(missing_ok=True)
        self._replaced = []

    def _write_about(self) -> None:
        with run_files.written(self.folder / run_files.ABOUT) as file:
            file.write(json.dumps(public(self._about), indent=1, default=str).encode() + b"\n")


def find_run(name: str | Path, results_dir: str | Path = "results") -> Path:
    """The folder of a run given by its path or by its run id.

    Raises:
        UsageError: there is no such run, and the newest few are named; or several have this id.
    """
    if Path(name).exists():
        return Path(name)
    id_ = glob.escape(str(name))
    found = sorted(Path(results_dir).glob(f"*/{id_}")) or sorted(Path(results_dir).glob(f"**/{id_}"))
    if len(found) > 1:
        raise UsageError(
            f"{name}: {len(found)} runs have this id: {', '.join(map(str, found))}; give the folder of one in its place"
        )
    if found:
        return found[0]
    recent = sorted(
        (p.parent.name for p in run_files.below(Path(results_dir), run_files.ABOUT, "*/*")), reverse=True
    )[:3]
    raise UsageError(f"no run {str(name)!r} in {results_dir}; newest: {', '.join(recent) or 'none'}")


def run_folder(file: Path) -> Path:
    """The folder of the run that a file belongs to: the one it lies in, or of a shard the one above.

    >>> run_folder(Path("results/gemm/r1/shard-0-of-2/rows-1.parquet")).name
    'r1'
    """
    return file.parent.parent if run_files.SHARD.fullmatch(file.parent.name) else file.parent


def _write_durably(table: pa.Table, target: Path) -> pa.Table:
    plain = table.cast(SCHEMA.with_metadata(table.schema.metadata))
    # Of strings that repeat zstd makes less than dictionaries do, in less time; nobody asks for statistics. To compress the
    # few rows of a part that will be gathered takes longer than all else.
    compression = "snappy" if target.name.startswith("part-") else "zstd"
    with run_files.written(target, durable=True) as file:
        pq.write_table(plain, file, compression=compression, use_dictionary=False, write_statistics=False)
    return plain


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
