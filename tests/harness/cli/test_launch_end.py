"""How a sweep that was spread ends. Oracle: what the shards wrote into `_run.json`, beside the command's exit code."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness import store
from harness.__main__ import main
from harness.cli import launch
from harness.cli.config import load as compose_request
from harness.engine.shards import of_command
from harness.store.errors import UsageError


def test_a_shard_that_ended_no_later_than_before_did_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed sweep whose shards were all refused: their notes are of last time. Oracle: which of them ended anew."""
    folder, both = tmp_path / "r1", of_command("0/2,1/2")
    for shard in both:
        (folder / shard.folder).mkdir(parents=True)
        (folder / shard.folder / "_run.json").write_text('{"state": "finished", "ended_at": "2026-01-01"}')
    before = launch._ended(folder, both)
    (folder / both[1].folder / "_run.json").write_text('{"state": "finished", "ended_at": "2026-01-02"}')
    writer = store.RunWriter(folder, run_id="r1", sweep="toy", env_id="e", env={}, about={})
    request = compose_request(["sweep=gemm", "device=cpu", f"reports_dir={tmp_path}"], lambda _: "cpu")
    assert launch._finish(request, writer, before, "it could not start any worker", 1.0) == 2
    said = capsys.readouterr()
    assert "1 of 2 shards finished" in said.out
    assert "shards 0/2 (not begun) did not finish: it could not start any worker" in said.err
    assert store.read_about(folder)["state"] == "failed"


@pytest.mark.parametrize("all_ended", [False, True])
def test_shards_are_named_though_the_report_cannot_be_made(
    all_ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray tells of the first shard that was lost while others still write, and a file is gone before it is read."""

    def lost(*given: object) -> None:
        raise UsageError("no such file or folder: part-1.parquet")

    monkeypatch.setattr("harness.report.write_report", lost)
    monkeypatch.setattr(store, "read_quietly", lambda folder: (pd.DataFrame({"status": ["ok"]}), []))
    folder, both = tmp_path / "r1", of_command("0/2,1/2")
    for shard in both[: 2 if all_ended else 1]:
        (folder / shard.folder).mkdir(parents=True)
        (folder / shard.folder / "_run.json").write_text('{"state": "finished", "ended_at": "2026-01-01"}')
    writer = store.RunWriter(folder, run_id="r1", sweep="toy", env_id="e", env={}, about={})
    request = compose_request(["sweep=gemm", "device=cpu", f"reports_dir={tmp_path}"], lambda _: "cpu")
    assert launch._finish(request, writer, dict.fromkeys(both), "a worker died", 1.0) == 2
    (line,) = capsys.readouterr().err.splitlines()
    expected = (
        "error: no report: no such file" if all_ended else "error: shards 1/2 (not begun) did not finish"
    )
    assert line.startswith(expected)


@pytest.mark.parametrize(("words", "known"), [([], False), (["device=cpu"], True)])
def test_the_device_of_the_command_is_not_that_of_shards_elsewhere(
    words: list[str], known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a node of a cluster without a GPU the sizes of `sweep=gemm` are others: a shard must not be refused for them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "_chosen_launcher", lambda to_hydra: "ray")
    monkeypatch.setattr(launch, "_launch", lambda *given: "")
    assert main(["-m", "sweep=gemm", *words, "shard=0/2,1/2", "run_id=r1", "quiet=true"]) == 2  # nothing ran
    assert bool(store.read_about(tmp_path / "results" / "gemm" / "r1")["config"]) == known
