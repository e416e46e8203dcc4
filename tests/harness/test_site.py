"""The documentation as a site. Oracles: mkdocs.yml, the files of docs/, and the objects that the reference names.

`make docs` builds it (`--strict`, weekly in CI); what is checked here needs no mkdocs.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

import fp8core
from harness.training import ab

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# LOG.md is the maintainers'; docs/examples holds files of users' projects.
PAGES = sorted(p for p in DOCS.rglob("*.md") if p.name != "LOG.md" and DOCS / "examples" not in p.parents)
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
CONSTANTS = {
    "BACKENDS",
    "FORMATS",
    "RECIPES",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0FNU",
    "FP8Granularity",
}


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the Python objects in it."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
CONFIG = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)


def navigated(entry: Any) -> Iterator[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        yield entry
    else:
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from navigated(part)


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as git hosts and the site name them."""
    tokens = MarkdownIt().parse(page.read_text())
    titles = [
        "".join(part.content for part in after.children or [])
        for before, after in itertools.pairwise(tokens)
        if before.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """Where the links and pictures of a page lead; those in code are no links."""
    found = []
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for part in token.children or []:
            if part.type in ("link_open", "image"):
                found.append(str(part.attrs["src" if part.type == "image" else "href"]))
    return found


def broken(page: Path) -> list[str]:
    """Relative links of a page to no file, or to no heading of one."""
    wrong = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in slugs(target)):
            wrong.append(link)
    return wrong


def directives() -> list[tuple[str, str]]:
    """(page, dotted name) of what the reference shows from docstrings."""
    return [
        (p.name, name) for p in REFERENCE for name in re.findall(r"^::: (\S+)$", p.read_text(), re.MULTILINE)
    ]


def named(dotted: str) -> Any:
    """The object of a dotted name: the longest part of it that is a module, then attributes."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AssertionError(dotted)


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(navigated(CONFIG["nav"])) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES)


BESIDE = [ROOT / "README.md", DOCS / "LOG.md", ROOT / "reports" / "README.md"]


@pytest.mark.parametrize("page", [*BESIDE, *PAGES], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title: it's `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# P\n[a](there.md) [b](gone.md) [c](there.md#a-title-its-code) [d](there.md#no) [e](#p) [f](#q) `[g](h.md)`\n"
        "| t |\n|---|\n| ![i](gone.svg) |\n\n```\n[j](k.md)\n```\n[l](https://example.org/x)\n"
    )
    assert broken(page) == ["gone.md", "there.md#no", "#q", "gone.svg"]


def test_every_page_is_two_clicks_from_the_index() -> None:
    reached = {DOCS / "index.md"}
    for _ in range(2):
        reached |= {
            (p.parent / link.partition("#")[0]).resolve() for p in reached if p in PAGES for link in links(p)
        }
    assert not [p.relative_to(DOCS).as_posix() for p in PAGES if p not in reached]


def test_the_reference_names_what_exists_and_says_what_it_is() -> None:
    assert len(directives()) > 60
    for page, name in directives():
        documented = named(name)
        assert inspect.isfunction(documented) or inspect.isclass(documented), (page, name)
        assert (documented.__doc__ or "").strip(), (page, name)


def test_the_reference_holds_every_public_name_once() -> None:
    names = [name for _, name in directives()]
    assert len(names) == len(set(names))
    ours = {name.rpartition(".")[2] for name in names if name.startswith("fp8core.")}
    assert ours | CONSTANTS == set(fp8core.__all__)
    text = "".join(p.read_text() for p in REFERENCE)
    assert not [name for name in CONSTANTS if f"`{name}`" not in text and f"`fp8core.{name}`" not in text]
    assert {f"harness.training.ab.{name}" for name in ab.__all__} < set(names)
    assert {"harness.timing.closures.measure", "harness.store.read"} < set(names)


@pytest.mark.parametrize("page", REFERENCE, ids=lambda p: p.stem)
def test_the_example_of_a_reference_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), {})
        printed = capsys.readouterr().out
        if "proves" in block:
            assert printed.startswith("FP8 verified: 1 of 1 Linear layers")


def test_pictures_say_what_they_show() -> None:
    """Each picture has a text instead of it, and each drawn one a title, a description and a page."""
    shown = set()
    for page in PAGES:
        for alt, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(alt.split()) >= 5, (page.name, path)
            shown.add((page.parent / path).resolve())
    drawn = set((DOCS / "figures").glob("*.svg"))
    assert drawn
    assert drawn < shown
    for path in drawn:
        svg = xml.dom.minidom.parse(str(path)).documentElement
        assert svg is not None
        assert svg.getAttribute("role") == "img"
        assert all(svg.getElementsByTagName(name)[0].firstChild for name in ("title", "desc")), path.name


def test_the_site_is_built_every_week_and_asks_no_network() -> None:
    runs = yaml.safe_load((ROOT / ".github" / "workflows" / "slow.yml").read_text())["jobs"]["all"]["steps"]
    assert "make docs" in [step.get("run") for step in runs]
    assert re.search(r"^docs: .*\n\t.*-m mkdocs build", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert CONFIG["strict"] is True
    assert CONFIG["theme"]["font"] is False
    assert CONFIG["site_dir"].startswith("build/")
    assert "repo_url" not in CONFIG
    assert not re.search(r"https?://", (ROOT / "mkdocs.yml").read_text())
