"""Asks `python -m harness advise` within a test: what it prints, its plain values, its refusal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from harness.__main__ import main

if TYPE_CHECKING:
    import pytest


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What it prints."""
    assert main(["advise", *words]) == 0
    return capsys.readouterr().out


def plain(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Its answer as plain values."""
    found = json.loads(said(capsys, *words, "json=true"))
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which it refuses."""
    assert main(["advise", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert "\x1b" not in lines[0], "nothing that a terminal obeys"
    return lines[0]
