"""The picture of the rooms is that of the code, and none grows unseen. Oracles: the imports of each file; tokens counted by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path

import house
import pytest


def test_the_picture_of_the_architecture_page_is_made_from_the_code() -> None:
    """`python reports/studies/house.py --picture` prints what belongs there."""
    page = (house.ROOT / "docs" / "architecture.md").read_text()
    assert f"<!-- rooms -->\n```\n{house.picture()}\n```\n<!-- /rooms -->" in page
    assert {path.name for path in (house.ROOT / "harness").glob("*.py")} == {"__init__.py", "__main__.py"}


def test_a_room_that_grows_is_told_and_layout_weighs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.house.tokens]\nroom = 12\n")
    (tmp_path / "room").mkdir()
    module = tmp_path / "room" / "a.py"
    module.write_text('"""Words."""\ndef f(\n    x\n):  # why\n    """More."""\n    return (\n        x)\n\n')
    assert house.tokens(module.read_text()) == 10  # def f ( x ) : return ( x )
    assert house.too_heavy() == []
    module.write_text(module.read_text() + "y = 1\n")
    (found,) = house.too_heavy()
    assert found.startswith("room weighs 13 tokens of code, 12 are allowed")


def test_every_room_has_a_line() -> None:
    allowed = tomllib.loads((house.ROOT / "pyproject.toml").read_text())["tool"]["house"]["tokens"]
    rooms = {f"harness/{path.parent.name}" for path in (house.ROOT / "harness").glob("*/__init__.py")}
    assert set(allowed) == {"fp8core", "reports/studies", "tests", *rooms}
