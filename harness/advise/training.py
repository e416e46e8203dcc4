"""The advice for an arm of a training step on the GPU here: which of its layers take FP8, and why the others don't.

The suite `train` asks with `convert: advised`. It is answered by the same functions as the command, for the set-up that
is trained: its mode, recipe, tokens, checkpointing, depth and vocabulary. Where nothing pays, what is left is the control.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fp8core import audit
from harness.advise.decide import POSITIVE, UNDECIDED, able, advise
from harness.advise.gpu import gpu_and_rows, here, rows_of_runs
from harness.advise.rates import rates_of
from harness.advise.recipes import described, unavailable
from harness.advise.step import speedup, step_cost
from harness.advise.trace import trace
from harness.machine.ceilings import SUITES, ceilings
from harness.machine.ranks import hosts
from harness.store.errors import UsageError
from harness.store.rows import rows_of
from harness.training.meta_estimate import skeleton
from harness.training.models import ModelSpec, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.advise.model import Model
    from harness.advise.rates import Rates
    from harness.machine.hardware import Device
    from harness.training.setup import Setup

_ALL = "leave axes.convert out to convert all layers"
_ELSEWHERE = ("link", "network")  # figures of what a step on one GPU does not use


@dataclass(frozen=True, slots=True)
class AdvisedMachine:
    """What an advice rests on.

    Attributes:
        rates: of the GPU.
        capability: its architecture.
        sha256: of the stored ceilings among the rates, see `content`; "" where all are published or typical ones.
    """

    rates: Rates
    capability: str
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Advised:
    """A set-up of which the advised layers alone are converted, and for `resolved` what was advised."""

    setup: Setup
    facts: Mapping[str, object]


@functools.cache
def machine_here(device: str, run: str) -> AdvisedMachine | str:
    """The rates of the GPU of this process; or why there is no advice for it, in one line with the way out.

    Args:
        device: of the sweep.
        run: id or folder of stored ceilings of this GPU; "": published rates, else nominal ones times a typical share.

    Raises:
        UsageError: no such run, or one without ceilings of this GPU.
    """
    if torch.device(device).type != "cuda":
        return f"convert=advised is of a GPU's rates, and this is a {device}; {_ALL}"
    if not torch.cuda.is_available():
        return f"convert=advised is of the rates of the GPU here, and there is none; {_ALL}"
    name, known = here()
    if known is None:
        return f"convert=advised: no peak of {name} is known; add an entry to harness/machine/hardware/devices.yaml, or {_ALL}"
    reached, sha256 = None, ""
    if run:
        _, frame = gpu_and_rows(known.key, [run])
        reached, sha256 = ceilings(frame) if frame is not None else None, content(run)
        if reached is None:
            raise UsageError(
                f"ceilings={run} has no product and no copy of the {known.key}; name a run of sweep=ceilings made on it"
            )
    rates = rates_of(known, reached)
    if not rates.has_fp8:
        return f"convert=advised: {known.key} has no FP8 matrix units, so no layer pays; use the bf16 arms"
    return AdvisedMachine(rates, known.capability, sha256)


def content(run: str) -> str:
    """Says of stored ceilings whether they are the same, wherever they lie: the SHA-256 of all rows that rates are read from.

    Raises:
        UsageError: no such run, or a damaged one.
    """
    frame = rows_of_runs([run])
    own = rows_of(frame[frame["suite"].isin(SUITES) & (frame["status"] == "ok")])
    columns = ("env_id", "suite", "axes", "arm", "regime", "metric", "value", "bytes_moved")
    lines = sorted(json.dumps([row[column] for column in columns]) for row in own)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def advised(setup: Setup, machine: AdvisedMachine) -> Advised:
    """A set-up with a recipe, narrowed to the layers that pay; where none does, its control.

    Args:
        setup: that converts every layer that can be. The layers of a peer are chosen by the costs of fp8core's, so that
            both have FP8 in the same places; grouped experts are not judged and stay as they are.
        machine: where it runs.

    Raises:
        UsageError: the model cannot be traced.
    """
    assert setup.recipe is not None
    model, recipe = _model(setup), described(setup.recipe, setup.compiled)
    reason = unavailable(recipe.name, machine.capability, setup.compiled)
    found = advise(model, machine.rates, setup, recipe, reason)
    step, off = found.step, found.verdict not in POSITIVE
    every = [layer.fqn for layer in audit(skeleton(replace(setup, recipe=None, peer=""))).layers]
    left = tuple(fqn for fqn in every if off or fqn not in found.converted)
    whole = found.unavailable or f"the step as a whole is predicted to gain {step.value - 1:.1%}"
    if found.verdict == UNDECIDED:
        whole += (
            f", which may be none ({step.low:.2f} to {step.high:.2f}): measure the rates by sweep=ceilings"
        )
    reasons = dict.fromkeys(every, "not used in the forward pass")
    for one in found.layers:
        ratio, why = one.ratio, whole if one.converted else one.reason
        reasons[one.layer.fqn] = f"{ratio.value:.2f}x predicted ({ratio.low:.2f} to {ratio.high:.2f}), {why}"
    facts: dict[str, object] = {
        "recipe": recipe.name,
        "decision": found.verdict,
        "predicted_step": None if off else [step.value, step.low, step.high],
        "converted": [fqn for fqn in every if fqn not in left],
        "left_in_bf16": {fqn: why for fqn, why in reasons.items() if fqn in left},
        "tokens": model.tokens,
        "mode": "compile" if setup.compiled else "eager",
        "rates": {n: asdict(f) for n, f in machine.rates.figures.items() if n not in _ELSEWHERE},
        "rates_of": machine.rates.name,
        "ceilings_sha256": machine.sha256,
    }
    if off:
        facts["runs_as"] = "its control: no layer is converted"
        setup = replace(setup, recipe=None, peer="")
    else:
        setup = replace(setup, left_out=left)
    return Advised(setup, {"convert": "advised", "advice": facts})


def predicted(setup: Setup, world: int, device: str, gpu: Device | None = None) -> dict[str, object] | str:
    """What the model of a step expects of a training arm on several GPUs of this machine, beside which it is measured.

    Args:
        setup: of one rank.
        world: ranks, over which FSDP2 shards the model.
        device: of the sweep.
        gpu: whose published and typical rates are taken; None: the one here.

    Returns:
        step_ms (bf16's for the control), speedup over bf16 with its 95 % interval (None for the control), and by what;
        or why there is no prediction.
    """
    try:
        return _predicted(setup, world, device, gpu)
    except UsageError as error:
        return f"no prediction: {error}"


def _predicted(setup: Setup, world: int, device: str, gpu: Device | None) -> dict[str, object]:
    if gpu is None and torch.device(device).type != "cuda":
        raise UsageError(f"rates of a {device} are not modelled")
    if setup.compute == "fp32":
        raise UsageError("the model of a step knows bf16 and FP8, not fp32")
    name, known = here() if gpu is None else (gpu.key, gpu)
    if known is None:
        raise UsageError(f"no peak of {name} is known")
    rates = rates_of(known)
    recipe = None if setup.recipe is None else described(setup.recipe, setup.compiled)
    if recipe is not None:
        if not rates.has_fp8:
            raise UsageError(f"{name} has no FP8 matrix units")
        if lacking := unavailable(recipe.name, known.capability, setup.compiled):
            raise UsageError(lacking)
    plan = replace(
        setup,
        dp=world,
        node=max(1, world // hosts()),
        reduce="fp32",
        reduce_each=setup.accumulation > 1,
        gather_fp8=setup.recipe is not None and setup.recipe.fp8_all_gather,
    )
    model = _model(setup)
    converted = able(model, recipe) if recipe is not None else ()
    gain = speedup(model, rates, plan, recipe, converted) if recipe is not None else None
    return {
        "step_ms": 1e3 * step_cost(model, rates, plan, recipe, converted).total,
        "speedup": None if gain is None else [gain.value, gain.low, gain.high],
        "rates_of": rates.name,
        "by": "the model of a step of `advise`, published and typical rates",
    }


def _model(setup: Setup) -> Model:
    named = isinstance(resolve(setup.model), ModelSpec)
    extent = (setup.seq, setup.layers, setup.vocab_size) if named else (0, None, None)
    return traced(setup.model, setup.batch, *extent)


@functools.lru_cache(maxsize=16)  # arms of a case ask for the same one
def traced(
    model: str, batch: int, seq: int, layers: int | None = None, vocab_size: int | None = None
) -> Model:
    """One pass of the model of a training case.

    Args:
        model: as the case names it.
        batch: sequences of a forward pass.
        seq: tokens of each; of no meaning for a user's model, which has lengths of its own.
        layers: blocks of a named model, where fewer than its own.
        vocab_size: of a named model, where it is not its own.

    Raises:
        UsageError: it cannot be traced.
    """
    spec = resolve(model)
    if isinstance(spec, ModelSpec):
        changed: dict[str, Any] = {
            "layers": layers or spec.layers,
            "vocab_size": vocab_size or spec.vocab_size,
        }
        spec = replace(spec, config=replace(spec.config, **changed))
    return trace(spec, batch, seq)
