"""What is shown on a terminal. Oracle: the text itself, without escapes that would act."""

from __future__ import annotations

from rich.console import Console

from harness.machine.terminal import print_text

HOSTILE = "[red]x[/red]\x1b[2J\x07<script>"


def test_names_are_neither_markup_nor_control_codes() -> None:
    where = Console(width=100, force_terminal=True, color_system=None)
    with where.capture() as seen:
        print_text(where, HOSTILE)
    assert seen.get() == "[red]x[/red]\\x1b[2J\\x07<script>\n"
