"""docs/assurance.md: `python tests/assurance/page.py --write` makes it anew from the situations."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":  # pytest gets these from pyproject.toml
    sys.path[:0] = [str(ROOT / "tests" / part) for part in ("assurance", "fp8core", "harness", "harness/report")]

import gate_situations  # noqa: E402, F401
import verdict_situations  # noqa: E402, F401
import verify_situations  # noqa: E402, F401
from situations import SITUATIONS  # noqa: E402

PATH = ROOT / "docs" / "assurance.md"
