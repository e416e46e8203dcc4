"""Hooks of the site: a file of the repository that a page links becomes a page of the site; nothing is fetched from elsewhere.

Links such as `../results/x.md` or `examples/ab/after/plain_loop.py` work in a checkout, where the site has no such
page. No address of a repository is invented: the file itself is shown, under `repository/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#\s])")
# What follows the language of a block tells the tests how to run it: `sh plan`, `python file=NAME`
FENCE = re.compile(r"^(```\w+) (?:file=(\S+)|[^\n]*)$", re.MULTILINE)
PICTURES = {".svg", ".png"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", "": "bash"}
FOLDER = "repository"
# What a browser fetches by itself; a link that somebody clicks may lead anywhere.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//|<link(?![^>]*canonical)[^>]*\shref=\"?(?:https?:)?//"
)


def _outside(link: str, page: str, docs: Path, held: Files) -> Path | None:
    """The file or folder of the repository that a link means and the site does not hold, relative to the repository."""
    root = docs.parent
    target = ((docs / page).parent / link).resolve()
    if not target.exists() or not target.is_relative_to(root):
        return None
    source = (
        held.get_file_from_path(target.relative_to(docs).as_posix()) if target.is_relative_to(docs) else None
    )
    if source is not None and source.inclusion.is_included():
        return None
    return target.relative_to(root)


def _address(path: Path) -> str:
    """Where the site shows a file: a picture as it is, anything else on a page of its own."""
    name = path.as_posix().replace("/.", "/").lstrip(".")
    return f"{FOLDER}/{name}" + ("" if path.suffix in PICTURES else ".md" if path.suffix != ".md" else "")


def _block(path: Path) -> str:
    return f"````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text().rstrip()}\n````\n"


def _shown(path: Path, root: Path) -> str:
    """The page that shows a file: Markdown without its links and pictures, else its text; of a folder all its files."""
    head = f"*`{path.as_posix()}` of the repository*\n\n"
    if (root / path).is_dir():
        files = sorted(p for p in (root / path).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        parts = [f"## {file.relative_to(root / path).as_posix()}\n\n{_block(file)}" for file in files]
        return f"# {path.name}\n\n{head}" + "\n".join(parts)
    if path.suffix == ".md":
        return head + re.sub(r"!?\[([^]]*)\]\([^):]+\)", r"\1", (root / path).read_text())
    return f"# {path.name}\n\n{head}{_block(root / path)}"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the files that pages link and the site lacks."""
    docs = Path(config.docs_dir)
    linked = {
        path
        for file in files.documentation_pages()
        for link in LINK.findall(file.content_string)
        if (path := _outside(link, file.src_uri, docs, files)) is not None
    }
    for path in sorted(linked):
        if path.suffix in PICTURES:
            added = File.generated(config, _address(path), abs_src_path=str(docs.parent / path))
        else:
            added = File.generated(
                config, _address(path), content=_shown(path, docs.parent), inclusion=InclusionLevel.NOT_IN_NAV
            )
        files.append(added)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of such files to their pages; a block shows the name of its file and no word for the tests."""
    docs = Path(config.docs_dir)
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = _outside(found[0], here, docs, files)
        return found[0] if path is None else "../" * here.count("/") + _address(path)

    named = FENCE.sub(lambda found: found[1] + (f' title="{found[2]}"' if found[2] else ""), markdown)
    return LINK.sub(moved, named)


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Fail where a page would fetch something from another host, or shows its own markup.

    Raises:
        PluginError: names the page and what it fetches, or that a block of code was not read as one.
    """
    if "<p>```" in output:
        raise PluginError(f"{page.file.src_uri}: a block of code is shown as text; see its first line")
    if fetched := FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri}: fetches {fetched[0]!r}; put it into docs/, or link it")
    return output
