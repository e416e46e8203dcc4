"""Oracle: the rows behind the report: its three questions, its numbers and its labels."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import cpu_run, gemm_cases, gpu_run, linear_cases, train_cases
from report_fixtures import CPU, Invented, absent, figure, write_run
from report_pages import Page, machine, run_of

from harness.__main__ import main
from harness.report import numerics, tables, verdicts, write_report
from harness.report.table import quantile
from harness.store import text
from harness.store.case import Case
from harness.store.cause import Cause

# The three questions


def test_an_emulated_arm_says_so_beside_its_name() -> None:
    for resolved, note in (('{"emulated": "no MX kernel"}', "emulated"), ("{}", ""), ("", "")):
        cell = tables.arm_cell({"arm": "mxfp8_eager", "resolved": resolved})
        assert (cell.text, cell.order, cell.note) == ("mxfp8_eager", "mxfp8_eager", note)


def test_quartiles_of_exact_results_are_infinite_not_nan() -> None:
    """numpy would interpolate between two infinities, which is NaN and a warning."""
    inf = float("inf")
    assert [quantile([inf] * n, q) for n in (1, 3) for q in (0.0, 0.25, 0.75)] == [inf] * 6
    assert quantile([], 0.25) is None
    assert quantile([1.0, 2.0, 3.0], 0.25) == 1.5


def test_a_gpu_run_answers_all_three_questions(gpu):
    faster, sound, ran = verdicts.answers(machine(gpu[0]))
    assert [faster.verdict, sound.verdict, ran.verdict] == ["yes", "yes", "yes"]
    assert faster.sentence.startswith(
        "Whole layers (forward and backward, casts included), compile against compile, speed over bf16: "
    )
    assert "speed over bf16: tensorwise_compile 1." in faster.sentence
    assert any("K=4104 is no multiple of 16" in line for line in ran.evidence)
    assert "80 of 80" in ran.sentence


def test_eager_layers_decide_where_nothing_was_compiled(tmp_path):
    cases = linear_cases(Invented(), 690.0, dict.fromkeys(_arms("compile"), "no compiler"))
    answer = verdicts.is_faster(run_of(tmp_path, *cases))
    assert "eager against eager" in answer.sentence
    assert answer.verdict == "partly"


def _arms(mode):
    return [f"{p}_{mode}" for p in ("bf16", "tensorwise", "rowwise", "rowwise_with_gw_hp")]


@pytest.mark.parametrize(("fp8_ms", "verdict"), [(0.5, "yes"), (2.0, "no"), (1.0, "can't tell")])
def test_verdict_of_speed(tmp_path, fp8_ms, verdict):
    """Arms of half and double the time; equal arms are noise or ties, which is no gain (with 40 % noise: can't tell)."""
    invented = Invented(spread=0.4 if verdict == "can't tell" else 0.004)
    cases = []
    for m in range(16, 64, 16):
        case = Case.of("gemm", {"M": m})
        arms = {
            "bf16": {"ms": 1.0, "flops": {"bf16": 1.0}},
            "fp8": {"ms": fp8_ms, "flops": {"e4m3": 1.0}, "baseline": "bf16"},
        }
        arms["bf16:again"] = {**arms["bf16"], "baseline": "bf16"}
        cases.append(invented.times(case, arms))
    assert verdicts.is_faster(run_of(tmp_path, *cases)).verdict == verdict


def test_a_device_without_fp8_cannot_tell_and_says_why(tmp_path):
    found = run_of(tmp_path, *gemm_cases(Invented(), 250.0, fp8=False))
    for answer in verdicts.answers(found):
        assert answer.verdict == "can't tell"
        assert any("compute capability 8.0 has no FP8" in line for line in answer.evidence)


def test_a_cpu_never_claims_speed(cpu):
    """The notice stands before the first answer; every section of times is folded and labelled."""
    page = Page(cpu[1].html.read_text()).text
    assert verdicts.is_faster(machine(cpu[0])).verdict == "can't tell"
    assert page.index(verdicts.CPU_NOTICE) < page.index("Is FP8 faster here?")
    assert "the speed of bf16" not in page
    source = cpu[1].html.read_text()
    titles = re.findall(
        r"<section id=\"[^\"]*\"( class=\"folded\")?>\s*(?:<details><summary>)?<h3>([^<]*)", source
    )
    timed = [
        (fold, title)
        for fold, title in titles
        if re.search("FP8 against|Eager and|Layers|GEMM|Casts|Ceil|Compile", title)
    ]
    assert len(timed) >= 3
    assert all(fold and title.startswith("CPU times: ") for fold, title in timed)
    assert cpu[1].markdown.read_text().index(verdicts.CPU_NOTICE) < cpu[1].markdown.read_text().index(
        "**Is FP8"
    )


NO_SQNR = "numerics: SQNR is 20.10 dB, 28.50 expected"
FELL_BACK = "numerics: 0 FP8 GEMMs ran where 3 were due"


@pytest.mark.parametrize(
    ("ask", "wrong", "evidence"),
    [
        (verdicts.is_sound, {"reason": NO_SQNR, "cause": Cause.NUMERICS}, "linear rowwise_eager: qkv 16: "),
        (verdicts.is_sound, {"sqnr_db": 28.0}, "linear tensorwise_eager: SQNR of output below its bound"),
        (verdicts.is_sound, {"mismatches": 3.0}, "linear tensorwise_eager: 3 codes differ"),
        (verdicts.did_fp8_run, {"reason": FELL_BACK, "cause": Cause.NOT_FP8}, "linear rowwise_eager, case "),
    ],
)
def test_a_wrong_result_is_a_no_and_is_named(tmp_path, ask, wrong, evidence):
    case = Case.of("linear", {"M": 16, "layer": "qkv"})
    about = {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": {"fp8_gemms": 3}}
    rows = Invented().times(case, {"tensorwise_eager": about})
    if "reason" in wrong:
        rows.append(absent(case, "rowwise_eager", "failed", wrong["reason"], "bf16", cause=wrong["cause"]))
    else:
        bound = {"sqnr_bound_db": {"sqnr_db": 28.3}}
        rows += [figure(case, "tensorwise_eager", *one, resolved=bound) for one in wrong.items()]
    answer = ask(run_of(tmp_path, rows))
    assert answer.verdict == "no"
    assert answer.evidence[0].startswith(evidence)


@pytest.mark.parametrize(
    ("resolved", "verdict"),
    [
        ({"fp8_gemms": 3, "fp8_gemms_expected": 3}, "yes"),
        ({"fp8_gemms": 2, "fp8_gemms_expected": 3}, "no"),
        ({"a_dtype": "float8_e4m3fn"}, "yes"),
        ({}, "can't tell"),
    ],
)
def test_proof_that_fp8_ran(tmp_path, resolved, verdict):
    case = Case.of("linear", {"M": 16})
    arms = {"tensorwise_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": resolved}}
    answer = verdicts.did_fp8_run(run_of(tmp_path, Invented().times(case, arms)))
    assert answer.verdict == verdict
    if verdict == "no":
        assert "2 of 3 GEMMs in FP8" in answer.evidence[0]


# Words and numbers


@given(st.floats(min_value=1e-12, max_value=1e15), st.integers(min_value=1, max_value=6))
def test_numbers_keep_their_digits(value, digits):
    """Property: what is shown lies within half a unit of the last digit that was asked for."""
    shown = float(text.number(value, digits).replace(",", ""))
    assert abs(shown - value) <= 0.5 * 10.0 ** (np.floor(np.log10(value)) + 1 - digits) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "N/A"),
        (float("nan"), "N/A"),
        (float("inf"), "inf"),
        (0, "0"),
        (-1.234, "-1.23"),
        (9.996, "10.0"),
        (1e-7, "1.00e-07"),
    ],
)
def test_special_numbers(value, shown):
    assert text.number(value) == shown


def test_each_case_is_held_to_its_own_bound() -> None:
    """Oracle: docs/numerics-gemm.md, section 4; e4m3 x e5m2 has 4 dB less than e4m3 x e4m3, and both are sound."""
    rows = [
        ("sqnr_db", 28.5, '{"sqnr_bound_db":{"sqnr_db":27.8}}'),
        ("sqnr_db", 24.5, '{"sqnr_bound_db":{"sqnr_db":24.0}}'),
        ("rel_err_max", 0.1, "{}"),
    ]
    frame = pd.DataFrame(rows, columns=["metric", "value", "resolved"]).assign(
        run_id="r", case_id=["a", "b", "c"]
    )
    where = {"sqnr_db": ("r", "b")}
    assert numerics._nearest_to_bound(frame) == ({"sqnr_db": 24.5}, {"sqnr_db": 24.0}, where)
    unbounded = frame.assign(resolved="{}")
    assert numerics._nearest_to_bound(unbounded) == ({"sqnr_db": 24.5}, {}, where)


# Labels of cases


NANO = {
    "accumulation": 1,
    "batch": 8,
    "checkpointing": "none",
    "compute": "fp32",
    "data": "stdlib",
    "layers": 0,
    "model": "nano",
    "profile": True,
    "profile_end": 3,
    "profile_start": 2,
    "schedule": "",
    "seq": 64,
}


OWN = '{"_target_":"my.module.build","batch":"my.module.batch","width":512}'


@pytest.mark.parametrize(
    ("changes", "without", "label"),
    [
        ({}, (), "nano fp32 stdlib batch=8 profile=true seq=64"),
        ({"layers": 4, "checkpointing": "full"}, ("seq",), "nano fp32 stdlib batch=8 checkpointing=full layers=4 profile=true"),
        ({"seed": 0}, set(NANO), "seed=0"),
        ({"lr": 1e-3}, set(NANO), "lr=0.001"),
        ({"schedule": ""}, set(NANO) - {"schedule"}, "nano fp32 stdlib batch=8 profile=true seq=64"),
        ({"schedule": "warmup_bf16:10"}, set(NANO) - {"schedule"}, "schedule=warmup_bf16:10"),
        ({"model": OWN}, set(NANO) - {"model"}, "my.module.build width=512"),
        ({"model": "{not json"}, set(NANO) - {"model"}, "{not json"),
    ],
)  # fmt: skip
def test_a_case_is_named_by_what_tells_it_apart(changes, without, label):
    assert text.case_label({**NANO, **changes}, without) == label


def test_what_goes_without_saying_is_what_the_suites_do_when_not_asked():
    """Oracle: the defaults of the suites that train."""
    from harness.suites import divergence, train

    known = {**divergence.AXES, **train.AXES}
    assert set(text.USUAL) <= set(known)
    for suite in (divergence, train):
        for name in set(text.USUAL) & set(suite.AXES):
            axis = suite.AXES[name]
            assert text.USUAL[name] == (axis.choices[0] if axis.choices else axis.default)


# Words

# A number and its unit, then parentheses.
AFTER_A_NUMBER = re.compile(r"(?<![\w.-])[-+]?\d[\d,.]*(?: ?(?:x|%|dB|ms|nats|GB/s|TFLOP/s))? \(([^()]*)\)")
END = r"[-+]?\d[\d,.]*(?: %|x)?"
INTERVAL = re.compile(rf"{END} to {END}|N/A")


def steps_run(folder):
    return write_run(folder, train_cases(Invented()))


@pytest.mark.parametrize("make", [gpu_run, cpu_run, steps_run])
def test_parentheses_after_a_number_hold_an_interval_and_nothing_else(tmp_path, make: object) -> None:
    run = make(tmp_path / "run")
    page = write_report([run], tmp_path / "r.html").markdown.read_text()
    page = re.sub(r"`[^`]*`", "", page).partition("## Runs and data")[0]
    heads = re.compile(r"^(?:\|?.*\| ---|#.*|\| (?:suite|case|arm|FP8 arm) \|.*)$", re.MULTILINE)
    wrong = [m[0] for m in AFTER_A_NUMBER.finditer(heads.sub("", page)) if not INTERVAL.fullmatch(m[1])]
    assert not wrong


def test_a_fast_arm_does_not_carry_a_slow_one(tmp_path) -> None:
    """Half and double the time: the pool's geometric mean is 1, the answer is partly, and both are named."""
    cases = []
    for m in range(16, 80, 16):
        case = Case.of("linear", {"M": m})
        arms = {
            "bf16_compile": {"ms": 1.0, "flops": {"bf16": 1.0}},
            "tensorwise_compile": {"ms": 0.5, "flops": {"e4m3": 1.0}, "baseline": "bf16_compile"},
            "rowwise_compile": {"ms": 2.0, "flops": {"e4m3": 1.0}, "baseline": "bf16_compile"},
        }
        arms["bf16_compile:again"] = {**arms["bf16_compile"], "baseline": "bf16_compile"}
        cases.append(Invented().times(case, arms))
    answer = verdicts.is_faster(machine(write_run(tmp_path / "run", cases)))
    assert answer.verdict == "partly"
    assert re.search(r"tensorwise_compile 2\.00x.*rowwise_compile 0\.50", answer.sentence), answer.sentence
    assert "1.00x" not in answer.sentence


def outlier_rows(db: float) -> list[object]:
    case = Case.of("outliers", {"data": "outliers_1e4", "M": 256})
    arms = {"tensorwise": {"ms": 1.0, "flops": {"e4m3": 1.0}}}
    row = figure(case, "tensorwise", "sqnr_db", db, resolved={"sqnr_bound_db": {"sqnr_db": 20.0}})
    return [*Invented().times(case, arms), row]


def test_a_study_of_breakage_is_never_sound(tmp_path) -> None:
    """It breaks recipes on purpose: what stays above its bound there says nothing about training."""
    alone = verdicts.is_sound(machine(write_run(tmp_path / "a", [outlier_rows(28.0)])))
    assert alone.verdict == "can't tell"
    assert "outliers" in alone.sentence
    case = Case.of("linear", {"M": 16})
    sound = Invented().times(case, {"tensorwise_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}}})
    sound += [
        figure(case, "tensorwise_eager", "sqnr_db", 28.5, resolved={"sqnr_bound_db": {"sqnr_db": 28.0}})
    ]
    honest = verdicts.is_sound(machine(write_run(tmp_path / "b", [sound])))
    assert honest.verdict == "yes"
    both = verdicts.is_sound(machine(write_run(tmp_path / "c", [sound, outlier_rows(28.0)])))
    assert both.verdict == "partly"
    assert "not judged" in both.sentence
    broken = verdicts.is_sound(machine(write_run(tmp_path / "d", [sound, outlier_rows(12.0)])))
    assert broken.verdict == "no"


def test_codes_alone_do_not_make_a_recipe_sound(tmp_path) -> None:
    case = Case.of("codes", {"inputs": "overflow"})
    run = write_run(tmp_path / "run", [[figure(case, "saturating", "mismatches", 0.0)]], env=CPU)
    answer = verdicts.is_sound(machine(run))
    assert answer.verdict == "can't tell"
    assert "code for code in 1 check" in " ".join(answer.evidence)


def test_diff_of_cpu_runs_carries_the_caution(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = cpu_run(tmp_path / "a"), cpu_run(tmp_path / "b", run_id="20260103T030405Z-0123456-abcd")
    assert main(["diff", str(first), str(second)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "measured on a CPU: its times decide nothing about a GPU" in words
    assert main(["diff", str(first), str(second), "json=true"]) == 0
    assert '"cpu": true' in capsys.readouterr().out
    run = gpu_run(tmp_path / "g")
    assert main(["diff", str(run), str(run)]) == 0
    assert "CPU" not in capsys.readouterr().out
