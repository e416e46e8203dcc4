"""Do the margins of the decision hold where rates are not what they are taken for? `python reports/studies/margins.py`

The filter never loses by its own prediction; what is asked here is how much it loses if the GPU is another than the rates
say. Steps are drawn (layers, shared inputs, tokens, mode, recipe, GPU of the peak table) or taken of named models; the layers
are chosen at the assumed rates; then every rate is moved at random, log-normal by its own stated error, and the step taken
at those. Rates are the published or typical ones of the GPU, or the same figures with the errors that measured ones have.

The rule for `decide.LAYER_GAIN`, `STEP_GAIN` and for what is "on": of the steps that the advice converts anything of, at least
`KEPT` stay at `FLOOR` of bf16 or above; of the drawn ones, and of those of each named model. No published case has a part in it.
"""

from __future__ import annotations

import functools
import math
import random
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.advise import decide
from harness.advise.advised_arms import FLOOR
from harness.advise.layer import closed_form
from harness.advise.model import Linear, Model, VectorTraffic
from harness.advise.rates import LARGE, rates_of
from harness.advise.recipes import candidates, unavailable
from harness.advise.step import Ratio, speedup, step_ratio
from harness.advise.trace import trace
from harness.machine.ceilings import BF16, TENSORWISE, Ceilings, TimedProduct
from harness.machine.hardware import DEVICES
from harness.training.models import MODELS
from harness.training.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from harness.advise.casts import RecipeCost
    from harness.advise.rates import Rates
    from harness.machine.hardware import Device

    Source = Callable[[random.Random, bool], "Drawn"]

KEPT = 0.95
DRAWS = 1000
SURE = 1.96  # standard errors: the interval of an advice (`decide.verdict`), two-sided 95 %
_NAMED = (
    "nanogpt_char",
    "gpt2",
    "gpt2_medium",
    "gpt2_xl",
    "llama_125m",
    "llama_moe",
    "llama3_1b",
    "llama3_8b",
)
_CUBE = 8192


@dataclass(frozen=True, slots=True)
class Margins:
    """What the decision asks for before it converts; see `harness.advise.decide`."""

    layer_gain: float = decide.LAYER_GAIN
    step_gain: float = decide.STEP_GAIN
    sure: float = SURE

    def allow(self, found: Outcome) -> bool:
        """Whether the advice is "on": so many standard errors below the prediction the step still gains."""
        predicted = found.predicted
        if predicted is None or predicted.value < self.step_gain:
            return False
        return predicted.value * (predicted.low / predicted.value) ** (self.sure / SURE) > 1


COMPARED = (
    Margins(1.0, 1.0, -math.inf),
    Margins(sure=-math.inf),
    Margins(1.06, 1.05, -math.inf),
    Margins(sure=1.0),
    Margins(),
)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One training step on one GPU, under one recipe."""

    model: Model
    rates: Rates
    plan: Step
    recipe: RecipeCost


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was predicted of the chosen layers, None where none was chosen; and what came of them at other rates."""

    predicted: Ratio | None
    real: float


def drawn(random_: random.Random, measured: bool) -> Drawn:
    """A step of no model in particular: up to twelve layers in up to four groups that read one tensor."""
    width, tokens = _size(random_, 256), _size(random_, 256, 131072)
    layers: list[Linear] = []
    for group in range(random_.randint(1, 4)):
        K = width if random_.random() < 0.7 else _size(random_, 128)
        for _ in range(random_.choice((1, 1, 2, 3))):
            layers.append(Linear(f"l{len(layers)}", K, _size(random_, 128), tokens, group))
    rates, plan, recipe = _machine(random_, measured)
    # What FP8 leaves alone takes up to as long as the products in bf16, and there are 3 to 30 launches a layer
    products = sum(layer.flops for layer in layers) / rates["bf16"]
    attention = random_.random() * products * rates["attention"] / 3
    moved = random_.random() * products * rates["bandwidth"] / 4
    kernels = len(layers) * random_.randint(3, 30)
    traffic = VectorTraffic(moved, moved, kernels, max(len(layers), kernels // 3))
    weights = sum(layer.K * layer.N for layer in layers)
    model = Model("drawn", tuple(layers), tokens, attention, 0.0, traffic, traffic, weights, 1)
    return Drawn(model, rates, plan, recipe)


def named(name: str, random_: random.Random, measured: bool) -> Drawn:
    """A step of a model of this project, of 1024 to 65536 tokens."""
    model = _one_sequence(name).with_tokens(2 ** random_.randint(10, 16))
    return Drawn(model, *_machine(random_, measured))


def outcome(step: Drawn, random_: random.Random, layer_gain: float = decide.LAYER_GAIN) -> Outcome:
    """The filter of the assumed rates, at rates that differ from them."""
    chosen = decide.choose(step.model, step.rates, step.plan, step.recipe, layer_gain)
    real = step.rates
    for name in step.rates.figures:
        real = real.shifted(name, random_.gauss(0.0, 1.0))
    if not chosen:
        return Outcome(None, 1.0)
    predicted = speedup(step.model, step.rates, step.plan, step.recipe, chosen)
    return Outcome(predicted, step_ratio(step.model, real, step.plan, step.recipe, chosen))


def outcomes(source: Source, measured: bool, layer_gain: float, draws: int) -> list[Outcome]:
    """That many steps of a source: the same steps and rates whatever the gain."""
    found = []
    for index in range(draws):
        random_ = random.Random(index)
        step = source(random_, measured)
        found.append(outcome(step, random_, layer_gain))
    return found


def on(found: Sequence[Outcome], margins: Margins) -> list[float]:
    """The real ratios of the steps that the advice is "on" for, ascending."""
    return sorted(o.real for o in found if margins.allow(o))


def lost(real: Sequence[float]) -> float:
    """Share of ratios below `FLOOR`; 0 of none."""
    return sum(ratio < FLOOR for ratio in real) / len(real) if real else 0.0


def _machine(random_: random.Random, measured: bool) -> tuple[Rates, Step, RecipeCost]:
    """A GPU with FP8, a mode and a recipe that it runs."""
    while True:
        device, compiled = random_.choice(DEVICES), random_.random() < 0.5
        rates = _rates(device.key, measured)
        recipes = [
            r for n, r in candidates(compiled).items() if not unavailable(n, device.capability, compiled)
        ]
        if rates.has_fp8 and recipes:
            return rates, Step(compiled=compiled), random_.choice(recipes)


@functools.cache
def _rates(key: str, measured: bool) -> Rates:
    device: Device = next(d for d in DEVICES if d.key == key)
    rates = rates_of(device)
    if not measured or not rates.has_fp8:
        return rates
    size = (_CUBE, _CUBE, _CUBE)
    products = tuple(
        TimedProduct(kind, "output", *size, closed_form(rates, kind, *size)) for kind in (BF16, TENSORWISE)
    )
    copied = rates["bandwidth"]
    moves = {"copy": ((LARGE, copied),), "transpose": ((LARGE, copied * rates["transposed"]),)}
    found = rates_of(device, Ceilings(products, moves, rates["launch"]))
    return replace(found, products=())  # which would stand whatever the rates are


@functools.cache
def _one_sequence(name: str) -> Model:
    spec = MODELS[name]
    return trace(spec, 1, min(spec.max_seq, 1024))


def _size(random_: random.Random, low: int, high: int = 16384) -> int:
    """A multiple of 16, even in its logarithm."""
    return round(math.exp(random_.uniform(math.log(low), math.log(high))) / 16) * 16


def table(draws: int) -> Iterator[str]:
    """Markdown: what several margins leave of drawn steps, then what the present ones do of each named model."""
    yield "| steps | rates | layer, step, sure | converted | below 0.98 | 1 % quantile | 5 % | median | least |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for measured in (False, True):
        gains = {m.layer_gain: outcomes(drawn, measured, m.layer_gain, draws) for m in COMPARED}
        for margins in COMPARED:
            yield _row("drawn", measured, margins, gains[margins.layer_gain])
    for name in _NAMED:
        for measured in (False, True):
            found = outcomes(functools.partial(named, name), measured, decide.LAYER_GAIN, draws)
            for margins in (Margins(sure=-math.inf), Margins()):
                yield _row(name, measured, margins, found)


def _row(steps: str, measured: bool, margins: Margins, found: Sequence[Outcome]) -> str:
    real = on(found, margins)
    sure = f"{margins.sure:g}" if margins.sure > 0 else "none"
    cells = [
        steps,
        "as measured" if measured else "published, typical",
        f"{margins.layer_gain:g}, {margins.step_gain:g}, {sure}",
        f"{len(real)} of {len(found)}",
        f"{lost(real):.1%}",
        *(f"{real[len(real) * share // 100]:.3f}" if real else "" for share in (1, 5, 50, 0)),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Prints the table."""
    for line in table(DRAWS):
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
