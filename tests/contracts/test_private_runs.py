"""A run folder that is published names neither its user nor the host. Oracle: the names themselves, in no file of results and pages."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import forked
import pyarrow.parquet as pq
import pytest
from command_line import HERE, QUICKLY

USER, HOST = "zz_secretuser", "zz-secrethost"
ROOT = Path(__file__).parents[2]
# A model whose batches fail by a path of the user's, of TMPDIR, of nobody's; or clear the environment before they fail.
MODEL = """\
import os, tempfile
import torch
from pathlib import Path
from torch import nn

def build():
    return nn.Sequential(nn.Linear(32, 32, bias=False), Sum())

class Sum(nn.Module):
    def forward(self, x):
        return x.float().square().mean()

def batch(step, seed, batch_size, device):
    if batch_size > 2 and step > 1:
        here = [Path.home(), tempfile.gettempdir(), Path.cwd(), "/mnt/homes/zz_secretuser/made"][batch_size - 3]
        if batch_size == 5:
            os.environ.clear()
        raise OSError(f"cannot open '{here}/a.txt' on zz-secrethost")
    return (torch.ones(batch_size, 16, 32, device=device),)
"""
NAMES = "import os, socket; name = lambda: 'zz-secrethost'; socket.gethostname = name; os.uname = lambda real=os.uname(): type(real)((real[0], name(), *real[2:]))\n"
GEMM = ("sweep=gemm", "axes.role=output", "axes.M=16", "axes.K=32", "axes.N=16", "arms=[bf16_eager]", HERE)
TRAIN = (
    "sweep=train",
    "model._target_=mine.build",
    "model.batch=mine.batch",
    "axes.batch=[2,3,4,5,6]",
    "arms=[bf16_eager]",
)
LOSS = (
    "sweep=divergence", "data=bytes", "model=nano", "axes.steps=4", "axes.lr_warmup=0", "axes.seed=[0]", "arms=[base]", "train.judge=false", "axes.batch=1",
)  # fmt: skip
CAST = (
    "sweep=cast", "axes.dtype=e4m3fn", "axes.granularity=tensorwise", "axes.src=bf16", "axes.M=[16,32,48,64]", "axes.K=64",
    "arms=[eager]", "run_id=killed", "timing.min_seconds=0.3",
)  # fmt: skip


def texts(folder: Path) -> dict[str, str]:
    """All that the files of a folder say, Parquet as its values and metadata."""
    found = {}
    for path in filter(Path.is_file, folder.rglob("*")):
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            found[str(path)] = f"{table.to_pylist()} {table.schema.metadata}"
        else:
            found[str(path)] = path.read_text(errors="replace")
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder in which they have measured, with paths written out: what it holds of it is published."""
    folder = tmp_path_factory.mktemp("published") / USER
    for name in ("home", "tmp", "made", "names", "elsewhere"):
        (folder / name).mkdir(parents=True)
    (folder / "names" / "sitecustomize.py").write_text(NAMES)
    (folder / "made" / "mine.py").write_text(MODEL)
    (folder / "elsewhere" / "text.txt").write_text("to be or not to be " * 9000)
    for package in ("harness", "fp8core", "sweeps"):
        (folder / "names" / package).symlink_to(ROOT / package)
    loss = (*LOSS, f"data_path={folder}/elsewhere/text.txt", "run_id=loss")
    words, cwd, env = started(folder, GEMM, TRAIN, loss)
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[0, 1, 0]", done.stderr
    process = forked.start(*started(folder, CAST))
    rows = folder / "made" / "results" / "cast" / "killed"
    while process.is_alive() and not list(rows.glob("part-*")):
        time.sleep(0.05)
    process.kill()
    process.join()
    return folder


def started(folder: Path, *commands: tuple[str, ...]) -> tuple[list[str], Path, dict[str, str]]:
    """The words, folder and environment of an interpreter for these commands; their exit codes are the last line of its output."""
    places = [f"results_dir={folder}/made/results", f"reports_dir={folder}/made/reports"]
    lines = [
        [*QUICKLY, *w, *places, "device=cpu"] if w[0].startswith("sweep") else [*w, *places] for w in commands
    ]
    env = {
        **os.environ, "HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "USER": USER, "LOGNAME": USER,
        "PYTHONPATH": str(folder / "names"), "ZZ_SECRET_VARIABLE": "1",
    }  # fmt: skip
    code = f"{NAMES}from harness.__main__ import main; print([main(words) for words in {lines}])"
    return ["-c", code], folder / "made", env


def refuse_names(folder: Path) -> None:
    hashed = hashlib.sha256(HOST.encode()).hexdigest()[:12]
    found = texts(folder / "made" / "results") | texts(folder / "made" / "reports")
    assert len(found) > 10
    for path, text in found.items():
        for name in (USER, HOST, hashed, "ZZ_SECRET_VARIABLE"):
            at = text.find(name)
            assert at < 0, f"{path}: {text[max(0, at - 80) : at + 40]!r}"


def test_no_file_of_a_run_names_the_user_or_the_host(home: Path) -> None:
    refuse_names(home)


@pytest.fixture(scope="module")
def continued(home: Path) -> subprocess.CompletedProcess[str]:
    text = home / "elsewhere" / "text.txt"
    commands = ("resume=killed",), ("resume=loss",), ("resume=loss", f"data_path={text}")
    return forked.run(*started(home, *commands))


def test_a_killed_run_is_continued_and_neither_names_them_nor_leaves_a_lock(
    home: Path, continued: subprocess.CompletedProcess[str]
) -> None:
    assert continued.stdout.splitlines()[-1] == "[0, 2, 0]"
    refuse_names(home)
    assert not list(home.rglob("_writer.lock"))
    stored = pq.read_table(home / "made" / "results" / "cast" / "killed").to_pylist()
    rows = [row for row in stored if row["status"] == "ok"]
    assert {json.loads(row["axes"])["M"] for row in rows} == {16, 32, 48, 64}
    assert len({row["attempt"] for row in rows}) == 2, "the rows before the kill stand"


def test_a_setting_whose_folder_is_not_stored_is_asked_for(
    continued: subprocess.CompletedProcess[str],
) -> None:
    (refused,) = (line for line in continued.stderr.splitlines() if line.startswith("error: "))
    assert "data_path=" in refused
