"""The published report. Oracle: the published rows, from which one command makes it again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from harness import store
from harness.__main__ import main

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "reports" / "published"


def recipe_of(target: str) -> list[str]:
    """The words of the `python -m harness` command of a make target."""
    rule = re.search(
        rf"^{target}:.*\n\t\$\(PY\) -m harness (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert rule is not None
    return rule[1].split()


def said(page: str) -> str:
    """HTML without scripts and figures, whose bytes depend on the versions of what compresses and draws."""
    return re.sub(
        r"<script.*?</script>|<svg.*?</svg>|<meta http-equiv.*?>|<pre>.*?</pre>", "", page, flags=re.DOTALL
    )


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make published`, beside the same rows; returns the folder of its report."""
    folder = tmp_path_factory.mktemp("published")
    (folder / "results").mkdir()
    (folder / "results" / "published").symlink_to(ROOT / "results" / "published")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(recipe_of("published")) == 0
    return folder / "reports" / "published"


def test_make_published_says_what_is_published(again: Path) -> None:
    """Run `make published` and look at the difference where this fails."""
    assert (again / "mfu.md").read_text() == (PUBLISHED / "mfu.md").read_text()
    assert said((again / "mfu.html").read_text()) == said((PUBLISHED / "mfu.html").read_text())
    figures = {path.name for path in (again / "mfu_figures").iterdir()}
    assert figures == {path.name for path in (PUBLISHED / "mfu_figures").iterdir()}


def test_without_a_gpu_run_it_claims_no_mfu_and_no_speed(again: Path) -> None:
    """Only for as long as nothing was published from a GPU."""
    text = (again / "mfu.md").read_text()
    rows = store.read(ROOT / "results" / "published")
    if any(json.loads(env)["device"] != "cpu" for env in rows["env"].unique()):
        pytest.skip("runs of a GPU are published: the page has figures")
    title, _, first, *_ = [line for line in text.splitlines() if line]
    assert title.endswith("MFU of others' published runs: none was measured by this project")
    assert "no MFU, no tokens/s and no time of a GPU on this page was measured by this project" in first
    # What stands before the runs of others says no speed, and neither do the headlines of our own.
    head, _, rest = text.partition("### ")
    ours = rest.partition("## What was measured in these runs: no MFU")[2].partition("### ")[0]
    assert ours
    for part in (head, ours):
        assert not re.search(r"\d x\b|\d+(\.\d+)?x\b|TFLOP", part.replace("no tokens/s", ""))
    (named,) = re.findall(r"^### (\d+) published runs of others, MFU recomputed$", text, re.MULTILINE)
    assert int(named) >= 85


def test_every_recomputed_figure_says_who_measured_it(again: Path) -> None:
    """Each row of others' runs ends with its source."""
    text = (again / "mfu.md").read_text()
    section = text.partition("published runs of others, MFU recomputed")[2].partition("## What was")[0]
    tables = section.split("| run | precision |")[1:]
    rows = [line for table in tables for line in table.partition("\n\n")[0].splitlines()[2:] if line]
    assert len(rows) >= 85
    known = ("torchao", "torchtitan", "llm-foundry", "pytorch issue", "KempnerForge", "IBM and Meta")
    for row in rows:
        assert row.strip("| ").rsplit(" | ", 1)[1].startswith(known), row


def test_nothing_published_names_a_place_of_the_machine_that_made_it() -> None:
    for path in [*PUBLISHED.rglob("*"), *(ROOT / "results" / "published").rglob("_run.json")]:
        if path.is_file():
            assert not re.search(r"/(home|tmp|root|work|Users)/", path.read_text()), path
