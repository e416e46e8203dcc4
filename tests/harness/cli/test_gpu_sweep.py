"""The lines of `.ci/gpu`. Oracle: the plan itself, which knows every key, axis, arm and the length of a model."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from harness.cli import doctor
from harness.cli.config import Request, load
from harness.engine.plan import SweepPlan, make_plan
from harness.judge.verdict.result import MIN_SEEDS
from harness.store.published import of_peer
from harness.store.words import options_of
from harness.suites import SUITES
from harness.timing.session import METERED_S
from harness.training.batches import setup_of

SLOT_S = 510
LEAST_ROUNDS = 3  # an interval needs them
ROOT = Path(__file__).parents[3]


def session(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([ROOT / ".ci/gpu", *words], capture_output=True, text=True, check=False, env=env)


@functools.cache
def slots(device: str) -> dict[str, dict[str, tuple[int, list[str]]]]:
    """Estimate and words by name, by slot."""
    done = session("dry_run=true", f"device={device}")
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, tuple[int, list[str]]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("slot "):
            found[line] = {}
        elif "=" in line:
            estimate, name, *words = shlex.split(line)
            found[[*found][-1]][name] = int(estimate), words
    return found


def listed(device: str) -> dict[str, tuple[int, list[str]]]:
    return {name: line for lines in slots(device).values() for name, line in lines.items()}


SWEEPS = [name for name, (_, words) in listed("cuda").items() if words[0] != "doctor"]


@functools.cache
def planned(name: str, device: str) -> tuple[Request, SweepPlan]:
    request = load(listed(device)[name][1], lambda _: device)
    return request, make_plan(request.config, SUITES)


def test_each_slot_has_room_for_its_lines() -> None:
    """The estimates of a slot fit into its 8.5 minutes; a fifth of a slot is what the part next to it may take over."""
    for title, lines in slots("cuda").items():
        assert sum(estimate for estimate, _ in lines.values()) <= SLOT_S, title
    first, *_, last = slots("cuda")
    assert ("right" in first, "loss" in last) == (True, True)


def test_the_first_line_compares_kernels() -> None:
    """A word that doctor does not know would be found on the GPU alone."""
    for device in ("cpu", "cuda"):
        name, (_, words) = next(iter(listed(device).items()))
        assert (name, words[0]) == ("kernels", "doctor")
        options = options_of(doctor.DoctorOptions, words[1:])
        assert options is not None
        assert (options.device, options.kernels_s) == (device, 30)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_rehearsal_is_a_plan_with_something_to_run_on_a_cpu(name: str) -> None:
    _, plan = planned(name, "cpu")
    arms = [arm for case in plan.cases for arm in case.runnable]
    assert 0 < len(arms) <= 80
    assert not any(arm.endswith(("_compile", "_graph")) for arm in arms)
    assert {case.suite for case in plan.cases} == {case.suite for case in planned(name, "cuda")[1].cases}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_line_is_a_command_that_the_plan_accepts(name: str) -> None:
    request, plan = planned(name, "cuda")
    assert plan.cases
    if request.config.name == "train":
        (case,) = plan.cases
        assert 2 <= len(case.arms) <= 5
        assert request.timing.checkpoint_s == 0
        rounds = request.timing.min_rounds
        assert rounds == request.timing.max_rounds >= LEAST_ROUNDS
        assert not request.config.warm_compile, "cold only"
        if request.timing.pause_s:
            assert request.timing.max_block_samples <= 4, "few steps, each after a rest"
        else:
            assert request.timing.max_seconds >= rounds * request.timing.block_ms / 1000
            assert request.timing.block_ms > 1000 * METERED_S


@pytest.mark.parametrize("name", [name for name in SWEEPS if "sweep=train" in listed("cuda")[name][1]])
def test_a_step_has_the_whole_head_and_clips(name: str) -> None:
    """128,256 rows, as Llama 3 has; and float32 weights, but where 32 blocks would not fit with them."""
    (case,) = planned(name, "cuda")[1].cases
    setup = setup_of(case.case, batch=1)
    assert (setup.vocab_size, setup.grad_clip) == (128_256, 1.0)
    assert setup.weight_dtype == (torch.bfloat16 if name == "whole" else torch.float32)


def test_bursts_and_sustained_steps_are_of_one_case() -> None:
    for burst, sustained in (("bursts", "sustained"), ("bursts_eager", "peers")):
        one, other = (planned(name, "cuda")[1].cases[0] for name in (burst, sustained))
        assert one.case.case_id == other.case.case_id
        assert {*one.arms} <= {*other.arms}


@pytest.mark.parametrize(
    ("name", "arm", "peer"),
    [
        ("peers", "nocompile_tensorwise_eager", "nocompile"),
        ("torchao_authors", "torchao_tensorwise_compile", "torchao"),
    ],
)
def test_peers_are_timed_at_their_authors_model_and_tokens(name: str, arm: str, peer: str) -> None:
    """Oracle: the figures that the authors publish."""
    (case,) = planned(name, "cuda")[1].cases
    assert arm in case.arms
    tokens = case.case.integer("batch") * case.case.integer("seq")
    shape = {"model": case.case.text("model"), "tokens": tokens}
    assert shape in [dict(each.shape) for each in of_peer(peer)]


def test_the_loss_has_eight_seeds_a_side() -> None:
    cases = planned("loss", "cuda")[1].cases
    assert len({case.case["seed"] for case in cases}) == 8 >= MIN_SEEDS
    assert {case.arms for case in cases} == {("base", "base_eps", "tensorwise")}
    assert len({case.case["seed"] for case in planned("loss", "cpu")[1].cases}) >= MIN_SEEDS


PYTHON = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in *=session-bursts) exec sleep 60;; *=session-products) exit 2;; *=session-casts) exit 1;; esac
"""


def test_a_slot_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """With a Python that notes how it is called: one line is cut off, one refused, one has a failed case."""
    (tmp_path / ".ci").mkdir()
    script = tmp_path / ".ci" / "gpu"
    script.write_text((ROOT / ".ci/gpu").read_text().replace("part bursts 140", "part bursts 1"))
    script.chmod(0o755)
    calls, python = tmp_path / "calls", tmp_path / "python"
    python.write_text(PYTHON.format(calls=calls))
    python.chmod(0o755)

    def slot(seconds: int) -> tuple[int, str, list[str]]:
        calls.write_text("")
        env = {**os.environ, "PY": str(python), "BUDGET_S": str(seconds)}
        done = subprocess.run([script], capture_output=True, text=True, check=False, env=env)
        lines = [line for line in calls.read_text().splitlines() if " report " not in line]
        return done.returncode, done.stdout, [line.rpartition(" ")[2] for line in lines]

    code, said, names = slot(120)
    assert names[:3] == ["kernels_s=30", "run_id=session-eager", "run_id=session-bursts"]
    assert "run_id=session-casts" in names
    assert "compiled: waits for the next slot" in said
    assert "bursts: cut off after" in said
    assert code == 1, "a case of casts failed"
    (tmp_path / "results" / "train" / "session-bursts").mkdir(parents=True)
    (tmp_path / "results" / "train" / "session-bursts" / "_run.json").write_text("{}")
    code, said, names = slot(2000)
    assert names[:2] == ["run_id=session-compiled", "resume=session-bursts"], "what is done is left alone"
    assert "run_id=session-casts" not in names
    assert "run_id=session-products" in names
    assert slot(2000)[2] == ["resume=session-bursts", "run_id=session-products"]
    code, said, names = slot(2000)
    assert (code, names) == (1, [])
    assert "bursts: given up after 3 tries" in said


def test_words_that_are_none_are_refused() -> None:
    done = session("rounds=3")
    assert done.returncode == 2
    assert "rounds=3" in done.stderr
