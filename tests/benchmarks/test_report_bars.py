"""Speed and size bars of the report; run by `make bench`, never by `make test`.

Bars: the report of 500 cases in under 5 s and under 2 MB; of 200,000 rows in under 10 s. A fresh process each, its start
and its imports included, and without torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from report_cases import large_run

from harness import store

pytestmark = pytest.mark.benchmark_bar

RENDER = """
import sys
from pathlib import Path
import harness.report
harness.report.write_report([Path(sys.argv[1])], Path(sys.argv[2]))
assert not {"torch", "triton", "fp8core"} & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("cases", "rows", "seconds", "most_bytes"), [(500, 0, 5.0, 2_000_000), (8000, 200_000, 10.0, None)]
)
def test_report_of_a_large_run(
    benchmark: Any, tmp_path: Path, cases: int, rows: int, seconds: float, most_bytes: int | None
) -> None:
    run = large_run(tmp_path, cases)
    stored = store.read(run)
    assert stored["case_id"].nunique() == cases
    assert len(stored) >= rows
    target = tmp_path / "report.html"

    def render() -> None:
        subprocess.run([sys.executable, "-c", RENDER, str(run), str(target)], check=True)

    benchmark.pedantic(render, rounds=1, iterations=1)
    size = target.stat().st_size
    print(
        f"\n{cases} cases, {len(stored)} rows: {benchmark.stats.stats.total:.1f} s (bar {seconds:g} s), {size / 1e6:.2f} MB"
    )
    assert benchmark.stats.stats.total < seconds
    assert most_bytes is None or size < most_bytes
