"""What arms cost in loss, in the report. Oracles: scipy's t interval of the planted gaps, sums of planted CPU seconds."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from curves_for_tests import AXES, SEEDS, control, rows_of_runs, shifted
from report_fixtures import CPU, write_run
from report_pages import machine, table
from scipy import stats

from harness.report import loss_cost, training, write_report

BASE = control()
LATE = slice(-60, None)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = {
        "tensorwise": shifted(BASE, 0.004),
        "tensorwise_only_weight": shifted(BASE, 0.001),
        "negative_control": shifted(BASE, 1.0),
        "tensorwise_eps": shifted(BASE, 0.0041),
    }
    rows = rows_of_runs("base", BASE, cpu_s=72.0)
    for arm, made in runs.items():
        rows += rows_of_runs(arm, made, cpu_s=72.0)
    return write_run(tmp_path_factory.mktemp("parts"), [rows], env=CPU, sweep="losses")


def test_a_row_has_the_mean_gap_and_its_90_percent_interval(parts: Path) -> None:
    made = loss_cost.cost_table(machine(parts))
    column = [c.title for c in made.columns].index("late gap")
    arms = {row[0].text: row[column] for row in made.rows}
    for arm, gap in (("tensorwise", 0.004), ("tensorwise_only_weight", 0.001)):
        runs = shifted(BASE, gap)
        late = np.array([(runs[s].loss.values - BASE[s].loss.values)[LATE].mean() for s in range(SEEDS)])
        level = np.mean([BASE[s].loss.values[LATE] for s in range(SEEDS)])
        low, high = stats.t.interval(0.9, SEEDS - 1, late.mean(), stats.sem(late))
        assert arms[arm].order == pytest.approx(late.mean() / level, rel=1e-3)
        shown = [float(x) for x in re.findall(r"[+-][\d.]+", arms[arm].interval)]
        assert shown == pytest.approx([100 * low / level, 100 * high / level], abs=6e-4)


def test_hours_are_those_of_all_seeds(parts: Path) -> None:
    made = loss_cost.cost_table(machine(parts))
    hours = {r["arm"]: float(r["CPU (h)"]) for r in table(made)}
    assert hours["tensorwise"] == pytest.approx(72 * SEEDS / 3600)
    assert f"{5 * 72 * SEEDS / 3600:.1f} hours of CPU" in made.caption


def test_the_figure_names_every_arm_and_writes_what_is_far_off_at_its_edge(parts: Path) -> None:
    (chart,) = loss_cost.cost_charts(machine(parts))
    for arm in ("tensorwise", "tensorwise_only_weight", "negative_control"):
        assert f">{arm}<" in chart.svg
    assert re.search(r"\+47\.\d %", chart.svg)  # 1 nat of 2.1
    assert "late gap" in chart.svg
    assert "held-out gap" in chart.svg


def test_axes_that_follow_from_others_name_no_set_up(tmp_path: Path) -> None:
    rows = []
    for steps, warmup in ((300, 30), (300, 60)):
        axes = {**AXES, "steps": steps, "lr_warmup": warmup, "accumulation": warmup // 30}
        rows += rows_of_runs("base", BASE, axes) + rows_of_runs("tensorwise", shifted(BASE), axes)
    found = machine(write_run(tmp_path, [rows], env=CPU, sweep="losses"))
    assert [training.setup_label(found, s.axes) for s in found.trainings] == [
        "accumulation 1",
        "accumulation 2",
    ]
    only = [s.axes | {"accumulation": 1} for s in found.trainings]
    for setup, axes in zip(found.trainings, only, strict=True):
        object.__setattr__(setup, "axes", axes)
    assert [training.setup_label(found, a) for a in only] == ["lr_warmup 30", "lr_warmup 60"]


# docs/loss-parts.md says what the published runs say

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
    listed = page[page.index("| setting, steps | arm |") :].split("\n\n")[0]
    shown = [cells(line) for line in listed.splitlines()[2:]]
    assert len(shown) > 8
    assert [row for row in shown if row not in rendered] == []
