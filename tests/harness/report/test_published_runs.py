"""Others' published runs. Oracles: parameter counts of the models' owners, PaLM's 6 N + 12 L H Q T written out here, printed MFUs."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest

from harness.report.published_page import sections
from harness.report.published_runs import DATA, MACHINES, SHAPES, runs

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests" / "studies"))
LLAMA_8B = 8_030_261_248  # Meta-Llama-3-8B, as huggingface.co counts its safetensors


def run(name: str, source: str = "") -> object:
    (only,) = (r for r in runs() if r.name == name and r.source.startswith(source))
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
        ("mpt_1b", 32768, 1_378_865_152),
    ],
)
def test_sizes_give_the_published_number_of_parameters(model: str, seq: int, parameters: int) -> None:
    """Oracle: config.json and safetensors of meta-llama; column NumParams of llm-foundry's tables."""
    assert SHAPES[model].parameters(seq) == parameters


def test_every_figure_of_the_study_is_here_and_says_the_same() -> None:
    """Oracle: the conditions that the predictions are held against (tests/studies/speedups)."""
    from speedups.throughputs import PUBLISHED

    ours = {(r.name, r.source): r for r in runs()}
    for one in PUBLISHED:
        found = ours[one.key, one.source]
        assert found.tokens_per_s == pytest.approx(one.tokens_per_s, rel=1e-4)
        step = one.step
        assert (found.model, found.seq) == (step.model, step.seq)
        machine = getattr(step, "machine", "H200 SXM")
        assert found.machine == {"H100 500 W, HBM2e": "H100 500 W"}.get(machine, machine)
        recipe = step.recipe.name if one.fp8 else "bf16"
        assert found.precision == {"nocompile": "tensorwise"}.get(recipe, recipe)
        assert (found.recomputed == "not published") == one.assumed.startswith("checkpointing")
    assert len(ours) == len(runs()) > len(PUBLISHED) >= 85


def test_the_page_and_the_list_of_throughputs_hold_the_same_tokens() -> None:
    listed = csv.DictReader(
        (ROOT / "reports" / "published" / "studies" / "scale-published.csv").read_text().splitlines()
    )
    ours = {(r.name, r.source): r.tokens_per_s for r in runs()}
    for row in listed:
        assert ours[row["run"], row["source"]] == pytest.approx(
            float(row["published_tokens_per_s"]), rel=2e-3
        )


def test_bf16_by_hand() -> None:
    """One H200, Llama 3 8B's sizes at 4096: 6 (N - embedding) + 12 L Q T FLOPs a token, 10,471 tokens/s, 989 TFLOP/s."""
    weights = 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 4096 * 128256
    per_token = 6 * weights + 12 * 32 * (32 * 128) * 4096
    found = run("7B, 1 H200")
    palm, causal = found.utilization("palm"), found.utilization("causal")
    assert palm.mfu_mixed == pytest.approx(per_token * 10471 / 989e12, rel=1e-12)
    assert palm.mfu_bf16_peak == pytest.approx(palm.mfu_mixed, rel=1e-12)
    halved = 6 * weights + 6 * 32 * (32 * 128) * 4096
    assert causal.mfu_mixed == pytest.approx(halved * 10471 / 989e12, rel=1e-12)
    again = 2 * (weights - 4096 * 128256) + 2 * 32 * 4096 * 4096  # the blocks' forward pass
    assert causal.hfu == pytest.approx((halved + again) * 10471 / 989e12, rel=1e-12)


def test_fp8_by_hand() -> None:
    """8 H100, Llama 3 8B at 8192, tensorwise, 7,186 tokens/s: blocks over 1978.9, head and attention over 989.4."""
    blocks = (LLAMA_8B - 2 * 128256 * 4096 - 65 * 4096) * 6  # without embedding, head and 65 norms
    rest = 6 * 128256 * 4096 + 12 * 32 * 4096 * 8192
    seconds = 1 / 7186
    found = run("8B, 8 H100, tensorwise, Feb 2025").utilization("palm")
    assert found.mfu_mixed == pytest.approx((blocks / 1978.9e12 + rest / 989.4e12) / seconds, rel=1e-9)
    assert found.mfu_bf16_peak == pytest.approx((blocks + rest) / 989.4e12 / seconds, rel=1e-9)
    assert found.mfu_fp8_peak == pytest.approx((blocks + rest) / 1978.9e12 / seconds, rel=1e-9)
    assert found.fp8_share == pytest.approx(blocks / (blocks + rest), rel=1e-9)
    assert found.mfu_fp8_peak < found.mfu_mixed < found.mfu_bf16_peak


def test_a_recipe_with_a_third_in_bf16() -> None:
    """rowwise_with_gw_hp: the weight's gradient, a third of each layer, in bf16 (1307.4 against 2614.9 on MI300X)."""
    blocks = 6 * 32 * 218_103_808
    rest = 6 * 128256 * 4096 + 12 * 32 * 4096 * 8192
    found = run("8B, 8 MI300X, rowwise_with_gw_hp").utilization("palm")
    least = (2 / 3 * blocks) / 2614.9e12 + (blocks / 3 + rest) / 1307.4e12
    assert found.mfu_mixed == pytest.approx(least * 6100.2, rel=1e-4)


@pytest.mark.parametrize(
    "found", [r for r in runs() if r.printed], ids=lambda r: f"{r.name}, {r.source[:12]}"
)
def test_a_printed_mfu_follows_from_tokens_per_second_or_the_difference_is_named(found: object) -> None:
    """By the authors' own count; one of 46 does not, and the page says so."""
    off = found.off_by()
    rows = {
        cell.text: row
        for s in sections()
        for t in s.all_tables
        for row in t.rows
        for cell in row[:1]
        if t.key.startswith("published-runs") and found.source in row[-1].text
    }
    note = rows[found.name][-2].note
    if off == 0.0:
        assert note.startswith("agrees")
    else:
        assert (found.name, round(off, 2)) == ("8B, 8 H100, rowwise, Feb 2025", -0.35)
        assert "differs" in note
        assert "-0.35 points" in note


def test_what_is_wrong_with_a_printed_figure_would_be_seen() -> None:
    """The count decides: KempnerForge's April figures hold the embedding, so none of them agrees without it."""
    from dataclasses import replace

    from harness.report.published_runs import COUNTS

    april = [r for r in runs() if r.printed and r.printed.count is COUNTS["kempner_april"]]
    assert len(april) == 14
    for one in april:
        assert one.off_by() == 0.0
        other = replace(one, printed=replace(one.printed, count=COUNTS["kempner_june"]))
        assert other.off_by() != 0.0
    doubled = replace(april[0], tokens_per_s=2 * april[0].tokens_per_s)
    assert doubled.off_by() == pytest.approx(2 * 57.83 - 57.8, abs=0.05)


def test_nothing_that_runs_is_above_its_peak() -> None:
    for one in runs():
        causal, palm = one.utilization("causal"), one.utilization("palm")
        assert 0 < causal.mfu_mixed < palm.mfu_mixed < 1, one.name
        assert not {"over_peak", "over_published"} & {*causal.flags, *palm.flags}
        assert (causal.hfu is None) == (one.recomputed == "not published")
        assert causal.hfu is None or causal.mfu_mixed <= causal.hfu < 1


def test_the_page_names_peaks_counts_and_what_cannot_be_formed() -> None:
    (section,) = sections()
    cells = [c.text for t in section.all_tables for row in t.rows for c in row]
    every = " ".join(cells)
    for key, remark in MACHINES.values():
        assert key in every
        assert not remark or remark in every
    missing = next(t for t in section.all_tables if t.key == "published-not-formed")
    assert len(missing.rows) >= 6
    assert all(len(row[1].text) > 20 for row in missing.rows)
    shown = [r for t in section.all_tables if t.key.startswith("published-runs") for r in t.rows]
    assert len(shown) == len(runs())
    assert "others" in section.intro


def test_docs_say_how_many_and_which_does_not_follow() -> None:
    page = (ROOT / "docs" / "mfu.md").read_text().replace("\n", " ")
    printed = [r for r in runs() if r.printed]
    agree = [r for r in printed if r.off_by() == 0.0]
    assert (
        f"holds {len(runs())} runs that others measured, {sum(r.is_fp8 for r in runs())} of them in FP8"
        in page
    )
    assert f"Of {len(printed)} printed MFUs {len(agree)} follow" in page
    (odd,) = (r for r in printed if r not in agree)
    assert (
        f"prints {odd.printed.text} for rowwise where its tokens/s give {odd.by_their_count():.2f} %" in page
    )
    one = run("7B, 1 H200")
    assert (
        f"{one.printed.text} of April would be {100 * one.utilization('palm').mfu_mixed:.1f} % in June"
        in page
    )


def test_data_is_plain() -> None:
    lines = DATA.read_text().splitlines()
    assert len(lines) == len(set(lines)) == len(runs()) + 1
    assert not re.search(r"/(home|tmp|work)/", DATA.read_text())
