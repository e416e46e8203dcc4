"""Oracle: the suites' own declarations; every sweep file must expand to valid cases on a CPU and on a GPU."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from harness.cli.config import load, question
from harness.engine.plan import SweepPlan, make_plan
from harness.suites import SUITES

FOLDER = Path(__file__).parents[3] / "sweeps"
FILES = sorted(FOLDER.glob("*.yaml"))
PLANS = [path for path in FILES if path.stem != "gpu"]  # which is made of other sweeps: test_gpu_sweep.py


TRAINING = ("train", "divergence")  # their work is in tokens
PROCESSES = {"parallel"}  # each run is several


@pytest.fixture(autouse=True)
def _memory_of_a_large_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine this is: plans for a GPU ask how much is free there, and how many there are."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 16)
    for suite in TRAINING:
        monkeypatch.setattr(f"harness.suites.{suite}.free_bytes", lambda device: 140 * 2**30)


@functools.cache  # a plan is never changed
def plan(name: str, device: str, *overrides: str) -> SweepPlan:
    return make_plan(load([f"sweep={name}", *overrides], lambda asked: device).config, SUITES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_the_first_line_is_a_question(path: Path) -> None:
    assert "?" in question(path)


LONG = {"losses", "divergence", "four_bits"}  # whole models on paper, for each arm


@pytest.mark.parametrize(
    ("path", "device"),
    [(path, device) for path in PLANS for device in ("cpu", "cuda")],
    ids=lambda value: getattr(value, "stem", value),
)
def test_every_sweep_expands(path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Axes, arms and shapes are valid (make_plan refuses others), no case is there twice, no shape is refused.

    On a CPU without bf16 units a bf16 product runs at 0.5 GFLOP/s: 256^3 takes 70 ms, 1024^3 over 4 s. The largest case
    of each part must fill a large GPU: over 100 MB moved, 10^11 operations or 4096 tokens a step.
    """
    if path.stem in LONG:
        monkeypatch.setattr("harness.training.meta_estimate.memory", lambda *_: {})
    planned = plan(path.stem, device).cases
    assert planned
    identities = [(p.part, p.case.case_id) for p in planned]
    assert len(set(identities)) == len(identities)
    for p in planned:
        axes, work = dict(p.case.axes), p.suite.work(p.case)
        assert all(why.kind == "device" for why in p.unsupported.values()), p
        assert set(axes) <= set(p.suite.AXES) | {"shape_set", "layer"}
        product = p.case.suite in ("gemm", "linear") or "cube" in axes
        most = math.inf if device == "cuda" else 2 * 256**3 if product else 2**28
        assert 0 <= work <= most
    for part in {p.part for p in planned if device == "cuda" and p.case.suite not in PROCESSES}:
        largest = max((p for p in planned if p.part == part), key=lambda p: p.suite.work(p.case))
        if largest.case.suite in TRAINING:
            assert largest.case.integer("batch") * largest.case.integer("seq") >= 4096
        else:
            assert largest.suite.work(largest.case) > 1e8, part


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_quick_measures_every_suite_of_speed_and_torchao_beside_us(device: str) -> None:
    """Other peers and further recipes have sweeps of their own, so that quick stays quick whatever is added."""
    planned = plan("quick", device).cases
    assert {p.case.suite for p in planned} == {"cast", "gemm", "linear", "ceilings"}
    assert {p.suite.ARMS[arm].peer for p in planned for arm in p.arms} == {"", "torchao"}
