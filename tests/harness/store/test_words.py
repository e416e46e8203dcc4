"""Words of a command line. Oracles: the promise of one line with a way out, and exit code 2 by way of `UsageError`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.store.errors import UsageError
from harness.store.words import key, options_of, word


@dataclass
class Odd:
    """python -m harness odd: what it does"""

    run: str = word("RUN", "a run")
    more: list[str] = word("MORE", "others", [])
    json: bool = key("plain values", False)
    rounds: int | None = key("how many", span=(1, 1000))
    rate: float | None = key("of it", span=(1e-9, 1e9), unit="GB/s")
    mode: str = key("how", "slow", choices=("slow", "fast"))
    output_dir: Path | None = key("where", short="-o")
    against: list[str] = key("runs", [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "RUN is not given"),
        (["a", "round=3"], "unknown key 'round' (nearest: rounds)"),
        (["a", "--jsn"], "unknown key '--jsn' (nearest: json)"),
        (["a", "-x"], "unknown key '-x'"),
        (["a", "run=b"], "unknown key 'run'"),
        (["a", "rounds=3", "--rounds", "4"], "--rounds is given twice"),
        (["a", "--rounds"], "--rounds needs a value"),
        (["a", "-o", "--json"], "-o needs a value"),
        (["a", "--rounds", "-1"], "rounds=-1: expected a whole number from 1"),
        (["a", f"rounds={'1' * 5000}x"], "expected a whole number from 1"),
        (["a", "rounds=many"], "rounds=many: expected a whole number from 1 to 1,000"),
        (["a", "rounds=1__0"], "rounds=1__0: expected a whole number from 1 to 1,000"),
        (["a", "rounds=0"], "rounds=0: expected a whole number from 1 to 1,000"),
        (["a", "rate=nan"], "rate=nan: expected a number above 0: GB/s"),
        (["a", "json=perhaps"], "json=perhaps: expected true or false"),
        (["a", "mode=quick"], "unknown mode 'quick'"),
        (["a", "\x1b[2J=1", "--\x1b[2J"], "unknown key '--\\x1b[2J'"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_what_is_refused_is_one_line_with_the_way_out(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as told:
        options_of(Odd, words)
    assert "\n" not in str(told.value)
    assert "\x1b" not in str(told.value)


def test_a_word_too_many_is_refused() -> None:
    @dataclass
    class One:
        """python -m harness one: a word"""

        run: str = word("RUN")

    with pytest.raises(UsageError, match=r"unknown word 'b'; usage: python -m harness one RUN"):
        options_of(One, ["a", "b"])
