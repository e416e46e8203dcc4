"""Reading one million rows: time and memory of a part of the columns, and of all.

    pytest -m benchmark_bar tests/benchmarks/test_store.py -s

The rows are those of published runs of the CPU, under other case ids. Each read is a process of its own, whose largest
resident memory the kernel tells.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as compute
import pyarrow.parquet as pq
import pytest

from harness.store.reading import SCHEMA, read_part

ROWS, FILES = 1_000_000, 64
MOST_S, MOST_MB = 2.0, 500  # of a part of the columns
PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "cpu" / "2026-11-21"

READ = """
import json, re, sys, time
from pathlib import Path
from harness import store
store.read  # imports pandas and pyarrow
began = time.perf_counter()
frame = store.read(sys.argv[1], **json.loads(sys.argv[2]))
seconds = time.perf_counter() - began
# Not ru_maxrss: that is handed down from the process that started this one
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(json.dumps([len(frame), seconds, peak / 1024]))
"""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("million")
    rows = pa.concat_tables([read_part(path).rows for path in sorted(PUBLISHED.rglob("*.parquet"))])
    each = rows.take(pa.array([index % len(rows) for index in range(ROWS // FILES)])).cast(SCHEMA)
    copies = pa.array([str(index // len(rows)) for index in range(ROWS // FILES)])
    for at in range(FILES):
        ids = compute.binary_join_element_wise(each["case_id"], copies, str(at), "-")
        pq.write_table(
            each.set_column(SCHEMA.get_field_index("case_id"), "case_id", ids),
            folder / f"rows-{at:020d}-{at:06x}.parquet",
            compression="zstd",
        )
    return folder


@pytest.mark.benchmark_bar
@pytest.mark.parametrize(
    "asked",
    [
        {"columns": ["suite", "case_id", "arm", "metric", "value", "status"]},
        {"columns": ["arm", "value"], "where": {"suite": "cast", "metric": "time_ms"}, "expand": True},
        {},
    ],
    ids=["columns", "selection", "all"],
)
def test_a_million_rows(million: Path, asked: dict[str, object]) -> None:
    command = [sys.executable, "-c", READ, str(million), json.dumps(asked)]
    runs = [json.loads(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(3)]
    count, seconds, megabytes = min(runs, key=lambda run: run[1])
    print(f"\n{asked or 'all'}: {count} rows in {seconds:.2f} s, at most {megabytes:.0f} MB resident")
    assert count > 0
    if asked:
        assert seconds <= MOST_S
        assert megabytes <= MOST_MB
    else:
        assert count == ROWS
