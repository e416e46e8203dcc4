"""Pages of the documentation. Oracles: the program, which must take every command; the files and objects that pages name."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import own_suite
import pytest
import torch
import yaml
from doc_blocks import blocks
from markdown_it import MarkdownIt
from torch import nn

import fp8core
from harness.__main__ import commands, main
from harness.peers.peer import GEMM_RECIPES
from harness.store.extensions import TABLES
from harness.suites import SUITES, gemm
from harness.training import ab

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# LOG.md is the maintainers'; docs/examples holds files of users' projects.
PAGES = sorted(p for p in DOCS.rglob("*.md") if p.name != "LOG.md" and DOCS / "examples" not in p.parents)
BESIDE = [ROOT / "README.md", DOCS / "LOG.md", ROOT / "reports" / "README.md",
          *sorted((ROOT / "reports" / "published" / "studies").glob("*.md"))]  # fmt: skip
REFERENCE = sorted((DOCS / "reference").glob("*.md"))
MOST_WORDS = {"README.md": 900, "LOG.md": 4000, "CHANGELOG.md": 700}
# What a reader puts in for a name of their own; a command that holds one can't be composed as it stands.
OWN = ("<", "RUN", "DIR", "FILE", "NAME", "[ID]", "my.", "my_")
HEAVY = ("sweep=losses", "sweep=train model=gpt2")  # over ten CPU seconds each
CONSTANTS = {"BACKENDS", "FORMATS", "RECIPES", "E4M3FN", "E4M3FNUZ", "E5M2", "E5M2FNUZ", "E8M0FNU", "FP8Granularity"}  # fmt: skip


@pytest.mark.parametrize("page", [*PAGES, *BESIDE[:2], ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_no_page_is_long(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS.get(page.name, 1800)


def test_all_pages_together_are_not_long() -> None:
    assert sum(len(page.read_text().split()) for page in DOCS.rglob("*.md")) <= 35_000


# Links


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as git hosts and the site name them."""
    tokens = MarkdownIt().parse(page.read_text())
    titles = ["".join(part.content for part in after.children or [])
              for before, after in itertools.pairwise(tokens) if before.type == "heading_open"]  # fmt: skip
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """Where the links and pictures of a page lead; those in code are no links."""
    parts = (
        part
        for token in MarkdownIt().enable("table").parse(page.read_text())
        for part in token.children or []
    )
    return [str(part.attrs["src" if part.type == "image" else "href"]) for part in parts
            if part.type in ("link_open", "image")]  # fmt: skip


def broken(page: Path) -> list[str]:
    """Relative links of a page to no file, or to no heading of one."""
    wrong = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        lost = not target.exists() or (anchor and target.suffix == ".md" and anchor not in slugs(target))
        if lost and not re.match(r"[a-z]+:", link):
            wrong.append(link)
    return wrong


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


def test_every_page_is_in_the_navigation_once_and_linked() -> None:
    class Loader(yaml.SafeLoader):
        """Reads mkdocs.yml without the Python objects in it."""

    def navigated(entry: Any) -> Iterator[str]:
        parts = entry.values() if isinstance(entry, dict) else entry
        return iter([entry]) if isinstance(entry, str) else itertools.chain(*map(navigated, parts))

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
    assert sorted(navigated(config["nav"])) == sorted(p.relative_to(DOCS).as_posix() for p in PAGES)
    assert config["strict"] is True
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(DOCS / "index.md")}
    assert [p.name for p in PAGES if p.name != "index.md" and p not in linked] == []


# Commands


def composed() -> list[list[str]]:
    """The words after `python -m harness` of every sweep in a block of code or in a table of the README."""
    found = []
    for page in (ROOT / "README.md", *PAGES):
        lines = (
            "\n".join(content for _, _, content in blocks(page.read_text())).replace("\\\n", " ").splitlines()
        )
        if page.name == "README.md":
            lines += re.findall(r"`(python -m harness [^`]*)`", page.read_text())
        for line in lines:
            words = shlex.split(line, comments=True) if line.startswith("python -m harness ") else []
            sweep = any(word.startswith("sweep=") for word in words) and "hydra/launcher" not in line
            if sweep and not any(own in word for own in OWN for word in words) and words[3:] not in found:
                found.append(words[3:])
    return found


@pytest.mark.parametrize(
    "words",
    [pytest.param(w, id=(n := " ".join(w)), marks=[pytest.mark.slow] * (n in HEAVY)) for w in composed()],
)
def test_a_command_of_the_documents_composes(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Up to the plan, on a CPU: every name and value is known, and there is something to run."""
    monkeypatch.chdir(tmp_path)
    if not any(word.startswith("--") for word in words):  # else it asks for no run
        words = [word for word in words if word != "dry_run=true"] + ["device=cpu", "dry_run=true"]
    assert main(words) == 0, capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_there_are_commands() -> None:
    assert len(composed()) >= 25


def symptoms() -> list[tuple[str, str]]:
    """(command, what it shows) of each row of docs/troubleshooting.md."""
    lines = (DOCS / "troubleshooting.md").read_text().splitlines()
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("| ")]
    return [(row[2].strip(" `"), row[3].strip()) for row in cells if row[0].strip() != "symptom"]


@pytest.mark.parametrize(("command", "shows"), symptoms())
def test_a_command_of_the_troubleshooting_table_runs(
    command: str,
    shows: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Sweeps up to their plan, on a CPU; what a row says is refused is refused."""
    monkeypatch.chdir(tmp_path)
    if study := re.match(r"python reports/studies/(\w+)\.py *(.*)", command):
        monkeypatch.setattr(SUITES, "data", dict(SUITES.data))
        suite = importlib.import_module(study[1])
        assert own_suite.run(study[1], suite, [*study[2].split(), "device=cpu", "dry_run=true"]) == 0
        return
    words = shlex.split(command)[3:]
    if not words[0].startswith("sweep="):
        assert words[0] in commands()
        if "RUN" not in words and words[0] != "doctor":  # a tutorial runs that
            assert main(words) == 0
        return
    code = main([*words, "device=cpu", "dry_run=true"])
    assert code == (2 if shows.startswith("refused: ") else 0), capsys.readouterr().err


# Code


def test_the_code_of_the_readme_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Each block in turn, around a small model; the names that it leaves to the reader are given."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.body, model.act, model.lm_head = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda module, given, out: out.square().mean())
    steps = 1001  # one more than it warms up
    names: dict[str, Any] = {"model": model, "optimizer": optimizer, "steps": steps,
                             "train_step": lambda: model(torch.randn(16, 32)).backward(),
                             "batches": lambda step: [(torch.randn(16, 32),)] * 2}  # fmt: skip
    code = [
        content for language, _, content in blocks((ROOT / "README.md").read_text()) if language == "python"
    ]
    assert len(code) == 2
    for block in code:
        exec(compile(block, "README.md", "exec"), names)
    assert "FP8 verified: 1 of 2 Linear layers" in capsys.readouterr().out


def directives() -> list[str]:
    """Dotted names of what the reference shows from docstrings."""
    return [name for p in REFERENCE for name in re.findall(r"^::: (\S+)$", p.read_text(), re.MULTILINE)]


def named(dotted: str) -> Any:
    """The object of a dotted name: the longest part of it that is a module, then attributes."""
    module, _, attribute = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(named(module), attribute)


def test_the_reference_holds_every_public_name_once() -> None:
    names = directives()
    assert len(names) == len(set(names))
    assert all((named(name).__doc__ or "").strip() for name in names)
    assert {n.rpartition(".")[2] for n in names if n.startswith("fp8core.")} | CONSTANTS == set(
        fp8core.__all__
    )
    text = "".join(p.read_text() for p in REFERENCE)
    assert not [name for name in CONSTANTS if f"`{name}`" not in text and f"`fp8core.{name}`" not in text]
    ours = {f"harness.training.ab.{name}" for name in ab.__all__}
    assert ours | {"harness.timing.closures.measure", "harness.store.read"} <= set(names)


@pytest.mark.parametrize("page", [*REFERENCE, DOCS / "howto-add.md"], ids=lambda p: p.stem)
def test_the_example_of_a_page_runs(page: Path) -> None:
    for language, _, content in blocks(page.read_text()):
        if language == "python" and "import" in content:
            exec(compile(content, page.name, "exec"), {})


def test_data_of_the_harness_name_modules_that_exist() -> None:
    """Oracle: Python's own import of each dotted name in a YAML file."""
    texts = {path: path.read_text() for path in (ROOT / "harness").rglob("*.yaml")}
    names = {
        name for text in texts.values() for name in re.findall(r"\b(?:fp8core|harness)(?:\.[a-z_]\w*)+", text)
    }
    assert len(names) >= 8
    for name in names:
        pkgutil.resolve_name(name)


def test_every_table_of_extensions_is_in_the_page_and_in_the_template() -> None:
    groups = {f"fp8_harness.{table}" for table in TABLES}
    page = (DOCS / "howto-add.md").read_text()
    assert set(re.findall(r"^\| `(fp8_harness\.\w+)`", page, re.MULTILINE)) == groups
    template = tomllib.loads((DOCS / "examples/extension/pyproject.toml").read_text())
    assert set(template["project"]["entry-points"]) == groups
    own = {info.arm.recipe for info in gemm.ARMS.values() if not info.peer and info.arm.has_fp8}
    assert set(GEMM_RECIPES) == own  # products of peers take the scales of the suite's own arms


@pytest.mark.parametrize("package", ["fp8core", "harness", "tests"])
def test_docstrings_start_with_a_verb_or_the_thing_itself(package: str) -> None:
    start = re.compile(r'^\s*"""(?:Of|As) ', re.MULTILINE)
    found = [path for path in (ROOT / package).rglob("*.py") if start.search(path.read_text())]
    assert [path for path in found if "contracts" not in path.parts] == []
