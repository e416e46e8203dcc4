"""PrecisionSchedule: layers change between bf16 and FP8 while a run goes on, in one process.

    schedule = PrecisionSchedule.parse("warmup_bf16:1000,cooldown_bf16:0.1")
    for step in range(total_steps):
        schedule.apply(model, step, total_steps)
        ... one training step ...

A schedule is rules joined by commas, each of which holds some GEMMs of some layers in high precision, or in a recipe, for a time:

    warmup_bf16:1000             the first 1000 steps          (a whole number counts steps, from 0)
    cooldown_bf16:0.1            the last tenth of the run     (a number with a point is a share of it)
    cooldown_bf16:1step          the last step                 (`1` alone could mean the whole run, and is refused)
    keep_bf16                    the whole run
    ...@layers.0.*               only layers whose name fits the pattern (`fnmatch`: * ? [abc])
    ...@layers.0.*:grad_weight   only that GEMM of theirs: output, grad_input or grad_weight
    ...@grad_weight              only that GEMM, of all layers
    cooldown_tensorwise:0.1      a recipe's name in the place of "bf16": its casts, multiplied as the layer multiplies

"bf16" stands for the high precision that the run uses: float32 where nothing casts to bfloat16. A layer with all three
GEMMs held in bf16 is nn.Linear bit for bit, so a run that starts with a warm-up equals the unconverted one until the
switch, and one that ends with a cool-down equals the FP8 one until then. Parameters and optimizer don't notice.

What is exchanged is the layer's `recipe`, always between the same few objects: compiled code is guarded by the object,
so torch.compile makes one graph for each distinct state of the model and finds it again later.

Delayed scaling sees no amax of what isn't cast: after a warm-up its first step in FP8 scales by the tensors themselves,
as at the start of any run.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch import nn

from fp8core.arguments import check_known, check_type
from fp8core.distributed.fsdp import switch_gathers
from fp8core.linear import Float8Linear
from fp8core.recipe import GEMMS, RECIPES, Recipe, recipe_named

if TYPE_CHECKING:
    from collections.abc import Collection

KINDS = ("warmup", "cooldown", "keep")
HIGH_PRECISION = "bf16"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a schedule.

    Attributes:
        kind: one of `KINDS`, "_", and `HIGH_PRECISION` or the name of a recipe.
        amount: its length: an int in steps, a float as share of the run; None for keep_bf16.
        pattern: of fully qualified layer names.
        gemms: those that it holds.
    """

    kind: str
    amount: int | float | None = None
    pattern: str = "*"
    gemms: tuple[str, ...] = GEMMS

    @property
    def held_as(self) -> str:
        """`HIGH_PRECISION`, or the name of the recipe."""
        return self.kind.partition("_")[2]

    def holds(self, step: int, total_steps: int) -> bool:
        """Whether the rule is in force at a step."""
        if self.amount is None:
            return True
        length = self.length(total_steps)
        return step < length if self.kind.startswith("warmup") else step >= total_steps - length

    def length(self, total_steps: int) -> int:
        """Steps for which it is in force; a share is rounded to the nearest step."""
        if self.amount is None:
            return total_steps
        return self.amount if isinstance(self.amount, int) else round(self.amount * total_steps)

    def __str__(self) -> str:
        length = f"{self.amount}{'step' * _is_one_step(self.amount)}"
        head = self.kind if self.amount is None else f"{self.kind}:{length}"
        if self.gemms == GEMMS:
            return head if self.pattern == "*" else f"{head}@{self.pattern}"
        (gemm,) = self.gemms
        return f"{head}@{gemm}" if self.pattern == "*" else f"{head}@{self.pattern}:{gemm}"


@dataclass(slots=True)
class PrecisionSchedule:
    """Rules, and what they have done to a model so far.

    Attributes:
        rules: none: every layer keeps its recipe.
        switches: steps at which some layer's recipe changed.
    """

    rules: tuple[Rule, ...] = ()
    switches: int = 0
    _recipes: dict[str, Recipe] = field(default_factory=dict, repr=False)  # of each layer, as converted

    @classmethod
    def parse(cls, text: str) -> PrecisionSchedule:
        """The schedule of a text, see the module docstring; "" is the one without rules.

        >>> str(PrecisionSchedule.parse("warmup_bf16:1000@layers.0.*, cooldown_bf16:0.1"))
        'warmup_bf16:1000@layers.0.*,cooldown_bf16:0.1'

        Raises:
            ValueError: the text is no schedule; it names the rule and what is expected.
            TypeError: no text.
        """
        check_type("a schedule", text, str, 'such as "warmup_bf16:1000"')
        return cls(tuple(_rule(part.strip()) for part in text.split(","))) if text.strip() else cls()

    def switch_steps(self, total_steps: int) -> tuple[int, ...]:
        """The steps before which some layer may change, ascending; without 0, which is the start.

        Raises:
            ValueError: a warm-up or cool-down of all layers that leaves no step in FP8.
        """
        found = set()
        for rule in self.rules:
            if rule.amount is None:
                continue
            length = rule.length(total_steps)
            if length >= total_steps and rule.pattern == "*" and rule.gemms == GEMMS:
                raise ValueError(
                    f"{rule} holds for all of the run's {total_steps} steps, so the layers' own recipe never runs; take fewer, or keep_{rule.held_as}"
                )
            if 0 < length < total_steps:
                found.add(length if rule.kind.startswith("warmup") else total_steps - length)
        return tuple(sorted(found))

    def check_patterns(self, layers: Collection[str]) -> None:
        """Refuses a rule that would do nothing to a model.

        Args:
            layers: names of its FP8 layers; none: nothing is refused, since nothing is converted.

        Raises:
            ValueError: names the rule, and the layers that there are.
        """
        for rule in self.rules:
            if layers and not any(fnmatchcase(name, rule.pattern) for name in layers):
                raise ValueError(
                    f"{rule}: no FP8 layer is named like {rule.pattern!r}; there are {', '.join(layers)}"
                )

    def apply(self, model: nn.Module, step: int, total_steps: int) -> int:
        """Gives every Float8Linear the recipe that is due; call it before each step, between optimizer steps.

        What the layers were converted to is what the schedule returns to; a layer that another schedule holds back
        remembers it, so that one may be made anew for each call.

        Args:
            model: always the same one; converted, or not, in which case nothing is done.
            step: counted from 0; beyond the last one the last one's recipes stay.
            total_steps: of the whole run.

        Returns:
            How many times a layer's recipe was changed.

        Raises:
            ValueError: a negative step, a rule that fits no layer of a converted model, or see `switch_steps`.
            TypeError: the model is no module.
        """
        check_type("model", model, nn.Module, "apply(model, step, total_steps)")
        if step < 0:
            raise ValueError(f"step={step}: steps count from 0; expected 0 to {total_steps - 1}")
        layers = {name: m for name, m in model.named_modules() if isinstance(m, Float8Linear)}
        changed = 0
        if layers.keys() != self._recipes.keys():
            self.switch_steps(total_steps)
            self._adopt(layers)
            before = max(step - 1, 0)  # where a resumed run was
            changed = switch_gathers(model, lambda: self._set(layers, before, total_steps))
        switched = switch_gathers(model, lambda: self._set(layers, step, total_steps))
        self.switches += bool(switched)
        return changed + switched

    def _set(self, layers: dict[str, Float8Linear], step: int, total_steps: int) -> int:
        """Gives the layers the recipes of a step; how many changed."""
        in_force = [rule for rule in self.rules if rule.holds(step, total_steps)]
        changed = 0
        for name, layer in layers.items():
            # The last rule that holds a GEMM decides
            held = {
                g: rule.held_as for rule in in_force if fnmatchcase(name, rule.pattern) for g in rule.gemms
            }
            gemms = tuple((g, held[g]) for g in GEMMS if g in held)
            # The very object: the cache would hand out an equal recipe of another model
            due = _held(self._recipes[name], gemms) if gemms else self._recipes[name]
            if layer.recipe is due:
                continue
            layer.recipe = due
            layer.suspended_recipe = None if due is self._recipes[name] else self._recipes[name]
            if layer.weight_cache is not None:
                layer.weight_cache.entry = None  # casts of the recipe that was
            changed += 1
        return changed

    def _adopt(self, layers: dict[str, Float8Linear]) -> None:
        """Notes what the layers were converted to."""
        self.check_patterns(layers)
        self._recipes = {name: layer.suspended_recipe or layer.recipe for name, layer in layers.items()}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the step; the recipes in force follow from it."""
        return {"rules": str(self), "switches": self.switches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the count of a checkpoint of the same rules.

        Raises:
            ValueError: other rules; the run would not be the one that was interrupted.
        """
        # Before "1step" was asked for, a single step was written "1".
        if re.sub(r"(?<=_bf16:)1(?=[@,]|$)", "1step", state["rules"]) != str(self):
            raise ValueError(
                f"checkpoint was made under schedule {state['rules']!r}, this run has {str(self)!r}"
            )
        self.switches = state["switches"]

    def __str__(self) -> str:
        return ",".join(map(str, self.rules))


@functools.cache
def _held(recipe: Recipe, gemms: tuple[tuple[str, str], ...]) -> Recipe:
    """One object for each state, so that compiled code knows it again."""
    high = tuple(gemm for gemm, held_as in gemms if held_as == HIGH_PRECISION)
    result = recipe.in_high_precision(*high) if high else recipe
    for gemm, held_as in gemms:
        if held_as != HIGH_PRECISION:
            other: dict[str, Any] = {gemm: recipe_named(held_as).gemms[gemm]}
            result = replace(result, name=f"{result.name}-{gemm}_{held_as}", **other)
    return result


def _rule(text: str) -> Rule:
    head, at, target = text.partition("@")
    kind, colon, amount = head.partition(":")
    when, _, held_as = kind.partition("_")
    if when not in KINDS or not held_as:
        check_known(f"schedule rule {text!r}:", kind, tuple(f"{each}_{HIGH_PRECISION}" for each in KINDS))
    if held_as != HIGH_PRECISION:
        check_known(f"schedule rule {text!r}: recipe", held_as, (HIGH_PRECISION, *RECIPES))
        held = recipe_named(held_as)
        blocks = {cast.granularity for cast in held.casts} - {"tensorwise", "rowwise"}
        if held.scaling != "dynamic" or blocks:
            raise ValueError(
                f"schedule rule {text!r}: {held_as} has its own memory or backend, which layers get where they are converted to it; "
                "take tensorwise or rowwise, or convert to it and schedule the others"
            )
    if (when == "keep") == bool(colon):
        expected = f"{kind} has no length" if colon else f"expected {kind}:STEPS or {kind}:SHARE"
        raise ValueError(f"schedule rule {text!r}: {expected}")
    pattern, gemms = "*", GEMMS
    if at:
        pattern, colon, gemm = target.rpartition(":")
        if not colon:
            pattern, gemm = ("*", target) if target in GEMMS else (target, "")
        if not pattern or (colon and gemm not in GEMMS):
            raise ValueError(
                f"schedule rule {text!r}: {target!r} is no target; expected PATTERN, PATTERN:GEMM or GEMM, a GEMM being "
                f"one of {', '.join(GEMMS)}"
            )
        gemms = (gemm,) if gemm else GEMMS
    return Rule(kind, _length(text, amount) if when != "keep" else None, pattern, gemms)


def _is_one_step(amount: int | float | None) -> bool:
    """Whether it is the length that needs its unit: a bare 1 could be a share too."""
    return isinstance(amount, int) and amount == 1


def _length(text: str, amount: str) -> int | float:
    number = re.sub(r"(?<=\d) *steps?$", "", amount.strip())
    has_unit = number != amount.strip()
    try:
        value = int(number) if has_unit or number.lstrip("+-").isdecimal() else float(number)
    except ValueError:
        value = -1
    if value == 1 and not has_unit:
        kind = text.partition(":")[0]
        raise ValueError(
            f"schedule rule {text!r}: length {amount!r} could mean one step or the whole run; write {kind}:1step, or keep_bf16"
        )
    if not (value >= 1 if isinstance(value, int) else 0 < value < 1):
        raise ValueError(
            f"schedule rule {text!r}: length {amount!r}; expected a whole number of steps from 1 or a share between 0 and 1"
        )
    return value
