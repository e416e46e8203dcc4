"""What is shown on a terminal. Oracle: the text itself, without escapes that would act."""

from __future__ import annotations

import pytest
from rich.console import Console

from harness.machine import raw_output
from harness.machine.terminal import printable, row, say, table

HOSTILE = "[red]x[/red]\x1b[2J\x07<script>"


def test_names_are_neither_markup_nor_control_codes() -> None:
    where = Console(width=100, force_terminal=True, color_system=None)
    shown = table("a [bold]title[/bold]", "name", ">number", "|whole")
    row(shown, HOSTILE, "1", "x y")
    with where.capture() as seen:
        where.print(shown)
        say(where, HOSTILE)
    text = seen.get()
    assert "\x1b[2J" not in text
    assert "\x07" not in text
    assert text.count("[red]x[/red]\\x1b[2J\\x07<script>") == 2
    assert "a [bold]title[/bold]" in text


def test_line_ends_are_kept_where_asked() -> None:
    assert printable("a\nb\t") == "a\\nb\\t"
    assert printable("a\nb", keep="\n") == "a\nb"
    assert printable("ä 中") == "ä 中"


def test_what_a_row_says_never_moves_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_output.guarded():
        print("failed: \x1b]0;title\x07 \u202e")
    raw_output.say("failed: \x1b]0;title\x07 \u202e\n")
    assert [*capsys.readouterr()] == ["failed: \\x1b]0;title\\x07 \\u202e\n"] * 2
