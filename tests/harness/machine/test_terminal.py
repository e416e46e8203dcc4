"""What is shown on a terminal. Oracle: the text itself, without escapes that would act."""

from __future__ import annotations

import pytest
from rich.console import Console

from harness.machine import raw_output
from harness.machine.terminal import printable, say

HOSTILE = "[red]x[/red]\x1b[2J\x07<script>"


def test_names_are_neither_markup_nor_control_codes() -> None:
    where = Console(width=100, force_terminal=True, color_system=None)
    with where.capture() as seen:
        say(where, HOSTILE)
    assert seen.get() == "[red]x[/red]\\x1b[2J\\x07<script>\n"


def test_line_ends_are_kept_where_asked() -> None:
    assert printable("a\nb\t") == "a\\nb\\t"
    assert printable("a\nb", keep="\n") == "a\nb"
    assert printable("ä 中") == "ä 中"


def test_what_a_row_says_never_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_output.guarded():
        print("failed: \x1b]0;title\x07 \u202e")
    raw_output.say("failed: \x1b]0;title\x07 \u202e\n")
    assert [*capsys.readouterr()] == ["failed: \\x1b]0;title\\x07 \\u202e\n"] * 2
