"""Oracle: the rows that were written."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from curves_for_tests import control, rows_of_runs, shifted
from gate_fixtures import failed_row, time_row, value_row, write

from harness import store
from harness.__main__ import main


def export(run: Path, file: Path) -> int:
    return main(["export", str(run), "-o", str(file)])


def run_of(tmp: Path) -> Path:
    rows = [
        time_row(1, [1.0, 2.0, 4.0, 3.0, 9.0]),
        time_row(1, [2.0] * 5, "bf16"),
        time_row(2, [0.5, 0.7]),
        value_row(1, "sqnr_db", 28.5),
        failed_row(3, "out of memory"),
    ]
    return write(tmp / "run", rows)


def test_a_table_holds_every_metric_and_every_sample(tmp_path: Path) -> None:
    """Oracle: the rows that were written."""
    run, file = run_of(tmp_path), tmp_path / "t.csv"
    assert export(run, file) == 0
    table = pd.read_csv(file)
    fp8 = table[(table.arm == "fp8") & (table.metric == "time_ms") & (table.M == 1)]
    assert fp8["sample"].tolist() == [1.0, 2.0, 4.0, 3.0, 9.0]
    assert fp8["round"].tolist() == [0, 1, 2, 3, 4]
    assert table[table.metric == "sqnr_db"].value.tolist() == [28.5]
    assert table[table.status == "failed"].reason.tolist() == ["out of memory"]
    assert export(run, tmp_path / "t.parquet") == 0
    assert len(pd.read_parquet(tmp_path / "t.parquet")) == len(store.read(run))
    assert export(run, tmp_path / "none" / "t.csv") == 2


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_curves_that_were_exported_are_judged_by_their_run_s_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A table holds no proof that FP8 ran, and other arms' rows between: columns that are named, or arms, make it no curve file."""
    base = control()
    rows = rows_of_runs("base", base) + rows_of_runs("tensorwise", shifted(base))
    file = tmp_path / f"t.{kind}"
    assert export(write(tmp_path / "run", rows, session=""), file) == 0
    for words in ([], ["value=sample" if kind == "csv" else "value=value", "step=round", "paired=seed"]):
        assert main(["verdict", f"base={file}:base*", f"candidate={file}:tensorwise*", *words]) == 2
        assert "python -m harness report run-1" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "says"), [("wand", "nearest: wandb"), ("mlflow", "pip install mlflow")])
def test_a_tracker_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, to: str, says: str
) -> None:
    """What is sent: tests/clients/test_trackers.py."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert main(["export", str(run_of(tmp_path)), f"to={to}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_tracker_with_folders_writes_where_it_is_told_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for tensorboard, whose SummaryWriter takes its folder first and keeps it as `log_dir`."""

    class SummaryWriter:
        def __init__(self, log_dir: str | None = None) -> None:
            self.log_dir = log_dir or "runs/now"

        def add_scalar(self, *_: object) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    run = str(run_of(tmp_path))
    for more, where in ((["-o", str(tmp_path / "mine")], str(tmp_path / "mine")), ([], "runs/now")):
        assert main(["export", run, "to=tensorboard", *more]) == 0
        out = capsys.readouterr().out
        assert " ".join(out.split()) == f"sent 4 numbers to tensorboard written {where}"
    assert main(["export", run, "to=wandb", "-o", str(tmp_path / "mine")]) == 2
    assert "to=tensorboard" in capsys.readouterr().err


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path)
    for source, name, says in ((run, "b.json", "FILE.csv"), (tmp_path / "x", "b.csv", "no run")):
        assert export(source, tmp_path / name) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
        assert not (tmp_path / name).exists()
    assert main(["export", str(run)]) == 2
