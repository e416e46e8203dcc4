"""Headline, claims and comparisons of the report. Oracles: the stored rows, arithmetic, and the command line itself."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import pytest
from curves_for_tests import whole_suite
from report_cases import cpu_run, gpu_run, linear_cases, train_cases
from report_fixtures import CPU, H100, H200, Invented, figure, write_run

from harness.__main__ import main as command_line
from harness.report import compared, utilization, write_report
from harness.report.claims import NAMED_CASES, Ledger, again
from harness.report.headline import headline, headline_rows, overview, recipe
from harness.report.mfu_examples import NOT_FORMED
from harness.report.runs import Machine, Run, load
from harness.report.table import Cell, Table
from harness.store.arm import parse
from harness.store.case import Case


def machine(*paths: Path) -> Machine:
    (found,) = load(paths, Path()).machines
    return found


def rows_of(table: Table | None) -> list[dict[str, str]]:
    """Rows as {column title: text}."""
    assert table is not None
    titles = [c.title for c in table.columns]
    return [{t: cell.text for t, cell in zip(titles, row, strict=True)} for row in table.rows]


def made(found: Machine) -> tuple[Table | None, Ledger]:
    ledger = Ledger()
    return headline(found, headline_rows(found, "conditions", ledger)), ledger


# Headline


def test_speed_exactness_and_proof_stand_in_one_row(tmp_path: Path) -> None:
    """Layers decide where no step was measured; the best arm first. 1.62x and casts of 0.12 ms are what was invented."""
    table, _ = made(machine(gpu_run(tmp_path)))
    rows = rows_of(table)
    assert [r["FP8 arm"] for r in rows][:2] == ["tensorwise_compile", "rowwise_compile"]
    gains = [float(r["speedup over bf16"].rstrip("x")) for r in rows]
    assert gains == sorted(gains, reverse=True)
    assert rows[0]["FP8 GEMMs"] == "15 of 15"
    assert 24.0 < float(rows[0]["worst SQNR (dB)"]) < 25.0
    assert "loss" not in rows[0]
    assert "mixed MFU" not in rows[0]


def test_steps_decide_where_they_were_measured(tmp_path: Path) -> None:
    found = machine(
        write_run(tmp_path, [*train_cases(Invented()), *linear_cases(Invented(), 690.0), whole_suite()])
    )
    table, _ = made(found)
    rows = {r["FP8 arm"]: r for r in rows_of(table)}
    assert rows["tensorwise_compile"]["measured"] == "training steps"
    assert rows["tensorwise_compile"]["loss"] == "PASS"
    assert rows["tensorwise_compile"]["worst SQNR (dB)"]  # of the same recipe's layers
    assert rows["rowwise_compile"]["loss"] == ""
    assert rows["tensorwise_compile"]["mixed MFU"].endswith(" %")


def test_a_result_below_its_bound_is_marked_beside_its_speed(tmp_path: Path) -> None:
    case = Case.of("linear", {"M": 16, "K": 32, "N": 48})
    arms = {
        "bf16_eager": {"ms": 2.0, "flops": {"bf16": 1.0}},
        "rowwise_eager": {
            "ms": 1.0,
            "flops": {"e4m3": 1.0},
            "baseline": "bf16_eager",
            "resolved": {"fp8_gemms": 2, "fp8_gemms_expected": 3},
        },
    }
    low = figure(case, "rowwise_eager", "sqnr_db", 20.0, resolved={"sqnr_bound_db": {"sqnr_db": 28.3}})
    table, _ = made(machine(write_run(tmp_path, [[*Invented().times(case, arms), low]])))
    assert table is not None
    cells = dict(zip([c.title for c in table.columns], table.rows[0], strict=True))
    assert (cells["worst SQNR (dB)"].text, cells["worst SQNR (dB)"].style) == ("20.0", "bad")
    assert (cells["FP8 GEMMs"].text, cells["FP8 GEMMs"].style) == ("2 of 3", "bad")


def test_a_cpu_has_recipes_and_no_speed(tmp_path: Path) -> None:
    table, _ = made(machine(cpu_run(tmp_path)))
    rows = rows_of(table)
    assert [r["FP8 arm"] for r in rows] == ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
    assert not any(re.search(r"\dx", text) for r in rows for text in r.values())
    assert "speedup over bf16" not in rows[0]


def test_without_an_fp8_arm_there_is_no_headline(tmp_path: Path) -> None:
    case = Case.of("linear", {"M": 16})
    table, ledger = made(machine(write_run(tmp_path, [Invented().times(case, {"bf16_eager": {"ms": 1.0}})])))
    assert table is None
    assert ledger.tables() == []


@pytest.mark.parametrize(
    ("arm", "name"),
    [("rowwise_fast_eager", "rowwise"), ("tensorwise_kernels_compile", "tensorwise"), ("rowwise_with_gw_hp_eager", "rowwise_with_gw_hp"),
     ("torchao_rowwise_eager", "torchao_rowwise"), ("tensorwise", "tensorwise"), ("torch", ""), ("compile", "")],
)  # fmt: skip
def test_the_recipe_of_an_arm(arm: str, name: str) -> None:
    assert str(recipe(parse(arm))) == name


# Claims


def test_every_number_of_the_headline_leads_to_a_claim(tmp_path: Path) -> None:
    """Oracle: the page's own ids. A number without a claim, or a claim without a command, is none."""
    source = write_report(
        [gpu_run(tmp_path / "g"), cpu_run(tmp_path / "c")], tmp_path / "r.html"
    ).html.read_text()
    section = "".join(re.findall(r'<section class="headline".*?</section>', source, re.DOTALL))
    links = set(re.findall(r'href="#(claim-\d+)"', section))
    assert len(links) > 10
    assert links == set(re.findall(r'id="(claim-\d+)"', source))
    numbers = re.findall(r'<td class="n[^"]*"[^>]*>(.*?)</td>', section)
    assert all(number.startswith('<a href="#claim-') for number in numbers if number)
    commands = re.findall(r'<td class="command">(.*?)</td>', source)
    assert len(commands) == len(links)
    assert all(command.startswith("python -m harness sweep=") for command in commands)


def _run(command: str) -> Run:
    return Run("r1", "gemm", {"command": command}, ())


@pytest.mark.parametrize(
    ("command", "cases", "expected"),
    [
        ("python -m harness sweep=gemm device=cpu", ["b", "a"], "python -m harness sweep=gemm device=cpu 'cases=[a,b]'"),
        ("python -m harness sweep=gemm results_dir=/home/me/x reports_dir=y resume=r0 cases=[z]", ["a"], "python -m harness sweep=gemm 'cases=[a]'"),
        ("python -m harness sweep=gemm", [str(i) for i in range(NAMED_CASES + 1)], "python -m harness sweep=gemm"),
        ("", ["a"], "python -m harness sweep=gemm 'cases=[a]'"),
        ("rm -rf 'unclosed", ["a"], "python -m harness sweep=gemm 'cases=[a]'"),
        ("python -m harness device=cpu", ["a"], "python -m harness sweep=gemm 'cases=[a]'"),
        ("python mine.py sweep=gemm", ["a"], "python -m harness sweep=gemm 'cases=[a]'"),
    ],
)  # fmt: skip
def test_the_command_that_measures_again(command: str, cases: list[str], expected: str) -> None:
    assert again(_run(command), cases) == expected


def test_the_commands_of_a_real_run_name_its_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: `dry_run=true` of each command lists exactly the cases that the claim names, by the same ids."""
    monkeypatch.chdir(tmp_path)
    words = ["sweep=gemm", "device=cpu", "axes.M=32", "axes.K=64", "axes.N=[16,48]", "arms=[bf16_eager,rowwise_eager]", "rounds=3",
             "timing.max_seconds=0.2", "timing.min_seconds=0.0", "timing.warmup_min_seconds=0.0", "timing.sustained_max_cases=0"]  # fmt: skip
    assert command_line(words) == 0
    (run,) = Path("results").glob("gemm/*")
    found = machine(run)
    _, ledger = made(found)
    assert ledger.claims
    for claim in ledger.claims:
        (command,) = claim.commands
        capsys.readouterr()
        assert command_line([*shlex.split(command)[3:], "dry_run=true"]) == 0
        listed = re.findall(r"^  ([0-9a-f]{12}) gemm\[", capsys.readouterr().out, re.MULTILINE)
        assert set(listed) == {case for _, case in claim.rows}
        assert set(listed) <= set(found.frame["case_id"])


# Machines and commits


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("two")
    other = {"seed": 3, "env": H100, "run_id": "20260103T030405Z-0123456-bbbb"}
    return [gpu_run(folder / "a"), gpu_run(folder / "b", **other)]


def test_gains_of_two_gpus_stand_side_by_side(two: list[Path], tmp_path: Path) -> None:
    """Oracle: each machine's own ratios over the shared cases; a CPU has a column of exactness and none of speed."""
    material = load([*two, cpu_run(tmp_path)], tmp_path)
    gains, exact = compared.across_machines(material)
    assert [c.title for c in gains.columns][-2:] == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    assert [c.title for c in exact.columns][-1].startswith("CPU: ")
    rows = {(r["suite"], r["arm"], r["regime"]): r for r in rows_of(gains)}
    own = rows["linear", "tensorwise_compile", "isolated"]
    assert own["shared cases"] == "5"
    for m in material.machines[:2]:
        ratios = m.ratios[(m.ratios["arm"] == "tensorwise_compile") & (m.ratios["regime"] == "isolated")][
            "speedup"
        ]
        assert float(own[m.name].rstrip("x")) == pytest.approx(
            math.exp(ratios.map(math.log).mean()), rel=5e-3
        )
    (chart,) = compared.machines_chart(material)
    assert "NVIDIA H100 80GB HBM3" in chart.svg


def test_twins_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    runs = [
        gpu_run(tmp_path / d, env=H200 | {"driver": d}, env_id=d, run_id=f"20260102T030405Z-0123456-{d}")
        for d in ("570", "575")
    ]
    assert compared.names(load(runs, tmp_path).machines) == [
        "NVIDIA H200, driver 570",
        "NVIDIA H200, driver 575",
    ]


def test_the_overview_has_the_best_of_each_machine(two: list[Path], tmp_path: Path) -> None:
    ledger = Ledger()
    material = load(two, tmp_path)
    table = overview({m: headline_rows(m, m.name, ledger) for m in material.machines})
    assert table is not None
    assert [row[0].note for row in table.rows] == ["NVIDIA H100 80GB HBM3"] * 4 + ["NVIDIA H200"] * 4
    assert table.rows[0][0].text == "tensorwise_compile"
    assert len(ledger.tables()) == 2


def test_commits_of_one_machine_are_compared_and_the_newest_leads(tmp_path: Path) -> None:
    """Oracle: the second run's arms all take 0.8 of the time, bf16 as well: gains are equal, times are 0.8."""
    runs = []
    for i, (commit, scale) in enumerate((("a" * 40, 1.0), ("b" * 40, 0.8))):
        cases = []
        for n in (64, 128):
            case = Case.of("gemm", {"M": 16, "K": 32, "N": n})
            arms = {
                "bf16": {"ms": 2.0 * scale, "flops": {"bf16": 1.0}},
                "fp8": {"ms": 1.0 * scale, "flops": {"e4m3": 1.0}, "baseline": "bf16"},
            }
            invented = Invented(spread=0.0)
            invented.random.gauss = lambda mean, sd: mean
            cases.append(invented.times(case, arms))
        run_id = f"2026010{i + 1}T000000Z-{commit[:7]}-0000"
        runs.append(write_run(tmp_path, cases, env=H200 | {"git_commit": commit}, run_id=run_id))
    found = machine(*runs)
    table = compared.across_commits(found)
    (row,) = rows_of(table)
    assert (row["aaaaaaa"], row["bbbbbbb"], row["shared cases"]) == ("2.00x", "2.00x", "2")
    assert row["time, last / first"] == "0.800x"
    headline_table, ledger = made(found)
    assert rows_of(headline_table)[0]["measured"] == "single GEMMs"
    assert {run for claim in ledger.claims for run, _ in claim.rows} == {runs[1].name}
    page = write_report(runs, tmp_path / "r.html").html.read_text()
    assert "commits aaaaaaa; bbbbbbb" in page
    assert compared.across_commits(machine(runs[0])) is None


def test_a_run_that_was_copied_counts_once(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", linear_cases(Invented(), 690.0))
    copy = tmp_path / "b" / run.name
    copy.mkdir(parents=True)
    for file in run.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert len(machine(run, copy).frame) == len(machine(run).frame)


# MFU


def test_mfu_by_hand_with_every_denominator(tmp_path: Path) -> None:
    """By hand: 0.2 s; 1e14 bf16 and 2e14 FP8 FLOPs against 989 and 1979 TFLOP/s; half of attention not counted."""
    case = Case.of("train", {"model": "gpt2"})
    resolved = {
        "tokens_per_step": 8192,
        "flops_formula_id": "palm",
        "flops_causal": {"bf16": 0.8e14, "e4m3": 2e14},
    }
    arms = {"tensorwise_eager": {"ms": 200.0, "flops": {"bf16": 1e14, "e4m3": 2e14}, "resolved": resolved}}
    invented = Invented(spread=0.0)
    invented.random.gauss = lambda mean, sd: mean
    palm, causal = rows_of(utilization.mfu_table(machine(write_run(tmp_path, [invented.times(case, arms)]))))

    def share(shown: str) -> float:
        return float(shown.removesuffix(" %"))

    assert float(palm["tokens/s/GPU"].replace(",", "")) == pytest.approx(8192 / 0.2, rel=5e-3)
    assert float(palm["model TFLOP/s"].replace(",", "")) == pytest.approx(1500)
    assert share(palm["mixed MFU"]) == pytest.approx(100 * (1e14 / 989e12 + 2e14 / 1979e12) / 0.2, rel=5e-3)
    assert share(palm["MFU of bf16 peak"]) == pytest.approx(100 * 3e14 / 989e12 / 0.2, rel=5e-3)
    assert share(palm["MFU of FP8 peak"]) == pytest.approx(100 * 3e14 / 1979e12 / 0.2, rel=5e-3)
    assert share(causal["mixed MFU"]) == pytest.approx(
        100 * (0.8e14 / 989e12 + 2e14 / 1979e12) / 0.2, rel=5e-3
    )
    assert (palm["FLOPs"], causal["FLOPs"]) == ("palm", "causal")
    assert palm["of achievable"] == "N/A"


def test_the_headline_takes_the_median_of_mfu_and_marks_an_impossible_one(tmp_path: Path) -> None:
    """By hand: 1e14 bf16 and 2e14 FP8 FLOPs take 202.2 ms at the peaks; in 300, 400 and 20 ms: 67, 51 and 1,011 %."""

    def steps(ms: dict[str, float]) -> Table | None:
        invented = Invented(spread=0.0)
        cases = []
        for model, time in ms.items():
            arms = {
                "bf16_eager": {"ms": 1.5 * time, "flops": {"bf16": 3e14}},
                "tensorwise_eager": {
                    "ms": time,
                    "flops": {"bf16": 1e14, "e4m3": 2e14},
                    "baseline": "bf16_eager",
                    "resolved": {
                        "tokens_per_step": 8192,
                        "flops_formula_id": "palm",
                        "flops_causal": {"bf16": 1e14, "e4m3": 2e14},
                    },
                },
            }
            cases.append(invented.times(Case.of("train", {"model": model}), arms))
        return made(machine(write_run(tmp_path / str(len(ms)), cases)))[0]

    def mfu_cell(table: Table | None) -> Cell:
        assert table is not None
        return table.rows[0][[c.title for c in table.columns].index("mixed MFU")]

    sound, impossible = (
        mfu_cell(steps({"a": 300.0, "b": 400.0})),
        mfu_cell(steps({"a": 300.0, "b": 400.0, "c": 20.0})),
    )
    assert sound.order == pytest.approx((0.2022 / 0.3 + 0.2022 / 0.4) / 2, rel=1e-2)
    assert sound.style == ""
    assert sound.note.startswith("51 % to 6")
    assert sound.note.endswith("range over 2 cases")
    assert impossible.order == pytest.approx(0.2022 / 0.3, rel=1e-2)
    assert "over peak" in impossible.note
    assert impossible.style == "bad"


@pytest.mark.parametrize(
    ("env", "train", "says"),
    [
        (CPU, True, "No training step has been measured on a GPU in these runs"),
        (H200, False, "No training step has been measured on NVIDIA H200 in these runs (sweep=train)"),
        (H200, True, ""),
    ],
)
def test_the_mfu_page_says_what_is_missing(
    tmp_path: Path, env: dict[str, object], train: bool, says: str
) -> None:
    cases = train_cases(Invented()) if train else linear_cases(Invented(), 690.0)
    run = write_run(tmp_path, cases, env=env)
    assert utilization.why_none(load([run], tmp_path)).startswith(says)
    source = write_report([run], tmp_path / "r.html", focus="mfu").html.read_text()
    assert (says in source) if says else ("No training step" not in source)
    assert "Published figures, read again" in source
    assert "152 %" in source


def test_published_figures_are_formed_again() -> None:
    """Oracle: the figures as they were printed; the three below are impossible or lower than their bf16 twin."""
    rows = {r["printed"]: r for r in rows_of(utilization.examples_table())}
    assert {"152 %", "563 %", "27.7 %"} <= rows.keys()
    for printed, row in rows.items():
        if row["formed again"] == NOT_FORMED:  # its inputs are not published, and the page does not pretend
            assert "taken back from the printed figure" in row["what is wrong"]
        else:
            again = float(row["formed again"].rstrip(" %"))
            assert again == pytest.approx(float(printed.rstrip(" %")), rel=0.02)
        assert float(row["mixed MFU"].rstrip(" %")) < 100
    assert sum(row["formed again"] != NOT_FORMED for row in rows.values()) >= 4
