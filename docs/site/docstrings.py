"""Griffe extension: shows docstrings as they are meant where Google's style has no rule for them.

A doctest is code, also outside of "Examples:"; `a, b: text` documents two arguments.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

# Prompts, what continues them and what they print, up to an empty line or the end
DOCTEST = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
SEVERAL = re.compile(r"^( {4})(\w+(?:, \w+)+)(: .*(?:\n {5,}.*)*)$", re.MULTILINE)


def _one_each(found: re.Match[str]) -> str:
    return "\n".join(f"{found[1]}{name}{found[3]}" for name in found[2].split(", "))


class Docstrings(griffe.Extension):
    """Rewrites the docstrings that are shown; those of the code stay."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of each object that is loaded."""
        if obj.docstring is not None:
            text = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = SEVERAL.sub(_one_each, text)
