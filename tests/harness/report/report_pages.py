"""The pages of a report, parsed; stored runs as one machine, and what the report makes of them."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from report_fixtures import write_run

from harness.report.first_screen import FirstScreen
from harness.report.runs import load

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect"}


class Page(HTMLParser):
    """Links, ids, visible words and nesting of a page."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(source)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self._open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def machine(*paths):
    """The only machine of some runs."""
    (found,) = load(paths, Path()).machines
    return found


def run_of(tmp_path, *cases, **more):
    return machine(write_run(tmp_path, cases, **more))


def table(made):
    """Rows as {column title: text}."""
    titles = [c.title for c in made.columns]
    return [{t: cell.text for t, cell in zip(titles, row, strict=True)} for row in made.rows]


def by_arm(made):
    """The last row of each arm, as `table` gives it."""
    return {row["arm"]: row for row in table(made)}


def lead_of(found):
    """The sentence at the head of a machine's page, and what stands beside it."""
    verdict, *rest = FirstScreen.of(found).lines()
    return verdict, " ".join(rest)


def told(found):
    return " ".join(lead_of(found))
