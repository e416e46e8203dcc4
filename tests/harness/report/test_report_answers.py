"""The questions at the head of a report and its lead sentence. Oracles: the rows as generated, and the gate's rules.

What stands beside an arm's speed holds of that arm; a positive word is impossible where it is false.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from curves_for_tests import AXES, control, falling, rows_of_runs, run_of, shifted
from report_cases import SHAPES, gemm_cases, linear_cases
from report_fixtures import H200, Invented, absent, figure, write_run
from report_pages import Page, lead_of, machine, table, told
from report_pages import run_of as stored

from harness.report import standings, steps, verdicts
from harness.report.drawing import look, subject
from harness.report.first_screen import FirstScreen
from harness.report.headline import headline, headline_rows
from harness.report.picture import picture
from harness.report.table import quantile
from harness.store.case import Arm, Case
from harness.store.case import parse as parse_arm
from harness.store.errors import Cause
from harness.store.outside import parse

NOTICE = "Measured on a CPU. These runs validate numerics, bytes moved and the harness itself. CPU timings are no evidence"
FAST = {"bf16_compile": 1.0, "rowwise_compile": 0.8}


def losses(**gaps):
    """Training runs of recipes with a constant gap to the control's loss, and of a known fault."""
    base = control()
    rows = rows_of_runs("base", base) + rows_of_runs("base_eps", shifted(base, 0.0, sd=1e-5))
    rows += rows_of_runs("base_other", {s: run_of(falling(100 + s)) for s in base})
    rows += rows_of_runs("negative_control", shifted(base, lambda t: 0.6 * t / (t + 30), ratio=0.6))
    for name, gap in gaps.items():
        rows += rows_of_runs(name, shifted(base, gap), recipe=name)
    return rows


def layers(ms, *, seen=(3, 3, 3), unchecked=(), regime="isolated", timing=None, spread=0.004):
    """Three layers with these times: so many of 3 GEMMs seen in FP8 (None: not counted), arms of these names without SQNR."""
    out = []
    for i, (layer, k, n) in enumerate(SHAPES[:3]):
        case = Case.of("linear", {"model": "llama3_8b", "layer": layer, "M": 8192, "K": k, "N": n})
        arms, rows = {}, []
        for arm, value in ms.items():
            precision, _, mode = arm.rpartition("_")
            if precision == "bf16":
                arms[arm] = {"ms": value, "flops": {"bf16": 1e12}}
                arms[f"{arm}:again"] = arms[arm] | {"baseline": arm}
                continue
            proof = {"fp8_gemms": seen[i], "fp8_gemms_expected": 3} if seen[i] is not None else {}
            arms[arm] = {"ms": value, "baseline": f"bf16_{mode}", "flops": {"e4m3": 1e12}, "resolved": proof}
            if arm not in unchecked and regime == "isolated":
                rows.append(figure(case, arm, "sqnr_db", 29.0, resolved={"sqnr_bound_db": 28.3}))
        times = Invented(i, rounds=6, spread=spread).times(case, arms, regime)
        out.append(rows + [replace(r, timing={**r.timing, **(timing or {}).get(r.arm, {})}) for r in times])
    return out


def checked(suite="linear", arm="tensorwise_eager", about=None, **axes):
    """One FP8 arm without a partner; figures by metric, each with its bound."""
    case = Case.of(suite, {"M": 16, **axes})
    rows = Invented().times(case, {arm: {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": about or {}}})
    return case, rows


def sqnr(suite, db, bound, arm="tensorwise_eager", **axes):
    case, rows = checked(suite, arm, **axes)
    return [*rows, figure(case, arm, "sqnr_db", db, resolved={"sqnr_bound_db": {"sqnr_db": bound}})]


# Is FP8 faster here?


@pytest.mark.parametrize(
    ("ms", "spread", "verdict"),
    [
        ({"rowwise_compile": 0.5}, 0.004, "yes"),
        ({"rowwise_compile": 2.0}, 0.004, "no"),
        ({"rowwise_compile": 1.0}, 0.4, "can't tell"),
        (
            {"tensorwise_compile": 0.5, "rowwise_compile": 2.0},
            0.004,
            "partly",
        ),  # a fast arm does not carry a slow one
    ],
)
def test_verdict_of_speed(tmp_path, ms, spread, verdict):
    answer = verdicts.is_faster(stored(tmp_path, *layers({"bf16_compile": 1.0} | ms, spread=spread)))
    assert answer.verdict == verdict
    assert answer.sentence.startswith(f"Whole layers, {len(ms)} compiled FP8 arm")


def test_what_was_not_measured_decides_nothing(tmp_path):
    """Eager layers decide where nothing was compiled; of a device without FP8 nothing can be told."""
    arms = [f"{p}_compile" for p in ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")]
    eager = stored(tmp_path / "a", *linear_cases(Invented(), 690.0, dict.fromkeys(arms, "no compiler")))
    assert (verdicts.is_faster(eager).verdict, verdicts.deciding(eager).mode) == ("partly", "eager")
    without = stored(tmp_path / "b", *gemm_cases(Invented(), 250.0, fp8=False))
    assert {answer.verdict for answer in verdicts.answers(without)} == {"can't tell"}


def test_an_arm_that_failed_in_two_of_three_cases_is_no_yes(tmp_path):
    """What is said of a mean counts the cases that have a time."""
    first, *rest = layers(FAST)
    failed = [
        [absent(Case.of("linear", dict(parse(rows[0].axes))), r.arm, "failed", "boom", r.baseline) if r.arm.startswith("rowwise") and r.metric == "time_ms" else r
         for r in rows if not (r.arm.startswith("rowwise") and r.metric == "sqnr_db")]
        for rows in rest
    ]  # fmt: skip
    found = stored(tmp_path, first, *failed)
    answer = verdicts.is_faster(found)
    assert answer.verdict == "partly"
    assert answer.sentence == "Whole layers, 1 compiled FP8 arm: 1 partly faster."
    assert "2 cases without a time" in " ".join(lead_of(found))


@pytest.mark.parametrize(
    ("ms", "code", "verdict"), [(0.8, "c1", "yes"), (0.4, "c1", "can't tell"), (0.4, "c2", "yes")]
)
def test_runs_of_the_same_code_that_disagree_are_no_yes(tmp_path, ms, code, verdict):
    """A run of other code may be faster; of the same code its ratio would be the same."""
    runs = [
        write_run(
            tmp_path / name, layers({"bf16_compile": 1.0, "rowwise_compile": arm}), env=H200 | {"code": of}, env_id="one",
            run_id=f"20260102T0304{name}Z-0123456-{name}",
        )
        for name, arm, of in (("05", 0.8, "c1"), ("06", ms, code))
    ]  # fmt: skip
    found = machine(*runs)
    assert verdicts.is_faster(found).verdict == verdict
    assert ("runs of the same code disagree" in " ".join(lead_of(found))) == (verdict != "yes")


@pytest.mark.parametrize("again", [2.0, 1.0])
def test_a_finding_of_a_slow_arm_needs_runs_that_agree(tmp_path, again):
    """Oracle: the pairs of the page, by which nothing is decided where two runs of the same code disagree."""
    case, flops = Case.of("linear", {"M": 512, "K": 384, "N": 384}), 6.0 * 512 * 384 * 384
    runs = []
    for place, ms in enumerate((2.0, again)):
        arms = {"bf16_eager": {"ms": 1.0, "flops": {"bf16": flops}}}
        arms["bf16_eager:again"] = arms["bf16_eager"] | {"baseline": "bf16_eager"}
        arms["rowwise_eager"] = {"ms": ms, "flops": {"e4m3": flops}, "baseline": "bf16_eager"}
        where = {
            "run_id": f"20260102T03040{place}Z-0123456-{place}",
            "env": H200 | {"code": "c"},
            "env_id": "one",
        }
        runs.append(write_run(tmp_path / str(place), [Invented(seed=place).times(case, arms)], **where))
    found = machine(*runs)
    assert [p["verdict"] for p in found.pairs] == ["slower" if again == 2.0 else "unclear"]
    assert len([f for f in found.findings if "is slower than" in f.symptom]) == (again == 2.0)


@pytest.mark.parametrize("setups", [1, 2])
def test_an_arm_of_two_set_ups_is_one_arm(tmp_path, setups):
    """Oracle: what was stored: one FP8 arm, judged once in each set-up."""
    base = control()
    rows = [
        row
        for i in range(setups)
        for arm, runs in (("base", base), ("tensorwise", shifted(base)))
        for row in rows_of_runs(arm, runs, {**AXES, "lr": 1e-3 * (i + 1)})
    ]
    sentence = verdicts.trains_the_same(stored(tmp_path, rows)).sentence
    assert "1 FP8 arm:" in sentence
    assert f"{setups} PASS" in sentence


def test_runs_of_the_same_code_are_one_interval_and_a_word_that_it_does_not_bear_is_not_said(tmp_path):
    """Oracle: the pairs of each run alone. Of a ratio of 1.02 beside one of 1.00 nobody knows whether it is faster."""
    runs = []
    for name, ms, clock in (("05", 1.0, 1500.0), ("06", 0.98, 1755.0)):
        rows = [
            replace(r, sample_clock_mhz=(clock,) * len(r.samples))
            if r.arm == "bf16_compile" and r.samples
            else r
            for case in layers({"bf16_compile": 1.0, "rowwise_compile": ms}, spread=0.001)
            for r in case
        ]
        runs.append(
            write_run(
                tmp_path / name, [rows], env=H200 | {"code": "c1"}, env_id="one",
                run_id=f"20260102T0304{name}Z-0123456-{name}",
            )
        )  # fmt: skip
    found, alone = machine(*runs), [machine(run) for run in runs]
    own = [[p for p in each.pairs if p["arm"] == "rowwise_compile"] for each in alone]
    both = [p for p in found.pairs if p["arm"] == "rowwise_compile"]
    assert {p["verdict"] for p in own[1]} == {"faster"}
    assert {p["verdict"] for p in both} == {"unclear"}
    for pair, *each in zip(both, *own, strict=True):
        assert pair["speedup"] == each[1]["speedup"]
        assert (pair["low"], pair["high"]) == (min(p["low"] for p in each), max(p["high"] for p in each))
        assert (pair["clock_mhz"], pair["baseline_clock_mhz"]) == (1755.0, 1500.0)
    (standing,) = standings.timed(found)
    (single,) = standings.timed(alone[1])
    assert ("of 2 runs" in standing.shown.note, "runs" in single.shown.note) == (True, False)


def test_clocks_that_differ_stand_beside_the_speed(tmp_path):
    """Under a power limit both sides are throttled, each at its own clock: the ratio stands, with both."""
    timing = {arm: {"throttled": True} for arm in ("bf16_compile", "rowwise_compile")}
    rows = [
        [
            replace(r, sample_clock_mhz=(1500.0,) * len(r.samples))
            if r.arm == "bf16_compile" and r.samples
            else r
            for r in case
        ]
        for case in layers(FAST, timing=timing)
    ]
    verdict, _ = lead_of(stored(tmp_path, *rows))
    assert "both sides throttled in 3 cases, at 1,755 MHz against 1,500" in verdict
    free = [[replace(r, timing={**r.timing, "throttled": False}) for r in case] for case in rows]
    found = stored(tmp_path / "free", *free)
    assert verdicts.is_faster(found).verdict == "can't tell"
    assert "clocks differ in 3 cases" in " ".join(lead_of(found))


def test_a_cpu_never_claims_speed(cpu, cpu_machine):
    """The notice stands before the first answer; every section of times is folded and labelled."""
    source, twin = cpu[1].html.read_text(), cpu[1].markdown.read_text()
    page = Page(source).text
    for made in (page, twin):
        assert made.index(NOTICE) < made.index("A CPU says nothing about speed.")
    titles = re.findall(
        r"<section id=\"[^\"]*\"( class=\"folded\")?>\s*(?:<details><summary>)?<h3>([^<]*)", source
    )
    timed = [
        each for each in titles if re.search("FP8 against|Eager and|Layers|GEMM|Casts|Ceil|Compile", each[1])
    ]
    assert len(timed) >= 2
    assert all(fold and title.startswith("CPU times: ") for fold, title in timed)
    drawn, said = picture(cpu_machine), told(cpu_machine)
    assert said.startswith("A CPU says nothing about speed.")
    for words in (said, drawn.svg, drawn.title):
        assert not re.search(r"\d(\.\d+)?x\b|faster|slower|speedup", words)


# Is it sound, did FP8 run?

WRONG = "numerics: SQNR is 20.10 dB, 28.50 expected"
FELL_BACK = "numerics: 0 FP8 GEMMs ran where 3 were due"


@pytest.mark.parametrize(
    ("ask", "wrong", "named"),
    [
        (verdicts.is_sound, {"reason": WRONG, "cause": Cause.NUMERICS}, "linear rowwise_eager"),
        (verdicts.is_sound, {"sqnr_db": 28.0}, "linear tensorwise_eager"),
        (verdicts.is_sound, {"mismatches": 3.0}, "linear tensorwise_eager"),
        (verdicts.did_fp8_run, {"reason": FELL_BACK, "cause": Cause.NOT_FP8}, "linear rowwise_eager"),
    ],
)
def test_a_wrong_result_is_a_no_and_is_named(tmp_path, ask, wrong, named):
    case, rows = checked(about={"fp8_gemms": 3}, layer="qkv")
    if "reason" in wrong:
        rows.append(absent(case, "rowwise_eager", "failed", wrong["reason"], "bf16", cause=wrong["cause"]))
    else:
        bound = {"sqnr_bound_db": {"sqnr_db": 28.3}}
        rows += [figure(case, "tensorwise_eager", *one, resolved=bound) for one in wrong.items()]
    answer = ask(stored(tmp_path, rows))
    assert (answer.verdict, answer.sentence.rpartition(": ")[2]) == ("no", f"{named}.")


@pytest.mark.parametrize(
    ("resolved", "verdict"),
    [
        ({"fp8_gemms": 3, "fp8_gemms_expected": 3}, "yes"),
        ({"fp8_gemms": 2, "fp8_gemms_expected": 3}, "no"),
        ({"fp8_gemms": 0, "fp8_gemms_expected": 0}, "no"),
        ({"a_dtype": "float8_e4m3fn"}, "yes"),
        ({}, "can't tell"),
    ],
)
def test_proof_that_fp8_ran(tmp_path, resolved, verdict):
    answer = verdicts.did_fp8_run(stored(tmp_path, checked(about=resolved)[1]))
    assert answer.verdict == verdict
    assert verdict != "no" or answer.sentence.endswith("recipe has: linear tensorwise_eager.")


def test_each_case_is_held_against_its_own_bound(tmp_path):
    """The case of the least SQNR is within its bound, another one is not."""
    rows = [*sqnr("linear", 28.1, 28.3), *sqnr("linear", 24.6, 24.3, layer="qkv")]
    assert verdicts.is_sound(stored(tmp_path, rows)).verdict == "no"


@pytest.mark.parametrize("suite", ["linear", "recipes"])
@pytest.mark.parametrize(
    ("bounds", "codes", "verdict", "results"),
    [
        ({"sqnr_db": 28.0, "grad_input_sqnr_db": 28.0}, False, "yes", ""),
        ({"sqnr_db": 28.0}, False, "partly", standings.UNCHECKED),
        ({}, False, "partly", standings.UNCHECKED),
        ({}, True, "yes", ""),
    ],
)
def test_a_result_that_no_bound_judged_is_not_called_passed(tmp_path, suite, bounds, codes, verdict, results):
    """Beside an arm that passed; equal codes are a judgement too."""
    case, times = checked(suite, "rowwise_eager")
    about = {"resolved": {"sqnr_bound_db": bounds}} if bounds else {}
    rows = [figure(case, "rowwise_eager", m, 29.0, **about) for m in ("sqnr_db", "grad_input_sqnr_db")]
    rows += [figure(case, "rowwise_eager", "mismatches", 0.0)] * codes
    found = stored(tmp_path, [*times, *rows], sqnr("gemm", 28.5, 28.0))
    assert verdicts.is_sound(found).verdict == verdict
    own = standings.Standing(Arm("rowwise", mode="eager"))
    assert standings.checks(found, own).results == results


@pytest.mark.parametrize("has_bound", [True, False])
def test_a_recipe_is_not_checked_because_another_suite_passed(tmp_path, has_bound):
    """One suite judges its result, another one stores a result of the same recipe with a bound or without."""
    about = {"resolved": {"sqnr_bound_db": {"sqnr_db": 28.0}}} if has_bound else {}
    case, times = checked("linear", "rowwise_eager")
    found = stored(
        tmp_path,
        [*times, figure(case, "rowwise_eager", "sqnr_db", 29.0, **about)],
        sqnr("gemm", 28.5, 28.0, "rowwise_eager"),
    )
    own = standings.Standing(Arm("rowwise", mode="eager"))
    assert standings.checks(found, own).results == ("" if has_bound else standings.UNCHECKED)


@pytest.mark.parametrize("state", ["interrupted", "failed", "running"])
def test_a_run_that_did_not_finish_gives_no_plain_yes(tmp_path, state):
    clean, found = (
        FirstScreen.of(stored(tmp_path / s, *layers(FAST), losses(rowwise=0.0003), state=s))
        for s in ("finished", state)
    )
    assert (clean.tone, found.tone) == ("good", "")
    assert found.lines()[0] == f"So far: {clean.lines()[0]}"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_figures_that_failed_are_counted_on_the_first_screen(tmp_path, count):
    """Rows of another suite, which answers nothing here: the verdict stays and is no plain yes."""
    lost = [absent(Case.of("copy", {"M": m}), "bf16_eager", "failed", "boom", "") for m in range(count)]
    found = FirstScreen.of(stored(tmp_path, *layers(FAST), losses(rowwise=0.0003), lost))
    clean = FirstScreen.of(stored(tmp_path / "clean", *layers(FAST), losses(rowwise=0.0003)))
    assert found.lines()[0] == clean.lines()[0]
    assert (found.tone, found.data()["failed"]) == ("" if count else "good", count)
    assert [line for line in found.lines() if line not in clean.lines()] == [
        f"Below: {count} failed figure{'s' * (count > 1)}."
    ] * bool(count)


def test_a_study_of_breakage_is_never_sound(tmp_path):
    """It breaks recipes on purpose: what stays above its bound there says nothing about training."""
    sound = sqnr("linear", 28.5, 28.0)
    codes = [figure(Case.of("codes", {"inputs": "overflow"}), "saturating", "mismatches", 0.0)]
    for rows, verdict in (
        (sqnr("outliers", 28.0, 20.0), "can't tell"),
        (codes, "can't tell"),
        (sound, "yes"),
        ([*sound, *sqnr("outliers", 28.0, 20.0)], "partly"),
        ([*sound, *sqnr("outliers", 12.0, 20.0)], "no"),
    ):
        assert verdicts.is_sound(stored(tmp_path / f"{verdict}{len(rows)}", rows)).verdict == verdict


@pytest.mark.parametrize("evidence", ["", "refutes", "none"])
@pytest.mark.parametrize("mismatches", [0.0, 3.0])
def test_a_suite_from_outside_says_what_its_rows_are_evidence_for(tmp_path, evidence, mismatches):
    """Oracle: `resolved.evidence`, whatever the suite is called: what refutes proves nothing, what is recorded neither."""
    case, times = checked("mine", "tensorwise_eager")
    about = {"resolved": {"evidence": evidence} if evidence else {}}
    rows = [*times, figure(case, "tensorwise_eager", "mismatches", mismatches, **about)]
    found = stored(tmp_path, rows, sqnr("linear", 28.5, 28.0))
    due = {"": ("yes", "no"), "refutes": ("partly", "no"), "none": ("yes", "yes")}[evidence]
    assert verdicts.is_sound(found).verdict == due[mismatches > 0]
    assert ("mine not judged" in verdicts.is_sound(found).sentence) == (
        evidence == "refutes" and not mismatches
    )


@pytest.mark.parametrize("first", ["refutes", ""])
def test_one_row_that_refutes_makes_the_others_of_its_arm_prove_nothing(tmp_path, first):
    """Whichever of them was stored first."""
    case, times = checked("mine", "tensorwise_eager")
    every = [first, "refutes" if not first else ""]
    rows = [
        figure(case, "tensorwise_eager", metric, 0.0, resolved={"evidence": evidence} if evidence else {})
        for metric, evidence in zip(("mismatches", "underflow_frac"), every, strict=True)
    ]
    found = stored(tmp_path, [*times, *rows], sqnr("linear", 28.5, 28.0))
    assert verdicts.is_sound(found).verdict == "partly"


# What was proved of a step before it was timed

STEP = {
    "first_loss": 5.501, "first_loss_control": 5.5, "first_grad_norm_ratio": 1.01, "fp8_layers": 9, "fp8_gemms": 27,
    "fp8_gemms_expected": 27, "verify": "FP8 verified: 27 of 27", "verify_outcome": "proved",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "verdict", "shown"),
    [
        ({}, "yes", {"gap of the loss (nats)": "0.00100", "norm of the gradients": "1.010"}),
        ({"verify": "", "verify_outcome": ""}, "yes", {"norm of the gradients": "1.010"}),
        ({"verify_warnings": ["head: 2 % underflow"]}, "yes", {"warnings": "head: 2 % underflow"}),
        ({"verify": "FP8 NOT verified: nothing", "verify_outcome": "disproved"}, "no", {"proof": "FP8 NOT verified: nothing"}),
        ({"first_loss": None}, "no", {"gap of the loss (nats)": ""}),
        ({"fp8_layers": 0}, "can't tell", None),
    ],
)  # fmt: skip
def test_checks_of_a_training_step_answer_whether_it_is_sound(tmp_path, changes, verdict, shown):
    found = stored(tmp_path, checked("train", about=STEP | changes)[1])
    answer, rows = verdicts.is_sound(found), table(steps.first_steps_table(found))
    assert answer.verdict == verdict
    assert [{"arm": row["arm"]} | {n: row[n] for n in shown} for row in rows] == (
        [{"arm": "tensorwise_eager"} | shown] if shown else []
    )
    seen = standings.checks(found, standings.Standing(Arm("tensorwise", "eager")))
    assert seen.warnings == len(changes.get("verify_warnings", ()))
    warned = "; 1 warning of fp8core.verify" * ("verify_warnings" in changes)
    assert verdict != "yes" or answer.sentence == f"First training steps of 1 arm agree{warned}."


def test_the_worst_of_two_first_steps_is_shown(tmp_path):
    """A loss or norm that is no number lies further off than any."""
    unknown = STEP | {"first_loss": None, "first_grad_norm_ratio": None}
    cases = [checked("train", about=STEP)[1], checked("train", about=unknown, n=1)[1]]
    (row,) = table(steps.first_steps_table(stored(tmp_path, *cases)))
    assert row["gap of the loss (nats)"] == row["norm of the gradients"] == ""


# The lead


def test_a_loss_of_one_recipe_is_not_claimed_of_another(tmp_path):
    """tensorwise is the fastest and was never trained; rowwise was, and is named."""
    verdict, rest = lead_of(stored(tmp_path, *linear_cases(Invented(), 690.0), losses(rowwise=0.0003)))
    assert verdict.startswith("FP8 is faster here: rowwise_compile")
    assert "Its recipe passed its checks; its GEMMs ran in FP8; its recipe trains the same." in rest
    assert re.search(r"In doubt: tensorwise_compile.*\(no loss judged\)", rest)


@pytest.mark.parametrize("env", [None, H200])
def test_what_was_measured_comes_before_what_was_not(tmp_path, env):
    """Training runs alone: the first sentence is about the loss; times and single results were never asked for."""
    found = stored(tmp_path, losses(rowwise=0.0003), **({"env": env} if env else {}))
    (same,) = (a for a in verdicts.answers(found) if a.about == "same")
    first, rest = lead_of(found)
    assert same.clause in first
    assert "SQNR" not in first
    assert "SQNR" in rest


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (lambda: layers(FAST, seen=(None, 3, None)), "but FP8 not proved in 2 of 3 cases."),
        (lambda: layers(FAST, seen=(6, 0, 3)), "only 0 of 3 GEMMs in FP8 in 1 of 3 cases"),  # 9 of 9 together
        (lambda: layers(FAST, timing={"rowwise_compile": {"contended": True}}), "but beside another process in 3 cases."),
        (lambda: layers(FAST, timing={"bf16_compile": {"throttled": True}}), "but one side throttled in 3 cases."),
        (lambda: layers(FAST, timing={a: {"throttled": True} for a in FAST}), "over 3 cases, both sides throttled in 3 cases)."),
        (lambda: [*layers(FAST), *layers({"bf16_compile": 1.0, "rowwise_compile": 1.3}, regime="sustained")],
         "but slower under load in 3 cases."),
    ],
)  # fmt: skip
def test_a_figure_in_doubt_says_so(tmp_path, rows, says):
    """Oracle for throttling: `harness.gate.matching`, by which that of one side alone decides nothing."""
    found = stored(tmp_path, *rows())
    assert says in told(found)
    if "slower under load" in says:
        assert (verdicts.is_faster(found).verdict, drawn_hollow(found)) == ("partly", 1)


def test_a_wrong_result_comes_before_any_speed(tmp_path):
    case = Case.of("linear", {"model": "x", "layer": "y", "M": 16, "K": 16, "N": 16})
    wrong = [absent(case, "rowwise_compile", "failed", WRONG, "bf16_compile", cause=Cause.NUMERICS)]
    verdict, rest = lead_of(stored(tmp_path, *linear_cases(Invented(), 690.0), wrong))
    assert verdict.endswith("1 result outside of what the format allows: linear rowwise_compile.")
    assert verdict.startswith("Do not switch FP8 on from these runs: ")
    assert "is faster" not in verdict + rest
    assert rest.startswith("Times alone: tensorwise_compile")
    assert "rowwise_compile (1 case without a time, a check failed)" in rest


def test_the_arm_named_beside_a_gain_has_one(tmp_path):
    """An arm that is everywhere the same has the better mean than one that gains in two layers and loses in the third."""
    ms = FAST | {"rowwise_compile": 1.0}
    cases = [layers(ms | {"tensorwise_compile": own})[i] for i, own in enumerate((0.9, 0.9, 1.8))]
    assert told(stored(tmp_path, *cases)).startswith("FP8 is faster here in part: tensorwise_compile")


def test_the_best_arm_is_one_that_nothing_stands_against(tmp_path):
    """tensorwise is faster and its loss fails; where rowwise is left out, no gain is beyond doubt."""
    trained = losses(tensorwise=0.08, rowwise=0.0003)
    found = stored(tmp_path / "a", *linear_cases(Invented(), 690.0), trained)
    verdict, rest = lead_of(found)
    assert verdict.startswith("FP8 is faster here: rowwise_compile")
    assert "tensorwise_compile, tensorwise_eager (loss: FAIL)" in rest
    assert drawn_hollow(found)
    skip = {
        f"rowwise{more}_{mode}": "left out" for more in ("", "_with_gw_hp") for mode in ("eager", "compile")
    }
    verdict, _ = lead_of(stored(tmp_path / "b", *linear_cases(Invented(), 690.0, skip), trained))
    assert re.fullmatch("Not shown that FP8 pays here: tensorwise_compile.*but loss: FAIL.", verdict)


# The picture


def drawn_hollow(found):
    """Arms that the picture draws as being in doubt; its caption says what that means."""
    hollow = sum(bool(standings.doubts(found, s.arm)) for s in standings.timed(found))
    assert ("Hollow: in doubt" in picture(found).caption) is (hollow > 0)
    return hollow


def test_the_first_screen_marks_what_was_not_judged(tmp_path):
    cases = layers(FAST | {"tensorwise_compile": 0.6}, unchecked=["tensorwise_compile"])
    cases.append(
        [absent(Case.of("linear", {"M": 16}), "mxfp8_compile", "skipped", "needs 10.0", "bf16_compile")]
    )
    found = stored(tmp_path, *cases)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", picture(found).svg)
    assert {"rowwise_compile", "tensorwise_compile", "3 faster", "A/A noise floor"} <= set(words)
    assert drawn_hollow(found) == 1
    rows = {row["FP8 arm"]: row["in doubt"] for row in table(headline(found, headline_rows(found)))}
    assert rows == {"tensorwise_compile": "results not checked", "rowwise_compile": ""}
    assert lead_of(found)[1].endswith("Not judged: mxfp8_compile (skipped).")


# Names


@pytest.mark.parametrize(
    ("field", "name"),
    [("recipe", n) for n in ("all_e4m3", "delayed_twice", "mxfp8", "zzz")]
    + [("variant", n) for n in ("torch", "fp8", "zzz")]
    + [("peer", "zzz")],
)
def test_no_answer_depends_on_a_name(tmp_path, field, name):
    """The same rows under another name: what is said and shown is the same but for the name, and no two arms look alike."""
    said = []
    for own in ("mine", name):
        rows = [*layers(FAST), losses(rowwise=0.0003), sqnr("gemm", 28.5, 28.0, "rowwise_eager")]
        named = [[renamed(row, field, own) for row in each] for each in rows]
        found = stored(tmp_path / own, *named, *layers({"bf16_eager": 1.0, "tensorwise_eager": 0.9}))
        arms = [s.fields for s in standings.standings(found)]
        looks = [str(look(found, arm)) for arm in arms]
        assert len(set(looks)) == len({subject(arm) for arm in arms}) == 2
        page = [*FirstScreen.of(found).lines(), str(table(headline(found, headline_rows(found))))]
        page += [answer.sentence for answer in verdicts.answers(found)]
        said.append(re.sub(rf"\b(rowwise_)?{own}|{own}_", "NAME", " ".join(page)))
    assert said[0] == said[1]


def renamed(row, field, name):
    """rowwise as an arm whose recipe, variant or peer has this name."""
    fields = row.arm_fields or parse_arm(row.arm)
    if fields.recipe == "rowwise":
        fields = replace(fields, **{"recipe": "rowwise" * (field == "peer"), field: name})
    return replace(row, arm=str(fields), arm_fields=fields)


# Cells


def test_quantiles_of_exact_results_are_no_nan():
    """numpy would interpolate between two infinities, which is NaN and a warning."""
    assert [quantile([float("inf")] * n, q) for n in (1, 3) for q in (0.0, 0.25, 0.75)] == [float("inf")] * 6
    assert (quantile([], 0.25), quantile([1.0, 2.0, 3.0], 0.25)) == (None, 1.5)
