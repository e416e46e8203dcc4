"""The advice for a training case. Oracles: the command `advise`, which must say the same; stored ceilings; planted machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from report_cases import ceiling_cases, cpu_run, train_cases
from report_fixtures import Invented, write_run

from fp8core import RECIPES
from harness.advise.command import Question, answer
from harness.advise.rates import MEASURED, rates_of
from harness.advise.training import AdvisedMachine, advised, content, machine_here
from harness.machine import environment
from harness.machine.hardware import named
from harness.store.errors import UsageError
from harness.training.setup import Setup

GPU = {"device": "cuda", "gpu": "NVIDIA H200", "gpu_memory_gib": 139.8, "power_limit_w": 700.0}
H200 = AdvisedMachine(rates_of(named("h200")), "9.0")
GPT2 = Setup("gpt2", 16, 1024, recipe=RECIPES["tensorwise"])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The facts of a GPU that is not there; a test may change them."""
    facts: dict[str, Any] = dict(GPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "fingerprint", lambda device: facts)
    machine_here.cache_clear()
    yield facts
    machine_here.cache_clear()


@pytest.mark.parametrize("mode", ["eager", "compile"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_it_is_the_advice_of_the_command(recipe: str, mode: str) -> None:
    """The same model, tokens, mode and recipe: the same layers, and the same prediction of the step."""
    found = advised(replace(GPT2, recipe=RECIPES[recipe], compiled=mode == "compile"), H200)
    said = answer(Question("gpt2", "h200", batch=16, seq=1024, mode=mode, recipe=recipe)).chosen
    facts: Any = found.facts["advice"]
    off = said.verdict not in ("on", "only these layers")  # also where nobody can tell
    assert facts["decision"] == said.verdict
    assert set(facts["converted"]) == (set() if off else said.converted)
    assert facts["predicted_step"] == (None if off else [said.step.value, said.step.low, said.step.high])
    assert len(facts["converted"]) + len(facts["left_in_bf16"]) == 49
    assert (facts["tokens"], facts["mode"], facts["rates_of"]) == (16384, mode, "H200 SXM")
    if off:
        assert found.setup.recipe is None
    else:
        assert set(found.setup.left_out) == set(facts["left_in_bf16"])
        assert found.setup.recipe == RECIPES[recipe]


def test_a_user_s_model_is_traced_by_its_own_batches() -> None:
    own = '{"_target_": "models_to_advise.mlp", "batch": "models_to_advise.mlp_batch"}'
    found = advised(Setup(own, 8, 64, recipe=RECIPES["tensorwise"]), H200)
    facts: Any = found.facts["advice"]
    assert facts["converted"] == ["gate", "up", "down"]
    assert facts["left_in_bf16"] == {"unused": "not used in the forward pass"}
    assert found.setup.left_out == ("unused",)


# The machine


@pytest.mark.parametrize(
    ("name", "memory", "said"),
    [
        (
            "NVIDIA H2000",
            139.8,
            "no peak of NVIDIA H2000 is known; add an entry to harness/machine/hardware/devices.yaml, or",
        ),
        ("NVIDIA H200", 17.0, "no peak of NVIDIA H200 is known"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 SXM 80GB has no FP8 matrix units"),
    ],
)
def test_a_gpu_without_rates_says_what_to_do(
    gpu: dict[str, Any], name: str, memory: float, said: str
) -> None:
    gpu.update(gpu=name, gpu_memory_gib=memory, power_limit_w=None)
    found = machine_here("cuda", "")
    assert isinstance(found, str)
    assert said in found
    assert "\n" not in found


def test_stored_ceilings_are_taken_and_known_by_their_content(gpu: dict[str, Any], tmp_path: Path) -> None:
    """The same rows in another folder under another id are the same ceilings; other rows are not."""
    cases = ceiling_cases(Invented(1), 4200.0, 740.0)
    one = write_run(tmp_path / "a", cases)
    two = write_run(tmp_path / "b", cases, run_id="20270102T030405Z-0123456-ffff")
    other = write_run(tmp_path / "c", ceiling_cases(Invented(1), 4200.0, 741.0))
    found = machine_here("cuda", str(one))
    assert isinstance(found, AdvisedMachine)
    assert {found.rates.figures[n].kind for n in ("bf16", "fp8", "bandwidth")} == {MEASURED}
    assert found.sha256 == content(str(one)) == content(str(two)) != content(str(other))
    assert len(found.sha256) == 64


def test_ceilings_of_elsewhere_are_refused(gpu: dict[str, Any], tmp_path: Path) -> None:
    of_cpu = cpu_run(tmp_path / "cpu")
    with pytest.raises(UsageError, match="no row is of the H200 SXM"):
        machine_here("cuda", str(of_cpu))
    steps = write_run(tmp_path / "steps", train_cases(Invented(1)))
    with pytest.raises(
        UsageError, match="has no product and no copy of the H200 SXM; name a run of sweep=ceilings"
    ):
        machine_here("cuda", str(steps))
    with pytest.raises(UsageError, match="no run 'nowhere'"):
        machine_here("cuda", "nowhere")


def test_what_stays_in_bf16_says_by_how_much_it_would_lose() -> None:
    """Products and casts of 768 to 768 at 16k tokens are 0.89x by the closed form; the 768-wide projection stays."""
    facts: Any = advised(GPT2, H200).facts["advice"]
    left = {fqn: why for fqn, why in facts["left_in_bf16"].items() if fqn.endswith("proj")}
    assert len(left) == 12
    assert set(left.values()) == {"0.87x predicted (0.70 to 1.09), casts cost more than products gain"}
    assert "N=50257 (columns of B) is not a multiple of 16" in facts["left_in_bf16"]["head"]
    assert facts["rates"]["fp8"]["kind"] == "published"
    assert "link" not in facts["rates"]
