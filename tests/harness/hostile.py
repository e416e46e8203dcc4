"""Text from outside that tries to be markup, a cell, a line or a command; and readers of pages as a browser and a forge have them."""

from __future__ import annotations

from html.parser import HTMLParser

from markdown_it import MarkdownIt

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a|b",
    "[click](javascript:alert(1))",
    "![x](http://127.0.0.1/x.png)",
    "**bold** _it_ `code` ~~gone~~",
    "line\nbreak\r\n# heading",
    "\u202egnirts\u2066",
    "&lt;b&gt; &amp;",
    "=HYPERLINK(1)",
    "$\\frac{1}{2}$",
    "\\|",
    "two\n\nparagraphs {{ 7 * 7 }}",
    "`](javascript:alert(1)) <script>alert(1)</script>",
    "[red]x[/red]\x1b[2J\x07\n::error::x",
)
READER = MarkdownIt("commonmark").enable("table").enable("strikethrough")


class Tags(HTMLParser):
    """The elements of some HTML, their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data
