"""Oracle: what each changed program computes when it is run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutator import KINDS, find, select

ROOT = Path(__file__).parents[2]
PROGRAM = '''\
"""A doc with 1 + 2."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    LIMIT = 3
__all__ = ["é"]
word: "tuple[int, 3]" = "é"; low = 2 - 1  # the umlaut moves byte offsets
@jit
def kernel(x):
    return x + 1
def above(x: int, y: int = 5) -> bool:
    """Another doc with 1 < 2."""
    if x < 0 and y:
        raise ValueError("below" + str(1 + 1))
    return x > y
def double(x: float) -> float:
    return x * 2.0
text = f"{1 + 1}" + "a"
'''


def run(source: str) -> dict[str, object]:
    scope: dict[str, object] = {"jit": lambda f: f}
    exec(compile(source, "program", "exec"), scope)
    return scope


def changed(before: str) -> dict[str, object]:
    """The program, run with the one mutation of an expression."""
    (mutation,) = [m for m in find("p.py", PROGRAM) if m.before == before]
    return run(mutation.apply(PROGRAM))


def test_every_kind_does_what_it_says() -> None:
    assert run(PROGRAM)["low"] == 1
    assert changed("2 - 1")["low"] == 3
    assert run(PROGRAM)["above"](6)  # type: ignore[operator]
    assert not changed("5")["above"](6)  # type: ignore[operator]
    assert changed("2.0")["double"](1.0) == 4.0  # type: ignore[operator]
    assert changed("x < 0")["above"](-1, -2)  # type: ignore[operator]
    with pytest.raises(ValueError, match="below"):
        changed("x < 0 and y")["above"](1)  # type: ignore[operator]
    negated = [m for m in find("p.py", PROGRAM) if m.kind == "return"]
    assert [m.before for m in negated] == ["x > y", "x * 2.0"]
    assert run(negated[0].apply(PROGRAM))["above"](1, 2)  # type: ignore[operator]
    assert run(negated[1].apply(PROGRAM))["double"](1.0) == -2.0  # type: ignore[operator]


def test_docs_types_messages_and_device_code_are_left_alone() -> None:
    lines = {m.line for m in find("p.py", PROGRAM)}
    assert lines == {6, 10, 12, 14, 16}  # of 17
    assert {m.kind for m in find("p.py", PROGRAM)} == set(KINDS)


def test_a_mutation_keeps_its_key_where_its_code_moves() -> None:
    moved = "import os\n\n\n" + PROGRAM
    assert [m.key for m in find("a/p.py", PROGRAM)] == [m.key for m in find("b/q.py", moved)]
    assert len({m.key for m in find("p.py", PROGRAM)}) == len(find("p.py", PROGRAM))


def test_a_source_that_changed_is_refused() -> None:
    mutation = find("p.py", PROGRAM)[0]
    with pytest.raises(ValueError, match="no longer reads"):
        mutation.apply("# one line more\n" + PROGRAM)


def test_the_draw_is_the_same_each_time_balanced_and_compiles() -> None:
    """Mutations of some of the project's own modules, in whatever order they are found."""
    files = [
        path for room in ("fp8core/inputs", "harness/timing") for path in sorted((ROOT / room).glob("*.py"))
    ]
    every = [m for path in files for m in find(str(path.relative_to(ROOT)), path.read_text())]
    mutations = select(every, 60, 0)
    assert set(mutations) == set(select(every[::-1], 60, 0))
    counts = [(m.path.partition("/")[0], m.kind) for m in mutations]
    assert {counts.count(stratum) for stratum in set(counts)} == {6}
    for mutation in mutations:
        source = (ROOT / mutation.path).read_text()
        mutated = mutation.apply(source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
