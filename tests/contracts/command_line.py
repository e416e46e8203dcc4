"""The command line as a user sees it: words in; exit code, output and files out. Nothing of its modules is named here."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

import harness.store

QUICKLY = (  # two short rounds: what a row says is tested here, not how well it was timed
    "timing.min_rounds=2",
    "timing.max_rounds=2",
    "timing.min_samples=1",
    "timing.min_seconds=0.0",
    "timing.warmup_min_iterations=1",
    "timing.warmup_min_seconds=0.0",
    "timing.warmup_max_seconds=0.1",
)
CAST = (
    "sweep=cast", "axes.dtype=e4m3fn", "axes.granularity=tensorwise", "axes.src=bf16", "axes.M=[16,32]", "axes.K=64",
    "arms=[eager]", "device=cpu",
)  # fmt: skip
HERE = "isolate=false"  # no worker process: half a second less

USERS_MODEL = '''\
"""A user's model. At a batch of 3 it fails, or never returns where a file `hang` lies in the current folder."""

import time
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(32, 32, bias=False) for _ in range(2))

    def forward(self, x):
        return self.second(torch.relu(self.first(x))).float().square().mean()


def build():
    return Net()


def batch(step, seed, batch_size, device):
    if batch_size == 3 and step > 1:  # not while the command line is checked
        if Path("hang").exists():
            Path("hanging").touch()
            time.sleep(3600)
        raise RuntimeError("three is too many")
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return (torch.randn(batch_size, 16, 32, generator=generator).to(device),)
'''


TRAIN = (
    "sweep=train", "model._target_=users_model.build", "model.batch=users_model.batch", "axes.batch=[2,3]",
    "arms=[bf16_eager,tensorwise_eager]", "device=cpu", *QUICKLY,
)  # fmt: skip


def with_model(folder: Path) -> Path:
    """The folder, which now holds the user's model."""
    (folder / "users_model.py").write_text(USERS_MODEL)
    return folder


@dataclass(frozen=True)
class Ended:
    """What a command left behind.

    Attributes:
        code: the exit code.
        out: lines of standard output.
        err: lines of standard error.
        folder: where it ran.
    """

    code: int
    out: list[str]
    err: list[str]
    folder: Path

    def path(self, name: str) -> Path:
        """The path that the last line of the output such as `results  PATH` names."""
        line = [line for line in self.out if line.split()[:1] == [name]][-1]
        return self.folder / line.split(maxsplit=1)[1]

    def refused(self, code: int = 2) -> str:
        """The one line on standard error of a command that ended with this code and printed nothing else."""
        assert self.code == code, (self.code, self.out, self.err)
        assert self.out == []
        assert len(self.err) == 1, self.err
        assert self.err[0].startswith("error: ")
        return self.err[0]


def run(folder: Path, *words: str) -> Ended:
    """`python -m harness WORDS` with `folder` as current folder, in this interpreter, which has imported torch."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    code: int | str | None = 0
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        path(folder),
    ):
        sys.argv = ["harness", *words]
        try:
            with warnings.catch_warnings():  # other tests may have imported the module that is run here anew
                warnings.filterwarnings("ignore", ".*found in sys.modules after import", RuntimeWarning)
                runpy.run_module("harness", run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
        except Exception:  # noqa: BLE001  # what an interpreter of its own would end with
            traceback.print_exc()
            code = 1
        finally:
            sys.argv = argv
    if not isinstance(code, int):
        code = 0 if code is None else 1
    return Ended(code, out.getvalue().splitlines(), err.getvalue().splitlines(), folder)


@contextlib.contextmanager
def path(folder: Path) -> Iterator[None]:
    """Modules of a folder can be imported, as they can of the current folder under `python -m`."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def files(folder: Path) -> list[Path]:
    """Everything below a folder."""
    return sorted(folder.rglob("*"))


def rows(paths: Path | Sequence[Path]) -> pd.DataFrame:
    """What the public reader gives."""
    return harness.store.read(paths)


def rewritten(source: Path, target: Path, **columns: Any) -> Path:
    """A copy of a run's rows with other values in some columns: one for all rows, or a function of each row.

    By other names, and without what a file says it was gathered from, since copies count once.
    """
    target.mkdir(parents=True)
    for file in source.glob("*.parquet"):
        table = pq.ParquetFile(file).read().replace_schema_metadata(None)
        old = table.to_pylist()
        for name, value in columns.items():
            new = [value(row) if callable(value) else value for row in old]
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, pa.array(new, table.schema.field(at).type))
        pq.write_table(table, target / f"{file.stem}-{target.name}.parquet")
    return target


def scaled(metric: str, factor: float) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The columns of `rewritten` in which the values of one metric are multiplied."""

    def by(row: dict[str, Any], value: float | None) -> float | None:
        return value if value is None or row["metric"] != metric else value * factor

    return {
        "samples": lambda row: [by(row, x) for x in row["samples"]],
        "value": lambda row: by(row, row["value"]),
    }
