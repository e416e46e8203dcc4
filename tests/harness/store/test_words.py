"""Words of a command line. Oracles: the promise of one line with a way out, and exit code 2 by way of `UsageError`."""

from __future__ import annotations

import re

import pytest

from harness.store.errors import UsageError
from harness.store.words import Parser, helped, keyed

USAGE = "usage: python -m harness odd RUN [json=true]\nwhat it does\n"


def test_plain_words_and_keys_are_told_apart() -> None:
    assert keyed(["a", "json=true", "b", "dir=x=y"], USAGE, ("json", "dir")) == (
        ["a", "b"],
        {"json": "true", "dir": "x=y"},
    )


@pytest.mark.parametrize("word", ["--html", "--json=true", "other=1", "-x"])
def test_an_unknown_word_is_refused_with_the_usage_in_one_line(word: str) -> None:
    with pytest.raises(UsageError, match=re.escape(word.split("=")[0] if word[0] != "-" else word)) as told:
        keyed(["run", word], USAGE, ("json",))
    assert str(told.value).endswith("usage: python -m harness odd RUN [json=true]")
    assert "\n" not in str(told.value)


def test_help_is_asked_for_at_any_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert not helped(["run", "json=true"], USAGE)
    assert not helped([], USAGE)
    assert capsys.readouterr().out == ""
    assert all(
        (helped(["run", "--help"], USAGE), helped(["-h", "run"], USAGE), helped([], USAGE, alone=True))
    )
    assert capsys.readouterr().out == 3 * USAGE


def test_a_parser_refuses_as_the_other_commands_do() -> None:
    with pytest.raises(UsageError, match=r"unrecognized arguments: --odd; see python -m harness x --help"):
        Parser("x", "what x does").parse_args(["--odd"])
