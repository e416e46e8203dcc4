"""The code that is printed, run as a reader would. Oracle: `fp8core.verify`, and the layers that were to be converted."""

from __future__ import annotations

import functools
import re
from typing import Any

import code_on_ranks
import forked
import on_ranks
import pytest
import torch
from code_on_ranks import FSDP, Tiny
from torch import Tensor

from fp8core import Proof, verify
from harness.advise.casts import ENGINE, FP8CORE, TORCHAO
from harness.advise.command import answer, parse
from harness.advise.libraries import candidates
from harness.advise.printed_code import as_code
from harness.advise.views import AdviceView

HEAD = {"words": ["head"], "names": ["layers.1.up"]}
CHOSEN = {"layers.0.up", "layers.0.down", "layers.1.down"}


def run(code: str, **verified: Any) -> tuple[Proof, set[str]]:
    """Executes it on a small model, trains three steps, verifies the next; the proof, and what is in FP8."""
    torch.manual_seed(0)
    model = Tiny().to(torch.bfloat16)
    names: dict[str, Any] = {"model": model, "total_steps": 100}
    exec(code, names)
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=1e-2)
    batch = (torch.randn(128, 128, dtype=torch.bfloat16),)

    def plain(step: int, batch: tuple[Tensor, ...]) -> None:
        model(*batch).backward()
        names["optimizer"].step()
        names["optimizer"].zero_grad()

    step = names.get("train_step", plain)
    for i in range(3):
        step(i, batch)
    proof = verify(lambda: step(3, batch), model, announce=False, **verified)
    return proof, {layer.fqn for layer in proof.layers if layer.recipe}


@pytest.fixture
def eager_backend(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """torch.compile without code generation, and the calls of it."""
    calls: list[Any] = []
    compile_ = torch.compile

    @functools.wraps(compile_)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return compile_(*args, **{**kwargs, "backend": "eager"})

    monkeypatch.setattr(torch, "compile", recorded)
    return calls


def test_without_its_sync_of_scales_or_its_filter_it_does_not(eager_backend: list[Any]) -> None:
    """Each line of the code counts: what is dropped is seen by the same judge."""
    code = as_code("delayed", HEAD, update_scales=True)
    proof, _ = run(code.replace("    fp8core.update_scales(model)\n", ""))
    assert not proof.ok
    assert "update_scales" in proof.line
    _, converted = run(code.replace(", module_filter_fn=takes", ""))
    assert converted == CHOSEN | {"head", "layers.1.up"}
    proof, _ = run(as_code("rowwise", HEAD), recipe="tensorwise")
    assert not proof.ok
    assert not eager_backend


def test_a_schedule_holds_layers_back_at_the_end() -> None:
    """Ends in bf16: of 100 steps the last ten, in which FP8 must not run."""
    code = as_code("rowwise", HEAD, schedule="cooldown_bf16:0.1")
    proof, converted = run(code, recipe="rowwise")
    assert proof.ok, proof.line
    assert converted == CHOSEN
    assert "cooldown_bf16:0.1" in code
    late, _ = run(code.replace("(model, step,", "(model, step + 90,"))
    assert not late.ok


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.slow)])
def test_torchaos_code_runs_in_torchao(recipe: str) -> None:
    """In a process of its own: torchao's conversion changes settings of Inductor for the whole process."""
    pytest.importorskip("torchao.float8")
    code = as_code(recipe, HEAD, library=TORCHAO, sharded=True)
    program = f"""
import sys
sys.path.insert(0, {code_on_ranks.__file__.rpartition("/")[0]!r})
import torch
from code_on_ranks import FSDP, Tiny
CHOSEN = {CHOSEN!r}
model = Tiny().to(torch.bfloat16)
{code}
from torchao.float8.float8_linear import Float8Linear
from fp8core import count_matmuls
assert {{n for n, m in model.named_modules() if isinstance(m, Float8Linear)}} == CHOSEN
x = torch.randn(128, 128, dtype=torch.bfloat16)
count = count_matmuls(lambda: model(x).backward(), model)
in_fp8 = sum(m.flops for m in count.matmuls if m.is_fp8) / (2 * 128 * 128 * 256)
assert in_fp8 == 3 * {3 if recipe != "rowwise_with_gw_hp" else 2}, in_fp8
"""
    done = forked.run(["-c", program])
    assert done.returncode == 0, done.stderr[-1500:]


@pytest.mark.parametrize("recipe", list(candidates(ENGINE, compiled=False)))
def test_transformer_engines_code_is_python(recipe: str) -> None:
    """The library is absent: its code is run nowhere."""
    code = as_code(recipe, HEAD, library=ENGINE)
    compile(code, recipe, "exec")
    assert {"'head'", "'layers.1.up'"} <= set(re.findall(r"'[\w.]+'", code))


def test_lines_of_many_names_are_no_longer_than_code_is_wide() -> None:
    code = as_code("rowwise", {"words": [], "names": [f"layers.{i}.up" for i in range(20)]})
    assert max(map(len, code.splitlines())) <= 78


ASKED = "model=llama3_1b gpu=h100 dp=2 recipe=tensorwise checkpointing=full"


@functools.cache
def printed(*more: str) -> str:
    """The code of the answer, as it stands on the screen."""
    told = AdviceView(answer(parse([*ASKED.split(), *more]))).lines()
    return "\n".join(line.removeprefix("  ") for line in told[told.index("code:") + 1 :])


def test_the_code_for_two_gpus_gathers_in_fp8() -> None:
    assert "with_fp8_all_gather()" in printed()
    for (found,) in on_ranks.run(code_on_ranks.trained, 2, printed(), True):
        assert found["ok"], found["line"]
        assert "gathered in FP8" in found["line"]
        assert found["layers"] == 4, "the head stays in bf16"


def test_the_code_for_two_gpus_without_it_is_no_proof_of_it() -> None:
    code = printed("fp8_all_gather=false")
    assert "with_fp8_all_gather()" not in code
    for claimed, plain in on_ranks.run(code_on_ranks.trained, 2, code, True, False):
        assert not claimed["ok"]
        assert "the all-gather is not in FP8" in claimed["line"]
        assert plain["ok"], plain["line"]


def test_where_layers_are_split_the_code_says_by_what() -> None:
    """Tensor parallelism comes before FSDP (docs/distributed.md); in FP8 by the styles that gather in FP8."""
    for library in (FP8CORE, TORCHAO):
        code = as_code("tensorwise", HEAD, library=library, sharded=True, split=True, tp_fp8_all_gather=True)
        before, behind = code.split(FSDP)
        assert "Float8ColwiseParallel" in before
        assert "# TP: " not in behind
    assert "# TP: " in (plain := as_code("rowwise", HEAD, split=True))
    assert "Float8ColwiseParallel" not in plain
    assert "# TP: " not in as_code("rowwise", HEAD, sharded=True)
