"""Oracle: the rows behind the report: its three questions, its numbers and its labels."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_cases import gemm_cases, linear_cases
from report_fixtures import Invented, absent, figure, write_run
from report_pages import Page, machine, run_of

from harness.report import numerics, tables, verdicts
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
    answer = verdicts.is_faster(run_of(tmp_path, cases))
    assert "eager against eager" in answer.sentence
    assert answer.verdict == "partly"


def test_steps_that_are_replayed_are_told_apart_and_decide_last():
    """By hand: what compiles decides, then what is eager, then a CUDA graph of it."""
    baselines = ["bf16_graph", "bf16_fused_eager", "bf16_compile", "bf16_eager"]
    pairs = pd.DataFrame({"suite": "train", "baseline": baselines, "regime": "isolated", "speedup": 1.1})
    parts = [(how, list(group["baseline"])) for _, how, group in verdicts._by_part(pairs)]
    assert parts == [
        ("compile against compile", ["bf16_compile"]),
        ("eager against eager", ["bf16_fused_eager", "bf16_eager"]),
        ("graph against graph", ["bf16_graph"]),
    ]


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
    assert verdicts.is_faster(run_of(tmp_path, cases)).verdict == verdict


def test_a_device_without_fp8_cannot_tell_and_says_why(tmp_path):
    found = run_of(tmp_path, gemm_cases(Invented(), 250.0, fp8=False))
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


def test_wrong_numerics_are_named(tmp_path):
    case = Case.of("gemm", {"M": 16, "layer": "qkv"})
    rows = Invented().times(case, {"bf16": {"ms": 1.0}})
    rows += [
        absent(
            case,
            "rowwise_eager",
            "failed",
            "20.1; SQNR is 20.10 dB, 28.50 expected",
            "bf16",
            "sqnr_db",
            Cause.NUMERICS,
        ),
        absent(
            case,
            "rowwise_eager",
            "failed",
            "numerics: SQNR is 20.10 dB, 28.50 expected",
            "bf16",
            cause=Cause.NUMERICS,
        ),
    ]
    answer = verdicts.is_sound(run_of(tmp_path, [rows]))
    assert answer.verdict == "no"
    assert answer.evidence[0].startswith("gemm rowwise_eager: qkv 16: ")
    assert "20.10 dB" in answer.evidence[0]
    assert answer.sentence.startswith("1 result")


def test_a_figure_below_its_stored_bound_is_a_no(tmp_path):
    case = Case.of("gemm", {"M": 16})
    arms = {"fp8": {"ms": 1.0, "flops": {"e4m3": 1.0}}}
    low = figure(case, "fp8", "sqnr_db", 28.0, resolved={"sqnr_bound_db": {"sqnr_db": 28.3}})
    answer = verdicts.is_sound(run_of(tmp_path, [[*Invented().times(case, arms), low]]))
    assert (answer.verdict, answer.evidence[0]) == ("no", "gemm fp8: SQNR of output below its bound")


def test_codes_that_differ_are_a_no(tmp_path):
    case = Case.of("cast", {"M": 16})
    answer = verdicts.is_sound(run_of(tmp_path, [[figure(case, "eager", "mismatches", 3.0)]]))
    assert (answer.verdict, answer.evidence[0]) == ("no", "cast eager: 3 codes differ")


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
    answer = verdicts.did_fp8_run(run_of(tmp_path, [Invented().times(case, arms)]))
    assert answer.verdict == verdict
    if verdict == "no":
        assert "2 of 3 GEMMs in FP8" in answer.evidence[0]


def test_an_arm_that_fell_back_is_a_no(tmp_path):
    case = Case.of("linear", {"M": 16})
    good = {"tensorwise_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}, "resolved": {"fp8_gemms": 3}}}
    rows = Invented().times(case, good)
    rows.append(
        absent(
            case,
            "rowwise_eager",
            "failed",
            "numerics: 0 FP8 GEMMs ran where 3 were due: FP8 did not run as asked",
            cause=Cause.NOT_FP8,
        )
    )
    answer = verdicts.did_fp8_run(run_of(tmp_path, [rows]))
    assert answer.verdict == "no"
    assert "0 FP8 GEMMs ran where 3 were due" in answer.evidence[0]


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


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "1 B"), (1536, "1.5 KiB"), (2**20, "1 MiB"), (5 * 2**40, "5120 GiB")]
)
def test_sizes(count, shown):
    assert text.bytes_(count) == shown


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


def test_recompiles_stand_beside_graphs_where_they_were_counted(tmp_path):
    case = Case.of("linear", {"M": 16})
    counted = {"compile_cache": "cold", "compile_graphs": 2, "compile_graph_breaks": 1, "recompiles": 3}
    for folder, about, titles in (
        ("with", counted, ["graphs", "graph breaks", "recompiles"]),
        ("without", {"compile_graphs": 2}, ["graphs"]),
    ):
        row = figure(case, "bf16_compile", "compile_s", 2.0, resolved=about)
        made = tables.compile_times(machine(write_run(tmp_path / folder, [[row]])))
        assert [c.title for c in made.columns[4:]] == titles
        assert [c.text for c in made.rows[0][4:]] == ["2", "1", "3"][: len(titles)]
