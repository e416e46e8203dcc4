"""Suite `divergence` and bisection. Oracles: the arms' own weights, batches and codes, bitwise; planted faults."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_for_training import BATCH, build
from train_cases import divergence_case

from fp8core import RECIPES, Float8Tensor, GroupedMatmul
from fp8core.gemm.layout import Operand
from fp8core.inputs import operands
from harness import store
from harness.__main__ import main
from harness.store.errors import UsageError
from harness.suites import divergence
from harness.suites.common import recipe_unsupported
from harness.timing.workload import Trial
from harness.training.loop import TrainingJob
from harness.training.setup import prepare

TEXT = Path(__file__).read_bytes() * 4  # any text will do


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


def test_seeds_differ_in_weights_and_batches() -> None:
    one, two = (divergence.job_of(divergence_case(seed=seed), "base", "cpu") for seed in (0, 1))
    assert not torch.equal(one.batches(0)[0][0], two.batches(0)[0][0])
    assert not torch.equal(weights(one)["layers.0.mlp.up.weight"], weights(two)["layers.0.mlp.up.weight"])


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_golden_has_the_candidates_codes_at_the_first_step(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rowwise bit for bit in every code of the forward and backward pass. Tensorwise up to the order in which the
    CPU's kernel multiplies by the two scales: its products differ by ulps of float32, and with them the scales and
    the codes that lie at a midpoint. Not counted are codes below eight float32 ulps of the largest: the gradients of
    a first token's query and key cancel to nothing but rounding errors."""
    real, both = operands.lines_one, operands.rows_and_columns

    def codes_of(arm: str) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

        def spy(x: Any, cast: Any, dim: int, memory: Any = None, role: str = "input", **how: Any) -> Any:
            made = real(x, cast, dim, memory, role, **how)
            if isinstance(made, Operand) and not isinstance(x, Float8Tensor):
                seen.append((role, made.qdata.float(), made.scale_inv.clone()))
            return made

        def spy_both(x: Any, cast: Any, role: str) -> Any:
            made = both(x, cast, role)
            seen.extend((role, each.qdata.float(), each.scale_inv.clone()) for each in made)
            return made

        monkeypatch.setattr(operands, "lines_one", spy)
        monkeypatch.setattr(operands, "rows_and_columns", spy_both)
        monkeypatch.setattr("fp8core.scaled_linear.lines_one", spy)
        job = divergence.job_of(divergence_case(), arm, "cpu")
        prepare(job.setup, "cpu").step(job.batches(0))
        return seen

    mine, golden = codes_of(recipe), codes_of(f"{recipe}_golden")
    assert [role for role, *_ in mine] == [role for role, *_ in golden]
    assert len(mine) > 20
    assert torch.equal(mine[0][1], golden[0][1])
    scales = zip((scale for *_, scale in mine), (scale for *_, scale in golden), strict=True)
    ratio = max(float((a / b - 1).abs().max()) for a, b in scales)
    noise = 2.0**-20 if recipe == "tensorwise" else 0.0
    differing = sum(
        int(((a != b) & (torch.maximum(a.abs(), b.abs()) > noise * b.abs().max())).sum())
        for (_, a, _), (_, b, _) in zip(mine, golden, strict=True)
    )
    if recipe == "rowwise":
        assert (ratio, differing) == (0.0, 0)
    else:
        assert ratio <= 2.0**-20  # a few ulps, for the roundings of two blocks add up
        assert differing <= 1e-4 * sum(codes.numel() for _, codes, _ in mine)


def run(arm: str, folder: Path, **changes: Any) -> Trial:
    return divergence.trial(divergence_case(**changes), arm, "cpu", folder, lambda done, total: None)


def curve(trial: Trial, metric: str = "loss") -> tuple[float, ...]:
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


def test_rows_say_what_ran(tmp_path: Path) -> None:
    trial = run("rowwise", tmp_path, schedule="keep_bf16@layers.0.*", accumulation=2, beta2=0.99)
    said = trial.resolved
    assert said["tokens_per_step"] == 2 * 4 * 16
    assert said["recipe"] == "rowwise"
    assert said["schedule"] == "keep_bf16@layers.0.*"
    assert said["data"] == "stdlib"
    assert len(str(said["data_sha256"])) == 64
    assert said["optimizer"] == "AdamW, betas 0.9 and 0.99, weight decay 0.1"
    assert "head" in said["fp8_layers"]
    assert (said["nonfinite_step"], said["stopped"]) == (None, "")
    cast = {s.part for s in trial.series if s.metric == "sqnr_db"}
    assert cast
    assert not any(part.startswith("layers.0.") for part in cast)


def test_the_head_of_the_character_set_is_left_alone_and_says_why(tmp_path: Path) -> None:
    job = divergence.job_of(
        divergence_case(model="nanogpt_char_cpu", data="bytes", data_path=str(text(tmp_path))),
        "tensorwise",
        "cpu",
    )
    setup = dataclasses.replace(job.setup, vocab_size=65)
    (head,) = prepare(setup, "cpu").audit.not_converted
    assert head.fqn == "head"
    assert "65" in head.reason


def text(folder: Path, content: bytes = TEXT) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text").write_bytes(content)
    return folder / "text"


def test_the_negative_control_casts_gradients_to_zero(tmp_path: Path) -> None:
    trial = run("negative_control", tmp_path, steps=6, batch=8, seq=64)
    scales = {s.part: s.samples for s in trial.series if s.metric == "scale_log2"}
    lost = {s.part: s.samples[0] for s in trial.series if s.metric == "underflow_frac"}
    gradients = [part for part in scales if part.endswith(":grad_output")]
    assert all(scales[part] == (0.0, 0.0) for part in gradients)
    assert min(lost[part] for part in gradients) > 0.5
    assert max(lost[part] for part in lost if part not in gradients) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "nanoo"}, r"unknown model 'nanoo' \(nearest: nano\)"),
        ({"data": "stdlb"}, r"unknown data 'stdlb' \(nearest: stdlib\)"),
        ({"data": "bytes"}, "data=bytes needs a file: data_path=FILE"),
        ({"data_path": "/no/such"}, "data=stdlib takes no path"),
        ({"lr": 0.0}, "lr=0.0: expected a finite number above 0"),
        ({"min_lr_frac": 2.0}, "min_lr=0.002: expected a number from 0 to lr=0.001"),
        ({"lr_warmup": 10}, "warmup=10: expected an integer from 0 to steps - 1 = 9"),
        ({"beta2": 1.0}, "beta2=1: expected a number below 1"),
        ({"schedule": "warmup:3"}, r"'warmup' is unknown \(nearest: warmup_bf16\); expected one of"),
        ({"schedule": "cooldown_bf16:1"}, "could mean one step or the whole run; write cooldown_bf16:1step"),
        ({"seq": 512}, "seq=512: model nano takes at most 256 tokens"),
        ({"layers": 3}, "layers=3: model nano has 2"),
        ({"model": '{"_target_": "model_for_training.build"}'}, "model.batch is not named"),
        ({"model": '{"_target_": "model_for_training.build", "batch": "model_for_training.wrong"}'}, "returned shape"),
        ({"model": '{"_target_": "model_for_training.build", "batch": "model_for_training.fails"}'}, r"model_for_training.fails\(step=0, seed=0, batch_size=4, device=cpu\) failed: FileNotFoundError: no data"),
        ({"model": '{"_target_": "model_for_training.build", "batch": "model_for_training.unseeded"}'}, "model_for_training.unseeded returned two different batches for the same step=0 and seed=0"),
    ],
)  # fmt: skip
def test_what_makes_no_run_is_refused_before_one_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        divergence_case(**changes)
    assert "\n" not in str(caught.value)


def test_a_schedule_that_fits_no_layer_is_refused_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep=divergence", "device=cpu", "dry_run=true"]
    assert main([*words, "schedule=warmup_bf16:10@layer.*"]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(
        "error: schedule: warmup_bf16:10@layer.*: no FP8 layer is named like "
        "'layer.*'; there are layers.0.attention.q"
    )
    assert main([*words, "schedule=warmup_bf16:10@layers.*"]) == 0
    assert (
        main([*words, "schedule=warmup_bf16:10@layer.*", "arms=[base,base_eps]"]) == 0
    )  # to which it does not apply


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="training part has 90 tokens, seq=128 needs more"):
        divergence_case(data="bytes", data_path=str(text(tmp_path, b"x" * 100)), seq=128)
    with pytest.raises(UsageError, match="held-out part has 10 tokens, seq=16 needs more"):
        divergence_case(data="bytes", data_path=str(text(tmp_path, b"x" * 100)))


def test_tokens_that_fp8_cannot_take_are_skipped_with_the_reason() -> None:
    why = divergence.unsupported(divergence_case(batch=3, seq=5), "tensorwise", "cpu")
    assert why is not None
    assert "batch x seq = 15 tokens; GEMM grad_weight takes multiples of 16" in why.reason
    assert divergence.unsupported(divergence_case(batch=3, seq=5), "rowwise_with_gw_hp", "cpu") is None
    assert divergence.unsupported(divergence_case(batch=3, seq=5), "base", "cpu") is None
    blockwise = divergence.unsupported(divergence_case(), "blockwise", "cpu")
    assert blockwise is not None
    assert blockwise.kind == "device"
    assert divergence.unsupported(divergence_case(), "blockwise_golden", "cpu") is None


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_a_recipe_is_asked_of_its_own_backend(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an invented H200, which multiplies blocks by fp8core's kernel. Oracle: `RECIPES`; only 1x32 has no kernel there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    why = recipe_unsupported(RECIPES[name], 32, "cuda")
    assert (why is not None) == (name == "mxfp8"), why


def test_a_batch_function_that_fails_in_the_middle_is_named_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "sweep=divergence",
        "device=cpu",
        "workers=1",
        "model._target_=model_for_training.build",
        "arms=[base]",
    ]
    words += ["model.batch=model_for_training.fails_late", "axes.steps=4", "axes.lr_warmup=0", "axes.seed=7"]
    assert main([*words, f"results_dir={tmp_path}", f"reports_dir={tmp_path}"]) == 1
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  failed: ")]
    assert told.endswith(
        "base: UsageError: model_for_training.fails_late(step=2, seed=7, batch_size=8, device=cpu) failed: "
        "FileNotFoundError: no more data"
    )


def test_a_model_of_ones_own_trains_on_its_own_batches(tmp_path: Path) -> None:
    model = '{"_target_": "model_for_training.build", "batch": "model_for_training.batch", "width": 32}'
    trial = run("tensorwise", tmp_path, model=model, batch=BATCH, lr=1e-2)
    assert trial.resolved["data"] == "batches of the model's own"
    assert trial.resolved["fp8_layers"] == ["hidden", "out"]
    assert curve(trial)[-1] < curve(trial)[0]
    assert isinstance(build(32).hidden, torch.nn.Linear)


@pytest.mark.slow
def test_the_sweep_end_to_end_here_and_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every arm's curves are bit for bit the same, and the verdict is printed."""
    monkeypatch.chdir(tmp_path)
    words = ["sweep=divergence", "device=cpu", "axes.steps=50", "axes.lr_warmup=10", "axes.seed=[0,1,2]"]
    words += ["arms=[base,tensorwise,negative_control]", "axes.diagnose_every=30"]
    frames = []
    for where in ("isolate=false", "workers=2"):
        assert main([*words, where]) == 0
        out = capsys.readouterr().out
        assert "FAIL         negative_control against base" in out
        frame = store.read(out.splitlines()[-2].split()[-1])
        frame = frame[frame["metric"] != "elapsed_s"]
        frames.append(
            {
                (row.arm, json.loads(row.axes)["seed"], row.metric, row.part): list(row.samples)
                for row in frame.itertuples(index=False)
            }
        )
    assert frames[0] == frames[1]
    assert len(frames[0]) > 100


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
