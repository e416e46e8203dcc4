"""docs/loss-parts.md says what the published runs say. Oracle: the report of those runs, rendered from their rows."""

from __future__ import annotations

import re
from pathlib import Path

from harness.report import write_report

ROOT = Path(__file__).parents[3]
MODELS = {"nanogpt_char_cpu": "nanoGPT char", "llama_tiny": "small Llama"}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def setting(cell: str) -> str:
    found = re.match(r"accumulation (\d+), batch \d+, model (\w+), steps (\d+)", cell)
    assert found is not None
    microbatches, model, steps = found.groups()
    name = f"{MODELS[model]}, {steps}"
    return name if steps != "200" else f"{name}, {microbatches} microbatch{'es' * (microbatches != '1')}"


def test_the_table_of_the_page_is_that_of_the_report(tmp_path: Path) -> None:
    run = ROOT / "results" / "published" / "cpu" / "2026-11-23" / "losses_five_seeds"
    markdown = write_report([run], tmp_path / "page.html").markdown.read_text()
    block = markdown[markdown.index("| set-up | arm | what is in FP8") :].split("\n\n")[0]
    rendered = [
        [setting(name), f"`{arm}`", late, held_out, verdict]
        for name, arm, _, late, held_out, _, verdict, _ in map(cells, block.splitlines()[2:])
    ]
    page = (ROOT / "docs" / "loss-parts.md").read_text()
    table = page[page.index("| setting, steps | arm |") :].split("\n\n")[0]
    shown = [cells(line) for line in table.splitlines()[2:]]
    assert len(shown) > 8
    assert [row for row in shown if row not in rendered] == []
