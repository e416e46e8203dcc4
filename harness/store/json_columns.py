"""The one parser of the store's JSON columns (`axes`, `resolved`, `flops`, `timing`, `env`)."""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.store.outside import from_json

if TYPE_CHECKING:
    from collections.abc import Mapping

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


@lru_cache(maxsize=1 << 14)  # the rows of a case repeat their axes, environment and FLOPs
def _object(text: str) -> Mapping[str, Any]:
    value = from_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a stored text is no JSON object: {text[:60]!r}")  # bad data, not a bad call
    return MappingProxyType(value)
