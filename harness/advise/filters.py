"""The module filter of an advice as keys of the harness; `harness.advise.printed_code` has it as Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SPECIAL = frozenset("*?[],@:'\"\\ ")  # of schedules, patterns and shells


def as_config(
    recipe: str, left_out: Mapping[str, Sequence[str]], convertible: Sequence[str], schedule: str = ""
) -> str | None:
    """Keys of a training sweep: the recipe, and a schedule that holds the layers in bf16 for the whole run.

    Args:
        recipe: its name.
        left_out: what stays in bf16: last words of names under "words", whole ones under "names".
        convertible: fully qualified names of the layers that the sweep will convert; a schedule may name no other.
        schedule: rules besides, of all layers; "" for none.

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
    parts = [*([schedule] if schedule else []), *(f"keep_bf16@{rule}" for rule in rules)]
    written = f" schedule='{','.join(parts)}'" if parts else ""
    return f"train.mixed_precision=fp8 train.recipe={recipe}{written}"
