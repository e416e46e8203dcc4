"""Rows that code of the user's own has measured, as a run of the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.machine import environment
from harness.store import RunWriter, new_run_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from harness.store.measurement import Measurement


def store_run(
    suite: str,
    model: str,
    results_dir: str | Path,
    device: str,
    rows: Iterable[Measurement],
    about: Mapping[str, object],
) -> Path:
    """Writes rows as a finished run, which `python -m harness report FOLDER` shows; returns its folder."""
    facts = environment.fingerprint(device)
    run_id = new_run_id(facts, suite, model)
    writer = RunWriter(
        Path(results_dir) / suite / run_id, run_id=run_id, sweep=suite, env_id=environment.env_id(facts),
        env=facts, about=about,
    )  # fmt: skip
    writer.append(rows)
    writer.close("finished")
    return writer.folder
