"""The newcomer's script finds its commands in the pages and types them. Oracle: the pages, and pages from which one is taken."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import newcomer
import pytest
from doc_blocks import blocks, section

ROOT = Path(__file__).parents[2]
STEPS = {step.name: step for step in newcomer.STEPS}


@pytest.mark.parametrize("step", newcomer.STEPS, ids=lambda step: step.name)
def test_each_step_is_in_its_page(step: newcomer.Step) -> None:
    """What is typed stands in the page, line by line; a program is a block of it."""
    page = (ROOT / step.page).read_text()
    typed = newcomer.commands(ROOT, step)
    for command in typed:
        for line in command.script.splitlines():
            assert line.removesuffix(" dry_run=true") in page or re.fullmatch(r"python \w+\.py", line)
        for _, content in command.files:
            assert all(line in page for line in content.splitlines())
    assert typed


@pytest.mark.parametrize("step", newcomer.STEPS, ids=lambda step: step.name)
def test_a_command_that_is_gone_ends_the_script(
    step: newcomer.Step, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ROOT / step.page
    wanted = section(page, step.heading)
    without = re.sub(r"^```.*?^```\n", "", wanted, flags=re.DOTALL | re.MULTILINE)
    target = tmp_path / step.page
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.read_text().replace(wanted, without))
    assert newcomer.main([str(tmp_path), "--here", "--only", step.name]) == 2
    assert capsys.readouterr().err.startswith(f"error: {step.page}: no")


def test_a_section_ends_where_the_next_of_its_rank_begins(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# T\n## A\n```sh\n# no heading\na\n```\n### B\nb\n## C\nc\n")
    assert section(page, "^A") == "## A\n```sh\n# no heading\na\n```\n### B\nb\n"
    assert section(page, "^B") == "### B\nb\n"
    with pytest.raises(
        LookupError, match=r"page.md: no heading matches '\^no'; there are \['T', 'A', 'B', 'C'\]"
    ):
        section(page, "^no")
    assert [*blocks(page.read_text())] == [("sh", "", "# no heading\na\n")]


def test_what_a_page_says_of_a_block_is_obeyed(tmp_path: Path) -> None:
    """Programs are written, plans are not measured, codes are those of the page."""
    (tmp_path / "p.md").write_text(
        "# P\n```python file=m.py\nx = 1\n```\n```sh\na \\\n  b\nc\n```\n```python\ny = 2\n```\n"
        "```text\nout\n```\n```sh plan\npython -m harness sweep=q\npython -m harness sweep=r\n```\n```sh exit=1\nd\n```\n"
    )
    step = newcomer.Step("p", "p.md", "", planned="sweep=q")
    typed = newcomer.commands(tmp_path, step)
    assert typed == [
        newcomer.Command("a    b", 0, (("m.py", "x = 1\n"),)),
        newcomer.Command("c"),
        newcomer.Command("python p_2.py", 0, (("p_2.py", "y = 2\n"),)),
        newcomer.Command("python -m harness sweep=q dry_run=true"),
        newcomer.Command("python -m harness sweep=r"),
        newcomer.Command("d", 1),
    ]


def test_a_new_user_gets_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The quick steps, with an empty home; the others are in the slow test."""
    assert newcomer.main([str(ROOT), "--here", "--only", "advise on a config.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(
        r"\| advise on a config.json \| docs/advise.md \| `python -m .*` \| \d+ \| 0 \| .* \|", lines[2]
    )


def test_a_code_that_the_page_does_not_promise_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.md").write_text("# P\n```sh\nexit 3\n```\n")
    monkeypatch.setattr(newcomer, "STEPS", (newcomer.Step("p", "p.md", ""),))
    assert newcomer.main([str(tmp_path), "--here"]) == 1
    assert "**3**, the page says 0" in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_user_follows_every_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All steps but the installation, in a clone; a Hugging Face model where transformers is installed."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    shutil.copy(ROOT / "README.md", clone)  # both as they are now
    shutil.copytree(ROOT / "docs", clone / "docs", dirs_exist_ok=True)
    code = newcomer.main([str(clone), "--here"])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err
    assert {line.split("|")[1].strip() for line in captured.out.splitlines()[2:]} == set(STEPS)
