"""The published page. Oracles: docs/evidence.csv, the published rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.report import write_report

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "published"


def said(page: str) -> str:
    """HTML without scripts and figures, whose bytes depend on the versions of what compresses and draws."""
    return re.sub(
        r"<script.*?</script>|<svg.*?</svg>|<meta http-equiv.*?>|<pre>.*?</pre>", "", page, flags=re.DOTALL
    )


@pytest.mark.slow
def test_the_published_page_is_what_the_published_rows_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `make published` and look at the difference where this fails."""
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)
    page = Path("reports/published/mfu.html")
    write_report([Path("results/published")], page, focus="mfu", figures=True)
    again = page.with_suffix(".md").read_text()
    assert again == (PUBLISHED / "mfu.md").read_text()
    assert said(page.read_text()) == said((PUBLISHED / "mfu.html").read_text())
    assert {p.name for p in page.with_name("mfu_figures").iterdir()} == {
        p.name for p in (PUBLISHED / "mfu_figures").iterdir()
    }
    for path in PUBLISHED.rglob("*"):
        assert not path.is_file() or not re.search(rb"/(home|tmp|root|work|Users)/", path.read_bytes()), path
