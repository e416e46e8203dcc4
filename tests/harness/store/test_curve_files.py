"""Readers of others' loss curves. Oracle: what was written, by the format's own library where this environment has it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from harness.store.curve_files import read, read_all, tidy
from harness.store.errors import UsageError

STEPS, LOSSES, SECONDS = [0, 10, 20, 30], [4.0, 3.0, math.inf, math.nan], [0.0, 1.5, 3.0, 4.5]
FRAME = pd.DataFrame({"step": STEPS, "val_loss": LOSSES, "train_loss": 1.0, "time_s": SECONDS})
RECORDS = [{"step": s, "loss": 1.0, "eval_loss": v} for s, v in zip(STEPS, LOSSES, strict=True)]


def csv(path: Path) -> None:
    FRAME.to_csv(path / "run.csv", index=False, na_rep="nan")


def wandb_csv(path: Path) -> None:
    """A chart as W&B's page exports it: no library writes it."""
    cells = ["4.0", "3.0", "Infinity", "NaN"]
    rows = [f'"{s}","{v}","{v}","{v}",""' for s, v in zip(STEPS, cells, strict=True)]
    head = '"Step","a - val_loss","a - val_loss__MIN","a - val_loss__MAX","b - val_loss"'
    (path / "run.csv").write_text("\n".join([head, *rows, '"40","","","","2.0"']))


def lightning_csv(path: Path) -> None:
    """Losses of training and validation in rows of their own."""
    try:
        from lightning.pytorch.loggers import CSVLogger
    except ImportError:
        rows = [f"0,{s},,{v}\n0,{s},1.0," for s, v in zip(STEPS, LOSSES, strict=True)]
        (path / "metrics.csv").write_text("\n".join(["epoch,step,train_loss,val_loss", *rows]))
        return
    logger = CSVLogger(path, name="", version="")
    for record in RECORDS:
        logger.log_metrics({"train_loss": 1.0}, record["step"])
        logger.log_metrics({"val_loss": record["eval_loss"]}, record["step"])
    logger.save()


def jsonl(path: Path) -> None:
    (path / "run.jsonl").write_text("\n".join(json.dumps(each) for each in [*RECORDS, {"step": 31}]))


def parquet(path: Path) -> None:
    FRAME.to_parquet(path / "run.parquet")


def trainer_state(path: Path) -> None:
    end = {"step": 30, "train_runtime": 4.5}
    try:
        from transformers import TrainerState
    except ImportError:
        (path / "trainer_state.json").write_text(json.dumps({"epoch": 1.0, "log_history": [*RECORDS, end]}))
        return
    TrainerState(log_history=[*RECORDS, end]).save_to_json(str(path / "trainer_state.json"))


def tensorboard(path: Path) -> None:
    pytest.importorskip("tensorboard", reason="its event files are read by the library tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(path)) as writer:
        for record in RECORDS:
            writer.add_scalar("train_loss", 1.0, record["step"], walltime=1000.0 + record["step"])
            writer.add_scalar(
                "val_loss", record["eval_loss"], record["step"], walltime=1000.0 + record["step"]
            )
        writer.add_text("note", "no figure")


def modded_nanogpt(path: Path) -> None:
    lines = [
        f"step:{s}/30 val_loss:{v:.4f} train_time:{1000 * t:.0f}ms step_avg:1.00ms"
        for s, v, t in zip(STEPS, LOSSES, SECONDS, strict=True)
    ]
    (path / "run.txt").write_text(
        "\n".join(["print(f'step:{step}/{n} val_loss:{v}')", *lines, "peak memory"])
    )


FORMATS = csv, wandb_csv, lightning_csv, jsonl, parquet, trainer_state, tensorboard, modded_nanogpt


@pytest.mark.parametrize("write", FORMATS, ids=lambda f: f.__name__)
def test_a_file_is_read_as_it_was_written(write: Callable[[Path], None], tmp_path: Path) -> None:
    """NaN and infinity too: each is a step, none is dropped."""
    write(tmp_path)
    (path,) = (p for p in tmp_path.iterdir() if p.is_file() and p.name != "hparams.yaml")
    rows = tidy(read(path, "modded_nanogpt" if path.suffix == ".txt" else ""))
    rows = rows[rows["run"] == rows["run"].iloc[0]]
    missing = (
        1 if write is parquet else 0
    )  # pandas writes NaN as null, which other columns beside it make a gap
    assert rows["step"].tolist() == STEPS[: 4 - missing]
    np.testing.assert_array_equal(rows["value"], LOSSES[: 4 - missing])
    assert rows.attrs["last"][rows["run"].iloc[0]] >= 30
    if write in (csv, modded_nanogpt):
        np.testing.assert_allclose(rows["time_s"], SECONDS)
    if write is tensorboard:
        np.testing.assert_allclose(rows["time_s"], np.array(STEPS, float) + rows["time_s"].iloc[0])


def test_a_regular_expression_and_a_column_of_runs(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("it 5 | loss=2.5\nnoise\nit 6 | loss=nan\r\nit 7 | loss=2.25\n")
    rows = tidy(read(tmp_path / "log", r"it (?P<step>\d+) \| loss=(?P<value>\S+)"))
    np.testing.assert_array_equal(rows["value"], [2.5, math.nan, 2.25])
    (tmp_path / "runs.csv").write_text("arm,run,step,val_loss\nx,1,0,4\nx,1,1,3\ny,1,0,4\ny,2,0,5\n")
    (table,) = read_all([f"{tmp_path}/r*.csv:y/*"], "base")
    assert tidy(table)["run"].tolist() == ["y/1", "y/2"]


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no number": ("a.csv", "step,val_loss\n0,4\n1,x1\n", "line 3"),
    "a step that is none": ("a.csv", "step,val_loss\n0,4\n,3\n", "line 3"),
    "rows of other lengths": ("a.csv", "step,val_loss\n0,4\n1,2,3\n", "line 3"),
    "no such column": ("a.csv", "step,cost\n0,4\n", "value="),
    "no loss at all": ("a.csv", "step,val_loss,x\n0,,1\n", "val_loss"),
    "an empty file": ("a.csv", "", "a.csv"),
    "a binary file": ("a.csv", b"\x89PNG\x00\xff\xfe", "a.csv"),
    "a truncated line": ("a.jsonl", '{"step": 0, "val_loss": 4}\n{"step": 1,\n', "line 2"),
    "a list in a line": ("a.jsonl", '{"step": 0}, {"step": 1}\n', "line 1"),
    "other JSON": ("a.json", '{"epochs": []}', "log_history"),
    "no Parquet": ("a.parquet", b"PAR1 it is not", "a.parquet"),
    "a text log": ("a.log", "step 1 of 2, loss 3", "format="),
    "an escape": ("a.csv", "step,val_loss\n0,\x1b[2J\n", "line 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_named_by_file_and_line(case: str, tmp_path: Path) -> None:
    name, content, said = REFUSED[case]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError) as error:
        tidy(read(path))
    message = str(error.value)
    assert str(path) in message
    assert said in message
    assert message.isprintable()


@pytest.mark.parametrize("format", ["(?P<step>", r"(?P<step>\d+)", "no such log (?P<step>.)(?P<value>.)"])
def test_a_format_that_reads_nothing_is_refused(format: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("step:1/2 val_loss:3")
    with pytest.raises(UsageError, match="format="):
        read(tmp_path / "log", format)


def test_globs(tmp_path: Path) -> None:
    (tmp_path / "a[1].csv").write_text("step,val_loss\n0,4\n")
    assert len(read_all([str(tmp_path / "a[1].csv")], "base")) == 1
    for pattern, said in ((f"{tmp_path}/none*", "base="), (str(tmp_path), "is a directory")):
        with pytest.raises(UsageError, match=said):
            read_all([pattern], "base")
    (table,) = read_all([f"{tmp_path}/*.csv:none"], "base")
    with pytest.raises(UsageError, match="no run"):
        tidy(table)
