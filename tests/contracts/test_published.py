"""Published runs read and render as before. Oracle: facts of each run that were written down once, by `facts` below.

Facts are what rows say and what a page's tables and the sentence at its head hold of numbers and verdicts; prose, headings, the order of
tables and their columns are free. `python tests/contracts/test_published.py` writes them anew where a change was meant.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from command_line import rows, run

ROOT = Path(__file__).parents[2]
FACTS = Path(__file__).parent / "data" / "published"
RUNS = sorted(path.parent for path in (ROOT / "results" / "published").rglob("_run.json"))
READ = ("run_id", "sweep", "suite", "case_id", "arm", "metric", "unit", "status", "seed", "regime", "part")
VERDICT = re.compile(
    r"\b(?:PASS|FAIL|INCONCLUSIVE|REGRESSED|IMPROVED|OK|[Cc]an't tell|Yes|No|N/A|not reached|failed|skipped|runs|refuses)\b"
)
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w-])")
PROSE = 60  # characters: a longer cell is a sentence, which may be said otherwise


def read_facts(folder: Path) -> list[str]:
    """How many rows a run has, and a digest of what they say."""
    frame = rows(folder)
    said = sorted(
        repr(
            (*(getattr(row, name) for name in READ), [float(x).hex() for x in row.samples], list(row.rounds))
        )
        for row in frame.itertuples()
    )
    return [f"rows {len(frame)}", f"digest {hashlib.sha256(chr(10).join(said).encode()).hexdigest()[:16]}"]


def page_facts(page: str) -> list[str]:
    """Numbers and verdicts of each row of each table, and of the sentence at the head."""
    found = []
    for line in page.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            # what follows is a note
            figures = [cell.partition(", " if cell[:1].isdigit() else "; ")[0] for cell in cells]
            said = [
                word
                for cell, figure in zip(cells, figures, strict=True)
                for shown in [cell if len(cell) <= PROSE else figure]
                if len(shown) <= PROSE
                for p in (VERDICT, NUMBER)
                for word in p.findall(shown)
            ]
        elif line.startswith("**"):
            verdict = line.partition("**")[2].partition("**")[0]
            said = [*VERDICT.findall(verdict), *NUMBER.findall(verdict)]
        else:
            continue
        if said:
            found.append(" ".join(sorted(said)))
    return sorted(found)


def facts(folder: Path, scratch: Path) -> list[str]:
    ended = run(scratch, "report", str(folder), "-o", "page.html")
    assert ended.code == 0, ended.err
    return [*read_facts(folder), *page_facts((scratch / "page.md").read_text())]


def test_every_published_run_has_its_facts() -> None:
    assert {path.name for path in RUNS} == {path.stem for path in FACTS.glob("*.txt")}
    assert len(RUNS) >= 8


@pytest.mark.parametrize("folder", RUNS, ids=lambda path: path.name)
def test_a_published_run_reads_and_renders_as_before(folder: Path, tmp_path: Path) -> None:
    assert facts(folder, tmp_path) == (FACTS / f"{folder.name}.txt").read_text().splitlines()


def test_facts_notice_a_changed_number_and_verdict_and_no_changed_prose() -> None:
    page = "**Is it faster? Yes.** Some 3 words.\n| a | ratio |\n| --- | ---: |\n| x2_eager | 1.25 (1.20 to 1.31) |\n"
    same = page.replace("Some 3 words", "Other words").replace("ratio", "speedup")
    assert page_facts(page) == page_facts(same) == ["1.20 1.25 1.31", "Yes"]
    assert page_facts(page) != page_facts(page.replace("1.31", "1.32"))
    assert page_facts(page) != page_facts(page.replace("Yes", "No"))


if __name__ == "__main__":
    import tempfile

    FACTS.mkdir(parents=True, exist_ok=True)
    for published in RUNS:
        with tempfile.TemporaryDirectory() as scratch:
            (FACTS / f"{published.name}.txt").write_text("\n".join(facts(published, Path(scratch))) + "\n")
