"""Words of a command line: one grammar for every command, made of the fields of a dataclass.

    key=value, --key=value, --key value, -k value    the field `key`; a flag may have `-` in the place of `_`
    --key                                            key=true
    WORD                                             the next of the fields made by `word`

A field of several (`list[...]`) takes all words that follow its flag. A key that is none is refused with the nearest one, a
value that is not what its field takes with the expectation; both in one line, exit code 2.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import textwrap
from dataclasses import field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence
    from dataclasses import Field

Command = TypeVar("Command")
HELP = {"-h", "--help"}
_NO_DEFAULT: Any = object()
_WIDTH = 110
_EXPECTED = {"int": "a whole number", "float": "a number", "bool": "true or false"}


def word(name: str, about: str = "", default: Any = _NO_DEFAULT) -> Any:
    """A field for the next word without a key; of several for all of them. Without a default it is needed."""
    rules = {"word": name, "about": about, "needed": default is _NO_DEFAULT}
    return field(default_factory=_anew(default), metadata=rules)


def key(
    about: str = "",
    default: Any = None,
    *,
    short: str = "",
    choices: Collection[str] = (),
    span: tuple[float, float] | None = None,
    unit: str = "",
) -> Any:
    """A field for `key=value`.

    Args:
        about: for the help.
        default: where the key is not given; of one of several values an empty list is made anew.
        short: a flag such as "-o".
        choices: the values that it takes.
        span: the lowest and the highest number that it takes.
        unit: of the number, for a refusal.
    """
    rules = {"about": about, "short": short, "choices": tuple(choices), "span": span, "unit": unit}
    return field(default_factory=_anew(default), metadata=rules)


def _anew(default: Any) -> Callable[[], Any]:
    """A list is a default of one command alone."""
    return lambda: list(default) if isinstance(default, list) else default


def options_of(
    command: type[Command], words: Sequence[str], usage: str = "", *, flags_only: bool = False
) -> Command | None:
    """The fields of a command line; None where help was asked for, which is then printed.

    Args:
        command: a dataclass whose fields are made by `word` and `key`, with the first line of the help in its docstring.
        words: after the name of the command.
        usage: the help; made of the fields where it is "".
        flags_only: words with a `=` are words like others: they are keys of something else.

    Raises:
        UsageError: an unknown key, a value that is none, a word too many or too few.
    """
    known: dict[str, Field[Any]] = {each.name: each for each in fields(command)}  # type: ignore[arg-type]
    usage = usage or _help(command, known)
    if HELP & set(words):
        sys.stdout.write(usage)
        return None
    first = usage.partition("\n")[0]
    keys = {name: each for name, each in known.items() if "word" not in each.metadata}
    short = {each.metadata["short"]: name for name, each in keys.items() if each.metadata.get("short")}
    values: dict[str, Any] = {}
    plain, left = [], list(words)
    while left:
        text = left.pop(0)
        name, equals, value = text.partition("=")
        is_flag = _is_flag(text)
        # Not by pathlib, which raises where a name is too long
        if not is_flag and (flags_only or not equals or not name.isidentifier() or os.path.exists(text)):  # noqa: PTH110
            plain.append(text)
            continue
        of = short.get(name, name.lstrip("-").replace("-", "_")) if is_flag else name
        if of not in keys:
            raise UsageError(f"{unknown('key', name, keys)}; {first}")
        kind = _kind(keys[of])
        several = kind.startswith("list")
        if of in values and not several:
            raise UsageError(f"{name} is given twice; {first}")
        given = [value] if equals else ["true"] * (kind == "bool")
        while left and not equals and (several or not given) and not _is_flag(left[0]):
            given.append(left.pop(0))
        if not given:
            raise UsageError(f"{name} needs a value; {first}")
        made = [_value(of, each, keys[of]) for each in given]
        values[of] = [*values.get(of, []), *made] if several else made[0]
    for name, each in known.items():
        if "word" not in each.metadata:
            continue
        several = _kind(each).startswith("list")
        mine, plain = (plain, []) if several else (plain[:1], plain[1:])
        if not mine and each.metadata["needed"]:
            raise UsageError(f"{each.metadata['word']} is not given; {first}")
        if mine:
            made = [_value(name, text, each) for text in mine]
            values[name] = made if several else made[0]
    if plain:
        raise UsageError(f"unknown word {plain[0]!r}; {first}")
    return command(**values)


def _is_flag(text: str) -> bool:
    """Whether a word is a flag, and so no value of the flag before it; a number, and `-` alone, are values."""
    return text.startswith("-") and text[1:2] not in {"", ".", *"0123456789"}


def _kind(of: Field[Any]) -> str:
    return str(of.type).removesuffix(" | None")


def _value(name: str, text: str, of: Field[Any]) -> Any:
    """A value of the kind that its field has, within what it takes."""
    kind, rules = _kind(of).removeprefix("list[").rstrip("]"), of.metadata
    if rules.get("choices") and text not in rules["choices"]:
        raise unknown(name, text, rules["choices"])
    if kind == "Path":
        return Path(text)
    if kind not in _EXPECTED:
        return text
    low, high = rules.get("span") or (-math.inf, math.inf)
    try:
        value: float
        if kind == "bool":
            value = {"true": True, "false": False}[text.lower()]
        else:
            value = int(text) if kind == "int" else float(text)
        if low <= value <= high:
            return value
    except (KeyError, ValueError):
        pass
    limits = " above 0" if 0 < low < 1e-6 else f" from {low:,g} to {high:,.12g}"
    within = "" if math.isinf(low) else limits
    unit = f": {rules['unit']}" if rules.get("unit") else ""
    raise UsageError(f"{name}={text}: expected {_EXPECTED[kind]}{within}{unit}")


def _help(command: type, known: dict[str, Field[Any]]) -> str:
    """The usage in the first line, what the command does, then a line for each word and key."""
    plain, rows = [], []
    for name, each in known.items():
        rules = each.metadata
        shown = rules.get("word") or ", ".join(filter(None, [rules["short"], f"--{name.replace('_', '-')}"]))
        if "word" in rules:
            several = "..." if _kind(each).startswith("list") else ""
            plain.append(f"{shown}{several}" if rules["needed"] else f"[{shown}{several}]")
        choices = ", ".join(rules.get("choices", ()))
        rows.append((f"  {shown}", "; ".join(filter(None, [rules["about"], choices]))))
    name, _, doc = inspect.cleandoc(command.__doc__ or "").partition(": ")
    return f"usage: {' '.join([name, *plain, '[--key VALUE or key=VALUE ...]'])}\n{doc}\n{listed(rows)}"


def listed(rows: Iterable[tuple[str, str]]) -> str:
    """Names, and beside them what is said of each, wrapped."""
    rows = list(rows)
    indent = min(max((len(name) for name, _ in rows), default=0), 36) + 2
    out = ""
    for name, about in rows:
        first = f"{name:<{indent - 2}}  "
        out += textwrap.fill(
            about, _WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_long_words=False,
            break_on_hyphens=False,
        ) + "\n"  # fmt: skip
    return out
