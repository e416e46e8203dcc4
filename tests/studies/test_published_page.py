"""Others' published runs, and the published page about MFU. Oracles: parameter counts of the models' owners, PaLM's
6 N + 12 L H Q T written out here, printed MFUs, the conditions of the other studies, the published rows.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published_page import Run, runs, sections
from speedups.throughputs import PUBLISHED as PREDICTED

from harness.report import write_report

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "published"
LLAMA_8B = 8_030_261_248  # Meta-Llama-3-8B, as huggingface.co counts its safetensors


def run(name: str) -> Run:
    (only,) = (r for r in runs() if r.name == name)
    return only


@pytest.mark.parametrize(
    ("model", "seq", "parameters"),
    [
        ("llama3_8b", 8192, LLAMA_8B),
        ("llama3_70b", 8192, 70_553_706_496),
        ("llama3_405b", 8192, 405_853_388_800),
        ("mpt_3b", 512, 2_647_905_280),
        ("mpt_3b", 32768, 2_730_480_640),
        ("mpt_1b", 512, 1_312_804_864),
    ],
)
def test_sizes_give_the_published_number_of_parameters(model: str, seq: int, parameters: int) -> None:
    assert Run(runs()[0].row | {"model": model, "seq": str(seq)}).parameters == parameters


def test_bf16_by_hand() -> None:
    """One H200, Llama 3 8B's sizes at 4096: 6 (N - embedding) + 12 L Q T FLOPs a token, 10,471 tokens/s, 989 TFLOP/s."""
    weights = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 4096 * 128256
    found = run("7B, 1 H200")
    palm, causal = found.utilization("palm"), found.utilization("causal")
    per_token = 6 * weights + 12 * 32 * (32 * 128) * 4096
    assert palm.mfu_mixed == pytest.approx(per_token * 10471 / 989e12, rel=1e-12)
    halved = 6 * weights + 6 * 32 * (32 * 128) * 4096
    again = 2 * (weights - 4096 * 128256) + 2 * 32 * 4096 * 4096  # the blocks' forward pass
    assert causal.hfu == pytest.approx((halved + again) * 10471 / 989e12, rel=1e-12)


def test_fp8_by_hand() -> None:
    """8 H100, Llama 3 8B at 8192, tensorwise, 7,186 tokens/s: blocks over 1978.9, head and attention over 989.4."""
    blocks = (LLAMA_8B - 2 * 128256 * 4096 - 65 * 4096) * 6  # without embedding, head and 65 norms
    rest = 6 * 128256 * 4096 + 12 * 32 * 4096 * 8192
    found = run("8B, 8 H100, tensorwise, Feb 2025").utilization("palm")
    assert found.mfu_mixed == pytest.approx((blocks / 1978.9e12 + rest / 989.4e12) * 7186, rel=1e-9)
    assert found.mfu_bf16_peak == pytest.approx((blocks + rest) / 989.4e12 * 7186, rel=1e-9)
    third = run("8B, 8 MI300X, rowwise_with_gw_hp").utilization("palm")  # of the products in bf16
    least = (2 / 3 * blocks) / 2614.9e12 + (blocks / 3 + rest) / 1307.4e12
    assert third.mfu_mixed == pytest.approx(least * 6100.2, rel=1e-4)


def test_printed_mfus_follow_from_tokens_per_second_but_for_one() -> None:
    off = {r.name: round(found, 2) for r in runs() if r.printed and (found := r.off_by())}
    assert off == {"8B, 8 H100, rowwise, Feb 2025": -0.35}
    april = [r for r in runs() if r.row["printed_count"] == "kempner_april"]
    assert all(Run(r.row | {"printed_count": "kempner_june"}).off_by() for r in april)


def test_conditions_are_those_that_predictions_are_held_against() -> None:
    ours = {(r.name, r.source): r for r in runs()}
    for one in PREDICTED:
        found = ours[one.key, one.source]
        assert found.tokens_per_s == pytest.approx(one.tokens_per_s, rel=1e-4)
        assert (found.row["model"], found.seq) == (one.step.model, one.step.seq)
    for one in runs():
        causal, palm = one.utilization("causal"), one.utilization("palm")
        assert 0 < causal.mfu_mixed < palm.mfu_mixed < 1, one.name
        assert (causal.hfu is None) == (one.row["recomputed"] == "not published")


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
    write_report([Path("results/published")], page, focus="mfu", figures=True, others=sections())
    again = page.with_suffix(".md").read_text()
    assert again == (PUBLISHED / "mfu.md").read_text()
    assert said(page.read_text()) == said((PUBLISHED / "mfu.html").read_text())
    assert {p.name for p in page.with_name("mfu_figures").iterdir()} == {
        p.name for p in (PUBLISHED / "mfu_figures").iterdir()
    }
    for path in PUBLISHED.rglob("*"):
        assert not path.is_file() or not re.search(r"/(home|tmp|root|work|Users)/", path.read_text()), path
