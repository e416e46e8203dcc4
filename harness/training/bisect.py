"""Which layers, and which of their three GEMMs, make a run fail: found by training with parts back in bf16.

A unit is a layer or one GEMM of a layer. `fails` trains with the given units in FP8 and the others in high precision,
and judges. It is taken to be monotonic: what fails still fails with more in FP8. Then QuickXplain (Junker, "QuickXplain:
Preferred Explanations and Relaxations for Over-Constrained Problems", AAAI 2004) finds a smallest set that fails by
itself, and which fails no more without any one of its members: with one culprit among n units in about 2 log2(n) runs.
Several members mean an interaction: each is harmless without the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fp8core.recipe import GEMMS

Fails = Callable[[frozenset[str]], bool]


class NotFP8Error(ValueError):
    """The run fails with nothing in FP8 as well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a bisection found.

    Attributes:
        culprits: sets of units; each set fails by itself with nothing else in FP8, and no smaller part of it does.
        rest_passes: with everything but the culprits in FP8 the run passes.
        runs: trainings that it took.
    """

    culprits: tuple[tuple[str, ...], ...]
    rest_passes: bool
    runs: int

    def __str__(self) -> str:
        if not self.culprits:
            return f"nothing to find: with every unit in FP8 the run passes ({self.runs} run)"
        sentences = [
            f"{units[0]} fails by itself"
            if len(units) == 1
            else f"{' and '.join(units)} fail together and not one without the other"
            for units in self.culprits
        ]
        rest = (
            "everything else in FP8 passes" if self.rest_passes else "what is left fails too: there are more"
        )
        return f"{'; '.join(sentences)}; {rest} ({self.runs} runs)"


def bisect(units: Sequence[str], fails: Fails, most: int = 3) -> Finding:
    """Finds the units that fail.

    Args:
        units: names, each once; neighbours are tried together, so order them as the model has them.
        fails: whether the run fails with exactly these units in FP8. Asked once for each set.
        most: sets of culprits after which to stop.

    Raises:
        NotFP8Error: the run fails with nothing in FP8, so FP8 is not the cause.
    """
    known: dict[frozenset[str], bool] = {}

    def asked(chosen: Sequence[str]) -> bool:
        key = frozenset(chosen)
        if key not in known:
            known[key] = fails(key)
        return known[key]

    if not asked(units):
        return Finding((), True, len(known))
    if asked([]):
        raise NotFP8Error("the run fails with nothing in FP8: FP8 is not the cause")
    left, culprits = list(units), list[tuple[str, ...]]()
    while len(culprits) < most and asked(left):
        found = _smallest([], False, left, asked)
        culprits.append(tuple(found))
        left = [unit for unit in left if unit not in found]
    return Finding(tuple(culprits), not asked(left), len(known))


def _smallest(
    background: list[str], grown: bool, units: list[str], fails: Callable[[Sequence[str]], bool]
) -> list[str]:
    """The units that must join the background for the run to fail; `grown`: it has changed since it was last tried."""
    if grown and fails(background):
        return []
    if len(units) == 1:
        return units
    first, second = units[: len(units) // 2], units[len(units) // 2 :]
    from_second = _smallest([*background, *first], True, second, fails)
    from_first = _smallest([*background, *from_second], bool(from_second), first, fails)
    return [*from_first, *from_second]


def locate(layers: Sequence[str], fails: Fails) -> tuple[Finding, Finding | None]:
    """The layers that fail, then the GEMMs of these layers.

    Args:
        layers: fully qualified names.
        fails: whether the run fails with exactly these GEMMs in FP8, each as "layer:gemm".

    Returns:
        What was found among the layers, and among their GEMMs; None where no layer was found.

    Raises:
        NotFP8Error: see `bisect`.
    """
    by_layer = bisect(layers, lambda chosen: fails(_gemms(chosen)))
    if not by_layer.culprits:
        return by_layer, None
    suspects = [layer for units in by_layer.culprits for layer in units]
    return by_layer, bisect([f"{layer}:{gemm}" for layer in suspects for gemm in GEMMS], fails)


def _gemms(layers: frozenset[str]) -> frozenset[str]:
    return frozenset(f"{layer}:{gemm}" for layer in layers for gemm in GEMMS)


def schedule_with(layers: Sequence[str], in_fp8: frozenset[str]) -> str:
    """The precision schedule that holds every GEMM of these layers back but those given as "layer:gemm".

    >>> schedule_with(["a", "b"], frozenset({"a:output", "a:grad_input"}))
    'keep_bf16@a:grad_weight,keep_bf16@b'
    """
    rules = []
    for layer in layers:
        held = [gemm for gemm in GEMMS if f"{layer}:{gemm}" not in in_fp8]
        if len(held) == len(GEMMS):
            rules.append(f"keep_bf16@{layer}")
        else:
            rules += [f"keep_bf16@{layer}:{gemm}" for gemm in held]
    return ",".join(rules)
