"""Trackers of others, by their own libraries and readers: what `watch(to=NAME)` and `export RUN to=NAME` give them comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8core
from harness import store
from harness.__main__ import main
from harness.store.case import Case
from harness.store.measurement import Measurement

pytestmark = pytest.mark.clients
LOSSES = (2.5, 2.25, 2.125)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    case = Case.of("divergence", {"model": "nano"})
    about: dict[str, Any] = {
        "suite": "divergence", "case_id": case.case_id, "axes": case.axes_json, "arm": "tensorwise", "status": "ok",
    }  # fmt: skip
    writer = store.RunWriter(tmp_path / "run", run_id="r", sweep="divergence", env_id="e", env={}, about={})
    writer.append(
        [
            Measurement(**about, metric="loss", samples=LOSSES, rounds=(0, 5, 10)),
            Measurement(**about, metric="sqnr_db", samples=(28.5,)),
        ]
    )
    writer.close("finished")
    return writer.folder


def watched(to: str) -> float:
    """Trains one watched step; the amax of its input."""
    layer = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8core.convert_to_float8_training(layer, config="tensorwise")
    x = torch.randn(16, 32)
    with fp8core.watch(layer, every=1, to=to) as watcher:
        layer(x).sum().backward()
        watcher.step()
    return x.abs().max().item()


def test_tensorboard(run: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    amax = watched("tensorboard")
    assert main(["export", str(run), "to=tensorboard", "-o", "runs/exported"]) == 0
    assert Path("runs/exported").is_dir()
    curves: dict[str, list[tuple[int, float]]] = {}
    for folder in Path("runs").iterdir():
        read = events.EventAccumulator(str(folder))
        read.Reload()
        for tag in read.Tags()["scalars"]:
            curves[tag] = [(e.step, e.value) for e in read.Scalars(tag)]
    _checked(curves, amax)


def test_mlflow(run: Path) -> None:
    mlflow: Any = pytest.importorskip("mlflow")
    amax = watched("mlflow")
    assert main(["export", str(run), "to=mlflow"]) == 0
    client, curves = mlflow.MlflowClient(), {}
    for each in client.search_runs(["0"]):
        assert each.info.status == "FINISHED"
        for tag in each.data.metrics:
            curves[tag] = [(m.step, m.value) for m in client.get_metric_history(each.info.run_id, tag)]
    _checked(curves, amax)


def test_wandb_takes_part_in_the_run_under_way(run: Path) -> None:
    """Its offline files have no public reader: what it was given is read from the summary of a run that stays open."""
    wandb: Any = pytest.importorskip("wandb")
    with wandb.init() as own:
        own.log({"loss": 1.0}, step=100)  # a training that is further on
        amax = watched("wandb")
        assert main(["export", str(run), "to=wandb"]) == 0
        assert wandb.run is own
        given = dict(own.summary)
    seen = [value for tag, value in given.items() if "/input/" in tag and tag.endswith("/amax")]
    assert seen == [pytest.approx(amax)]
    loss = [value for tag, value in given.items() if tag.startswith("divergence/tensorwise/loss/")]
    assert loss == [LOSSES[-1]]
    watched("wandb")
    assert wandb.run is None


def _checked(curves: dict[str, list[tuple[int, float]]], amax: float) -> None:
    (loss,) = (curve for tag, curve in curves.items() if tag.startswith("divergence/tensorwise/loss/"))
    assert loss == [(0, 2.5), (5, 2.25), (10, 2.125)]
    (sqnr,) = (curve for tag, curve in curves.items() if "/sqnr_db/" in tag)
    assert sqnr == [(0, 28.5)]
    seen = [curve for tag, curve in curves.items() if "/input/" in tag and tag.endswith("/amax")]
    assert seen[0] == [(0, pytest.approx(amax))]
