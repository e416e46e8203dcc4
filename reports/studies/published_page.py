"""The published page: the rows of published runs with their MFU.

python reports/studies/published_page.py results/published reports/published/mfu.html
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.report import write_report

if __name__ == "__main__":
    rows, page = map(Path, sys.argv[1:])
    write_report([rows], page, focus="mfu", figures=True)
