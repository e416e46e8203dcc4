"""Rows for the tests of the store, and a writer of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import store
from harness.store.cause import Cause
from harness.store.measurement import Measurement


def rows(case: str, value: float = 1.0, arm: str = "a") -> list[Measurement]:
    return [Measurement("s", case, arm, "{}", "time_ms", "ok", samples=(value, value))]


def trial(
    case: str, arm: str, value: float = 1.0, reason: str = "", cause: Cause = Cause.NONE
) -> list[Measurement]:
    """A run of a trial suite, or why there is none."""
    samples, status = ((), "failed") if reason else ((value,), "ok")
    return [
        Measurement("s", case, arm, "{}", "loss", status, samples=samples, reason=reason, cause=cause)  # type: ignore[arg-type]
    ]


def writer(folder: Path, **changes: Any) -> store.RunWriter:
    given: dict[str, Any] = {
        "run_id": folder.name,
        "sweep": "w",
        "env_id": "e1",
        "env": {"gpu": None},
        "about": {},
    }
    return store.RunWriter(folder, **(given | changes))


# Copies


def closed_run(folder: Path) -> Path:
    run = writer(folder)
    for case in ("c1", "c2"):
        run.append(rows(case))
    run.close("finished")
    return folder
