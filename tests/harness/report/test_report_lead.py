"""The lead: what stands beside an arm's speed holds of that arm. Oracles: the rows as generated, and the gate's rules."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from curves_for_tests import control, falling, rows_of_runs, run_of, shifted
from report_cases import SHAPES, linear_cases
from report_fixtures import CPU, Invented, absent, figure, write_run
from report_pages import lead_of, machine, told

from harness.report import training, verdicts
from harness.report.answer import MOST_BRIEF
from harness.report.looks import PLACES, subject
from harness.report.picture import picture
from harness.report.sections import sections
from harness.store.arm import parse
from harness.store.case import Case
from harness.store.cause import Cause

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from harness.store.measurement import Measurement


def losses(**gaps: float) -> list[Measurement]:
    """Training runs of recipes with a constant gap to the control's loss, and of a known fault."""
    base = control()
    rows = rows_of_runs("base", base) + rows_of_runs("base_eps", shifted(base, 0.0, sd=1e-5))
    rows += rows_of_runs("base_other", {s: run_of(falling(100 + s)) for s in base})
    rows += rows_of_runs("negative_control", shifted(base, lambda t: 0.6 * t / (t + 30), ratio=0.6))
    for name, gap in gaps.items():
        rows += rows_of_runs(name, shifted(base, gap), recipe=name)
    return rows


def layers(
    ms: Mapping[str, float],
    *,
    counted: Collection[int] = range(3),
    unchecked: Collection[str] = (),
    regime: str = "isolated",
    timing: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[list[Measurement]]:
    """Three layers with these times: FP8 counted in these cases, arms of these names without SQNR."""
    out = []
    for i, (layer, k, n) in enumerate(SHAPES[:3]):
        case = Case.of("linear", {"model": "llama3_8b", "layer": layer, "M": 8192, "K": k, "N": n})
        arms: dict[str, Mapping[str, object]] = {}
        rows = []
        for arm, value in ms.items():
            precision, _, mode = arm.rpartition("_")
            if precision == "bf16":
                bf16: dict[str, object] = {"ms": value, "flops": {"bf16": 1e12}}
                arms |= {arm: bf16, f"{arm}:again": bf16 | {"baseline": arm}}
                continue
            proof = {"fp8_gemms": 3, "fp8_gemms_expected": 3} if i in counted else {}
            arms[arm] = {"ms": value, "baseline": f"bf16_{mode}", "flops": {"e4m3": 1e12}, "resolved": proof}
            if arm not in unchecked and regime == "isolated":
                rows.append(figure(case, arm, "sqnr_db", 29.0, resolved={"sqnr_bound_db": 28.3}))
        times = Invented(i, rounds=6).times(case, arms, regime)
        more = timing or {}
        out.append(rows + [replace(r, timing={**r.timing, **more.get(r.arm, {})}) for r in times])
    return out


FAST = {"bf16_compile": 1.0, "rowwise_compile": 0.8}


def test_a_loss_of_one_recipe_is_not_claimed_of_another(tmp_path: Path) -> None:
    """tensorwise is the fastest and was never trained; rowwise was, and is named."""
    found = machine(write_run(tmp_path, [*linear_cases(Invented(), 690.0), losses(rowwise=0.0003)]))
    said = lead_of(found)
    assert said.verdict.startswith("FP8 is faster here: rowwise_compile")
    assert "Its recipe passed its checks, its GEMMs ran in FP8 and its recipe trains the same." in said.rest
    assert "In doubt: tensorwise_compile" in said.rest
    assert "(no loss judged)" in said.rest


def test_what_nobody_judged_of_the_named_arm_is_said(tmp_path: Path) -> None:
    ms = {"bf16_compile": 1.0, "tensorwise_compile": 0.6, "rowwise_compile": 0.8}
    said = lead_of(machine(write_run(tmp_path / "a", layers(ms, unchecked=["tensorwise_compile"]))))
    assert said.verdict.startswith("FP8 is faster here: rowwise_compile")
    assert "In doubt: tensorwise_compile (results not checked)." in said.rest
    assert "Whether it trains the same was not judged." in said.rest
    assert "trains the same." not in said.rest.replace("it trains the same was", "")
    said = lead_of(machine(write_run(tmp_path / "b", layers(FAST, counted=[1]))))
    assert said.verdict.endswith("but FP8 not proved in 2 of 3 cases.")
    assert "GEMMs ran in FP8" not in said.verdict + said.rest


def test_the_figure_is_of_the_mode_that_decides(tmp_path: Path) -> None:
    """Eager FP8 gains 1.43x over eager bf16 and is slower than compiled bf16; compiled FP8 loses: 1 / 1.15 = 0.870."""
    ms = {"bf16_eager": 2.0, "bf16_compile": 1.0, "rowwise_eager": 1.4, "rowwise_compile": 1.15}
    found = machine(write_run(tmp_path, layers(ms)))
    said = lead_of(found)
    assert re.match(
        r"FP8 is not faster here: rowwise_compile runs whole layers at 0\.8[67]\dx the speed of bf16_compile",
        said.verdict,
    )
    assert verdicts.is_faster(found).brief == "Whole layers, 1 compiled FP8 arm: 1 not faster."


def test_a_gain_that_load_takes_away_is_in_doubt(tmp_path: Path) -> None:
    slow = layers({"bf16_compile": 1.0, "rowwise_compile": 1.3}, regime="sustained")
    found = machine(write_run(tmp_path, [*layers(FAST), *slow]))
    answer = verdicts.is_faster(found)
    assert lead_of(found).verdict.endswith("but slower under load in 3 cases.")
    assert answer.verdict == "partly"
    assert "1 slower under load" in answer.brief
    drawn = picture(found)
    assert drawn is not None
    assert "slower under load in 3 cases" in drawn.svg


def test_steps_that_all_failed_are_named_beside_the_speed_of_layers(tmp_path: Path) -> None:
    case = Case.of("train", {"model": "gpt2"})
    steps = Invented().times(case, {"bf16_compile": {"ms": 5.0}})
    steps.append(absent(case, "rowwise_compile", "failed", "out of memory", "bf16_compile", cause=Cause.OOM))
    said = lead_of(machine(write_run(tmp_path, [*layers(FAST), steps])))
    assert "Not judged: rowwise_compile (training steps: failed)." in said.rest


@pytest.mark.parametrize(
    ("struck", "says"),
    [
        ({"rowwise_compile": {"contended": True}}, "but beside another process in 3 cases."),
        ({"bf16_compile": {"throttled": True}}, "but one side throttled in 3 cases."),
        ({arm: {"throttled": True} for arm in FAST}, "over 3 cases, both sides throttled in 3 cases)."),
    ],
)
def test_a_time_under_bad_conditions_says_so(struck: Any, says: str, tmp_path: Path) -> None:
    """Oracle: `harness.gate.conditions`, by which throttling of one side alone decides nothing."""
    assert lead_of(machine(write_run(tmp_path, layers(FAST, timing=struck)))).verdict.endswith(says)


def test_no_sum_over_cases_hides_one_that_ran_no_fp8(tmp_path: Path) -> None:
    """6 of 3, 0 of 3 and 3 of 3 are 9 of 9 together."""
    cases = layers(FAST)
    for rows, seen in zip(cases, (6, 0, 3), strict=True):
        proof = {"fp8_gemms": seen, "fp8_gemms_expected": 3}
        rows[:] = [
            replace(r, resolved=proof) if r.samples and r.baseline == "bf16_compile" else r for r in rows
        ]
    assert "only 0 of 3 GEMMs in FP8 in 1 of 3 cases" in told(machine(write_run(tmp_path, cases)))


def test_a_run_under_way_says_so_far_and_a_cpu_asks_nothing(tmp_path: Path) -> None:
    running = lead_of(machine(write_run(tmp_path / "a", layers(FAST)[:1], state="running")))
    assert running.verdict.startswith("So far: FP8 is faster here")
    said = told(machine(write_run(tmp_path / "b", layers(FAST), env=CPU)))
    assert "Numerically sound: 1 arm passed every check" in said
    assert "?" not in said


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
    trained = losses(tensorwise=0.08, rowwise=0.0003)
    cases = linear_cases(Invented(), 690.0)
    found = machine(write_run(tmp_path / "a", [*cases, trained]))
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
    alone = lead_of(machine(write_run(tmp_path / "b", [*linear_cases(Invented(), 690.0, skip), trained])))
    assert alone.verdict.startswith("Not shown that FP8 pays here: tensorwise_compile")
    assert alone.verdict.endswith("but loss: FAIL.")


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


def test_a_cpu_claims_no_speed(cpu, gpu) -> None:
    found = machine(cpu[0])
    said, drawn = told(found), picture(found)
    assert said.startswith("A CPU says nothing about speed.")
    assert drawn is not None
    for text in (said, drawn.svg, drawn.narrow, drawn.title):
        assert not re.search(r"\d(\.\d+)?x\b|faster|slower|speedup", text)
    for each in (found, machine(gpu[0])):
        for answer in verdicts.answers(each):
            assert 0 < len(answer.brief) <= MOST_BRIEF
            assert "\u2026" not in answer.brief, "composed to fit, not cut"
    full: list[verdicts.Verdict] = ["yes"] * 12 + ["partly"] * 4 + ["no"] * 3 + ["can't tell"]
    for slower in (0, 11):
        assert len(verdicts._speed_brief("train", "compile against compile", full, slower)) <= MOST_BRIEF


def test_the_picture_of_a_gpu_marks_what_was_not_judged(tmp_path: Path) -> None:
    cases = layers(FAST | {"tensorwise_compile": 0.6}, unchecked=["tensorwise_compile"])
    case = Case.of("linear", {"M": 16})
    cases.append([absent(case, "mxfp8_compile", "skipped", "needs 10.0", "bf16_compile")])
    drawn = picture(machine(write_run(tmp_path, cases)))
    assert drawn is not None
    for svg in (drawn.svg, drawn.narrow):
        words = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
        assert {"mxfp8_compile", "rowwise_compile", "tensorwise_compile", "A/A noise floor"} <= set(words)
        assert any(word.startswith("skipped") for word in words)
        assert sum("results not checked" in word for word in words) == 1
        assert any(re.match(r"1\.2\dx faster", word) for word in words)


def test_a_recipe_looks_the_same_in_every_figure(gpu) -> None:
    """Oracle: the legends as drawn, of all figures of the page."""
    colours: dict[str, set[str]] = {}
    for chart in (chart for section in sections(machine(gpu[0])) for chart in section.charts):
        for entry in chart.svg.partition('legend_1">')[2].split("</text>")[:-1]:
            name = entry.rpartition(">")[2]
            arm = parse(name if name in PLACES else "none")
            if subject(arm) in PLACES:
                seen = re.findall(r"var\((--[\w-]+)\)", entry.rpartition("<text")[0])
                colours.setdefault(subject(arm), set()).update(seen[-1:])
    assert {"tensorwise", "rowwise", "rowwise_with_gw_hp"} <= colours.keys()
    assert {name: {f"--series-{PLACES.index(name)}"} for name in colours} == colours


def test_images_and_tables_have_names_for_those_who_hear_the_page(gpu) -> None:
    page = gpu[1].html.read_text()
    drawn = re.findall(r"<svg [^>]*>\s*(?:<title>([^<]+)</title>)?", page)
    assert len(drawn) > 8
    assert all(drawn)
    assert page.count("<svg ") == page.count('<svg role="img"')
    heads = re.findall(r"<th\b[^>]*>", page)
    assert len(heads) > 100
    assert all('scope="col"' in head or 'scope="row"' in head for head in heads)
