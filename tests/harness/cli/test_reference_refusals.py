"""What the reference job refuses before it trains. Oracle: the one line that is given back, and the calls that are not made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cli import reference_job
from harness.cli.reference_settings import read
from harness.store.errors import UsageError

SMALL = ("run_id=a", "model=llama_tiny", "seq=32", "batch=1")


def job(folder: Path, *words: str) -> reference_job.ReferenceJob:
    """Rank 0 of two, without a group."""
    made: Any = object.__new__(reference_job.ReferenceJob)
    made.settings, made.device, made.folder = read([*SMALL, *words]), "cpu", folder
    made.rank, made.world, made.text = 0, 2, None
    return made


@pytest.mark.parametrize(
    ("words", "start", "end"),
    [
        (
            ("recipe=mxfp8",),
            "recipe=mxfp8, batch=1, seq=32: backend 'torch' has no kernel",
            "recipes that run here: tensorwise, rowwise, rowwise_with_gw_hp, delayed, static",
        ),
        (
            ("seq=33",),
            "recipe=tensorwise, batch=1, seq=33: batch x seq = 33 tokens; GEMM grad_weight takes multiples of 16",
            "recipes that run here: rowwise_with_gw_hp",
        ),
    ],
)
def test_a_recipe_that_no_kernel_takes_is_refused_before_bf16_trains(
    words: tuple[str, ...], start: str, end: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as refused:
        job(tmp_path, *words)._check()
    said = str(refused.value)
    assert said.startswith(start)
    assert said.endswith(end)
    assert "\n" not in said


def test_what_runs_here_is_not_refused(tmp_path: Path) -> None:
    for words in (("recipe=rowwise",), ("seq=33", "recipe=rowwise_with_gw_hp")):
        job(tmp_path, *words)._check()


def test_a_folder_of_reports_that_cannot_be_written_is_refused_before_the_run_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("together", "refuse_other_facts", "refuse_unshared"):
        monkeypatch.setattr(reference_job, name, lambda *args: None)
    monkeypatch.setattr(reference_job, "from_first", lambda fn: fn())
    monkeypatch.setattr(reference_job.run_lock, "held", lambda *args, **kwargs: pytest.fail("it was opened"))
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "reports"
    with pytest.raises(UsageError) as refused:
        job(tmp_path, f"reports_dir={place}").run()
    said = str(refused.value)
    assert said.startswith(f"reports_dir={place}: the report cannot be written there (NotADirectoryError: ")
    assert "\n" not in said
