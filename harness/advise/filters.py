"""The module filter of an advice, as Python code and as keys of the harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SPECIAL = frozenset("*?[],@:'\"\\ ")  # of schedules, patterns and shells


def as_code(recipe: str, left_out: Mapping[str, Sequence[str]], *, fp8_all_gather: bool = False) -> str:
    """Python that converts a model `model` with fp8core; all names are quoted.

    Args:
        recipe: its name.
        left_out: last words of names under "words", and whole "names".
        fp8_all_gather: FSDP, which comes after it, gathers the weights in FP8 (`enable_fsdp_float8_all_gather`).

    >>> print(as_code("tensorwise", {"words": ["k"], "names": []}))
    from fp8core import convert_to_float8_training
    <BLANKLINE>
    LEFT_OUT = {'k'}  # last words of names
    <BLANKLINE>
    <BLANKLINE>
    def module_filter_fn(module, fqn):
        return fqn.rsplit(".", 1)[-1] not in LEFT_OUT
    <BLANKLINE>
    <BLANKLINE>
    convert_to_float8_training(model, config='tensorwise', module_filter_fn=module_filter_fn)
    """
    words, names = left_out["words"], left_out["names"]
    config = repr(recipe)
    lines = ["from fp8core import convert_to_float8_training", ""]
    if fp8_all_gather:
        # with enable_fsdp_float8_all_gather=True, of recipes by name
        lines.insert(1, "from fp8core.recipe import RECIPES")
        config = f"RECIPES[{recipe!r}].with_fp8_all_gather()"
    if not words and not names:
        return "\n".join([*lines, f"convert_to_float8_training(model, config={config})"])
    tests = []
    if words:
        lines.append(f"LEFT_OUT = {_literal(words)}  # last words of names")
        tests.append('fqn.rsplit(".", 1)[-1] not in LEFT_OUT')
    if names:
        lines.append(f"LEFT_OUT_WHOLE = {_literal(names)}")
        tests.append("fqn not in LEFT_OUT_WHOLE")
    lines += ["", "", "def module_filter_fn(module, fqn):", f"    return {' and '.join(tests)}", "", ""]
    lines.append(f"convert_to_float8_training(model, config={config}, module_filter_fn=module_filter_fn)")
    return "\n".join(lines)


def as_config(recipe: str, left_out: Mapping[str, Sequence[str]], convertible: Sequence[str]) -> str | None:
    """Keys of a training sweep: the recipe, and a schedule that holds the layers in bf16 for the whole run.

    Args:
        recipe: its name.
        left_out: words and names, as for `as_code`.
        convertible: fully qualified names of the layers that the sweep will convert; a schedule may name no other.

    Returns:
        Words of a command line; None where a name has characters that a schedule gives a meaning.
    """
    rules = []
    for word in left_out["words"]:
        if word in convertible:
            rules.append(word)
        if any(name.endswith(f".{word}") for name in convertible):
            rules.append(f"*.{word}")
    rules += [name for name in left_out["names"] if name in convertible]
    if any(_SPECIAL & set(rule.removeprefix("*.")) or not rule.isprintable() for rule in rules):
        return None
    schedule = f" schedule='{','.join(f'keep_bf16@{rule}' for rule in rules)}'" if rules else ""
    return f"train.mixed_precision=fp8 train.recipe={recipe}{schedule}"


def _literal(names: Sequence[str]) -> str:
    return "{" + ", ".join(repr(name) for name in names) + "}"
