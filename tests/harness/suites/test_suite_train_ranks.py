"""Suite `train` on several ranks. Oracles: one process that takes all ranks' batches, planted faults on rank 1."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import on_ranks
import psutil
import pytest
from model_on_ranks import SLEEP_S
from train_cases import case, execute, row

from harness.engine.arms import TimeLimits
from harness.store.compare import paired_ratios
from harness.store.errors import Cause
from harness.store.measurement import FIELD, ProofOutcome
from harness.suites import train
from harness.training.batches import corpus_of, microbatches_of
from harness.training.parallel import ranked
from harness.training.setup import Setup, prepare
from harness.training.steps import cause_of_fault
from harness.training.timed import Source, TrainingArm

if TYPE_CHECKING:
    from pathlib import Path

    from harness.timing.workload import Numerics

USERS = '{"_target_": "model_on_ranks.build", "batch": "model_on_ranks.batch"}'
ARMS = ["bf16_eager", "tensorwise_eager"]
NAN = float("nan")


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


def first_step() -> tuple[float, float, Setup, Source]:
    """What the control holds, on this rank."""
    arm = train.build(case(ranks=2), "bf16_eager", "cpu").run
    assert isinstance(arm, ranked.RankedArm)
    return arm.control.loss, arm.control.grad_norm, arm.setup, arm.source


def test_the_first_step_of_two_ranks_is_one_processs_of_both_batches() -> None:
    found = on_ranks.run(first_step, 2)
    *_, setup, source = found[0]
    text: Any = corpus_of(setup.model, source.data, source.path)
    trainee = prepare(replace(setup, accumulation=2, grad_clip=float("inf")), "cpu")
    both = [
        microbatches_of(setup.model, text, step, source.seed, (1, setup.batch, setup.seq), "cpu")[0]
        for step in range(2)
    ]
    loss = trainee.step(both)
    assert sum(own for own, *_ in found) / 2 == pytest.approx(float(loss), rel=1e-6)
    assert trainee.grad_norm is not None
    for _, norm, *_ in found:
        assert norm == pytest.approx(float(trainee.grad_norm), rel=1e-5)


@pytest.mark.parametrize(
    ("compute", "size", "ranks"),
    [("fp32", 4, 2), pytest.param("bf16_autocast", 2, 3, marks=pytest.mark.slow)],
)
def test_codes_are_a_byte_each_at_the_collective_and_losses_stay(
    compute: str, size: int, ranks: int, tmp_path: Path
) -> None:
    """Oracle: sizes of the model by hand. Three ranks have shards of unequal length, padded to those of the first."""
    frame = execute(tmp_path, ARMS, model="llama_tiny", ranks=ranks, fp8_all_gather=True, compute=compute)
    sent = {
        arm: of["value"].sum()
        for arm, of in frame[
            (frame["metric"] == "wire_bytes") & frame["part"].str.startswith("all_gather")
        ].groupby("arm")
    }
    trainee = prepare(train._setup(case(model="llama_tiny"), ARMS[1], 2), "cpu")
    # Blocks are freed after the forward pass and gathered again; the rest stays
    codes = sum(
        (1 + layer.fqn.startswith("layers.")) * math.ceil(layer.out_features / ranks) * layer.in_features
        for layer in trainee.audit.converted
    )
    assert codes > 0
    assert sent["bf16_eager"] - sent["tensorwise_eager"] == codes * (size - 1)
    apart = row(frame, "tensorwise_eager", "loss_deviation")
    assert apart["value"] == apart["resolved"]["bound"] == 0
    assert row(frame, "tensorwise_eager")["resolved"]["scale_all_reduces_per_step"] > 0
    reduced = frame[(frame["metric"] == "collectives") & frame["part"].str.startswith("reduce_scatter")]
    assert dict(zip(reduced["arm"], reduced["value"], strict=True)) == dict.fromkeys(
        ARMS, len(ranked.blocks_of(trainee.model)) + 1
    )


def checked(high: float | None) -> tuple[Numerics, Numerics]:
    """The arm itself; and where the last loss is another one with weights gathered in high precision."""
    work = train.build(case(model="llama_tiny", ranks=2, fp8_all_gather=True), ARMS[1], "cpu")
    arm: Any = work.run
    counted, right = arm.counted, work.check()

    def wrong(setup: Setup) -> Any:
        losses, *rest = counted(setup)
        gathers = setup.recipe is not None and setup.recipe.fp8_all_gather
        return (losses if gathers else [*losses[:-1], high]), *rest

    arm.counted = wrong
    return right, work.check()


@pytest.mark.parametrize("high", [pytest.param(1.5, marks=pytest.mark.slow), NAN])
def test_other_losses_than_those_of_weights_gathered_in_high_precision_have_no_speed(high: float) -> None:
    for right, wrong in on_ranks.run(checked, 2, high):
        assert right.ok
        assert (wrong.ok, wrong.cause) == (False, Cause.NUMERICS)
        assert "weights gathered in high precision" in wrong.reason


@pytest.mark.parametrize(
    ("how", "cause", "message"),
    [
        pytest.param(
            "killed",
            "died",
            "rank 1 of 2: its process died (signal 9, SIGKILL) after it was begun",
            marks=pytest.mark.slow,
        ),
        ("killed later", "died", "rank 1 of 2: its process died (signal 9, SIGKILL) after timing began"),
        pytest.param(
            "hangs",
            "timeout",
            "rank 1 of 2 is at fault: ",
            marks=pytest.mark.slow,  # it waits for them
        ),
        ("bf16", "not_fp8", "rank 1"),
    ],
)
def test_a_fault_of_rank_1_is_named_and_the_other_arm_goes_on(
    how: str, cause: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK_1", how)
    limits = TimeLimits(silence_s=20.0 if how == "hangs" else 300.0)
    frame = execute(tmp_path, ARMS, limits=limits, model=USERS, batch=16, ranks=2)
    wrong = frame[(frame["arm"] == "tensorwise_eager") & (frame["status"] == "failed")].to_dict("records")
    assert len(wrong) == 1
    assert message in wrong[0]["reason"]
    assert wrong[0]["cause"] == cause
    assert row(frame, "bf16_eager")["status"] == "ok"
    (ratio,) = paired_ratios(frame).to_dict("records")
    assert math.isnan(ratio["speedup"])
    assert not processes_left()


def test_a_step_is_the_slowest_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_1", "slow")
    frame = execute(tmp_path, ["bf16_eager"], model=USERS, batch=16, ranks=2)
    for metric in ("time_ms", "forward_backward_ms"):
        assert min(row(frame, "bf16_eager", metric)["samples"]) >= 1e3 * SLEEP_S


# What needs no ranks


def test_ranks_that_train_on_other_batches_have_no_facts() -> None:
    facts = dict.fromkeys(ranked.SHARED, 1) | {"batch_sha256": "a"}
    assert ranked.same_on_all([facts, facts])["batch_sha256"] == ["a", "a"]
    with pytest.raises(ValueError, match="rank 1 has batch_shapes = 2, rank 0 1"):
        ranked.same_on_all([facts, {**facts, "batch_shapes": 2}])


PROVED, DISPROVED, UNPROVEN = ProofOutcome.PROVED, ProofOutcome.DISPROVED, ProofOutcome.UNPROVEN


@pytest.mark.parametrize(
    ("gemms", "second", "reason", "cause"),
    [
        ([9, 9], PROVED, "", ""),
        ([9, 6], PROVED, "ranks ran other numbers of FP8 GEMMs: [9, 6]", Cause.NOT_FP8),
        ([9, 6], DISPROVED, "rank 1 of 2: disproved", Cause.NOT_FP8),
        ([9, 9], UNPROVEN, "rank 1 of 2: unproven", Cause.UNPROVEN),
    ],
)
def test_ranks_count_only_if_each_is_proved_and_all_ran_the_same(
    gemms: list[int], second: ProofOutcome, reason: str, cause: str
) -> None:
    """Oracle: by hand. What the ranks tell is given: rank 0's proof holds."""
    faults = ["", "" if second is PROVED else str(second)]
    told = zip(gemms, (PROVED, second), strict=True)
    proofs = list(zip(faults, [{"fp8_gemms": n, FIELD: str(outcome)} for n, outcome in told], strict=True))

    arm = TrainingArm()
    arm.resolved = {}
    fault, proof = arm._proved(proofs)
    assert fault == reason
    assert not reason or cause_of_fault(proof) is cause
    assert arm.resolved["proved_on_ranks"] == faults.count("")
    assert arm.resolved[FIELD] == second, "not rank 0's, whose proof holds"
