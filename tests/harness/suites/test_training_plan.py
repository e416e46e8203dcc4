"""Requests for training runs whose verdict is known before they start are refused. Oracle: the verdict's own limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.__main__ import main
from harness.judge.verdict.result import MIN_POINTS, MIN_SEEDS
from harness.suites.divergence import OTHER_SEEDS

WORDS = ["sweep=divergence", "device=cpu", "dry_run=true", "axes.lr_warmup=0"]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a command is refused with."""
    capsys.readouterr()
    assert main([*WORDS, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["axes.seed=[0,1]"], ["axes.seed=[0,1]", "2 seeds", f"at least {MIN_SEEDS}"]),
        (["axes.seed=7"], ["axes.seed=[7]", "1 seed,", f"at least {MIN_SEEDS}"]),
        ([f"axes.steps={MIN_POINTS - 1}"], [f"axes.steps={MIN_POINTS - 1}", f"at least {MIN_POINTS}"]),
        (["axes.steps=[100,20]"], ["axes.steps=20", f"at least {MIN_POINTS}"]),
        (["axes.seed=[0,1]", "arms=[base,base_other]"], ["2 seeds"]),
        (["axes.seed=[0,1]", "bisect=tensorwise"], ["2 seeds"]),
        (["axes.seed=[0,1,2,3]", "shard=0/2", "axes.steps=20"], ["axes.steps=20"]),
    ],
)
def test_what_no_verdict_can_come_of_is_refused_in_the_plan(
    words: list[str], values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *words)
    assert all(value in line for value in [*values, "train.judge=false"]), line


@pytest.mark.parametrize(
    "words",
    [
        [f"axes.steps={MIN_POINTS}", "axes.seed=[0,1,2]"],
        ["axes.steps=4", "axes.seed=7", "train.judge=false"],
        ["axes.steps=4", "axes.seed=7", "arms=[base]"],  # nothing is compared
        ["axes.seed=[0,1,2]", "shard=0/3"],  # one seed a shard, three in all
        ["axes.seed=[0,1,2]", "axes.lr=[0.001,0.002]"],
    ],
)
def test_enough_runs_or_none_to_be_judged_are_planned(words: list[str]) -> None:
    assert main([*WORDS, *words]) == 0


def test_one_case_of_three_is_one_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "axes.seed=[0,1,2]"]) == 0
    case_id = next(line.split()[0] for line in capsys.readouterr().out.splitlines() if " seed=1 " in line)
    assert "1 seed," in refused(capsys, "axes.seed=[0,1,2]", f"cases=[{case_id}]")


@pytest.mark.parametrize(
    ("seeds", "copy"), [("[0,0,0,0,0]", "0 stands 5 times"), ("[3,1,2,1]", "1 stands 2 times")]
)
def test_copies_of_a_run_are_no_seeds(seeds: str, copy: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, f"axes.seed={seeds}")
    assert f"axes.seed={seeds}" in line
    assert copy in line


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["arms=[tensorwise]"], ["arms=[tensorwise]", "no run of base"]),
        (["arms=[rowwise,rowwise_eps]"], ["arms=[rowwise,rowwise_eps]", "no run of base"]),
        (["axes.eval_batches=0"], ["axes.eval_batches=0", "PASS"]),
        (["axes.eval_batches=[4,0]", "arms=[base,base_eps]"], ["axes.eval_batches=0", "PASS"]),
    ],
)
def test_runs_that_no_verdict_can_be_made_of_are_refused_with_the_way_out(
    words: list[str], values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: `judge.verdict.rows`: paired with base, and L4h INCONCLUSIVE without a held-out loss."""
    line = refused(capsys, *words)
    assert all(value in line for value in [*values, "train.judge=false"]), line
    assert main([*WORDS, *words, "train.judge=false"]) == 0


@pytest.mark.parametrize("arms", ["[base]", "[base,base_other]", "[base,negative_control]"])
def test_arms_without_a_held_out_gate_need_no_held_out_loss(arms: str) -> None:
    assert main([*WORDS, "axes.eval_batches=0", f"arms={arms}"]) == 0


@pytest.mark.parametrize(
    ("words", "seed"),
    [
        (["axes.seed=[0,1,18446744073709551616]"], 2**64),  # no generator takes it
        (["axes.seed=[1000000,2000000,0]"], OTHER_SEEDS),  # base of it is base_other of seed 0
        (["axes.seed=[0,1,2]", "seed=999998"], OTHER_SEEDS),
        (["axes.seed=[0,1,2]", "seed=-1"], -1),  # batches are drawn for no seed below 0
        (["axes.seed=1000000", "train.judge=false"], OTHER_SEEDS),
    ],
)
def test_a_seed_that_cannot_run_or_is_that_of_base_other_is_refused(
    words: list[str], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *words)
    assert f" {seed}" in line
    assert f"0 to {OTHER_SEEDS - 1}" in line


def test_the_last_seed_below_those_of_base_other_is_planned() -> None:
    assert main([*WORDS, "axes.seed=[0,1,2]", f"seed={OTHER_SEEDS - 3}"]) == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("warmup_bf16:60", "warmup_bf16:0.2"),
        ("warmup_bf16:60", "warmup_bf16:60steps"),
        ("warmup_bf16:9,keep_bf16@head", "keep_bf16@head,warmup_bf16:0.03"),
    ],
)
def test_two_schedules_of_the_same_steps_are_copies(
    first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, f'axes.schedule=["{first}","{second}"]')
    assert f"{first} and {second}" in line
    assert "300 steps" in line


def test_schedules_that_are_the_same_at_other_steps_alone_are_planned() -> None:
    assert main([*WORDS, 'axes.schedule=["warmup_bf16:60","warmup_bf16:0.2"]', "axes.steps=310"]) == 0


@pytest.mark.parametrize(
    ("words", "arm", "schedule"),
    [
        (["schedule=warmup_bf16:300"], "tensorwise", "warmup_bf16:300"),
        (["schedule=cooldown_bf16:400"], "tensorwise", "cooldown_bf16:400"),
        (["schedule=keep_bf16"], "tensorwise", "keep_bf16"),
        (["schedule=keep_bf16@layers.*,keep_bf16@head"], "tensorwise", "keep_bf16@layers.*,keep_bf16@head"),
        (
            ["schedule=warmup_bf16:300@layers.*,cooldown_bf16:300@head"],
            "tensorwise",
            "warmup_bf16:300@layers.*",
        ),
        (
            ["schedule=keep_bf16@l*,warmup_bf16:0.5@head,cooldown_bf16:0.5@head"],
            "tensorwise",
            "keep_bf16@l*,",
        ),
        (
            ["schedule=keep_bf16@output,keep_bf16@grad_input", "arms=[base,rowwise_with_gw_hp]"],
            "rowwise_with_gw_hp",
            "keep_bf16@output,keep_bf16@grad_input",
        ),
        (["schedule=warmup_bf16:0.9", "axes.steps=2", "train.judge=false"], "tensorwise", "warmup_bf16:0.9"),
        (["schedule=warmup_bf16:0.001"], "tensorwise", "warmup_bf16:0.001"),
        (
            ["axes.steps=2", "train.judge=false", "arms=[base,base_to_tensorwise]"],
            "base_to_tensorwise",
            "warmup_bf16:0.2",
        ),
        (
            ["axes.steps=1", "train.judge=false", "arms=[base,tensorwise,rowwise_to_base]"],
            "rowwise_to_base",
            "cooldown_bf16:0.2",
        ),
    ],
)
def test_an_arm_that_would_never_run_as_named_is_refused_with_its_schedule(
    words: list[str], arm: str, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *words)
    assert f"arm {arm}, schedule {schedule}" in line


@pytest.mark.parametrize(
    "words",
    [
        ["schedule=warmup_bf16:299"],
        ["schedule=keep_bf16@layers.*"],  # the head runs in FP8
        ["schedule=keep_bf16@output,keep_bf16@grad_input"],
        ["schedule=warmup_bf16:0.5,cooldown_bf16:0.4"],
        ["schedule=warmup_bf16:300@*.0.*"],  # the second block runs in FP8
        ["schedule=cooldown_bf16:400@*.0.*"],
        ["schedule=warmup_bf16:300@output,cooldown_bf16:300@grad_input"],  # grad_weight does
        ["schedule=warmup_bf16:300", "arms=[base,base_eps]"],  # to which it does not apply
        ["axes.steps=3", "train.judge=false", "arms=[base,base_to_tensorwise,tensorwise_to_base]"],
    ],
)
def test_arms_that_run_fp8_at_some_step_are_planned(words: list[str]) -> None:
    assert main([*WORDS, *words]) == 0


def test_judge_means_nothing_where_no_verdict_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep=cast", "device=cpu", "dry_run=true", "train.judge=false"]) == 2
    assert "train.judge=False means nothing to sweep 'cast'" in capsys.readouterr().err
    assert "bisect=tensorwise" in refused(capsys, "bisect=tensorwise", "train.judge=false")


PARTS = """# Seeds in two parts?
parts:
  some: {suite: divergence, axes: {seed: [0, 1]}, arms: [base, tensorwise]}
  rest: {suite: divergence, axes: {seed: [2]}, arms: [base, %s]}
"""


def test_parts_share_out_the_seeds_of_one_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweeps").mkdir()
    for arm, code in (("tensorwise", 0), ("rowwise", 2)):
        (tmp_path / "sweeps" / "mine.yaml").write_text(PARTS % arm)
        assert main(["sweep=mine", "device=cpu", "dry_run=true"]) == code
    assert "seed" in capsys.readouterr().err


def test_a_bisection_needs_no_control_among_its_arms() -> None:
    """It trains the control itself; without bisect= the same arms are refused."""
    words = [
        "sweep=divergence",
        "axes.steps=60",
        "axes.lr_warmup=6",
        "arms=[tensorwise]",
        "dry_run=true",
        "device=cpu",
    ]
    assert main([*words, "bisect=tensorwise"]) == 0
    assert main(words) == 2
