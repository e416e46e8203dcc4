"""The newcomer's script finds its commands in the pages and types them. Oracle: the pages, and one from which they are taken."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import newcomer
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("step", newcomer.STEPS, ids=lambda step: step.name)
def test_each_step_is_in_its_page(step: newcomer.Step, tmp_path: Path) -> None:
    page = (ROOT / step.page).read_text()
    for line in newcomer.script(ROOT, step, tmp_path).splitlines():
        assert line.removesuffix(" dry_run=true") in page or line.startswith("python part_")


def test_codes_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.md").write_text("# P\n## A\n```sh\nexit 3\n```\n## B\n")
    for heading, due, code in (("^A", 3, 0), ("^A", 0, 1), ("^B", 0, 2)):
        monkeypatch.setattr(newcomer, "STEPS", (newcomer.Step("p", "p.md", heading, exit=due),))
        assert newcomer.main([str(tmp_path), "--here"]) == code


@pytest.mark.slow
def test_a_new_user_follows_every_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All steps, in a clone; a Hugging Face model where transformers is installed."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    shutil.copy(ROOT / "README.md", clone)  # both as they are now
    shutil.copytree(ROOT / "docs", clone / "docs", dirs_exist_ok=True)
    assert newcomer.main([str(clone), "--here"]) == 0, capsys.readouterr().err
