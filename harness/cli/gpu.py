"""`python -m harness gpu`: short for `sweep=gpu`, with minutes for its time budget and a check of what is installed."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING

from harness.store.errors import UsageError, unknown
from harness.store.words import helped

if TYPE_CHECKING:
    from collections.abc import Sequence

HELP = """\
usage: python -m harness gpu [minutes=8.5] [text=FILE] [out=DIR] [device=cpu] [dry_run=true] [KEY=VALUE ...]
sweep=gpu in slots: run it again to continue; dry_run=true: its timetable; device=cpu: a rehearsal; text: nanoGPT's
exit 0 all ok or skipped; 1 a case failed; 2 the request could not be carried out
"""
NEEDED = (
    "hydra", "omegaconf", "yaml", "pandas", "pyarrow", "jinja2", "matplotlib", "itables", "rich", "psutil",
)  # fmt: skip
SHORT = {"minutes": "budget_s", "text": "data_path", "out": "reports_dir"}


def main(argv: Sequence[str]) -> int:
    """Runs one slot of `sweep=gpu`; its exit code.

    Raises:
        UsageError: something is not installed, or the request is refused.
    """
    if helped(argv, HELP):
        return 0
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"not installed: {', '.join(missing)}; where there is no network, `make wheels` elsewhere and here "
            "`make PY=python3 WHEELS=wheels gpu`"
        )
    from harness.cli.config import KEYS, SweepConfig
    from harness.cli.sweep import run_sweep

    given = dict(word.partition("=")[::2] for word in argv)
    for key in given:
        if key.split(".")[0] not in (*SHORT, *KEYS):
            raise unknown("key", key, (*SHORT, *KEYS))
    for word in argv:
        if "=" not in word:
            is_switch = isinstance(getattr(SweepConfig, word, None), bool)
            raise UsageError(f"{word!r} is not key=value; write {word}={'true' if is_switch else 'VALUE'}")
    if "minutes" in given:
        given["minutes"] = f"{60 * _minutes(given['minutes']):g}"
    folder = given.get("results_dir") or ("results/rehearsal" if given.get("device") == "cpu" else "results")
    given.setdefault("out", f"{folder}/gpu")
    return run_sweep(
        ["sweep=gpu", *(f"{SHORT.get(key, key)}={value}" for key, value in given.items() if value)]
    )


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise UsageError(f"minutes={text!r} is no number") from None
    if not (math.isfinite(minutes) and minutes > 0):
        raise UsageError(f"minutes={text}: expected a finite number above 0, such as 8.5")
    return minutes
