"""Suite `divergence`. Oracles: the arms' own weights, batches and codes, bitwise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from train_cases import divergence_case

from fp8core import GroupedMatmul
from harness.store.case import ABLATIONS, KNOBS
from harness.suites import divergence
from harness.training.setup import prepare

if TYPE_CHECKING:
    from harness.timing.workload import TrialOutcome
    from harness.training.loop import TrainingJob


def weights(job: TrainingJob) -> dict[str, torch.Tensor]:
    from harness.training.loop import perturb

    model = prepare(job.setup, "cpu").model
    if job.perturb:
        perturb(model, job.setup.seed)
    return {name: p.detach() for name, p in model.named_parameters()}


ARMS = (
    "base",
    "tensorwise",
    "rowwise_golden",
    "base_to_tensorwise",
    "tensorwise_to_base",
    "negative_control",
)


@pytest.mark.parametrize("arm", [*ARMS, "base_eps", "tensorwise_eps", "base_other"])
def test_arms_share_weights_and_batches_but_where_they_must_not(arm: str) -> None:
    base, job = (divergence.job_of(divergence_case(seed=2), name, "cpu") for name in ("base", arm))
    same_batches = all(
        torch.equal(x, y)
        for step in (0, 7)
        for mine, theirs in zip(job.batches(step), base.batches(step), strict=True)
        for x, y in zip(mine, theirs, strict=True)
    )
    mine, theirs = weights(job), weights(base)
    assert mine.keys() == theirs.keys()
    same_weights = all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert same_batches == (arm != "base_other")
    assert same_weights == (arm in ARMS)
    assert all(
        torch.equal(x, y)
        for a, b in zip(job.heldout, base.heldout, strict=True)
        for x, y in zip(a, b, strict=True)
    )
    if arm.endswith("_eps"):
        relative = torch.cat(
            [((mine[n] - theirs[n]) / theirs[n]).flatten() for n in mine if mine[n].dim() > 1]
        )
        # 80,000 draws: the standard error of their standard deviation is 0.25 %.
        assert float(relative.std()) == pytest.approx(1e-4, rel=0.02)


def run(arm: str, folder: Path, **changes: Any) -> TrialOutcome:
    return divergence.trial(divergence_case(**changes), arm, "cpu", folder, lambda done, total: None)


def curve(trial: TrialOutcome, metric: str = "loss") -> tuple[float, ...]:
    (found,) = (s.samples for s in trial.series if s.metric == metric and not s.part)
    return found


def test_each_pattern_is_its_base_arm_until_it_switches(tmp_path: Path) -> None:
    base, fp8, warm, cool = (
        run(arm, tmp_path / arm) for arm in ("base", "tensorwise", "base_to_tensorwise", "tensorwise_to_base")
    )
    assert (warm.resolved["switch_steps"], cool.resolved["switch_steps"]) == ([2], [8])
    assert curve(warm)[:3] == curve(base)[:2] + curve(warm)[2:3]
    assert curve(warm)[2] != curve(base)[2]
    assert curve(cool)[:8] == curve(fp8)[:8]
    assert curve(cool)[8] != curve(fp8)[8]
    assert (warm.resolved["switches"], fp8.resolved["switches"]) == (1, 0)


def test_the_negative_control_casts_gradients_to_zero(tmp_path: Path) -> None:
    trial = run("negative_control", tmp_path, steps=6, batch=8, seq=64)
    scales = {s.part: s.samples for s in trial.series if s.metric == "scale_log2"}
    lost = {s.part: s.samples[0] for s in trial.series if s.metric == "underflow_frac"}
    gradients = [part for part in scales if part.endswith(":grad_output")]
    assert all(scales[part] == (0.0, 0.0) for part in gradients)
    assert min(lost[part] for part in gradients) > 0.5
    assert max(lost[part] for part in lost if part not in gradients) < 0.1


def test_experts_in_fp8() -> None:
    """Oracle: the converted modules: of the recipes' arms alone, emulated in the golden ones; no schedule holds them."""
    moe = divergence_case(model="llama_moe_tiny", experts="fp8")
    found = {}
    for arm in ("base", "rowwise", "rowwise_golden", "negative_control"):
        assert divergence.unsupported(moe, arm, "cpu") is None
        model = prepare(divergence.setup_of(moe, arm), "cpu").model
        found[arm] = {str(m.recipe) for m in model.modules() if isinstance(m, GroupedMatmul)}
    golden = "rowwise, backend=reference_bf16"
    assert found == {
        "base": {"None"},
        "rowwise": {"rowwise"},
        "rowwise_golden": {golden},
        "negative_control": {"None"},
    }
    why = divergence.unsupported(moe, "base_to_rowwise", "cpu")
    assert why is not None
    assert "holds nn.Linear layers back, not experts" in why.reason


PARTS = {name: info.arm for name, info in divergence.ARMS.items() if info.arm.variant in ABLATIONS}


def test_the_first_loss_tells_which_parts_the_forward_pass_has(tmp_path: Path) -> None:
    losses = {}
    for arm in ("base", "tensorwise_golden", *(a for a in PARTS if PARTS[a].recipe == "tensorwise")):
        trial = run(arm, tmp_path / arm, steps=4, eval_every=0, diagnose_every=0)
        losses[arm] = curve(trial)
        if arm in PARTS:
            assert trial.resolved["emulated"] is True
    first = {arm: values[0] for arm, values in losses.items()}
    backward_only = ("only_grad_output", "only_grad_input", "only_grad_weight")
    for part in backward_only:
        assert first[f"tensorwise_{part}"] == first["base"], part
    for part in ("only_output", "e4m3_gradients"):
        assert first[f"tensorwise_{part}"] == first["tensorwise_golden"], part
    one_operand = {first["tensorwise_only_input"], first["tensorwise_only_weight"]}
    assert len(one_operand | {first["base"], first["tensorwise_golden"]}) == 4
    assert len({tuple(values) for values in losses.values()}) == len(losses)  # no two arms train alike


def test_the_first_loss_tells_which_knobs_of_four_bits_the_forward_pass_has(tmp_path: Path) -> None:
    """Oracle: the recipe. grad_output alone is rounded stochastically, grad_weight alone is transformed: the first loss has neither."""
    parts = [
        info.arm.variant for info in map(divergence.ARMS.get, PARTS) if info and info.arm.recipe == "nvfp4"
    ]
    assert set(parts) == {*KNOBS, "only_output", "only_grad_input", "only_grad_weight"}
    assert "nvfp4_golden" not in divergence.ARMS  # it would be the arm itself
    arms = ["base", "nvfp4", *(f"nvfp4_{part}" for part in (*KNOBS, "only_output"))]
    losses = {}
    for arm in arms:
        trial = run(arm, tmp_path / arm, steps=4, eval_every=0, diagnose_every=0)
        losses[arm] = curve(trial)
        assert arm == "base" or trial.resolved["emulated"] is True
    first = {arm: values[0] for arm, values in losses.items()}
    assert (
        first["nvfp4"] == first["nvfp4_nearest"] == first["nvfp4_no_hadamard"] == first["nvfp4_only_output"]
    )
    assert len({first["nvfp4"], first["base"], first["nvfp4_1x16_weight"]}) == 3
    assert len({tuple(values) for values in losses.values()}) == len(arms)  # no two arms train alike
