"""Folders that a stranger made: every command that reads runs ends, in bounded memory, with a clear error or names what it left
out. Oracle: the exit codes of the house, of which 7 (a fault of its own) is none; the kernel's count of resident memory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness import store
from harness.__main__ import main
from harness.store.errors import UsageError
from harness.store.measurement import Measurement
from harness.store.reading import LIMIT, ReadLimits
from harness.store.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMANDS = [
    "report runs/w/bad -o out.html", "report runs/w/bad runs/w/good -o out.html", "runs results_dir=runs",
    "resume=bad results_dir=runs dry_run=true", "resume=bad results_dir=runs trust=true dry_run=true",
    "sweep=cast device=cpu resume=bad results_dir=runs dry_run=true", "diff runs/w/good runs/w/bad",
    "gate --baseline runs/w/good --candidate runs/w/bad --machine-free", "gate --baseline runs/w/bad --candidate runs/w/good",
    "fleet runs/w/bad runs/w/good", "export runs/w/bad -o out.csv", "export runs/w/bad -o out.parquet",
    "verdict base=runs/w/bad/* candidate=runs/w/good/*", "advise model=nano gpu=h100_sxm runs=runs/w/bad",
]  # fmt: skip
HANG_S = 60  # a bound for what would otherwise never end; nothing is timed
MOST_MIB = 700  # that a command may add: half of what is refused would take


def row(arm: str = "bf16_eager", **changes: Any) -> dict[str, Any]:
    """A sound row as it is stored, with some columns in the stranger's way."""
    made = Measurement("gemm", "c1", arm, '{"M":64}', "time_ms", "ok", samples=(1.0, 2.0), rounds=(0, 1))
    constant = {"run_id": "bad", "sweep": "w", "attempt": 1, "env_id": "e", "env": "{}", "created_at": "2026"}
    return {**made.as_row(), **constant, **changes}


def part(folder: Path, *rows: dict[str, Any], name: str = "part-bad.parquet", **options: Any) -> Path:
    table = pa.Table.from_pylist(list(rows), schema=SCHEMA)
    pq.write_table(table, folder / name, **options)
    return folder / name


def instead(make: Callable[[Path], object], *names: str) -> Callable[[Path], None]:
    """A folder in which something else has the name of each of these files."""

    def made(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)
            make(folder / name)

    return made


def listen(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def huge_samples(folder: Path) -> None:
    """200 million samples in some kilobytes: zeros, run-length encoded."""
    samples = pa.ListArray.from_arrays(pa.array([0, 10**6], pa.int32()), pa.array(np.zeros(10**6)))
    at = SCHEMA.get_field_index("samples")
    table = pa.Table.from_pylist([row(rounds=[])], schema=SCHEMA).set_column(
        at, SCHEMA.field("samples"), samples
    )
    with pq.ParquetWriter(folder / "part-bad.parquet", table.schema, compression="zstd") as file:
        for _ in range(200):
            file.write_table(table)


def long_texts(folder: Path) -> None:
    """One text of a mebibyte in each of 2,300 rows, as a dictionary: 9 kB, decoded 2.3 GiB."""
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 2300, pa.int32()), pa.array(["x" * 2**20]))
    table = pa.Table.from_pylist([row()] * 2300, schema=SCHEMA)
    table = table.set_column(SCHEMA.get_field_index("reason"), "reason", column)
    pq.write_table(table, folder / "part-bad.parquet", compression="zstd")


def differences(folder: Path) -> None:
    """Texts each of which is stored as what it adds to the one before: no metadata say how long they are."""
    encoding = {"reason": "DELTA_BYTE_ARRAY"}
    rows = [row(reason="x" * 2**20)] * 8
    part(folder, *rows, use_dictionary=False, column_encoding=encoding, compression="zstd")


def about(folder: Path, **changes: Any) -> None:
    known = json.loads((folder / "_run.json").read_text())
    (folder / "_run.json").write_text(json.dumps({**known, **changes}))


TEXT_FILES = ("_run.json", "_run.log", "_progress.json")
FOLDERS: dict[str, Callable[[Path], object]] = {
    "pipes": instead(os.mkfifo, *TEXT_FILES, "part-bad.parquet", "_part-1.tmp", "_writer.lock"),
    "sockets": instead(listen, *TEXT_FILES, "part-bad.parquet"),
    "folders": instead(Path.mkdir, *TEXT_FILES, "part-bad.parquet", "_part-1.tmp"),
    "devices": instead(lambda p: p.symlink_to("/dev/zero"), *TEXT_FILES, "part-bad.parquet"),
    "links to themselves": instead(lambda p: p.symlink_to(p.name), *TEXT_FILES, "part-bad.parquet"),
    "links to nowhere": instead(lambda p: p.symlink_to("nowhere"), *TEXT_FILES, "part-bad.parquet"),
    "a folder in itself": lambda folder: (folder / "shard-0-of-1").symlink_to(folder),
    "200 million samples": huge_samples,
    "2,300 texts of a mebibyte": long_texts,
    "texts that are differences": differences,
    "an arm of 200,000 characters": lambda folder: part(folder, row("x" * 200_000), row("y")),
    "samples that are texts": lambda folder: pq.write_table(
        pa.table({**{k: [v] for k, v in row().items()}, "samples": [["x" * 2**20] * 9]}), folder / "part-bad.parquet"
    ),
    "infinite flops": lambda folder: part(folder, row(flops='{"bf16":1e999}'), row("b", flops='{"bf16":NaN}')),
    "times at both ends of float64": lambda folder: part(
        folder, *(row(arm, samples=[time] * 2, value=time, baseline="bf16_eager", case_id="c2") for arm, time in (("bf16_eager", 5e-324), ("rowwise_eager", 1.7e308)))
    ),
    "extensions that are a number": lambda folder: part(folder, row(resolved='{"extensions":5}'), row("b", resolved='{"memory":[1]}')),
    "150 levels": lambda folder: part(folder, row(resolved='{"a":' + "[" * 150 + "]" * 150 + "}")),
    "half a character": lambda folder: part(folder, row(resolved='{"recipe":"\\ud800"}')),
    "a curve that goes back": lambda folder: part(folder, row(metric="loss", unit="nats", rounds=[1, 0])),
    "another unit": lambda folder: part(folder, row(unit="fortnights")),
    "another schema_version": lambda folder: part(folder, row(schema_version=3)),
    "columns twice": lambda folder: pq.write_table(
        pa.table([pa.array([4]), pa.array([4])], names=["schema_version", "schema_version"]), folder / "part-bad.parquet"
    ),
    "an environment in pieces": lambda folder: part(folder, row(env='{"gpu":5}'), row("b", env="{")),
    "entries of _run.json of other types": lambda folder: about(folder, gate=5, config=[1], state={"a": 1}, started_at=7),
    "a gate that counts words": lambda folder: about(folder, made_by="gate", gate={"stage": "x", "pairs": [1]}),
    "a deep _run.json": lambda folder: (folder / "_run.json").write_text("[" * 10**6),
    "infinity in _run.json": lambda folder: (folder / "_run.json").write_text('{"run_id": 1e999}'),
    "infinity in _progress.json": lambda folder: (folder / "_progress.json").write_text(
        '{"state":"running","host":"h","share":0.5,"started":1e999,"written":1,"total":1e999,"statuses":{}}'
    ),
}  # fmt: skip


@contextmanager
def ends(what: str) -> Iterator[None]:
    """Fails where the block is still under way when nothing can be said for it any more."""

    def hangs(*_: object) -> None:
        raise AssertionError(f"{what} hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def light(what: str) -> Iterator[None]:
    """Fails where the block makes this process larger than `MOST_MIB` more (proc(5): clear_refs, VmHWM)."""

    def resident(name: str) -> int:
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10  # type: ignore[index]

    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    yield
    assert resident("VmHWM") - before <= MOST_MIB, what


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run as another harness would have left it, and a good one beside it."""
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad"):
        run = store.RunWriter(
            Path("runs/w") / name, run_id=name, sweep="w", env_id="e", env={"device": "cpu"}, about={}
        )
        rows = [
            Measurement("gemm", "c1", arm, '{"M":64}', "time_ms", "ok", samples=(1.0, 2.0), rounds=(0, 1))
            for arm in ("bf16_eager", "rowwise_eager")
        ]
        run.append(rows)
        run.close("finished")
    return Path("runs/w/bad")


@pytest.mark.parametrize("kind", FOLDERS)
def test_every_command_ends_and_none_with_a_fault_of_its_own(
    kind: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    FOLDERS[kind](folder)
    for words in COMMANDS:
        with ends(words), light(words):
            code = main(words.split())
        said = capfd.readouterr()
        assert code in range(7), (words, said.err[-2000:])
        assert code == 0 or said.err or said.out, words
        if code == 2:
            assert "Traceback" not in said.err


LEFT_OUT = [
    kind
    for kind, make in FOLDERS.items()
    if "_run.json" not in kind and "_progress" not in kind and "gate" not in kind and "itself" not in kind
]


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_what_is_left_out_is_named_and_the_rest_is_read(kind: str, folder: Path) -> None:
    FOLDERS[kind](folder)
    with ends(kind), light(kind):
        frame = store.open_run("runs")
    assert len(frame[frame["run_id"] == "good"]) == 2
    assert [problem for problem in frame.attrs["problems"] if "part-bad.parquet" in problem]


def test_a_bad_row_costs_itself(folder: Path) -> None:
    bad = part(folder, row("a"), row("b", flops='{"bf16":"many"}'), row("c"), row("d", status="fine"))
    frame = store.open_run(bad)
    assert frame["arm"].tolist() == ["a", "c"]
    (problem,) = frame.attrs["problems"]
    assert problem.startswith(f"{bad}: left out 2 of 4 rows")
    assert "flops: bf16 is 'many'; expected number" in problem


def test_a_larger_run_is_read_where_its_user_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part(folder, *(row(f"arm {i}") for i in range(2000)))
    monkeypatch.setenv(LIMIT, "0.0001")
    (problem,) = store.open_run(folder / "part-bad.parquet").attrs["problems"]
    named = re.search(rf"{LIMIT}=(\d+)", problem)
    assert named is not None
    monkeypatch.setenv(LIMIT, named[1])
    assert len(store.open_run(folder / "part-bad.parquet")) == 2000
    assert len(store.read(folder / "part-bad.parquet", limit_gib=1)) == 2000
    for wrong in ("0", "-1", "nan", "much"):
        monkeypatch.setenv(LIMIT, wrong)
        with pytest.raises(UsageError, match=LIMIT):
            store.open_run(folder)


def test_many_files_share_what_one_command_may_take(folder: Path) -> None:
    for i in range(20):
        part(folder, *(row(f"arm {n}", run_id=f"r{i}") for n in range(2000)), name=f"copy-{i}.parquet")
    limits = ReadLimits(4 * 2**20)
    frame = store.open_run(folder, limits)
    left_out = frame.attrs["problems"]
    assert 0 < len(left_out) < 20
    assert all(LIMIT in problem for problem in left_out)
    assert frame["run_id"].nunique() == 20 - len(left_out) + 1  # the good rows of the folder
