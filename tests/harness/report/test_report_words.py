"""Words of a report and of diff. Oracle: invented runs of which is known what was measured; issue 19, line 11."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from report_cases import cpu_run, gemm_cases, gpu_run, linear_cases, train_cases
from report_fixtures import CPU, Invented, figure, write_run

from harness.__main__ import main
from harness.report import verdicts, write_report
from harness.report.runs import load
from harness.report.tables import suite_table
from harness.store.case import Case

if TYPE_CHECKING:
    from pathlib import Path

    from harness.report.runs import Machine

# A number and its unit, then parentheses.
AFTER_A_NUMBER = re.compile(r"(?<![\w.-])[-+]?\d[\d,.]*(?: ?(?:x|%|dB|ms|nats|GB/s|TFLOP/s))? \(([^()]*)\)")
END = r"[-+]?\d[\d,.]*(?: %|x)?"
INTERVAL = re.compile(rf"{END} to {END}|N/A")


def only(folder: Path, run: Path) -> Machine:
    (machine,) = load([run], folder).machines
    return machine


@pytest.mark.parametrize("make", [gpu_run, cpu_run], ids=["gpu", "cpu"])
def test_parentheses_after_a_number_hold_an_interval_and_nothing_else(tmp_path: Path, make: object) -> None:
    run = make(tmp_path / "run")
    page = write_report([run], tmp_path / "r.html").markdown.read_text()
    page = re.sub(r"`[^`]*`", "", page).partition("## Runs and data")[0]
    heads = re.compile(r"^(?:\|?.*\| ---|#.*|\| (?:suite|case|arm|FP8 arm) \|.*)$", re.MULTILINE)
    wrong = [m[0] for m in AFTER_A_NUMBER.finditer(heads.sub("", page)) if not INTERVAL.fullmatch(m[1])]
    assert not wrong


def test_parentheses_of_training_steps_too(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", train_cases(Invented()))
    page = write_report([run], tmp_path / "r.html").markdown.read_text()
    page = re.sub(r"`[^`]*`", "", page).partition("## Runs and data")[0]
    heads = re.compile(r"^#.*$", re.MULTILINE)
    wrong = [m[0] for m in AFTER_A_NUMBER.finditer(heads.sub("", page)) if not INTERVAL.fullmatch(m[1])]
    assert not wrong
    assert "range over 2 models" in page


def test_a_range_over_cases_says_over_how_many(tmp_path: Path) -> None:
    page = write_report([gpu_run(tmp_path / "run")], tmp_path / "r.html").markdown.read_text()
    row = next(line for line in page.splitlines() if line.startswith("| tensorwise_compile |"))
    assert re.search(r"x; [\d.]+ to [\d.]+, range over 5 cases \|", row), row


def test_yes_names_the_arm_and_its_mode(tmp_path: Path) -> None:
    """Each arm by itself: a pool of a fast arm and a slow one is nobody's speed."""
    machine = only(tmp_path, gpu_run(tmp_path / "run"))
    faster, sound, ran = verdicts.answers(machine)
    assert faster.verdict in ("yes", "partly")
    assert "tensorwise_compile" in faster.sentence
    assert "compile against compile" in faster.sentence
    assert "geometric mean over 5 cases" in faster.sentence
    for answer in (sound, ran):
        assert answer.verdict == "yes"
        assert "tensorwise_compile" in answer.sentence + " ".join(answer.evidence)


def test_a_fast_arm_does_not_carry_a_slow_one(tmp_path: Path) -> None:
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
    answer = verdicts.is_faster(only(tmp_path, write_run(tmp_path / "run", cases)))
    assert answer.verdict == "partly"
    assert re.search(r"tensorwise_compile 2\.00x.*rowwise_compile 0\.50", answer.sentence), answer.sentence
    assert "1.00x" not in answer.sentence


def outlier_rows(db: float) -> list[object]:
    case = Case.of("outliers", {"data": "outliers_1e4", "M": 256})
    arms = {"tensorwise": {"ms": 1.0, "flops": {"e4m3": 1.0}}}
    row = figure(case, "tensorwise", "sqnr_db", db, resolved={"sqnr_bound_db": {"sqnr_db": 20.0}})
    return [*Invented().times(case, arms), row]


def test_a_study_of_breakage_is_never_sound(tmp_path: Path) -> None:
    """It breaks recipes on purpose: what stays above its bound there says nothing about training."""
    alone = verdicts.is_sound(only(tmp_path, write_run(tmp_path / "a", [outlier_rows(28.0)])))
    assert alone.verdict == "can't tell"
    assert "outliers" in alone.sentence
    case = Case.of("linear", {"M": 16})
    sound = Invented().times(case, {"tensorwise_eager": {"ms": 1.0, "flops": {"e4m3": 1.0}}})
    sound += [
        figure(case, "tensorwise_eager", "sqnr_db", 28.5, resolved={"sqnr_bound_db": {"sqnr_db": 28.0}})
    ]
    honest = verdicts.is_sound(only(tmp_path, write_run(tmp_path / "b", [sound])))
    assert honest.verdict == "yes"
    both = verdicts.is_sound(only(tmp_path, write_run(tmp_path / "c", [sound, outlier_rows(28.0)])))
    assert both.verdict == "partly"
    assert "not judged" in both.sentence
    broken = verdicts.is_sound(only(tmp_path, write_run(tmp_path / "d", [sound, outlier_rows(12.0)])))
    assert broken.verdict == "no"


def test_codes_alone_do_not_make_a_recipe_sound(tmp_path: Path) -> None:
    case = Case.of("codes", {"inputs": "overflow"})
    run = write_run(tmp_path / "run", [[figure(case, "saturating", "mismatches", 0.0)]], env=CPU)
    answer = verdicts.is_sound(only(tmp_path, run))
    assert answer.verdict == "can't tell"
    assert "code for code in 1 check" in " ".join(answer.evidence)


def test_where_nothing_was_checked_it_says_what_was_looked_for(tmp_path: Path) -> None:
    """Runs of the loss alone: the sentence names what is missing and the sweep that has it."""
    case = Case.of("divergence", {"model": "nano", "seed": 0})
    run = write_run(tmp_path / "run", [[figure(case, "base", "loss", 1.0)]], sweep="divergence", env=CPU)
    answer = verdicts.is_sound(only(tmp_path, run))
    assert answer.verdict == "can't tell"
    for word in ("SQNR", "codes", "first training step", "only divergence"):
        assert word in answer.sentence, answer.sentence
    assert "python -m harness sweep=linear" in " ".join(answer.evidence)


def test_beside_a_layer_s_ratio_stands_that_of_its_products_alone(tmp_path: Path) -> None:
    """Oracle: times of the three products of the same sizes, bf16 over FP8, operands already cast."""
    invented = Invented()
    machine = only(
        tmp_path, write_run(tmp_path / "run", gemm_cases(invented, 720.0) + linear_cases(invented, 690.0))
    )
    table = suite_table(machine, "linear")
    titles = [c.title for c in table.columns]
    at, speedup, arm = (titles.index(t) for t in ("products alone", "speedup", "arm"))
    assert at == speedup + 1
    case = next(r for r in machine.rows if r["suite"] == "linear")
    import json

    axes = json.loads(case["axes"])
    m, k, n = axes["M"], axes["K"], axes["N"]
    sizes = {(m, k, n, "output"), (m, n, k, "grad_input"), (n, m, k, "grad_weight")}
    total = {"bf16_eager": 0.0, "tensorwise_eager": 0.0}
    for r in machine.rows:
        if r["suite"] == "gemm" and r["metric"] == "time_ms" and r["arm"] in total:
            a = json.loads(r["axes"])
            if (a["M"], a["K"], a["N"], a["role"]) in sizes and a["layer"] == axes["layer"]:
                total[r["arm"]] += r["value"]
    row = next(
        r for r in table.rows if r[arm].text == "tensorwise_compile" and axes["layer"] in [c.text for c in r]
    )
    assert row[at].order == pytest.approx(total["bf16_eager"] / total["tensorwise_eager"], rel=1e-9)
    assert row[at].order > row[speedup].order, "casts cost something"


def test_products_that_were_not_measured_say_so(tmp_path: Path) -> None:
    machine = only(tmp_path, write_run(tmp_path / "run", linear_cases(Invented(), 690.0)))
    table = suite_table(machine, "linear")
    at = [c.title for c in table.columns].index("products alone")
    shown = {row[at].text for row in table.rows if row[at].text}
    assert shown == {"not measured"}


def test_diff_of_cpu_runs_carries_the_caution(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = cpu_run(tmp_path / "a"), cpu_run(tmp_path / "b", run_id="20260103T030405Z-0123456-abcd")
    assert main(["diff", str(first), str(second)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "measured on a CPU: its times decide nothing about a GPU" in words
    assert main(["diff", str(first), str(second), "json=true"]) == 0
    assert '"cpu": true' in capsys.readouterr().out
    run = gpu_run(tmp_path / "g")
    assert main(["diff", str(run), str(run)]) == 0
    assert "CPU" not in capsys.readouterr().out
