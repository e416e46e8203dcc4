"""Suite `train` on several ranks. Oracles: one process that takes all ranks' batches, planted faults on rank 1."""

from __future__ import annotations

import json
import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from model_on_ranks import SLEEP_S, becomes, held
from train_cases import case, execute, row

from fp8core import RECIPES
from harness.advise import training
from harness.advise.rates import rates_of
from harness.advise.scale.job import ClusterJob
from harness.advise.scale.predict import gain, step_parts
from harness.machine.hardware import named
from harness.machine.ranks import RanksError
from harness.store.compare import paired_ratios
from harness.store.errors import UsageError
from harness.suites import train
from harness.timing.clock import Split
from harness.timing.device_memory import Peak
from harness.training.batches import corpus_of, microbatches_of
from harness.training.parallel import agreement, ranked
from harness.training.setup import Setup, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USERS = '{"_target_": "model_on_ranks.build", "batch": "model_on_ranks.batch"}'
ARMS = ["bf16_eager", "tensorwise_eager"]


@pytest.fixture(autouse=True)
def _own_ranks() -> Iterator[None]:
    """Ranks have the environment in which they were started: those of a test that failed must not serve the next one."""
    yield
    for gang in list(ranked._gangs.values()):
        gang.close()


def processes_left() -> list[psutil.Process]:
    """Ranks of this process that still run; the server that forks them stays."""
    every = psutil.Process().children(recursive=True)
    return [p for p in every if p.parent() != psutil.Process() and p.status() != psutil.STATUS_ZOMBIE]


def test_two_ranks_give_paired_rows_with_the_proof_of_each(tmp_path: Path) -> None:
    frame = execute(tmp_path, ARMS, model="llama_tiny", ranks=2, fp8_all_gather=True, accumulation=2)
    assert set(frame["status"]) == {"ok", "skipped"}, frame[["arm", "metric", "status", "reason"]].to_string()
    got, base = row(frame, "tensorwise_eager"), row(frame, "bf16_eager")
    facts = got["resolved"]
    assert (facts["ranks"], facts["proved_on_ranks"]) == (2, 2)
    assert facts["weights_gathered_as"] == ["fp8"]
    assert base["resolved"]["weights_gathered_as"] == ["float32"]
    assert facts["fp8_gemms"] == facts["fp8_gemms_expected"] == 2 * 3 * facts["fp8_layers"] > 0
    assert base["resolved"]["fp8_gemms"] == 0
    assert facts["batch_sha256"] == base["resolved"]["batch_sha256"], "the same batches for all arms"
    assert len(set(facts["batch_sha256"])) == 2, "and others for each rank"
    assert json.loads(got["timing"])["method"] == "perf_counter_ranks_adjoining"
    assert "one GPU's" in row(frame, "bf16_eager", "joules_per_token")["reason"]
    assert "not modelled" in facts["prediction"]
    halves = row(frame, "bf16_eager", "forward_backward_ms")
    assert 0 < halves["value"] < base["value"]
    (ratio,) = paired_ratios(frame).to_dict("records")
    assert (ratio["arm"], ratio["baseline"]) == ("tensorwise_eager", "bf16_eager")
    assert not processes_left()


def test_the_first_step_of_two_ranks_is_one_processs_of_both_batches() -> None:
    of = case(ranks=2)
    arm = train.build(of, "bf16_eager", "cpu").run
    assert isinstance(arm, ranked.RankedArm)
    setup, source = arm.arm.setup, arm.arm.source
    text: Any = corpus_of(setup.model, source.data, source.path)
    trainee = prepare(replace(setup, accumulation=2, grad_clip=float("inf")), "cpu")
    both = [
        microbatches_of(setup.model, text, step, source.seed, (1, setup.batch, setup.seq), "cpu")[0]
        for step in range(2)
    ]
    loss = trainee.step(both)
    assert ranked.mean_loss(arm.control) == pytest.approx(float(loss), rel=1e-6)
    assert trainee.grad_norm is not None
    for first in arm.control:
        assert first.grad_norm == pytest.approx(float(trainee.grad_norm), rel=1e-5)
    whole = {n: p.grad for n, p in trainee.model.named_parameters() if p.dim() >= 2 and p.grad is not None}
    name = "layers.0.mlp.down.weight"
    assert name in whole
    half = whole[name].chunk(2)[1].reshape(-1)  # rank 1 holds the second half of the rows
    stride = (half.numel() // 4096) | 1
    mine = arm.control[1].gradients[name]
    # clipped to 1 on the ranks; the direction is that of one process
    assert torch.nn.functional.cosine_similarity(mine, half[::stride][:4096], dim=0) > 0.999999


@pytest.mark.parametrize(
    ("how", "cause", "message"),
    [
        ("killed", "build", "rank 1 of 2: was killed by SIGKILL"),
        ("killed later", "run", "rank 1 of 2: was killed by SIGKILL"),
        ("hangs", "build", "rank 1 of 2 is at fault: not all ended within 10 s"),
        ("bf16", "not_fp8", "rank 1"),
    ],
)
def test_a_fault_of_rank_1_is_named_and_the_other_arm_goes_on(
    how: str, cause: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_1", how)
    monkeypatch.setattr(ranked, "TIMEOUT_S", 10.0)
    frame = execute(tmp_path, ARMS, model=USERS, batch=16, ranks=2)
    wrong = frame[(frame["arm"] == "tensorwise_eager") & (frame["status"] == "failed")].to_dict("records")
    assert len(wrong) == 1
    assert message in wrong[0]["reason"]
    assert wrong[0]["cause"] == cause
    assert row(frame, "bf16_eager")["status"] == "ok"
    (ratio,) = paired_ratios(frame).to_dict("records")
    assert math.isnan(ratio["speedup"])
    assert not processes_left()


def test_a_step_is_the_slowest_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_1", "slow")
    work = train.build(case(model=USERS, batch=16, ranks=2), "bf16_eager", "cpu")
    split = Split()
    with work.held():
        samples = work.timer.back_to_back(work.run, 3, split=split)
    assert len(samples) == len(split.samples_ms) == 3
    assert min(samples) >= 1e3 * SLEEP_S
    assert min(split.samples_ms) >= 1e3 * SLEEP_S


def test_the_time_limit_of_a_block_grows_with_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy ranks whose block of steps takes far longer than the limit of one command."""
    monkeypatch.setenv("RANK_1", "slow")
    work = train.build(case(model=USERS, batch=16, ranks=2), "bf16_eager", "cpu")
    n = 12
    with work.held():
        monkeypatch.setattr(ranked, "TIMEOUT_S", SLEEP_S * n / 2)
        work.run()
        assert len(work.timer.back_to_back(work.run, n)) == n


def test_a_step_that_hangs_is_late_after_few_times_what_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_1", "slow")
    work = train.build(case(model=USERS, batch=16, ranks=2), "tensorwise_eager", "cpu")
    arm = work.run
    assert isinstance(arm, ranked.RankedArm)
    with work.held():
        arm()
        arm.on_ranks(becomes, "hangs")
        monkeypatch.setattr(ranked, "TIMEOUT_S", 1.0)
        before = time.monotonic()
        with pytest.raises(RanksError, match="rank 1 of 2 is at fault: not all ended within"):
            work.timer.back_to_back(work.run, 3)
    assert time.monotonic() - before < 60
    assert not processes_left()


def test_what_one_rank_refuses_leaves_no_memory_on_the_others() -> None:
    work = train.build(case(model=USERS, batch=16, ranks=2), "bf16_eager", "cpu")
    arm = work.run
    assert isinstance(arm, ranked.RankedArm)
    arm.on_ranks(becomes, "refuses")
    ranked.control_of.cache_clear()
    why = re.compile("rank 1 of 2: .* this rank has no place for it")
    with pytest.raises(ValueError, match=why), arm.resident():
        pytest.fail("one rank has nothing to run")
    assert arm.on_ranks(held) == [0, 0]
    with pytest.raises(ValueError, match=why):
        ranked.control_of(arm.arm, 2)
    assert arm.on_ranks(held) == [0, 0]


def test_why_an_arm_cannot_be_made_again_for_its_peak_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory was enough once, and is not the second time."""
    here = SimpleNamespace(arm=None, device=torch.device("cpu"))
    monkeypatch.setattr(ranked, "_held", [here])
    monkeypatch.setattr(ranked, "peak_memory", lambda: nullcontext(Peak()))
    monkeypatch.setattr(ranked, "enter", lambda arm: "AssertionError: no such mesh")
    with pytest.raises(ValueError, match="AssertionError: no such mesh"):
        ranked.peak(2)


def test_a_model_that_fsdp_cannot_shard_is_refused_in_one_line(tmp_path: Path) -> None:
    model = USERS.replace("build", "scalars")
    frame = execute(tmp_path, ["bf16_eager"], model=model, batch=16, ranks=2)
    (wrong,) = frame[frame["status"] == "failed"].to_dict("records")
    assert "rank 0 of 2: ValueError: fully_shard doesn't support scalar parameters" in wrong["reason"]
    assert not processes_left()


# What needs no ranks


@pytest.mark.parametrize(
    ("arm", "changes", "device", "message"),
    [
        ("torchao_tensorwise_eager", {}, "cpu", "ranks=2: these arms are not timed over ranks"),
        ("bf16_eager", {"batch": "max"}, "cpu", "give a number"),
        ("bf16_eager", {"ranks": 99}, "cuda", "99 ranks need 99 GPUs; here are"),
        ("rowwise_eager", {"fp8_all_gather": True}, "cpu", "take axes.fp8_all_gather=false"),
    ],
)
def test_what_is_not_timed_over_ranks_is_skipped_with_the_way_out(
    arm: str, changes: dict[str, Any], device: str, message: str
) -> None:
    why = train.unsupported(case(**{"ranks": 2, **changes}), arm, device)
    assert why is not None
    assert message in why.reason


def test_an_all_gather_of_one_process_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"fp8_all_gather=true: one process gathers nothing; add axes.ranks=2"
    ):
        case(fp8_all_gather=True)


def test_ranks_that_train_on_other_batches_have_no_facts() -> None:
    facts = dict.fromkeys(agreement.SHARED, 1) | {"batch_sha256": "a"}
    assert agreement.same_on_all([facts, facts])["batch_sha256"] == ["a", "a"]
    with pytest.raises(RanksError, match="rank 1 has batch_shapes = 2, rank 0 1") as caught:
        agreement.same_on_all([facts, {**facts, "batch_shapes": 2}])
    assert caught.value.rank == 1
    assert agreement.proofs_differ([{"fp8_gemms": 9}, {"fp8_gemms": 6}]).endswith("[9, 6]")
    assert ranked.slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    assert ranked.slowest([[1.0], []]) == []


@pytest.mark.parametrize(("gather", "world"), [(True, 4), (False, 4), (True, 8)])
def test_the_prediction_is_that_of_the_suite_scale(gather: bool, world: int) -> None:
    """Oracle: `sweep=scale` for the same job, eager."""
    recipe = RECIPES["tensorwise"].with_fp8_all_gather(gather)
    setup = Setup("llama3_1b", batch=2, seq=2048, compute="bf16", recipe=recipe)
    found = training.predicted(setup, world, "cpu", named("h100"))
    job = ClusterJob("llama3_1b", "h100", world, 2, 2048, checkpointing="none", node=world, recipe="tensorwise",
              gather_fp8=gather, weights="bf16", compiled=False)  # fmt: skip
    rates = rates_of(named("h100"))
    expected = gain(job, rates)
    assert isinstance(found, dict)
    assert expected is not None
    assert found["speedup"] == [expected.value, expected.low, expected.high]
    assert found["step_ms"] == 1e3 * step_parts(job, rates).total
    base = training.predicted(replace(setup, recipe=None), world, "cpu", named("h100"))
    assert isinstance(base, dict)
    assert base["step_ms"] == 1e3 * step_parts(replace(job, recipe=""), rates).total
    assert base["speedup"] is None


def test_without_rates_there_is_no_prediction() -> None:
    setup = Setup("nano", batch=2, seq=64, compute="bf16", recipe=RECIPES["tensorwise"])
    assert training.predicted(setup, 2, "cpu") == "no prediction: rates of a cpu are not modelled"
    assert "not fp32" in str(training.predicted(replace(setup, compute="fp32"), 2, "cpu", named("h100")))
    assert "no FP8 matrix units" in str(training.predicted(setup, 2, "cpu", named("a100")))
