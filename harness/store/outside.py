"""Outside: texts and files that others may have written, each read by one guarded reader."""

from __future__ import annotations

import codecs
import json
import math
import stat
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import yaml


LARGEST = 2**28  # bytes of a file of text
NODES = 100_000  # of a YAML file, each alias written out
DIGITS = 300  # of an integer: it is then a float too
DEPTH = 100  # of lists and objects


def read_bytes(path: Path, most: int = LARGEST) -> bytes:
    """The content of a file that others may have put there: a pipe or a device would be waited for.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or larger than `most` bytes.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no file but a folder, a pipe, a socket or a device")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most >> 20} MiB")
    return content


def read_text(path: Path, errors: str = "strict") -> str:
    """Read a file of text: UTF-8, or UTF-16 with a byte order mark.

    Args:
        path: the file.
        errors: what becomes of bytes that are no text, as in `bytes.decode`.

    Raises:
        OSError: it cannot be read.
        ValueError: see `read_bytes`; it is not UTF-8 where `errors` is "strict".
    """
    content = read_bytes(path)
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_utf16 else "utf-8-sig", errors)


def from_json(text: str | bytes, *, finite: bool = False) -> Any:
    """What a JSON text says.

    Args:
        text: the text.
        finite: as what a run stores is read: no infinity, no NaN, and no text that cannot be written.

    Raises:
        ValueError: it is no JSON, nested too deeply, holds an integer of too many digits, or what `finite` excludes.
    """
    strict: Any = {"parse_float": _finite, "parse_constant": _finite} if finite else {}
    try:
        value = json.loads(text, parse_int=_integer, **strict)
        if not _is_deeper(value, DEPTH):
            if finite:
                json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError: half of a surrogate pair
            return value
    except RecursionError:
        pass
    raise ValueError(f"it is nested more than {DEPTH} levels deep")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text:.40} is no finite number")
    return number


def _integer(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits; expected at most {DIGITS}")
    return int(digits)


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    below = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in below)


def checked_yaml(path: Path) -> str:
    """The text of a YAML file that is safe to load: no alias means its own place, and written out they stay few.

    Raises:
        OSError: it cannot be read.
        ValueError: it is too large, no UTF-8, or has too many nodes.
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    text = read_text(path)
    try:
        size = _size(yaml.compose(text, yaml.SafeLoader), {})
    except RecursionError:
        size = NODES + 1
    if size > NODES:
        raise ValueError(
            f"it has more than {NODES:,} values, or holds itself, once each alias is written out"
        )
    return text


def _size(node: yaml.Node | None, known: dict[int, float]) -> float:
    """Nodes of a tree; of one that holds itself infinite."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        below = getattr(node, "value", None)
        parts = (
            [each for entry in below for each in (entry if isinstance(entry, tuple) else [entry])]
            if isinstance(below, list)
            else []
        )
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


# The one parser of the store's JSON columns (`axes`, `resolved`, `flops`, `timing`, `env`).

_NOTHING: Mapping[str, Any] = MappingProxyType({})


def parse(text: object) -> Mapping[str, Any]:
    """The object that a stored text says, read-only; each distinct text is parsed once.

    Args:
        text: of a JSON column; empty, null or NaN where nothing was stored.

    Returns:
        The object; empty where nothing was stored. What `harness.store.read` returns is always an object.

    Raises:
        ValueError: the text is no JSON object.
    """
    return _object(text) if isinstance(text, str) and text else _NOTHING


@lru_cache(maxsize=1 << 12)  # the rows of a case repeat their axes, environment and FLOPs
def _object(text: str) -> Mapping[str, Any]:
    value = from_json(text, finite=True)
    if not isinstance(value, dict):
        raise ValueError(f"a stored text is no JSON object: {text[:60]!r}")  # bad data, not a bad call
    return MappingProxyType(value)
