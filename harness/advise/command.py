"""`python -m harness advise model=NAME gpu=NAME ...`: reads the words, traces the model, judges, prints."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8core.recipe import RECIPES
from harness.advise import four_bits, libraries, losses, measured
from harness.advise.advice import Advice
from harness.advise.asked_model import model_of, sizes
from harness.advise.casts import ENGINE, LIBRARIES, not_by_default
from harness.advise.decide import OFF, POSITIVE, advise, best, gather_matters_from, pays_from
from harness.advise.gpu import gpu_and_rows
from harness.advise.memory import GIB
from harness.advise.model import head_in_fp8, split
from harness.advise.rates import rates_of
from harness.advise.scale.layout import SCHEDULES, layout
from harness.advise.scale.need import memory_of
from harness.advise.step import both_steps
from harness.advise.training import traced
from harness.advise.views import AdviceView
from harness.machine.ceilings import ceilings
from harness.machine.terminal import console
from harness.store import printer
from harness.store.errors import UsageError, unknown
from harness.store.words import HELP, key, options_of
from harness.training.models import MODELS
from harness.training.models.user import TARGET
from harness.training.setup import Setup
from harness.training.step import BYTES, CHECKPOINTING, Step

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from harness.advise.advice import Check
    from harness.advise.casts import RecipeCost
    from harness.advise.decide import RecipeAdvice
    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.machine.hardware import Device

USAGE = """\
usage: python -m harness advise model=NAME [gpu=NAME] [KEY=VALUE ...] [--full]
does FP8 pay: as a step and layer by layer, with the code; no model is run

model=NAME, or model=PATH/config.json (Hugging Face; or its folder), or
  model._target_=my.module.build model.batch=my.module.batch model.ARG=VALUE
gpu=NAME            a GPU of the peak table; default: of runs=, or this one
tokens=N batch=N seq=N              size of one forward pass of one GPU
mode=compile|eager recipe=NAME priority=speed|loss
library=fp8core|torchao|transformer_engine         whose kernels are assumed
checkpointing=none|selective|full accumulation=N
weights=fp32|bf16 reduce=fp32|bf16  masters, reduced gradients
gpus=N              all GPUs; how they are split is printed, or named:
  dp=N tp=N pp=N schedule=1f1b|interleaved replicas=N node=N network_gb_s=X
fp8_all_gather=auto|true|false      weights (FSDP), inputs (TP) gathered in
                    FP8; auto: if it gains
head=bf16|fp8       the output head; its loss in FP8 was not judged
formats=fp8|all     all: also what is published of four bits on that GPU
train_tokens=N      of the whole training: which verdicts on losses count
bf16_tokens_per_s=X measured in bf16, of one GPU
runs=RUN,RUN        stored runs of that GPU: measured rates for assumed ones
full=true, --full   the tables behind the answer
json=true|FILE      print or write plain values
exit 0 answered; 2 the request could not be carried out
"""
_COMPUTE = {"fp32": "bf16_autocast", "bf16": "bf16"}  # products in bf16, by the masters' dtype
GATHERS = {"auto": None, "true": True, "false": False}
LIMIT = 1e9  # of a rate


@dataclass(frozen=True, slots=True)
class Question:
    """The words of the command line, checked. None: a default that depends on the rest."""

    model: str | dict[str, Any] = key(default="")
    gpu: str = key(default="")
    tokens: int | None = key(span=(1, 2**22))
    batch: int | None = key(span=(1, 2**16))
    seq: int | None = key(span=(1, 2**20))
    mode: str = key(default="", choices=("compile", "eager"))
    recipe: str = key(default="")
    priority: str = key(default="speed", choices=("speed", "loss"))
    checkpointing: str = key(default=next(iter(CHECKPOINTING)), choices=CHECKPOINTING)
    accumulation: int | None = key(span=(1, 2**12))
    gpus: int | None = key(span=(1, 2**16))
    dp: int | None = key(span=(1, 2**16))
    tp: int | None = key(span=(1, 64))
    pp: int | None = key(span=(1, 256))
    schedule: str = key(default=next(iter(SCHEDULES)), choices=SCHEDULES)
    replicas: int = key(default=1, span=(1, 2**16))
    node: int = key(default=8, span=(1, 256))
    weights: str = key(default=next(iter(BYTES)), choices=BYTES)
    reduce: str = key(default="", choices=BYTES)
    fp8_all_gather: str = key(default="auto", choices=GATHERS)
    head: str = key(default="bf16", choices=("bf16", "fp8"))
    formats: str = key(default="fp8", choices=("fp8", "all"))
    bf16_tokens_per_s: float | None = key(span=(1e-9, LIMIT), unit="tokens/s of one GPU")
    train_tokens: int | None = key(span=(1, 2**50))
    network_gb_s: float | None = key(span=(1e-9, LIMIT), unit="GB/s of one GPU")
    runs: str = key(default="")
    json: str = key(default="")
    library: str = key(default=next(iter(LIBRARIES)), choices=LIBRARIES)
    full: bool = key(default=False)


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: a word that is not understood, a model that cannot be traced, a GPU that is not known.
    """
    if HELP & set(words):
        options_of(Question, words, USAGE)
        return 0
    question = parse(words)
    found = AdviceView(answer(question), question.full)
    if question.json not in ("", "true"):
        try:
            Path(question.json).write_text(printer.as_json(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write json={question.json}: {error.strerror}") from error
    printer.show(found, console(), as_program=question.json == "true")
    return 0


def parse(words: Sequence[str]) -> Question:
    """The question of a command line.

    Raises:
        UsageError: an unknown key or value, with the nearest; a number that cannot be.
    """
    own: dict[str, Any] = {}
    others = []
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name.startswith("model.")):
            others.append(word)
            continue
        *names, last = name.split(".")[1:]
        into = own
        for each in names:
            into = into.setdefault(each, {})
            if not isinstance(into, dict):
                raise UsageError(f"{name}={value}: model.{each} has a value already")
        into[last] = _value(value)
    question = options_of(Question, others, USAGE)
    assert question is not None
    if own and question.model:
        raise UsageError(
            f"model={question.model} and model.{next(iter(own))}=...: name one model or give your own"
        )
    given = own or _value(str(question.model))
    if given == "":
        raise UsageError(f"which model? model=NAME of {', '.join(MODELS)}, or model.{TARGET}=my.module.build")
    mode = question.mode or ("eager" if question.library == ENGINE else "compile")
    return replace(question, mode=mode, model=given if isinstance(given, dict) else question.model)


def answer(question: Question) -> Advice:
    """The advice.

    Raises:
        UsageError: see `main`.
    """
    q = question
    device, frame = gpu_and_rows(q.gpu, [run for run in q.runs.split(",") if run])
    reached = ceilings(frame) if frame is not None else None
    rates = rates_of(device, reached, network_gb_s=q.network_gb_s)
    whole, made_up = model_of(q.model, q.tokens, q.batch, q.seq, q.tp or 1)
    if q.head == "fp8":
        whole = head_in_fp8(whole)
    active = whole.active or whole.parameters
    # How experts are split by tensor parallelism is not known, so that it is not planned either
    tp = 1 if whole.experts and q.tp is None and q.gpus is not None else q.tp
    sized = replace(whole, parameters=active)
    divided, defaults = layout(sized, q.gpus, q.dp, tp, q.pp, q.accumulation, q.schedule, q.node)
    batch, seq = 1, max(1, whole.tokens)  # all of a forward pass, however many sequences they are
    if isinstance(q.model, str) and q.model in MODELS:
        batch, seq = sizes(q.model, MODELS[q.model].max_seq, q.tokens, q.batch, q.seq)
    plan = Setup(
        **{name: getattr(q, name) for name in ("checkpointing", "replicas", "node", "reduce")},
        **divided,
        model=whole.name,
        batch=batch,
        seq=seq,
        compute=_COMPUTE[q.weights],
        compiled=q.mode == "compile",
        tp_gather_fp8=divided["tp"] > 1,
    )
    model = split(whole, plan.tp)
    if q.bf16_tokens_per_s is not None:
        _check_rate(q.bf16_tokens_per_s, whole, device)
        tokens = whole.tokens * plan.accumulation / (plan.tp * plan.pp)
        plan = replace(plan, bf16_step_s=tokens / q.bf16_tokens_per_s)
    recipes = libraries.candidates(q.library, plan.compiled)
    if q.fp8_all_gather == "true" and plan.dp == plan.tp == 1:
        raise UsageError(
            "fp8_all_gather=true: one GPU gathers nothing; name the GPUs by dp=, or leave it out"
        )
    if q.recipe:
        if q.recipe not in recipes:
            raise unknown("recipe", q.recipe, recipes)
        recipes = {q.recipe: recipes[q.recipe]}
        if why := _cannot_send(recipes[q.recipe], q):
            raise UsageError(f"fp8_all_gather=true: {why}; take fp8_all_gather=auto, or recipe=tensorwise")
    options = []
    for name, recipe in recipes.items():
        why = libraries.unavailable(q.library, name, device.capability, plan.compiled)
        why = why or _cannot_send(recipe, q)
        option = advise(model, rates, plan, recipe, why, GATHERS[q.fp8_all_gather])
        options.append(replace(option, loss=losses.of(name, active, q.train_tokens)))
    checks = _checks(frame, rates) if frame is not None and rates.has_fp8 else []
    careful = q.priority == "loss"
    usual = [o for o in options if len(options) == 1 or not not_by_default(q.library, o.recipe)]
    chosen = best(usual, careful)
    head = {la.fqn for la in model.layers if la.is_head and not chosen.unavailable}
    if head and not chosen.lossy:
        more = advise(
            head_in_fp8(model), rates, plan, chosen.recipe, fp8_all_gather=GATHERS[q.fp8_all_gather]
        )
    fours = [name for name, recipe in RECIPES.own.items() if recipe.is_four_bit]
    found = Advice(
        model,
        device,
        rates,
        plan,
        tuple(options),
        chosen,
        both_steps(model, rates, chosen.plan, chosen.recipe, chosen.converted),
        None if chosen.unavailable else pays_from(model, rates, _in_bf16(plan), chosen.recipe),
        gather_matters_from(model, rates, replace(plan, accumulation=1)),
        careful,
        tuple(checks),
        q.library,
        more.step if head and not chosen.lossy and _pays(head, more, chosen) else None,
        made_up=made_up,
        warnings=(defaults,) if defaults else (),
        four_bits=four_bits.known(device.key, fours, active, q.train_tokens) if q.formats == "all" else None,
        train_tokens=q.train_tokens,
    )
    asked = replace(
        plan,
        recipe=RECIPES[chosen.recipe.name] if found.decision in POSITIVE else None,
        gather_fp8=found.fp8_all_gather,
        left_out=tuple(layer.fqn for layer in model.layers if layer.fqn not in chosen.converted),
    )
    return replace(found, memory=memory_of(model, int(device.memory_gib * GIB), asked, q.gpus is not None))


def _pays(head: set[str], more: RecipeAdvice, chosen: RecipeAdvice) -> bool:
    """The head in FP8 as well brings something that can be seen."""
    return head <= more.converted and more.verdict != OFF and more.step.value >= chosen.step.value + 0.005


def _in_bf16(plan: Step) -> Step:
    """Nothing goes around in FP8, so that what is left is gained by products."""
    return replace(plan, gather_fp8=False, tp_gather_fp8=False)


def _check_rate(tokens_per_s: float, model: Model, device: Device) -> None:
    """A throughput that no such card reaches is refused: of another card, or of all GPUs together."""
    flops = sum(layer.flops for layer in model.layers) + 3 * (model.other + model.attention)
    peak = device.tflops.get("bf16", math.inf) * 1e12
    if model.tokens and (most := peak * model.tokens / flops) < tokens_per_s:
        raise UsageError(
            f"bf16_tokens_per_s={tokens_per_s:g}: at the bf16 peak of the {device.key} one GPU reaches {most:.0f} tokens/s of "
            f"{model.name}; expected the throughput of one GPU"
        )


def _cannot_send(recipe: RecipeCost, question: Question) -> str:
    """Why a recipe cannot do what `fp8_all_gather=true` asks for; "" if it can, or nothing is asked."""
    if question.fp8_all_gather != "true" or recipe.gathered_weight is not None:
        return ""
    return f"{recipe.name} casts a weight along both axes, so that FSDP must gather it in bf16"


def _checks(frame: pd.DataFrame, rates: Rates) -> list[Check]:
    def of_case(axes: Mapping[str, Any], resolved: Mapping[str, Any]) -> tuple[Model, Step] | None:
        if axes.get("model") not in MODELS or not isinstance(axes.get("batch"), int):
            return None
        extent = axes["batch"], axes["seq"], axes.get("layers"), resolved.get("vocab_size")
        named = {name: axes[name] for name in ("compute", "checkpointing", "accumulation") if name in axes}
        return traced(axes["model"], *extent), Step(**named)

    steps = measured.steps(frame, rates, of_case)
    return [*measured.products(frame, rates), *measured.layers(frame, rates), *steps]


def _value(text: str) -> Any:
    """An argument of a user's model: a number, true, false or null as JSON; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
