"""The picture of the rooms is that of the code. Oracle: the imports of each file."""

from __future__ import annotations

import house


def test_the_picture_of_the_architecture_page_is_made_from_the_code() -> None:
    """`python tests/studies/house.py --picture` prints what belongs there."""
    page = (house.ROOT / "docs" / "architecture.md").read_text()
    assert f"<!-- rooms -->\n```\n{house.picture()}\n```\n<!-- /rooms -->" in page
    assert {path.name for path in (house.ROOT / "harness").glob("*.py")} == {"__init__.py", "__main__.py"}
