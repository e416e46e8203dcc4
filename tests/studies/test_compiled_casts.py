"""inductor: what is counted of Inductor's schedules, and one row of the page made anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inductor.table import HEADER, markdown

PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "compiled-casts.md"


@pytest.mark.slow
def test_the_page_holds_every_row_and_one_is_made_anew() -> None:
    """Oracle: the compiler: `python reports/studies/compiled_casts.py` on one case prints the row that the page holds."""
    page = PAGE.read_text()
    rows = [line for line in page.splitlines() if " | fp8core | " in line or " | torchao | " in line]
    assert len(rows) == 3 * (5 + 3)
    if torch.cuda.is_available():
        pytest.skip("code is generated for a GPU that is absent, and this machine has one")
    if f"torch {torch.__version__}," not in page:
        pytest.skip(f"the page was made with another torch than {torch.__version__}")
    script = str(Path(__file__).with_name("compiled_casts.py"))
    words = [script, "--case", "Linear", "--recipe", "tensorwise", "--library", "fp8core"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *words], capture_output=True, text=True, cwd=PAGE.parents[1]
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = done.stdout.strip().splitlines()[-1]
    assert made in rows
    assert markdown([]).splitlines()[0] in done.stdout
    assert len(HEADER) == made.count("|") - 1
