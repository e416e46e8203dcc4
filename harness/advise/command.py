"""`python -m harness advise model=NAME gpu=NAME ...`: reads the words, traces the model, judges, prints."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.advise import libraries, measured
from harness.advise.advice import advice
from harness.advise.decide import POSITIVE, advise
from harness.advise.from_config import of_config
from harness.advise.gpu import gpu_and_rows
from harness.advise.library_names import ENGINE, FP8CORE, LIBRARIES
from harness.advise.need import memory_of
from harness.advise.own_model import divisible, made_up, own_model, put, reads_tokens, without_batch
from harness.advise.plan import BYTES, CHECKPOINTING
from harness.advise.rates import rates_of
from harness.advise.recipes import candidates
from harness.advise.scale.asked import cannot_send, job_of, step_seconds
from harness.advise.scale.layout import SCHEDULES
from harness.advise.trace import trace
from harness.advise.training import plan_of as plan_of_case
from harness.advise.training import traced
from harness.advise.views import WIDTH, as_dict, show
from harness.machine.ceilings import ceilings
from harness.machine.terminal import console, printable
from harness.store.errors import UsageError, unknown
from harness.store.words import helped
from harness.training.models import MODELS, ModelSpec, resolve
from harness.training.models.hugging_face import is_config, read
from harness.training.models.user import BATCH, TARGET

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd

    from harness.advise.advice import Advice
    from harness.advise.casts import RecipeCost
    from harness.advise.fits import Memory
    from harness.advise.measured import Check
    from harness.advise.model import Model
    from harness.advise.plan import Plan
    from harness.advise.rates import Rates
    from harness.advise.scale.job import ClusterJob

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
bf16_tokens_per_s=X measured in bf16, of one GPU
runs=RUN,RUN        stored runs of that GPU: measured rates for assumed ones
full=true, --full   the tables behind the answer
json=true|FILE      print or write plain values
exit 0 answered; 2 the request could not be carried out
"""
MODES = ("compile", "eager")
PRIORITIES = ("speed", "loss")
GATHERS = {"auto": None, "true": True, "false": False}
_TOKENS, _SEQ = 16384, 4096
_REAL = {"network_gb_s": "GB/s of one GPU", "bf16_tokens_per_s": "tokens/s of one GPU"}
_MOST = {
    "tokens": 2**22,
    "batch": 2**16,
    "seq": 2**20,
    "gpus": 2**16,
    "dp": 2**16,
    "tp": 64,
    "pp": 256,
    "replicas": 2**16,
    "accumulation": 2**12,
    "node": 256,
}


@dataclass(frozen=True, slots=True)
class Question:
    """The words of the command line, checked. None: a default that depends on the rest."""

    model: str = ""
    gpu: str = ""
    tokens: int | None = None
    batch: int | None = None
    seq: int | None = None
    mode: str = "compile"
    recipe: str = ""
    priority: str = "speed"
    checkpointing: str = "none"
    accumulation: int | None = None
    gpus: int | None = None
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    schedule: str = "1f1b"
    replicas: int = 1
    node: int = 8
    weights: str = "fp32"
    reduce: str = ""
    fp8_all_gather: str = "auto"
    bf16_tokens_per_s: float | None = None
    network_gb_s: float | None = None
    runs: tuple[str, ...] = ()
    json: str = ""
    library: str = FP8CORE
    full: bool = False


def main(words: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: a word that is not understood, a model that cannot be traced, a GPU that is not known.
    """
    if helped(words, USAGE):
        return 0
    question = parse(words)
    found = answer(question)
    if question.json:
        text = json.dumps(as_dict(found), indent=1)
        if question.json == "true":
            print(text)  # noqa: T201  # asked for on standard output
            return 0
        try:
            Path(question.json).write_text(text + "\n")
        except OSError as error:
            raise UsageError(f"cannot write json={question.json}: {error.strerror}") from error
    show(found, console(WIDTH), question.full)
    return 0


def parse(words: Sequence[str]) -> Question:
    """The question of a command line.

    Raises:
        UsageError: an unknown key or value, with the nearest; a number that cannot be.
    """
    known = {field.name: field for field in fields(Question)}
    values: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for word in words:
        key, equals, value = ("full", "=", "true") if word == "--full" else word.partition("=")
        if not equals:
            raise UsageError(f"{printable(word)!r} is not key=value; keys: {', '.join(known)}")
        if key.startswith("model."):
            put(own, key.split(".")[1:], _value(value))
        elif key not in known:
            raise unknown("key", printable(key), [*known, f"model.{TARGET}"])
        else:
            values[key] = _checked(key, value)
    if own:
        if values.get("model"):
            raise UsageError(
                f"model={values['model']} and model.{next(iter(own))}=...: name one model or give your own"
            )
        values["model"] = json.dumps(own)
    if not values.get("model"):
        raise UsageError(f"which model? model=NAME of {', '.join(MODELS)}, or model.{TARGET}=my.module.build")
    if values.get("library") == ENGINE:
        values.setdefault("mode", "eager")
    return Question(**values)


def answer(question: Question) -> Advice:
    """The advice.

    Raises:
        UsageError: see `main`.
    """
    device, frame = gpu_and_rows(question.gpu, question.runs)
    reached = ceilings(frame) if frame is not None else None
    rates = rates_of(device, reached, network_gb_s=question.network_gb_s)
    model = _model(question)
    job, said = job_of(question, model, device)
    tokens = model.tokens
    model, plan = job.on_a_gpu(model)
    plan = replace(plan, bf16_step_s=step_seconds(question, tokens, job))
    recipes = libraries.candidates(question.library, plan.compiled)
    if question.fp8_all_gather == "true" and plan.dp == plan.tp == 1:
        raise UsageError(
            "fp8_all_gather=true: one GPU gathers nothing; name the GPUs by dp=, or leave it out"
        )
    if question.recipe:
        if question.recipe not in recipes:
            raise unknown("recipe", question.recipe, recipes)
        recipes = {question.recipe: recipes[question.recipe]}
        if why := cannot_send(recipes[question.recipe], question):
            raise UsageError(f"fp8_all_gather=true: {why}; take fp8_all_gather=auto, or recipe=tensorwise")
    options = [
        advise(
            model,
            rates,
            plan,
            recipe,
            libraries.unavailable(question.library, name, device.capability, plan.compiled)
            or cannot_send(recipe, question),
            GATHERS[question.fp8_all_gather],
        )
        for name, recipe in recipes.items()
    ]
    checks = _checks(frame, rates) if frame is not None and rates.has_fp8 else []
    careful = question.priority == "loss"
    found = advice(
        model, device, rates, plan, options, careful=careful, checks=checks, library=question.library
    )
    return replace(
        found,
        memory=_memory(question, found, job),
        warnings=(said,) if said else (),
        made_up=made_up(_value(question.model)),
    )


def _memory(question: Question, found: Advice, job: ClusterJob) -> Memory:
    """What the advised step takes: of a named model whole, of any other at least."""
    spec = MODELS.get(question.model)
    batch, seq = sizes(question, spec.max_seq) if spec is not None else (1, job.seq)
    recipe = found.chosen.recipe.name if found.decision in POSITIVE else ""
    asked = replace(job, batch=batch, seq=seq, recipe=recipe, gather_fp8=found.fp8_all_gather)
    return memory_of(found, asked, by_gpus=question.gpus is not None, reduce=question.reduce)


def _model(question: Question) -> Model:
    own = _value(question.model)
    if isinstance(own, dict) and BATCH not in own and not reads_tokens(own):
        return without_batch(own, question.tokens or _TOKENS)
    if question.model not in MODELS and is_config(question.model):
        described = read(question.model)
        if (question.tp or 1) > 1 and described.top_k:
            raise UsageError(
                f"tp={question.tp}: how {question.model} splits its experts is not known; leave tp out"
            )
        batch, seq = sizes(question, described.max_seq or _MOST["seq"])
        return of_config(described, batch * seq)
    spec = resolve(question.model)
    if isinstance(spec, ModelSpec):
        batch, seq = sizes(question, spec.max_seq)
        return trace(spec, batch, seq)
    if question.seq:
        raise UsageError(
            f"seq={question.seq}: a model of your own brings its lengths with model.batch; leave seq out"
        )
    return own_model(spec, question.tokens, question.batch)


def sizes(question: Question, max_seq: int) -> tuple[int, int]:
    """Sequences and tokens of each.

    Raises:
        UsageError: longer than the model, tokens that are no whole number of sequences or that FP8 can't take.
    """
    seq = question.seq or min(max_seq, _SEQ, question.tokens or _SEQ)
    if seq > max_seq:
        raise UsageError(f"seq={seq}: {question.model} reads at most {max_seq} tokens")
    if question.batch and question.tokens and question.batch * seq != question.tokens:
        raise UsageError(
            f"tokens={question.tokens} is not batch={question.batch} times seq={seq}; leave one of them out"
        )
    tokens = question.tokens or (question.batch or max(1, _TOKENS // seq)) * seq
    if tokens % seq:
        near = max(1, round(tokens / seq)) * seq
        raise UsageError(f"tokens={tokens} is no multiple of seq={seq}; the nearest is {near}")
    divisible(tokens)
    return tokens // seq, seq


def _checks(frame: pd.DataFrame, rates: Rates) -> list[Check]:
    def recipe_of(name: str, compiled: bool) -> RecipeCost | None:
        return candidates(compiled).get(name)

    def of_case(axes: Mapping[str, Any], resolved: Mapping[str, Any]) -> tuple[Model, Plan] | None:
        if axes.get("model") not in MODELS or not isinstance(axes.get("batch"), int):
            return None
        sizes = axes["batch"], axes["seq"], axes.get("layers"), resolved.get("vocab_size")
        trained = axes.get("compute", ""), axes.get("checkpointing", "none"), axes.get("accumulation", 1)
        return traced(axes["model"], *sizes), plan_of_case(*trained, compiled=True)

    steps = measured.steps(frame, rates, of_case, recipe_of)
    return [*measured.products(frame, rates), *measured.layers(frame, rates, recipe_of), *steps]


def _checked(key: str, value: str) -> Any:
    choices = {
        "mode": MODES,
        "priority": PRIORITIES,
        "checkpointing": tuple(CHECKPOINTING),
        "weights": tuple(BYTES),
        "reduce": tuple(BYTES),
        "schedule": tuple(SCHEDULES),
        "fp8_all_gather": tuple(GATHERS),
        "library": LIBRARIES,
        "full": ("true", "false"),
    }
    if key in choices:
        if value not in choices[key]:
            raise unknown(key, printable(value), choices[key])
        return value == "true" if key == "full" else value
    if key == "runs":
        return tuple(run for run in value.split(",") if run)
    if key in _REAL:
        return _real(key, value)
    if key in _MOST:
        return _whole(key, value)
    return value


def _whole(key: str, value: str) -> int:
    try:
        number = int(value.replace("_", ""))
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST[key]:
        raise UsageError(f"{key}={printable(value)}: expected a whole number from 1 to {_MOST[key]:,}")
    return number


def _real(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise UsageError(f"{key}={printable(value)}: expected a number above 0: {_REAL[key]}")
    return number


def _value(text: str) -> Any:
    """An argument of a user's model: a number, true, false or null as JSON; else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
