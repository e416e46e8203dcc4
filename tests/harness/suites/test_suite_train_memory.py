"""Suite `train` and memory. Oracle: an allocator that is told to run out."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from train_cases import case, execute, row

from harness.machine import mfu
from harness.machine.hardware import named
from harness.store.compare import rows_of
from harness.store.errors import MemoryShortageError, UsageError
from harness.suites import train
from harness.training import meta_estimate, timed
from harness.training.models import MODELS
from harness.training.models.flops import recomputed
from harness.training.setup import Trainee

# Memory


def runs_out(monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    """A step of a trainee of which `when` says so meets an allocator that has nothing left."""
    step = Trainee.step

    def refused(self: Trainee, batches: Any, *more: Any, **named: Any) -> Tensor:
        if when(self.setup):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return step(self, batches, *more, **named)

    monkeypatch.setattr(Trainee, "step", refused)


def test_an_arm_that_runs_out_of_memory_says_what_would_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_out(monkeypatch, lambda made: made.recipe is not None)
    frame = execute(tmp_path, ["bf16_eager", "rowwise_eager"])
    got = row(frame, "rowwise_eager")
    assert got["status"] == "failed"
    assert got["reason"].startswith("out of memory: a training step; predicted GiB by part: weights 0.00")
    assert "remedies: batch=1 saves" in got["reason"]
    assert "checkpointing=full saves" in got["reason"]
    assert set(got["resolved"]["remedies"]) == {"batch=1", "checkpointing=full"}
    assert all(saved > 0 for saved in got["resolved"]["remedies"].values())
    assert set(got["resolved"]["memory"]) >= {"weights", "gradients", "optimizer", "activations"}
    assert row(frame, "bf16_eager")["status"] == "ok"


def test_what_ran_out_of_memory_is_let_go_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the report of it is on its way, no tensor of the step that failed is kept."""
    held: list[weakref.ref[Tensor]] = []
    made = train._timed(case(), "rowwise_eager", 2, "cpu")

    def refused(self: Trainee, batches: Any, *more: Any, **named: Any) -> Tensor:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Trainee, "step", refused)
    with pytest.raises(MemoryShortageError, match=r"a training step; predicted"):
        made.check()
    assert [ref() for ref in held] == [None], "pytest still holds the error, and so all frames"


def test_memory_that_runs_out_while_it_is_timed_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**6))
    runs_out(monkeypatch, lambda made: made.recipe is not None and next(calls) > 8)
    frame = execute(tmp_path, ["bf16_eager", "rowwise_eager"])
    got = row(frame, "rowwise_eager")
    assert got["reason"].startswith("out of memory: a training step; predicted")
    assert set(got["resolved"]["remedies"]) == {"batch=1", "checkpointing=full"}
    assert row(frame, "bf16_eager")["status"] == "ok"


def test_the_control_is_run_in_parts_where_it_does_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    timed.control_of.cache_clear()
    whole = train._timed(case(batch=4), "tensorwise_eager", 4, "cpu").control
    timed.control_of.cache_clear()
    runs_out(monkeypatch, lambda made: made.recipe is None and made.batch > 1)
    parts = train._timed(case(batch=4), "tensorwise_eager", 4, "cpu").control
    assert parts.first.loss == pytest.approx(whole.first.loss, rel=1e-6)
    assert parts.first.grad_norm == pytest.approx(whole.first.grad_norm, rel=1e-4)
    timed.control_of.cache_clear()


def test_what_is_predicted_not_to_fit_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = meta_estimate.total(meta_estimate.memory(train._setup(case(), "bf16_eager", 2), "cpu"))
    monkeypatch.setattr(train, "free_bytes", lambda device: needed - 1)
    monkeypatch.setattr(timed, "prepare", lambda *_: pytest.fail("was made"))
    why = train.unsupported(case(), "bf16_eager", "cpu")
    assert why is not None
    assert why.kind == "device"
    assert why.reason.startswith(
        "out of memory, predicted: a training step needs 0.00 GiB and 0.00 GiB are free"
    )
    assert "GiB by part: " in why.reason


@pytest.mark.parametrize("arms", [["bf16_eager"], ["bf16_eager", "tensorwise_eager", "rowwise_eager"]])
def test_weights_that_do_not_fit_are_refused_without_a_pass_on_paper(
    arms: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass on paper over 80 blocks takes a minute. Oracle: 16 bytes a parameter of AdamW in float32, 256 bytes for words."""
    monkeypatch.setattr(meta_estimate, "predict", lambda *_, **__: pytest.fail("ran the model on paper"))
    gib = 16 * (MODELS["llama3_70b"].parameters - 2 * (128256 - 256) * 8192) / 2**30
    with pytest.raises(
        UsageError,
        match=rf"none of the arms .* out of memory, predicted: .* at least {gib:.2f} GiB .*by part: optimizer",
    ):
        execute(tmp_path, arms, model="llama3_70b", seq=4096)


def test_a_model_of_which_nothing_can_be_converted_says_which_layers_and_why() -> None:
    model = '{"_target_": "model_for_training.odd", "batch": "model_for_training.batch"}'
    why = train.unsupported(case(model=model), "tensorwise_eager", "cpu")
    assert why is not None
    assert why.kind == "shape"
    assert why.reason.startswith(
        "Odd: no layer can be converted to recipe tensorwise; narrow: N=10 (columns of B) is not a"
    )
    assert train.unsupported(case(model=model), "bf16_eager", "cpu") is None


def test_prediction_is_of_the_setup_and_not_of_how_it_is_compiled() -> None:
    eager, compiled = (train._setup(case(), arm, 2) for arm in ("rowwise_eager", "rowwise_compile"))
    assert meta_estimate.memory(eager, "cpu") == meta_estimate.memory(compiled, "cpu")
    assert meta_estimate.memory(eager, "cpu") != meta_estimate.memory(
        train._setup(case(), "bf16_eager", 2), "cpu"
    )


def test_a_stored_step_tells_its_mfu_and_what_recomputation_adds(tmp_path: Path) -> None:
    """harness.machine.mfu on real rows, as if an H200 had taken that long: PaLM's formula for bf16, blocks run again for HFU."""
    frame = execute(tmp_path, ["bf16_eager", "tensorwise_eager"], checkpointing="full", compute="bf16")
    device = named("h200")
    times = {r["arm"]: r for r in rows_of(frame[frame["metric"] == "time_ms"])}
    for arm, stored in times.items():
        palm, causal = mfu.of_row(stored, device)
        flops = sum(json.loads(stored["flops"]).values())
        assert (palm.formula, causal.formula) == ("palm", "causal")
        assert palm.model_tflops == pytest.approx(flops / (stored["value"] * 1e-3) / 1e12)
        assert palm.tokens_per_s == json.loads(stored["resolved"])["tokens_per_step"] / (
            stored["value"] * 1e-3
        )
        assert causal.mfu_mixed < palm.mfu_mixed
        assert palm.hfu > palm.mfu_mixed
        again = train._setup(case(checkpointing="full", compute="bf16"), arm, 2)
        added = meta_estimate.recomputed_flops(again)["palm"]
        assert (
            sum(added.values()) == sum(recomputed(meta_estimate.skeleton(again), 2, again.seq).values()) > 0
        )
    bf16 = mfu.of_row(times["bf16_eager"], device)[0]
    assert bf16.mfu_mixed == pytest.approx(bf16.model_tflops / 989.0, rel=1e-9)
    assert mfu.of_row(times["tensorwise_eager"], device)[0].fp8_share > 0.5


@pytest.mark.parametrize(("fits", "expected"), [(1, 1), (4, 4), (7, 4), (64, 32)])
def test_the_largest_batch_is_tried_and_not_only_predicted(
    monkeypatch: pytest.MonkeyPatch, fits: int, expected: int
) -> None:
    """Room for 16 sequences by the prediction; the allocator says otherwise. One step beyond it is tried too."""
    room = meta_estimate.total(meta_estimate.memory(train._setup(case(), "tensorwise_eager", 16), "cpu"))
    monkeypatch.setattr(train, "free_bytes", lambda device: room)
    runs_out(monkeypatch, lambda made: made.recipe is not None and made.batch > fits)
    found = train.largest(case(batch=train.MAX), "tensorwise_eager", "cpu")
    assert found.setup.batch == found.resolved["batch"] == expected
    assert found.workload().tokens == found.resolved["tokens_per_step"] == 16 * expected
    assert found.check().ok


def test_not_even_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "free_bytes", lambda device: 2**22)
    runs_out(monkeypatch, lambda made: made.recipe is not None)
    with pytest.raises(MemoryShortageError, match="checkpointing=full saves"):
        train.largest(case(batch=train.MAX), "tensorwise_eager", "cpu")


def test_the_largest_batch_is_skipped_on_a_cpu() -> None:
    why = train.unsupported(case(batch=train.MAX), "bf16_eager", "cpu")
    assert why is not None
    assert why.reason == "batch=max is determined on a GPU; give a number"
