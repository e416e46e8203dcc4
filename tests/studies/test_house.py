"""The picture of the rooms is that of the code, and no file has grown too large."""

from __future__ import annotations

import house


def test_the_picture_of_the_architecture_page_is_made_from_the_code() -> None:
    """Oracle: the imports of each file. `python tests/studies/house.py --picture` prints what belongs there."""
    page = (house.ROOT / "docs" / "architecture.md").read_text()
    block = page.partition("<!-- rooms -->\n```\n")[2].partition("\n```\n<!-- /rooms -->")[0]
    assert block == house.picture()


def test_the_architecture_page_stays_short() -> None:
    assert len((house.ROOT / "docs" / "architecture.md").read_text().split()) <= house.MOST_WORDS_OF_THE_PAGE


def test_no_file_is_longer_than_a_reader_keeps_in_mind() -> None:
    assert house.long_files() == []


def test_nothing_lies_beside_the_rooms() -> None:
    files = {path.name for path in (house.ROOT / "harness").glob("*.py")}
    assert files == {"__init__.py", "__main__.py"}
