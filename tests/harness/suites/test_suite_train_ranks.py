"""Suite `train` on several ranks. Oracles: one process that takes all ranks' batches, planted faults on rank 1."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import create_autospec

import psutil
import pytest
from model_on_ranks import SLEEP_S
from train_cases import case, execute, row

from harness.machine.ranks import Gang, RanksError
from harness.store.compare import paired_ratios
from harness.store.errors import Cause
from harness.store.measurement import FIELD, ProofOutcome
from harness.suites import train
from harness.timing.clock import Split
from harness.timing.workload import Numerics
from harness.training.batches import corpus_of, microbatches_of
from harness.training.parallel import ranked
from harness.training.setup import Setup, prepare
from harness.training.steps import FirstStep
from harness.training.timed import Arm, mean_loss

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USERS = '{"_target_": "model_on_ranks.build", "batch": "model_on_ranks.batch"}'
ARMS = ["bf16_eager", "tensorwise_eager"]
NAN = float("nan")


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
    setup, source = arm.setup, arm.source
    text: Any = corpus_of(setup.model, source.data, source.path)
    trainee = prepare(replace(setup, accumulation=2, grad_clip=float("inf")), "cpu")
    both = [
        microbatches_of(setup.model, text, step, source.seed, (1, setup.batch, setup.seq), "cpu")[0]
        for step in range(2)
    ]
    loss = trainee.step(both)
    assert mean_loss(arm.controls) == pytest.approx(float(loss), rel=1e-6)
    assert trainee.grad_norm is not None
    for first in arm.controls:
        assert first.grad_norm == pytest.approx(float(trainee.grad_norm), rel=1e-5)


@pytest.mark.parametrize(("compute", "size", "ranks"), [("fp32", 4, 2), ("bf16_autocast", 2, 3)])
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


@pytest.mark.parametrize("high", [1.5, NAN])
def test_other_losses_than_those_of_weights_gathered_in_high_precision_have_no_speed(
    high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = train.build(case(model="llama_tiny", ranks=2, fp8_all_gather=True), ARMS[1], "cpu")
    arm = work.run
    assert isinstance(arm, ranked.RankedArm)
    counted = arm.counted

    def wrong(setup: Setup) -> Any:
        losses, *rest = counted(setup)
        gathers = setup.recipe is not None and setup.recipe.fp8_all_gather
        return (losses if gathers else [*losses[:-1], high]), *rest

    assert work.check().ok
    monkeypatch.setattr(arm, "counted", wrong)
    found = work.check()
    assert (found.ok, found.cause) == (False, Cause.NUMERICS)
    assert "weights gathered in high precision" in found.reason


@pytest.mark.parametrize(
    ("how", "cause", "message"),
    [
        ("killed", "build", "rank 1 of 2: was killed by SIGKILL"),
        ("killed later", "run", "rank 1 of 2: was killed by SIGKILL"),
        pytest.param(
            "hangs",
            "build",
            "rank 1 of 2 is at fault: not all ended within 10 s",
            marks=pytest.mark.slow,  # it waits for them
        ),
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


# What needs no ranks


def test_ranks_that_train_on_other_batches_have_no_facts() -> None:
    facts = dict.fromkeys(ranked.SHARED, 1) | {"batch_sha256": "a"}
    assert ranked.same_on_all([facts, facts])["batch_sha256"] == ["a", "a"]
    with pytest.raises(RanksError, match="rank 1 has batch_shapes = 2, rank 0 1") as caught:
        ranked.same_on_all([facts, {**facts, "batch_shapes": 2}])
    assert caught.value.rank == 1


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

    class Told(Arm):
        device, controls = "cpu", (FirstStep(1.0, 1.0),) * 2

        def __init__(self) -> None:
            self.resolved = {}

        def resident(self, *, recorded: bool = True) -> nullcontext[None]:
            return nullcontext()

        def on_all(self, method: str, n: int) -> list[Any]:
            return list(self.controls) if method == "first_step" else proofs

        def expected(self) -> Numerics:
            return Numerics({})

    arm = Told()
    found = arm.check()
    assert (found.ok, found.reason) == (not reason, reason)
    assert not reason or found.cause is cause
    assert arm.resolved["proved_on_ranks"] == faults.count("")
    assert arm.resolved[FIELD] == second, "not rank 0's, whose proof holds"


def test_a_time_limit_grows_with_the_steps_and_what_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: by hand, of ranks that take 2 s for each command."""
    now, gang = [0.0], create_autospec(Gang, instance=True)

    def run(*_: object, **__: object) -> list[Any]:
        now[0] += 2.0
        return []

    gang.run.side_effect = run
    monkeypatch.setattr(ranked, "time", SimpleNamespace(monotonic=lambda: now[0]))
    crew = ranked.Crew(gang)
    for n in (0, 4, 10, 0, 1):  # steps of no length known yet; then of 0.5 s; no steps; of 0.2 s
        crew.run(ranked.ask, n=n)
    limits = [call.kwargs["timeout_s"] for call in gang.run.call_args_list]
    assert limits == pytest.approx([300.0, 1200.0, 300.0 + 4 * 0.5 * 10, 300.0, 300.0 + 4 * 0.2])
