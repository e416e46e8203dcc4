"""Requests that no case comes of, and arms that a case has none of: one line, with the word that tells the way out.

Oracle: this table, a row a rule of a suite.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from suite_checks import CAST, GEMM, LINEAR
from train_cases import SMALL

from harness.__main__ import main
from harness.judge.verdict.result import MIN_POINTS, MIN_SEEDS
from harness.peers import PEERS
from harness.store.case import Case
from harness.store.errors import Cause, UsageError
from harness.suites import SUITES
from harness.suites.divergence import OTHER_SEEDS

OWN = '{"_target_": "model_for_training.%s", "batch": "model_for_training.%s"}'
MOE = {"model": "llama_moe_tiny", "experts": "fp8"}
ON_RANKS = {"model": "llama_tiny", "ranks": 2, "fp8_all_gather": True, "eval_batches": 2, "diagnose_every": 0}
ADVISED = {"convert": "advised", "compute": "bf16"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cast": CAST,
    "gemm": GEMM,
    "linear": LINEAR,
    "recipes": LINEAR,
    "checksum": {"cube": 48, "data": "codes"},
    "parallel": {"cell": "ddp", "steps": 3},
    "train": SMALL,
    "divergence": {"steps": 10, "batch": 4, "seq": 16, "eval_every": 5, "eval_batches": 1, "diagnose_every": 5},
}  # fmt: skip


@pytest.mark.parametrize(
    ("suite", "changes", "arm", "kind", "words"),
    [
        ("checksum", {"cube": 40}, "rowwise_eager", "shape", ""),
        ("divergence", {"batch": 3, "seq": 5}, "tensorwise", "shape", "15 tokens; GEMM grad_weight"),
        ("divergence", {"batch": 3, "seq": 5}, "rowwise_with_gw_hp", "", ""),
        ("divergence", {}, "blockwise", "device", ""),
        ("divergence", {}, "blockwise_golden", "", ""),
        ("divergence", ON_RANKS, "rowwise", "shape", "fp8_all_gather=false"),
        ("gemm", {"K": 100}, "bf16_eager", "", ""),
        ("gemm", {"K": 100}, "rowwise_eager", "shape", r"K=100.*pad_inner_dim.*96 or 112; arms=\[bf16_eager\]"),
        ("gemm", {"N": 8}, "tensorwise_fast_eager", "shape", "nearest: N=16"),
        ("gemm", {}, "rowwise_fast_eager", "device", "use_fast_accum"),
        ("linear", {"M": 33}, "tensorwise_eager", "shape", "GEMM grad_weight: K=33"),
        ("linear", {"M": 33}, "rowwise_with_gw_hp_eager", "", ""),
        ("linear", {}, "tensorwise_plain_eager", "device", "here this arm would repeat tensorwise_eager"),
        ("parallel", {}, "tensorwise", "", ""),
        ("recipes", {"M": 33}, "rowwise_eager", "shape", ""),
        ("recipes", {"M": 33}, "bf16_eager", "", ""),
        ("train", {"batch": 1, "seq": 17}, "tensorwise_eager", "shape", "17 tokens; GEMM grad_weight"),
        ("train", {"batch": 1, "seq": 17}, "rowwise_with_gw_hp_eager", "", ""),
        ("train", {}, "mxfp8_eager", "device", "no kernel for 1x32"),
        ("train", {}, "nocompile_tensorwise_eager", "device", "Triton"),
        ("train", {}, "mxfp4_compile", "device", "no e8m0"),
        ("linear", {"M": 64, "K": 64, "N": 64}, "mxfp4_compile", "device", "no e8m0"),
        ("linear", {"M": 64, "K": 64, "N": 64}, "mxfp4_eager", "", ""),
        ("linear", {}, "nvfp4_compile", "", ""),
        ("train", {}, "tensorwise_graph", "device", "a cpu has none"),
        ("train", {"batch": "max"}, "bf16_eager", "device", "on a GPU; give a number"),
        ("train", {"model": OWN % ("odd", "batch")}, "tensorwise_eager", "shape", "no layer can be converted.*narrow: N=10"),
        ("train", ADVISED, "tensorwise_eager", "device", "this is a cpu"),
        ("train", ADVISED, "bf16_eager", "", ""),
        ("train", ADVISED | {"compute": "fp32"}, "tensorwise_eager", "shape", "axes.convert=all"),
        ("train", ADVISED | MOE, "tensorwise_eager", "shape", "leave experts=hp"),
        ("train", MOE, "torchao_rowwise_eager", "device|shape", "none for experts"),
        ("train", {"ranks": 2, "batch": "max"}, "bf16_eager", "device|shape", "give a number"),
        ("train", {"ranks": 2, "fp8_all_gather": True}, "rowwise_eager", "device|shape", "axes.fp8_all_gather=false"),
    ],
)  # fmt: skip
def test_an_arm_that_a_case_has_none_of_says_why(
    suite: str, changes: dict[str, Any], arm: str, kind: str, words: str
) -> None:
    axes = {**DEFAULTS[suite], **changes}
    if suite in ("train", "divergence"):
        axes = SUITES[suite].points([], {name: [value] for name, value in axes.items()}, None)[0] | axes
    why = SUITES[suite].unsupported(Case.of(suite, axes), arm, "cpu")
    assert (why.kind if why else "") in kind.split("|")
    if why is not None:
        assert "\n" not in why.reason
        assert re.search(words, why.reason), why.reason


@pytest.mark.parametrize(
    ("suite", "arm"),
    [
        ("cast", "torchao_eager"),
        ("cast", "compile"),
        ("gemm", "scaled_mm_tensorwise_eager"),
        ("linear", "torchao_rowwise_eager"),
        ("linear", "bf16_compile"),
    ],
)
def test_what_could_be_installed_is_missing_and_not_unsupported(
    suite: str, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = SUITES[suite]
    monkeypatch.setattr(
        "harness.suites.common.compile_unavailable", lambda device: "no compiler: install g++"
    )
    if name := of.ARMS[arm].peer:
        absent = replace(PEERS[name], missing=lambda device: "not installed: pip install it")
        monkeypatch.setitem(PEERS, name, absent)
    why = of.unsupported(Case.of(suite, DEFAULTS[suite]), arm, "cpu")
    assert why is not None
    assert (why.kind, why.cause) == ("device", Cause.MISSING)
    assert "install" in why.reason


@pytest.mark.parametrize(
    ("suite", "shapes", "axes", "words"),
    [
        ("cast", [], {"M": 4}, "axes.K"),
        ("cast", ["tiny"], {"M": 4, "K": 4}, "shapes="),
        ("ceilings", [], {"what": "copy", "cube": 64}, "axes.mib"),
        ("ceilings", [], {"mib": 1}, "axes.cube"),
        ("checksum", ["tiny"], {}, "axes.cube"),
        ("checksum", [], {"cube": 2**16}, "not exact"),
        ("gemm", [], {"M": 4}, "axes.K.*axes.N"),
        ("linear", [], {}, "no shapes"),
        ("linear", ["lama3_8b"], {"tokens": 16}, "nearest: llama3_8b"),
        ("linear", ["llama3_8b"], {}, r"axes\.tokens"),
        ("linear", ["from_model"], {"tokens": 16}, r"model\._target_"),
        ("recipes", [], {}, "no shapes"),
        ("train", ["llama3_8b"], {}, "whole models"),
        ("train", [], {"model": "gpt3"}, "unknown model 'gpt3'"),
        ("train", [], {"data": "wiki"}, "unknown data 'wiki'"),
        ("train", [], {"seq": 257}, "at most 256 tokens"),
        ("train", [], {"layers": 3}, "layers=3: model nano has 2"),
        ("train", [], {"profile_start": 5}, "profile_end=3 lies before profile_start=5"),
        ("train", [], {"ceilings": "a-run"}, "axes.convert=advised"),
        ("train", [], {"fp8_all_gather": True}, "add axes.ranks=2"),
        ("train", [], {"model": OWN % ("build", "fails")}, r"fails\(step=0, .*FileNotFoundError: no data"),
        ("train", [], {"model": OWN % ("build", "unseeded")}, "two different batches for the same step=0 and seed=0"),
        ("divergence", [], {"model": OWN % ("build", "wrong")}, "returned shape"),
        ("divergence", [], {"model": '{"_target_": "model_for_training.build"}'}, "model.batch"),
        ("divergence", [], {"data": "bytes"}, "data_path=FILE"),
        ("divergence", [], {"data": "bytes", "data_path": __file__, "seq": 8192}, "needs more|at most"),
        ("divergence", [], {"data_path": "/no/such"}, "takes no path"),
        ("divergence", [], {"data": "random"}, "says nothing of training"),
        ("divergence", [], {"lr": 0.0}, "lr=0.0"),
        ("divergence", [], {"min_lr_frac": 2.0}, "min_lr=0.002"),
        ("divergence", [], {"lr_warmup": 10}, "warmup=10"),
        ("divergence", [], {"beta2": 1.0}, "beta2=1"),
        ("divergence", [], {"schedule": "warmup:3"}, "nearest: warmup_bf16"),
        ("divergence", [], {"schedule": "cooldown_bf16:1"}, "cooldown_bf16:1step"),
        ("divergence", [], ON_RANKS | {"eval_batches": 3}, "eval_batches=3"),
        ("divergence", [], ON_RANKS | {"diagnose_every": 5}, "diagnose_every=5"),
        ("divergence", [], ON_RANKS | {"ranks": 1}, "fp8_all_gather=True"),
    ],
)  # fmt: skip
def test_what_makes_no_case_is_refused_in_one_line(
    suite: str, shapes: list[str], axes: dict[str, Any], words: str
) -> None:
    base = DEFAULTS[suite] if suite in ("train", "divergence") else {}
    with pytest.raises(ValueError, match=words) as caught:
        SUITES[suite].points(shapes, {name: [value] for name, value in {**base, **axes}.items()}, None)
    assert "\n" not in str(caught.value)
    assert suite != "divergence" or shapes or isinstance(caught.value, UsageError)


# Training runs whose verdict is known before they start. Oracle: the verdict's own limits

TRAIN = ["sweep=divergence", "device=cpu", "dry_run=true", "axes.lr_warmup=0"]
ENOUGH = "axes.seed=[0,1,2]"


@pytest.fixture
def _no_pass_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step of each arm takes is no matter of these plans."""
    monkeypatch.setattr("harness.training.meta_estimate.memory", lambda *_: {})


@pytest.mark.usefixtures("_no_pass_on_paper")
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["axes.seed=[0,1]"], [f"at least {MIN_SEEDS}", "2 seeds", "train.judge=false"]),
        (["axes.seed=[0,0,0,0,0]"], ["0 stands 5 times"]),
        ([f"axes.steps={MIN_POINTS - 1}"], [f"at least {MIN_POINTS}"]),
        (["axes.steps=[100,20]"], ["axes.steps=20"]),
        (["arms=[tensorwise]"], ["no run of base"]),
        (["axes.eval_batches=[4,0]", "arms=[base,base_eps]"], ["axes.eval_batches=0", "PASS"]),
        (["axes.seed=[0,1,18446744073709551616]"], [str(2**64), f"0 to {OTHER_SEEDS - 1}"]),
        ([ENOUGH, "seed=999998"], [f" {OTHER_SEEDS}"]),  # base of it is base_other of seed 0
        ([ENOUGH, "seed=-1"], [" -1"]),
        (['axes.schedule=["warmup_bf16:60","warmup_bf16:0.2"]'], ["300 steps"]),
        (["schedule=warmup_bf16:300"], ["arm tensorwise, schedule warmup_bf16:300"]),
        (["schedule=keep_bf16@layers.*,keep_bf16@head"], ["arm tensorwise, schedule keep_bf16@layers.*"]),
        (["schedule=keep_bf16@l*,warmup_bf16:0.5@head,cooldown_bf16:0.5@head"], ["schedule keep_bf16@l*,"]),
        (
            ["schedule=keep_bf16@output,keep_bf16@grad_input", "arms=[base,rowwise_with_gw_hp]"],
            ["arm rowwise_with_gw_hp"],
        ),
        (["axes.steps=2", "train.judge=false", "arms=[base,base_to_tensorwise]"], ["warmup_bf16:0.2"]),
        (["schedule=warmup_bf16:10@layer.*"], ["'layer.*'; there are layers.0.attention.q"]),
        (["axes.cell=[dpp]"], ["cell"]),
    ],
)
def test_a_plan_that_can_show_nothing_is_refused(
    words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TRAIN, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(value in line for value in told), line


@pytest.mark.usefixtures("_no_pass_on_paper")
@pytest.mark.parametrize(
    "words",
    [
        [f"axes.steps={MIN_POINTS}", ENOUGH],
        ["axes.steps=4", "axes.seed=7", "train.judge=false"],
        ["axes.steps=4", "axes.seed=7", "arms=[base]"],  # nothing is compared
        [ENOUGH, "shard=0/3"],  # one seed a shard, three in all
        [ENOUGH, f"seed={OTHER_SEEDS - 3}"],
        ["axes.eval_batches=0", "arms=[base,negative_control]"],
        ['axes.schedule=["warmup_bf16:60","warmup_bf16:0.2"]', "axes.steps=310"],
        ["schedule=warmup_bf16:299"],
        ["schedule=keep_bf16@output,keep_bf16@grad_input"],
        ["schedule=warmup_bf16:300@*.0.*"],  # the second block runs in FP8
        ["schedule=warmup_bf16:300@output,cooldown_bf16:300@grad_input"],  # grad_weight does
        ["schedule=warmup_bf16:300", "arms=[base,base_eps]"],  # to which it does not apply
    ],
)
def test_a_plan_that_can_show_something_is_planned(words: list[str]) -> None:
    assert main([*TRAIN, *words]) == 0


@pytest.mark.parametrize(
    ("sweep", "words", "told"),
    [
        ("parallel", ["axes.cell=[dpp]"], "axes.cell='dpp'"),
        ("parallel", ["shapes=[llama3_8b]"], "shapes"),
        ("allgather", ["ranks=0"], "axes.ranks=0"),
        ("quick", ["ranks=2"], "means nothing"),
        ("cast", ["train.judge=false"], "means nothing"),
    ],
)
def test_what_a_sweep_has_no_use_for_is_refused(
    sweep: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"sweep={sweep}", "device=cpu", "dry_run=true", *words]) == 2
    assert told in capsys.readouterr().err


def test_ranks_beyond_the_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    of = {
        "train": ("bf16_eager", {"ranks": 2}),
        "divergence": ("base", ON_RANKS),
        "parallel": ("tensorwise", {}),
    }
    for suite, (arm, more) in of.items():
        axes = DEFAULTS[suite] | more
        if more:
            axes = SUITES[suite].points([], {name: [value] for name, value in axes.items()}, None)[0] | axes
        why = SUITES[suite].unsupported(Case.of(suite, axes), arm, "cuda")
        assert why is not None
        assert "2 ranks need 2 GPUs" in why.reason
