"""Suite `divergence` and bisection. Oracles: the arms' own weights, batches and codes, bitwise; planted faults."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_for_training import BATCH, build

from fp8core import RECIPES, Float8Linear, Float8Tensor, GroupedMatmul, PrecisionSchedule
from fp8core.gemm.layout import Operand
from fp8core.inputs import operands
from harness import store
from harness.__main__ import main
from harness.store.case import Case
from harness.store.errors import UsageError
from harness.suites import divergence
from harness.suites.common import recipe_unsupported
from harness.timing.workload import Trial
from harness.training.bisect import Finding, bisect, locate, schedule_with
from harness.training.loop import Job, train
from harness.training.setup import prepare

TEXT = Path(__file__).read_bytes() * 4  # any text will do


def case(**changes: Any) -> Case:
    axes = {
        "steps": 10,
        "batch": 4,
        "seq": 16,
        "eval_every": 5,
        "eval_batches": 1,
        "diagnose_every": 5,
        **changes,
    }
    return Case.of("divergence", divergence.points([], {k: [v] for k, v in axes.items()}, None)[0] | axes)


def weights(job: Job) -> dict[str, torch.Tensor]:
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
    base, job = (divergence.job_of(case(seed=2), name, "cpu") for name in ("base", arm))
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
    one, two = (divergence.job_of(case(seed=seed), "base", "cpu") for seed in (0, 1))
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
        job = divergence.job_of(case(), arm, "cpu")
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
    return divergence.trial(case(**changes), arm, "cpu", folder, lambda done, total: None)


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
        case(model="nanogpt_char_cpu", data="bytes", data_path=str(text(tmp_path))), "tensorwise", "cpu"
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
        case(**changes)
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
        case(data="bytes", data_path=str(text(tmp_path, b"x" * 100)), seq=128)
    with pytest.raises(UsageError, match="held-out part has 10 tokens, seq=16 needs more"):
        case(data="bytes", data_path=str(text(tmp_path, b"x" * 100)))


def test_tokens_that_fp8_cannot_take_are_skipped_with_the_reason() -> None:
    why = divergence.unsupported(case(batch=3, seq=5), "tensorwise", "cpu")
    assert why is not None
    assert "batch x seq = 15 tokens; GEMM grad_weight takes multiples of 16" in why.reason
    assert divergence.unsupported(case(batch=3, seq=5), "rowwise_with_gw_hp", "cpu") is None
    assert divergence.unsupported(case(batch=3, seq=5), "base", "cpu") is None
    blockwise = divergence.unsupported(case(), "blockwise", "cpu")
    assert blockwise is not None
    assert blockwise.kind == "device"
    assert divergence.unsupported(case(), "blockwise_golden", "cpu") is None


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


# Bisection


def planted(*culprits: set[str]) -> tuple[Any, list[frozenset[str]]]:
    """A run that fails if all members of one of the sets are in FP8; and what was asked."""
    asked: list[frozenset[str]] = []

    def fails(chosen: frozenset[str]) -> bool:
        asked.append(chosen)
        return any(culprit <= chosen for culprit in culprits)

    return fails, asked


UNITS = [f"layers.{i}" for i in range(32)]


@pytest.mark.parametrize("index", range(32))
def test_one_culprit_is_found_wherever_it_is_in_logarithmic_time(index: int) -> None:
    fails, asked = planted({UNITS[index]})
    assert bisect(UNITS, fails) == Finding(((UNITS[index],),), True, len(asked))
    assert len(asked) <= 2 * 5 + 3  # 2 log2(32), and all, none and the rest
    assert len(set(asked)) == len(asked)


def test_an_interaction_is_said_to_be_one() -> None:
    finding = bisect(UNITS, planted({"layers.3", "layers.20"})[0])
    assert finding.culprits == (("layers.3", "layers.20"),)
    assert "layers.3 and layers.20 fail together and not one without the other" in str(finding)
    assert finding.rest_passes


def test_several_culprits_are_found_one_after_the_other_up_to_a_number() -> None:
    fails, _ = planted({"layers.1"}, {"layers.9"}, {"layers.30"})
    found = bisect(UNITS, fails)
    assert {units[0] for units in found.culprits} == {"layers.1", "layers.9", "layers.30"}
    assert found.rest_passes
    few = bisect(UNITS, fails, most=1)
    assert len(few.culprits) == 1
    assert str(few).count("what is left fails too: there are more") == 1


def test_a_run_that_passes_or_that_fails_without_fp8_is_not_searched() -> None:
    assert bisect(UNITS, lambda chosen: False) == Finding((), True, 1)
    with pytest.raises(ValueError, match="FP8 is not the cause"):
        bisect(UNITS, lambda chosen: True)


def test_the_schedule_of_a_bisection_is_what_it_says() -> None:
    layers = ["hidden", "out"]
    everything = frozenset(
        f"{layer}:{gemm}" for layer in layers for gemm in ("output", "grad_input", "grad_weight")
    )
    assert schedule_with(layers, everything) == ""
    assert schedule_with(layers, frozenset()) == "keep_bf16@hidden,keep_bf16@out"
    assert PrecisionSchedule.parse(schedule_with(layers, frozenset({"out:output"})))


def test_a_fault_in_one_gemm_of_one_layer_of_a_real_run_is_located() -> None:
    """Planted: an amax of infinity in one layer, for the gradient of its weight alone, which therefore is NaN."""
    sick = "layers.1.mlp.up"

    def plant(trainee: Any) -> None:
        layer = trainee.model.get_submodule(sick)
        assert isinstance(layer, Float8Linear)
        layer.recipe = dataclasses.replace(layer.recipe, grad_weight=divergence.UNSCALED.grad_weight)
        layer.amaxes = Float8Linear(16, 16, config=divergence.UNSCALED).amaxes
        divergence.scale_by_one(trainee)
        assert layer.amaxes is not None
        layer.amaxes.in_use.fill_(math.inf)

    short = case(steps=1, diagnose_every=0, eval_batches=0)
    layers = [
        m.fqn for m in prepare(divergence.job_of(short, "tensorwise", "cpu").setup, "cpu").audit.converted
    ]

    def fails(in_fp8: frozenset[str]) -> bool:
        job = divergence.job_of(short, "tensorwise", "cpu")
        job.schedule, job.alter = PrecisionSchedule.parse(schedule_with(layers, in_fp8)), plant
        return bool(train(job, "cpu").stopped)

    by_layer, by_gemm = locate(layers, fails)
    assert by_layer.culprits == ((sick,),)
    assert by_gemm is not None
    assert by_gemm.culprits == ((f"{sick}:grad_weight",),)
    assert by_gemm.rest_passes


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


def test_bisect_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A correct recipe has nothing to be found, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    words = [
        "sweep=divergence",
        "device=cpu",
        "axes.steps=50",
        "axes.lr_warmup=5",
        "axes.seed=[0,1,2]",
        "axes.seq=16",
    ]
    words += ["axes.eval_batches=2", "axes.diagnose_every=0", "axes.lr=0.003"]
    assert main([*words, "bisect=tensorwise"]) == 0
    assert "nothing to find: with every unit in FP8 the run passes (1 run)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bisect=tensrwise"], "unknown arm 'tensrwise' (nearest: tensorwise)"),
        (["bisect=base"], "bisect=base: expected an arm that runs FP8 from the first step to the last"),
        (["bisect=base_to_tensorwise"], "expected an arm that runs FP8 from the first step"),
    ],
)
def test_what_cannot_be_bisected_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep=divergence", "device=cpu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_bisect_needs_the_sweep_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=cast", "device=cpu", "bisect=eager"]) == 2
    assert "which only sweep=divergence has" in capsys.readouterr().err


def test_experts_in_fp8() -> None:
    """Oracle: the converted modules: of the recipes' arms alone, emulated in the golden ones; no schedule holds them."""
    moe = case(model="llama_moe_tiny", experts="fp8")
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
