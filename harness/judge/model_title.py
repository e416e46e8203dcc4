"""What a training step is really of: the words for titles, headlines and reports. A pure function of a stored row.

A model cut to some of its blocks, or given the vocabulary of another text, is not the model that its name promises.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from harness.store.outside import parse
from harness.store.text import own_model

if TYPE_CHECKING:
    from collections.abc import Mapping


def model_title(axes: Mapping[str, Any], resolved: Mapping[str, Any]) -> str:
    """The model of a step by what ran of it.

    >>> model_title({"model": "llama3_8b", "layers": 4},
    ...     {"layers": "truncated to 4 of 32 layers", "vocab_size": 256, "parameters": 874_553_344})
    '4 of 32 llama3_8b blocks, vocabulary 256, 875M parameters'
    >>> model_title({"model": "gpt2"}, {"layers": "all 12", "vocab_size": 256, "parameters": 86_035_968})
    'gpt2, vocabulary 256, 86.0M parameters'
    >>> model_title({"model": "llama3_8b", "layers": 2}, {})
    '2 llama3_8b blocks'

    Args:
        axes: of the case.
        resolved: of one of its arms; {} where nothing is known of what ran.
    """
    name = str(axes.get("model", ""))
    if given := own_model(name):
        name = str(given.get("_target_", "a model of your own"))
    cut = re.search(r"truncated to (\d+) of (\d+) layers", str(resolved.get("layers", "")))
    if cut:
        name = f"{cut[1]} of {cut[2]} {name} blocks"
    elif axes.get("layers"):
        name = f"{axes['layers']} {name} blocks"
    parts = [name]
    if resolved.get("vocab_size"):
        parts.append(f"vocabulary {resolved['vocab_size']}")
    if resolved.get("parameters"):
        parts.append(f"{_count(resolved['parameters'])} parameters")
    return ", ".join(parts)


def title_of(row: Mapping[str, Any]) -> str:
    """`model_title` of a row of the store."""
    return model_title(parse(row["axes"]), parse(row["resolved"]))


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            whole = len(str(int(number / size)))
            return f"{number / size:.{max(0, 3 - whole)}f}{unit}"
    return f"{number:g}"
