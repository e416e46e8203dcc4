"""Situations of `advise`, by the fields of its record: no FP8 where FP8 cannot pay, cannot run or is not known."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from configs_for_tests import PUBLISHED, written
from report_cases import gpu_run
from situations import Place, exit_code, situation

from harness.__main__ import main

# What a reader takes as yes
YES = ("on", "only these layers")
of_advise = partial(situation, "advise", word="decision is on", positive=True, instead=False)
FITS = ("dp=8", "checkpointing=full")  # 8B on an H200
WIDE = ("model._target_=planted_model.build", "model.batch=planted_model.batch")
STAND_INS = Path(__file__).parents[1] / "harness" / "stand_ins"
CODE = """\
import torch
from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        return super().forward(x).float().mean()


def build(width):
    return Net(*({layer} for _ in range(4)))


def batch(step, seed, batch_size, device):
    return (torch.zeros(batch_size, 8192, WIDTH, device=device),)
"""


def says_yes(place: Place, *words: str) -> bool:
    place.capture.readouterr()
    assert main(["advise", *words, "json=true"]) == 0
    return json.loads(place.capture.readouterr().out)["decision"] in YES


def own_model(place: Place, layer: str, width: int) -> tuple[str, ...]:
    """Words that name a model made here."""
    code = CODE.replace("{layer}", layer).replace("WIDTH", str(width))
    (place.folder / "planted_model.py").write_text(code)
    place.patch.syspath_prepend(str(place.folder))
    place.patch.delitem(sys.modules, "planted_model", raising=False)
    return (*WIDE, f"model.width={width}")


@of_advise(what="the GPU has no FP8 matrix units")
def gpu_without_fp8(place: Place, planted: bool) -> object:
    gpu = "a100" if planted else "h200"
    return says_yes(place, "model=llama3_8b", f"gpu={gpu}", "recipe=tensorwise", *FITS)


@of_advise(what="a pass has 256 tokens: casts cost more than products gain")
def few_tokens(place: Place, planted: bool) -> object:
    tokens = 256 if planted else 16384
    return says_yes(
        place,
        "model=llama3_8b",
        "gpu=h200",
        "recipe=tensorwise",
        "checkpointing=full",
        "weights=bf16",
        f"tokens={tokens}",
    )


@of_advise(what="the GPU has no kernel for the recipe: mxfp8 on Hopper")
def recipe_without_kernel(place: Place, planted: bool) -> object:
    recipe = "mxfp8" if planted else "tensorwise"
    return says_yes(place, "model=llama3_8b", "gpu=h200", f"recipe={recipe}", *FITS)


@of_advise(what="no layer's width is a multiple of 16")
def odd_widths(place: Place, planted: bool) -> object:
    words = own_model(place, "nn.Linear(width, width)", 8200 if planted else 8192)
    return says_yes(place, *words, "gpu=h200", "recipe=tensorwise", "tokens=16384")


@of_advise(what="all that would gain is the output head, whose loss in FP8 was not judged")
def head_alone(place: Place, planted: bool) -> object:
    # As many rows as the layer has outputs make it the head
    embedding = f"type('E', (nn.Identity,), dict(num_embeddings={8192 if planted else 64}))()"
    layer = f"(nn.Linear(width, width) if _ == 3 else {embedding})"
    return says_yes(place, *own_model(place, layer, 8192), "gpu=h200", "recipe=tensorwise", "tokens=16384")


@of_advise(what="the model has no Linear layer")
def no_linear_layer(place: Place, planted: bool) -> object:
    layer = f"nn.{'LayerNorm(width)' if planted else 'Linear(width, width)'}"
    words = *own_model(place, layer, 8192), "gpu=h200", "recipe=tensorwise", "tokens=16384"
    return main(["advise", *words]) == 0 and says_yes(place, *words)


@of_advise(what="the step does not fit, whatever FP8 gains")
def step_that_does_not_fit(place: Place, planted: bool) -> object:
    gpus = 1 if planted else 8
    return says_yes(
        place, "model=llama3_8b", "gpu=h100", "recipe=tensorwise", "checkpointing=full", f"dp={gpus}"
    )


@of_advise(what="the interval contains 1")
def interval_that_contains_1(place: Place, planted: bool) -> object:
    tokens = 2048 if planted else 16384
    words = ("model=llama3_1b", "gpu=h200", "recipe=tensorwise", "checkpointing=full")
    return says_yes(place, *words, f"tokens={tokens}")


def asked(place: Place, *words: str) -> dict[str, Any]:
    """The plain values of an answer."""
    place.capture.readouterr()
    assert main(["advise", *words, "json=true"]) == 0
    return json.loads(place.capture.readouterr().out)


of_interval = partial(situation, "advise", positive=True, instead=False)


def of_config(place: Place, *words: str, **more: object) -> dict[str, Any]:
    """An answer about Llama-3-8B's `config.json` with other fields, read by a stand-in for transformers."""
    place.patch.syspath_prepend(str(STAND_INS))
    for name in ("transformers", "language_models"):
        place.patch.setitem(sys.modules, name, None)  # so that it is undone
        del sys.modules[name]
    fields = PUBLISHED["meta-llama/Meta-Llama-3-8B"][0] | more
    return asked(place, f"model={written(place.folder, fields)}", "gpu=h100", *words)


@of_interval(
    what="a `config.json` whose attention is windowed, which is not modelled",
    word="the gain is more than a bound",
)
def unknown_attention(place: Place, planted: bool) -> object:
    step = of_config(place, "dp=8", sliding_window=4096 if planted else None)["step_speedup"]
    return step["high"] > step["value"]


@of_interval(
    what="a `config.json` of a model whose blocks are not known",
    word="the step's interval is that of the named model of these sizes, to 3 %",
)
def config_of_a_named_model(place: Place, planted: bool) -> object:
    words = ("dp=8", "tokens=16384")
    found = of_config(place, *words, model_type="mixtral" if planted else "llama")
    own = asked(place, "model=llama3_8b", "gpu=h100", *words)
    ratios = [found["step_speedup"][end] / own["step_speedup"][end] for end in ("value", "low", "high")]
    return all(abs(ratio - 1) < 0.03 for ratio in ratios)


@situation(
    "advise",
    "a `config.json` with a vision tower, of which the part for text is read",
    word="the gain is more than a bound, nothing is said to be left out",
    positive=[True, True],
    instead=[False, False],
)
def vision_tower(place: Place, planted: bool) -> object:
    tower = {"vision_config": {"model_type": "clip_vision_model"}} if planted else {}
    found = of_config(place, "dp=8", **tower)
    step = found["step_speedup"]
    return [step["high"] > step["value"], "vision" not in " ".join(found["warnings"])]


@of_interval(
    what="the step of 16 tokens waits for gathered codes, whose rate nobody measured",
    word="the interval is within 5 % of the step",
)
def step_that_waits(place: Place, planted: bool) -> object:
    words = ["dp=8", "tokens=16"] if planted else ["tokens=16384", "bf16_tokens_per_s=500"]
    step = asked(place, "model=llama3_8b", "gpu=h100", "recipe=tensorwise", *words)["step_speedup"]
    return step["high"] < 1.05 * step["value"]


@exit_code("advise", "stored runs of another GPU stand for its rates", instead=2)
def runs_of_another_gpu(place: Place, planted: bool) -> object:
    gpu_run(place.folder / "run")
    gpu = "h100" if planted else "h200"
    return main(["advise", "model=gpt2", f"gpu={gpu}", "recipe=tensorwise", "runs=run", "json=true"])


@exit_code("advise", "the peak table does not know the GPU", instead=2)
def unknown_gpu(_: Place, planted: bool) -> object:
    gpu = "h900" if planted else "h200"
    return main(["advise", "model=gpt2", f"gpu={gpu}", "recipe=tensorwise", "json=true"])
