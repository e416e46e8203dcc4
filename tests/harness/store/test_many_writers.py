"""Sixty-four shards write one run at once: no row is lost, doubled or mixed up. Oracle: what each process was told to write."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path

import pytest

from harness import store
from harness.report import write_report
from harness.store.measurement import Measurement

SHARDS, PARTS, ROWS = 64, 20, 50  # of each shard: closed parts, rows in each


def write(folder: Path, shard: int, begin: multiprocessing.Barrier) -> None:  # type: ignore[valid-type]
    """One shard: its rows in parts, once all others are ready."""
    begin.wait(timeout=120)  # type: ignore[attr-defined]
    own = folder / f"shard-{shard}-of-{SHARDS}"
    run = store.RunWriter(
        own, run_id=folder.name, sweep="many", env_id="e1", env={"cpu": "one"}, about={"sweep": "many"}
    )
    for part in range(PARTS):
        run.append(
            Measurement(
                "gemm", f"{shard}-{part}-{row // 2}", ("bf16_eager", "rowwise_eager")[row % 2], f'{{"M":{row}}}', "time_ms",
                "ok", samples=(float(shard), float(part), float(row)), baseline="bf16_eager" if row % 2 else "",
            )
            for row in range(ROWS)
        )  # fmt: skip
    run.close("finished")


@pytest.mark.slow
def test_shards_that_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.store.parquet"])
    folder, begin = tmp_path / "results" / "many" / "r1", context.Barrier(SHARDS)
    writers = [context.Process(target=write, args=(folder, shard, begin)) for shard in range(SHARDS)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(timeout=300)
    assert [one.exitcode for one in writers] == [0] * SHARDS
    frame = store.read(folder)
    assert len(frame) == SHARDS * PARTS * ROWS
    expected = {
        (f"{shard}-{part}-{row // 2}", ("bf16_eager", "rowwise_eager")[row % 2])
        for shard in range(SHARDS)
        for part in range(PARTS)
        for row in range(ROWS)
    }
    assert set(zip(frame["case_id"], frame["arm"], strict=True)) == expected
    of = frame["samples"].map(lambda drawn: f"{drawn[0]:.0f}-{drawn[1]:.0f}-{drawn[2] // 2:.0f}")
    assert (of == frame["case_id"]).all()
    assert not list(folder.rglob("*.tmp"))
    assert len(list(folder.rglob("*.parquet"))) == SHARDS  # each compacted its own
    # Merged with a copy of itself from another machine, every row still counts once
    shutil.copytree(folder, tmp_path / "other" / "many" / "r1")
    assert len(store.read([folder, tmp_path / "other"])) == len(frame)
    one_file = tmp_path / "one.parquet"
    store.gather(folder, one_file)
    assert len(store.read([one_file, folder])) == len(frame)
    page = write_report([folder], tmp_path / "page.html").html
    assert page.stat().st_size > 0
