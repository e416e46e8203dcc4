"""First screen: the verdict in a sentence, one picture, short answers. Oracles: the rows as generated, and the rules of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from curves_for_tests import control, falling, rows_of_runs, run_of, shifted
from h200_rows import ENV, GENERATED_BY, h200_runs
from matplotlib.figure import Figure
from report_cases import cpu_run, linear_cases
from report_fixtures import CPU, H200, Invented, absent, figure, write_run

from harness.machine.environment import env_id
from harness.report import training, verdicts
from harness.report.answer import MOST_BRIEF
from harness.report.drawing import LEAST_DB, MARKERS, SERIES, ratio_limits, span
from harness.report.lead import Lead, lead
from harness.report.looks import PLACES, look, subject
from harness.report.picture import picture
from harness.report.render import Page, render
from harness.report.runs import Machine, Material, load
from harness.report.sections import sections
from harness.store.arm import parse
from harness.store.case import Case
from harness.store.cause import Cause


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return load(h200_runs(tmp_path_factory.mktemp("h200")), Path())


@pytest.fixture(scope="module")
def h200(material: Material) -> Machine:
    (found,) = material.machines
    return found


@pytest.fixture(scope="module")
def page(material: Material) -> Page:
    return render(material, static=True)


def machine(*paths: Path) -> Machine:
    (found,) = load(paths, Path()).machines
    return found


def lead_of(found: Machine) -> Lead:
    more = [training.trains_the_same(found)] if found.trainings else []
    return lead(found, [*verdicts.answers(found), *more])


def told(found: Machine) -> str:
    one = lead_of(found)
    return f"{one.verdict} {one.rest}"


# The sentence


def test_the_sentence_names_the_best_arm_and_every_arm_without_a_verdict(h200: Machine) -> None:
    """Generated: 1.26x and 1.073x of tensorwise_compile, whose geometric mean is 1.163."""
    said = told(h200)
    assert said.startswith(
        "FP8 is faster here in part: tensorwise_compile runs training steps at 1.16x the speed of bf16"
    )
    assert (
        "In doubt: delayed_compile (can't tell in 2 cases, results not checked, no loss judged); "
        "torchao_tensorwise_compile, te_tensorwise_eager, rowwise_compile and 2 more (no loss judged)."
        in said
    )
    assert "Its recipe passed its checks, its GEMMs ran in FP8 and its recipe trains the same." in said
    assert "Not judged: rowwise_with_gw_hp_compile (failed); mxfp8_compile (skipped)" in said


def test_a_wrong_result_comes_before_any_speed(tmp_path: Path) -> None:
    cases = linear_cases(Invented(), 690.0)
    case = Case.of("linear", {"model": "x", "layer": "y", "M": 16, "K": 16, "N": 16})
    why = "numerics: SQNR of output 11 dB below its bound"
    wrong = [absent(case, "rowwise_compile", "failed", why, "bf16_compile", cause=Cause.NUMERICS)]
    said = lead_of(machine(write_run(tmp_path, [*cases, wrong])))
    assert said.verdict == "Do not switch FP8 on from these runs: 1 result outside of what the format allows."
    assert "is faster" not in said.verdict + said.rest
    assert said.rest.startswith("Times alone: tensorwise_compile")
    assert "rowwise_compile (1 case without a time, a check failed)" in said.rest


def test_the_best_arm_is_one_that_nothing_stands_against(tmp_path: Path) -> None:
    """tensorwise is faster and its loss fails; where rowwise is left out, no gain is beyond doubt."""
    base = control()
    losses = [
        *rows_of_runs("base", base),
        *rows_of_runs("base_eps", shifted(base, 0.0, sd=1e-5)),
        *rows_of_runs("base_other", {s: run_of(falling(100 + s)) for s in base}),
        *rows_of_runs("tensorwise", shifted(base, 0.08), recipe="tensorwise"),
        *rows_of_runs("rowwise", shifted(base, 0.0003), recipe="rowwise"),
        *rows_of_runs("negative_control", shifted(base, lambda t: 0.6 * t / (t + 30), ratio=0.6)),
    ]
    cases = linear_cases(Invented(), 690.0)
    found = machine(write_run(tmp_path / "a", [*cases, losses]))
    said = lead_of(found)
    assert training.trains_the_same(found).verdict == "partly"
    assert said.verdict.startswith("FP8 is faster here: rowwise_compile")
    assert "tensorwise_compile, tensorwise_eager (loss: FAIL)" in said.rest
    drawn = picture(found)
    assert drawn is not None
    assert "loss: FAIL" in drawn.svg
    skip = {
        f"rowwise{more}_{mode}": "left out" for more in ("", "_with_gw_hp") for mode in ("eager", "compile")
    }
    alone = lead_of(machine(write_run(tmp_path / "b", [*linear_cases(Invented(), 690.0, skip), losses])))
    assert alone.verdict.startswith("Not shown that FP8 pays here: tensorwise_compile")
    assert alone.verdict.endswith("but loss: FAIL.")


def test_a_cpu_claims_no_speed(tmp_path: Path) -> None:
    found = machine(cpu_run(tmp_path))
    said, drawn = told(found), picture(found)
    assert said.startswith("A CPU says nothing about speed.")
    assert drawn is not None
    for text in (said, drawn.svg, drawn.narrow, drawn.title):
        assert not re.search(r"\d(\.\d+)?x\b|faster|slower|speedup", text)


def test_a_time_that_nobody_saw_run_in_fp8_makes_no_yes(tmp_path: Path) -> None:
    """The same rows without the counts of one suite that answers for speed."""
    rows = linear_cases(Invented(), 690.0)
    case = Case.of("gemm", {"M": 16, "K": 16, "N": 16})
    arms = {"bf16": {"ms": 1.0}, "fp8_tensorwise": {"ms": 0.6, "baseline": "bf16", "flops": {"e4m3": 8192.0}}}
    whole, uncounted = (
        verdicts.did_fp8_run(machine(write_run(tmp_path / name, cases)))
        for name, cases in (("a", rows), ("b", [*rows, Invented().times(case, arms)]))
    )
    assert whole.verdict == "yes"
    assert uncounted.verdict == "partly"
    assert "1 measured arm had no count" in uncounted.sentence
    assert "1 without a count" in uncounted.brief


def test_every_answer_is_short(h200: Machine, tmp_path: Path) -> None:
    for found in (h200, machine(cpu_run(tmp_path))):
        answers = (*verdicts.answers(found), training.trains_the_same(found))
        for answer in answers:
            assert 0 < len(answer.brief) <= MOST_BRIEF
            assert "\u2026" not in answer.brief, "composed to fit, not cut"


# The picture


def test_the_picture_of_a_gpu_marks_what_was_not_judged(h200: Machine) -> None:
    drawn = picture(h200)
    assert drawn is not None
    for svg in (drawn.svg, drawn.narrow):
        words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert "speedup over bf16, same mode (log scale)" in words
        assert "A/A noise floor" in words
        for arm, word in (
            ("rowwise_with_gw_hp_compile", "failed"),
            ("mxfp8_compile", "skipped"),
            ("delayed_compile", "0.992x unclear"),
        ):
            assert arm in words
            assert any(w.startswith(word) for w in words), (arm, word)
        # rowwise, twice torchao and Transformer Engine: each hollow mark has its reason beside it
        assert sum(w.endswith("no loss judged") for w in words) == 5
        assert any("can't tell in 2 cases and 2 more" in w or "unclear: 3 doubts" in w for w in words)
        assert "1.16x faster" in words


def test_the_picture_of_a_cpu_has_quality_and_bytes(tmp_path: Path) -> None:
    case = Case.of("recipes", {"shape_set": "custom", "layer": "custom", "M": 128, "K": 256, "N": 128})
    rows = Invented(clock_mhz=None).times(case, {"bf16_eager": {"ms": 1.0}})
    rows.append(figure(case, "bf16_eager", "saved_bytes_per_elem", 2.0))
    for arm, db, kept in (("tensorwise_eager", 24.4, 2.0), ("rowwise_eager", 21.0, 1.03)):
        work = {"ms": 1.0, "baseline": "bf16_eager", "flops": {"e4m3": 1e6}}
        rows += Invented(clock_mhz=None).times(case, {arm: work})
        rows.append(figure(case, arm, "sqnr_db", db, resolved={"sqnr_bound_db": 23.6}))
        rows.append(figure(case, arm, "saved_bytes_per_elem", kept))
    drawn = picture(machine(write_run(tmp_path, [rows], env=CPU)))
    assert drawn is not None
    words = re.findall(r"<text[^>]*>([^<]*)</text>", drawn.svg)
    assert {"tensorwise", "24.4 dB passed", "21.0 dB BELOW ITS BOUND", "1.03", "kept for backward"} <= set(
        words
    )
    assert "rowwise" in words


def test_an_axis_spans_a_difference_that_matters() -> None:
    """0.12 dB are a fiftieth of a bit, 6.02 dB; a speedup of 1.001 is no gain."""
    axes = Figure().subplots()
    axes.plot([28.40, 28.52], [0, 1])
    span(axes, LEAST_DB)
    low, high = axes.get_xlim()
    assert high - low == pytest.approx(LEAST_DB) == 12
    assert 0.12 / (high - low) <= 0.011
    low, high = ratio_limits([1.0, 1.001])
    assert low < 0.91
    assert high > 1.1
    low, high = ratio_limits([0.5, 3.0, float("nan")])
    assert low < 0.5
    assert high > 3.0


# Colours


def test_a_recipe_looks_the_same_in_every_figure(h200: Machine) -> None:
    """Oracle: the legends as drawn, of all figures of the page."""
    colours: dict[str, set[str]] = {}
    figures = [chart for section in sections(h200) for chart in section.charts]
    for chart in figures:
        for entry in chart.svg.partition('legend_1">')[2].split("</text>")[:-1]:
            name = entry.rpartition(">")[2]
            arm = parse(name if name in PLACES or name.startswith(("torchao", "te_", "fp8_")) else "none")
            if subject(arm) in PLACES:
                seen = re.findall(r"var\((--[\w-]+)\)", entry.rpartition("<text")[0])
                colours.setdefault(subject(arm), set()).update(seen[-1:])
    assert {"tensorwise", "rowwise", "rowwise_with_gw_hp"} <= colours.keys()
    assert {name: {f"--series-{PLACES.index(name)}"} for name in colours} == colours


def test_recipes_differ_in_colour_and_marker_and_others_take_neither(h200: Machine) -> None:
    every = [look(h200, parse(f"{name}_eager")) for name in PLACES]
    assert len({(style["color"], style["marker"]) for style in every}) == len(PLACES) < len(MARKERS)
    other = look(h200, parse("negative_control"))
    assert other["color"] not in SERIES[: len(PLACES)]
    ours, peer = look(h200, parse("rowwise_eager")), look(h200, parse("torchao_rowwise_compile"))
    assert (ours["color"], ours["marker"]) == (peer["color"], peer["marker"])
    assert ours["fillstyle"] == "full" != peer["fillstyle"]


# Generated rows


def test_generated_rows_cannot_be_taken_for_a_measurement(page: Page) -> None:
    """Title, notice, picture, figures' conditions and markdown say so; an environment of their own keeps them apart."""
    html, markdown = page.html, page.markdown
    assert "<h1>NVIDIA H200 (generated rows, not measured)</h1>" in html
    assert f"Generated rows, not a measurement: {GENERATED_BY}" in html
    assert f"Generated rows, not a measurement: {GENERATED_BY}" in markdown
    assert html.count("GENERATED ROWS, NOT A MEASUREMENT") == 2  # both drawings of the picture
    names = re.findall(r"NVIDIA H200(?!_)(.{0,15})", html)
    assert names
    assert all(after.startswith((" (generated", "</dd>", " page, https:")) for after in names), set(names)
    assert env_id(ENV) != env_id({k: v for k, v in ENV.items() if k != "generated_by"})
    assert env_id(H200) == env_id(H200 | {"generated_by": None})


def test_the_twin_begins_with_the_same_verdict(page: Page) -> None:
    start = page.markdown[: page.markdown.index("What the answers rest on")]
    assert "FP8 is faster here in part: tensorwise_compile runs training steps" in start.replace("\\", "")
    assert "**Does it train the same? Yes.** 3 FP8 arms: 3 PASS." in start


def test_images_and_tables_have_names_for_those_who_hear_the_page(page: Page) -> None:
    drawn = re.findall(r"<svg [^>]*>\s*(?:<title>([^<]+)</title>)?", page.html)
    assert len(drawn) > 10
    assert all(drawn)
    assert page.html.count("<svg ") == page.html.count('<svg role="img"')
    heads = re.findall(r"<th\b[^>]*>", page.html)
    assert len(heads) > 100
    assert all('scope="col"' in head or 'scope="row"' in head for head in heads)
