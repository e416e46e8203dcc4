"""The filter as code and as keys. Oracle: fp8core itself, which converts by the one and holds back by the other."""

from __future__ import annotations

import pytest
import torch
from advise_fixtures import model, round_h200
from torch import nn

from fp8core import audit
from harness.advise import decide
from harness.advise.recipes import candidates
from harness.advise.step import Plan
from harness.advise.trace import trace
from harness.advise.views import as_code
from harness.training.models import resolve

RATES = round_h200()


def converted_by(code: str, module: nn.Module) -> set[str]:
    exec(code, {"model": module})  # what the advice prints, as a reader would run it
    return {layer.fqn for layer in audit(module).converted}


@pytest.mark.parametrize("name", ["gpt2", "llama_125m", "llama3_1b", "llama_moe"])
def test_what_is_printed_converts_what_was_chosen(name: str) -> None:
    spec = resolve(name)
    traced = trace(spec, 4, 1024)
    for recipe in (r for n, r in candidates(False).items() if n in ("tensorwise", "rowwise", "delayed")):
        chosen = decide.choose(traced, RATES, Plan(compiled=False), recipe)
        if not chosen:
            continue
        left_out = decide.module_filter(traced, chosen)
        module = spec.build(device="meta", dtype=torch.bfloat16)
        assert converted_by(as_code(recipe.name, left_out), module) == chosen


@pytest.mark.parametrize(
    "name", ["b'c", 'd"e', "x*y", "[red]z[/red]", "</script>", "a b", "q,r", "back\\slash", "n\nl"]
)
def test_names_that_hold_anything(name: str) -> None:
    """Code quotes them; a schedule gives commas, stars and the like a meaning, so there is none."""
    module = nn.Module()
    module.add_module(name, nn.Linear(64, 64))
    module.add_module("plain", nn.Linear(64, 64))
    left_out = decide.module_filter(model((name, 64, 64), ("plain", 64, 64)), frozenset({"plain"}))
    assert left_out == {"words": (name,), "names": ()}
    assert converted_by(as_code("tensorwise", left_out), module) == {"plain"}
