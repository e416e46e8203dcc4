"""inductor: what is counted of Inductor's schedules, and one row of the page made anew."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inductor.schedule import GENERATED, GRAPH_INPUT, LIBRARY, Access, Kernel
from inductor.table import HEADER, counts, markdown, row

PAGE = Path(__file__).parents[2] / "reports" / "published" / "studies" / "compiled-casts.md"
N = 1000
ELEMENTS = {"input": N, "weight": 3 * N, "grad_output": 2 * N}


def access(source: str, elements: int = N, dtype: str = "bfloat16") -> Access:
    return Access("b", elements, elements * (1 if dtype.startswith("float8") else 2), dtype, source)


def kernel(
    *reads: Access, writes: tuple[Access, ...] = (), maximum: bool = False, library: bool = False
) -> Kernel:
    return Kernel(False, library, reads, writes, maximum)


CODES = access(GENERATED, dtype="float8_e4m3fn")


@pytest.mark.parametrize(
    ("source", "amax", "cast"),
    [
        (GRAPH_INPUT, "yes (1)", "yes (1)"),
        (LIBRARY, "yes (1)", "yes (1)"),
        (GENERATED, "no: 1 of 1 read back", "no: 1 of 1 read back"),
    ],
)
def test_fused_means_not_read_back(source: str, amax: str, cast: str) -> None:
    """Oracle: by hand: a cast of two bytes read and one written, after a pass of two for its amax."""
    found = [
        kernel(access(source), writes=(access(GENERATED, 1),), maximum=True),
        kernel(access(source), writes=(CODES,)),
        kernel(access(GRAPH_INPUT), writes=(access(LIBRARY),), library=True),
    ]
    line = row("c", "l", "r", True, counts(found, [], ELEMENTS))
    assert line == ("c", "l", "r", "2 (+2)", "5.00", "0.00", "0.00", f"{5002 / 6000:.2f}", amax, cast)
    assert row("c", "l", "r", False, counts(found, [], ELEMENTS))[-1] == "no neighbour (1)"


def test_codes_that_are_read_back_are_no_tensor_read_back() -> None:
    """Oracle: by hand: a transposition of codes reads no high precision. And bf16's own bytes are no cast's."""
    plain = [kernel(access(GRAPH_INPUT), writes=(access(GENERATED),))]
    found = counts([kernel(CODES, writes=(CODES,))], plain, ELEMENTS)
    assert (found.casts, found.casts_read_back, found.amaxes, found.kernels, found.more_kernels) == (
        1,
        0,
        0,
        1,
        0,
    )
    assert found.bytes_per_element["input"] == -2
    assert row("c", "l", "r", True, found)[-2] == "none needed"


def test_the_page_holds_every_row_and_one_is_made_anew() -> None:
    """Oracle: the compiler: `python tests/studies/compiled_casts.py` on one case prints the row that the page holds."""
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
