"""What a sweep that compares cards refuses. Oracles: the program; fleets that would have had nothing in common."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fleet_fixtures import card, env

import harness.judge.fleet
from harness.__main__ import main
from harness.cli.config import load
from harness.judge.fleet.request import refuse_another_card, refuse_shares
from harness.store.errors import UsageError

SCRIPT = Path(harness.judge.fleet.__file__).parents[3] / "docs" / "examples" / "sweep.sbatch"
QUICK = (
    *("rounds=1", "control=false", "isolate=false", "timing.min_seconds=0", "timing.min_samples=1"),
    *("timing.warmup_min_seconds=0", "parts.checksum.axes.cube=[16]", "parts.checksum.axes.data=[codes]"),
    *(
        "parts.gemm.arms=[bf16_eager]",
        "parts.gemm.axes.M=[16]",
        "parts.gemm.axes.K=[16]",
        "parts.gemm.axes.N=[16]",
    ),
)


@pytest.mark.parametrize(
    "words",
    [
        ["sweep=fleet", "shard=0/2"],
    ],
    ids=" ".join,
)
def test_shards_of_a_comparison_are_refused_with_the_way_out(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each case would be on one card, and `fleet` would have nothing to compare."""
    monkeypatch.chdir(tmp_path)
    assert main([*words, "device=cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "once a card (devices=0, devices=1, ..." in line
    assert "run_id of its own" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sweep", "places", "refused"), [("fleet", 2, True), ("fleet", 1, False), ("gemm", 8, False)]
)
def test_several_devices_are_refused_where_cards_are_compared(sweep: str, places: int, refused: bool) -> None:
    config = load([f"sweep={sweep}"], lambda asked: "cpu").config
    if refused:
        with pytest.raises(UsageError, match="must measure every case, and 2 shards or devices"):
            refuse_shares(config, places)
    else:
        refuse_shares(config, places)


def test_a_run_of_another_card_is_not_gone_on_with(tmp_path: Path) -> None:
    card(tmp_path, "aaaa", run_id="night")
    folder = tmp_path / "aaaa" / "fleet" / "night"
    config = load(["sweep=fleet"], lambda asked: "cpu").config
    refuse_another_card(config, folder, env("aaaa"))
    refuse_another_card(load(["sweep=gemm"], lambda asked: "cpu").config, folder, env("bbbb"))
    for other in (env("bbbb"), env("aaaa") | {"host_hash": "f" * 12}):
        with pytest.raises(UsageError, match="night holds what card aaaaaaaa@01234567 measured and this is"):
            refuse_another_card(config, folder, other)


def test_one_run_id_on_two_machines_is_refused_and_not_taken_for_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A results folder that both see: the second must not say "nothing new"."""
    monkeypatch.chdir(tmp_path)
    words = ["sweep=fleet", "device=cpu", *QUICK, "--quiet"]
    for host, more, code in (
        ("one", "run_id=night", 0),
        ("two", "run_id=night", 2),
        ("two", "resume=night", 2),
    ):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        assert main([*words, more]) == code
        captured = capsys.readouterr()
        assert ("each takes a run_id of its own" in captured.err) == (code == 2)


@pytest.mark.parametrize("index", [0, 7])
def test_the_sbatch_example_gives_each_card_of_a_fleet_all_cases(index: int, tmp_path: Path) -> None:
    """Oracle: the words that reach Python. A job that starts again may be on another card, and starts afresh."""
    echoed = tmp_path / "python"
    echoed.write_text('#!/bin/bash\necho "$@"\n')
    echoed.chmod(0o755)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SWEEP": "fleet",
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_ARRAY_JOB_ID": "9",
        "SLURM_ARRAY_TASK_COUNT": "8",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    for again in ({}, {"SLURM_RESTART_COUNT": "1"}):
        said = subprocess.run(
            ["bash", str(SCRIPT)], env=variables | again, capture_output=True, text=True, check=True
        ).stdout
        *_, last = said.split()
        assert last == f"run_id=slurm-9-{index}-{1 if again else 0}"
        assert "sweep=fleet" in said
        assert "shard" not in said
