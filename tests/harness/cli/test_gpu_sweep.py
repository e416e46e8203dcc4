"""The lines of `.ci/gpu`. Oracle: the plan itself, which knows every key, axis, arm and the length of a model."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.cli.config import Request, load
from harness.engine.plan import Plan, make_plan
from harness.judge.verdict.result import MIN_SEEDS
from harness.suites import SUITES
from harness.timing.session import METERED_S

FIRST_S, SLOT_S = 400, 510
LEAST_ROUNDS = 3  # an interval needs them
ROOT = Path(__file__).parents[3]
TEXT = ROOT / "docs" / "numerics.md"


def session(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([ROOT / ".ci/gpu", *words], capture_output=True, text=True, check=False, env=env)


@functools.cache
def listed(device: str) -> dict[str, tuple[int, list[str]]]:
    """Estimate and words by name."""
    done = session("dry_run=true", f"device={device}")
    assert done.returncode == 0, done.stderr
    lines = [shlex.split(line) for line in done.stdout.splitlines() if "sweep=" in line]
    return {name: (int(estimate), words) for estimate, name, *words in lines}


NAMES = list(listed("cuda"))


@functools.cache
def planned(name: str, device: str) -> tuple[Request, Plan]:
    """With another text where one is read: nanoGPT's is no part of a clone."""
    words = [word for word in listed(device)[name][1] if word != "data=shakespeare"]
    text = ["data=bytes", f"data_path={TEXT}"] if {"sweep=train", "sweep=nanogpt_char"} & {*words} else []
    request = load([*words, *text], lambda _: device)
    return request, make_plan(request.config, SUITES)


def test_the_first_lines_hold_the_headline_and_each_fits_into_a_slot() -> None:
    """At most 400 s, so that 1.25 times as much fits into a slot of 8.5 minutes."""
    estimates = [estimate for estimate, _ in listed("cuda").values()]
    assert sum(estimates[:5]) <= FIRST_S
    assert max(estimates) < SLOT_S


@pytest.mark.parametrize("name", NAMES)
def test_a_rehearsal_is_a_plan_with_something_to_run_on_a_cpu(name: str) -> None:
    _, plan = planned(name, "cpu")
    arms = [arm for case in plan.cases for arm in case.runnable]
    assert 0 < len(arms) <= 80
    assert not any(arm.endswith(("_compile", "_graph")) for arm in arms)
    assert {case.suite for case in plan.cases} == {case.suite for case in planned(name, "cuda")[1].cases}


@pytest.mark.parametrize("name", NAMES)
def test_a_line_is_a_command_that_the_plan_accepts(name: str) -> None:
    request, plan = planned(name, "cuda")
    assert plan.cases
    if request.config.name == "train":
        (case,) = plan.cases
        assert 2 <= len(case.arms) <= 3
        assert request.timing.checkpoint_s == 0
        rounds = request.timing.min_rounds
        assert rounds == request.timing.max_rounds >= LEAST_ROUNDS
        assert request.timing.max_seconds >= rounds * request.timing.block_ms / 1000
        assert not request.config.warm_compile, "cold only"
        if name != "compiled_torchao":
            assert request.timing.block_ms > 1000 * METERED_S


def test_the_loss_is_that_of_the_published_setting() -> None:
    """Oracle: karpathy/nanoGPT, config/train_shakespeare_char.py."""
    _, plan = planned("nanogpt_char", "cuda")
    published = {"model": "nanogpt_char", "batch": 64, "seq": 256, "steps": 5000}
    for case in plan.cases:
        axes = dict(case.case.axes)
        assert {name: axes[name] for name in published} == published
        assert case.arms == ("base", "tensorwise")
    assert "data=shakespeare" in listed("cuda")["nanogpt_char"][1]
    assert len({case.case["seed"] for case in plan.cases}) >= MIN_SEEDS
    assert len({case.case["seed"] for case in planned("nanogpt_char", "cpu")[1].cases}) >= MIN_SEEDS


PYTHON = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in *"session-eager"*) exec sleep 60;; *"session-gemm"*) exit 2;; *"session-casts"*) exit 1;; esac
"""


def test_a_slot_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """With a Python that notes how it is called: one line is cut off, one refused, one has a failed case."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "gpu"
    script.write_text((ROOT / ".ci/gpu").read_text().replace("part eager 110", "part eager 1"))
    script.chmod(0o755)
    calls, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(PYTHON.format(calls=calls))
    python.chmod(0o755)

    def slot(seconds: int) -> tuple[int, str, list[str]]:
        calls.write_text("")
        env = {**os.environ, "PY": str(python), "BUDGET_S": str(seconds)}
        done = subprocess.run([script], capture_output=True, text=True, check=False, env=env)
        names = [
            word for line in calls.read_text().splitlines() for word in line.split() if "=session-" in word
        ]
        return done.returncode, done.stdout, names

    code, said, names = slot(130)
    assert names[:4] == [f"run_id=session-{name}" for name in ("start", "smoke", "eager", "casts")]
    assert "compiled: waits for the next slot" in said
    assert "eager: cut off after" in said
    assert code == 1, "a case of casts failed"
    (tmp_path / "results" / "train" / "session-eager").mkdir(parents=True)
    (tmp_path / "results" / "train" / "session-eager" / "_run.json").write_text("{}")
    code, said, names = slot(2000)
    assert names[0] == "resume=session-eager", "what is done is left alone"
    assert "run_id=session-casts" not in names
    assert "run_id=session-gemm" in names
    assert slot(2000)[2] == ["resume=session-eager", "run_id=session-gemm"]
    code, said, names = slot(2000)
    assert (code, names) == (1, ["run_id=session-gemm"])
    assert "eager: given up after 3 tries" in said


def test_words_that_are_none_are_refused() -> None:
    done = session("rounds=3")
    assert done.returncode == 2
    assert "rounds=3" in done.stderr
