"""Oracle: ratios of the times that these tests make up; nothing here was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from report_fixtures import H200, TIMING, absent, figure, write_run

from harness.report import write_report
from harness.report.league import Place, places
from harness.report.runs import load
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.measurement import Measurement

LAYERS = [Case.of("linear", {"M": m, "K": 64, "N": 64}) for m in (1024, 4096)]
PRODUCT = Case.of("gemm", {"M": 1024, "K": 64, "N": 64})
STEP = Case.of("train", {"model": "gpt2"})
TE = "transformer_engine is not installed: pip install 'transformer_engine[pytorch]'"


def time(case: Case, arm: str, ms: float, baseline: str = "", peer: str = "") -> Measurement:
    row = Measurement(case.suite, case.case_id, arm, case.axes_json, "time_ms", "skipped", reason="-")
    resolved = {"peer": peer, "peer_version": "1.2"} if peer else {}
    row = replace(row, status="ok", reason="", samples=(ms,) * 8, rounds=tuple(range(8)), baseline=baseline)
    return replace(row, regime="isolated", timing=TIMING, resolved=resolved, flops={"e4m3": 1e9})


@pytest.fixture
def found(tmp_path: Path) -> list[Place]:
    cases = []
    for case, ours in zip(LAYERS, (2.0, 2.0), strict=True):
        theirs = 1.0 if case is LAYERS[0] else 4.0
        cases.append(
            [
                time(case, "bf16_eager", 3.0),
                time(case, "rowwise_eager", ours, "bf16_eager"),
                time(case, "torchao_rowwise_eager", theirs, "bf16_eager", "torchao"),
                figure(case, "torchao_rowwise_eager", "sqnr_db", 28.0 if case is LAYERS[0] else 27.0),
                absent(case, "te_tensorwise_eager", "skipped", TE, cause=Cause.MISSING),
            ]
        )
    cases[0].append(time(LAYERS[0], "nanochat_tensorwise_eager", 5.0, "bf16_eager", "nanochat"))
    cases.append(
        [
            time(PRODUCT, "bf16_eager", 4.0),
            time(PRODUCT, "rowwise_eager", 2.0, "bf16_eager"),
            time(PRODUCT, "scaled_mm_rowwise_eager", 1.6, "rowwise_eager", "scaled_mm"),
        ]
    )
    cases.append(
        [
            time(STEP, "bf16_eager", 9.0),
            time(STEP, "tensorwise_eager", 8.0, "bf16_eager"),
            time(STEP, "torchao_tensorwise_linears", 6.0, "bf16_eager", "torchao"),
            time(STEP, "nocompile_tensorwise_eager", 10.0, "bf16_eager", "torchao_nocompile"),
        ]
    )
    write_run(tmp_path, cases, env=H200)
    (machine,) = load([tmp_path], tmp_path).machines
    return places(machine)


def test_a_peer_is_set_against_our_arm_of_the_same_recipe_and_mode(found: list[Place]) -> None:
    """Half our time in one case and twice in the other is as fast: geometric means, of shared cases."""
    layer = {p.arm: p for p in found if p.level == "linear layer"}
    torchao = layer["torchao_rowwise_eager"]
    assert (torchao.ours, torchao.peer, torchao.version, torchao.cases) == (
        "rowwise_eager",
        "torchao",
        "1.2",
        2,
    )
    assert torchao.against_ours == pytest.approx(1.0)
    assert torchao.over_bf16 == pytest.approx(math.sqrt(3.0 * 0.75))
    assert torchao.sqnr_db == 27.0
    assert layer["rowwise_eager"].over_bf16 == pytest.approx(1.5)
    nanochat = layer["nanochat_tensorwise_eager"]
    assert nanochat.ours == "tensorwise_eager"
    assert math.isnan(nanochat.against_ours)  # ours was not measured
    assert nanochat.over_bf16 == pytest.approx(0.6)


def league_of(folder: Path, *runs: list[list[Measurement]]) -> list[tuple[str, int, float, float]]:
    """(arm, cases, against ours, over bf16) in the order of the table, of several runs."""
    for i, cases in enumerate(runs):
        write_run(folder, cases, run_id=f"r{i}", env=H200)
    (machine,) = load([folder], folder).machines
    return [(p.arm, p.cases, p.against_ours, p.over_bf16) for p in places(machine)]


def layer_times(
    case: Case, bf16: float, ours: float = 0, torchao: float = 0, te: float = 0
) -> list[Measurement]:
    """The times of a layer; 0 where an arm has none."""
    peers = [("torchao_rowwise_eager", torchao, "torchao"), ("te_rowwise_eager", te, "transformer_engine")]
    arms = [("bf16_eager", bf16, ""), ("rowwise_eager", ours, ""), *peers]
    return [
        time(case, arm, ms, "" if arm == "bf16_eager" else "bf16_eager", peer) for arm, ms, peer in arms if ms
    ]


def test_every_figure_is_of_the_cases_that_the_arm_ours_and_bf16_all_measured(tmp_path: Path) -> None:
    """Ours gains 2x in the first case and 1.25x in the second. A peer that has the second alone is set against that; one
    that has both stands apart; a case without bf16, and one without ours, count for nobody."""
    extra = [Case.of("linear", {"M": m, "K": 64, "N": 64}) for m in (32, 48)]
    found = league_of(
        tmp_path,
        [
            layer_times(LAYERS[0], 10.0, 5.0, te=2.0),
            layer_times(LAYERS[1], 10.0, 8.0, torchao=7.0, te=10.0),
            layer_times(extra[0], 0, 9.0, torchao=1.0),
            layer_times(extra[1], 9.0, torchao=1.0),
        ],
    )
    assert found == [
        ("te_rowwise_eager", 2, pytest.approx(math.sqrt(2.5 * 0.8)), pytest.approx(math.sqrt(5 * 1))),
        ("rowwise_eager", 2, pytest.approx(1), pytest.approx(math.sqrt(2 * 1.25))),
        ("torchao_rowwise_eager", 1, pytest.approx(8 / 7), pytest.approx(10 / 7)),
        ("rowwise_eager", 1, pytest.approx(1), pytest.approx(1.25)),
    ]


def test_arms_are_compared_within_a_run_the_newest_that_has_them_all(tmp_path: Path) -> None:
    """The last run lacks the peer: its times of the others were not made in the same rounds."""
    runs = [
        [layer_times(LAYERS[0], 10.0, ours, torchao=torchao)]
        for ours, torchao in ((5.0, 5.0), (4.0, 5.0), (1.0, 0.0))
    ]
    assert league_of(tmp_path, *runs) == [
        ("rowwise_eager", 1, pytest.approx(1), pytest.approx(2.5)),
        ("torchao_rowwise_eager", 1, pytest.approx(0.8), pytest.approx(2)),
    ]


def test_products_are_led_back_to_bf16_over_our_arm(found: list[Place]) -> None:
    product = [p for p in found if p.level == "GEMM"]
    assert [(p.arm, p.peer) for p in product] == [
        ("scaled_mm_rowwise_eager", "scaled_mm"),
        ("rowwise_eager", ""),
    ]
    assert [p.against_ours for p in product] == pytest.approx([1.25, 1.0])
    assert [p.over_bf16 for p in product] == pytest.approx([2.5, 2.0])


def test_steps_with_compiled_linears_stand_beside_our_eager_step(found: list[Place]) -> None:
    steps = [p for p in found if p.level == "training step"]
    assert [p.arm for p in steps] == [
        "torchao_tensorwise_linears",
        "tensorwise_eager",
        "nocompile_tensorwise_eager",
    ]
    assert [p.against_ours for p in steps] == pytest.approx([8 / 6, 1.0, 0.8])


def test_the_page_has_the_league_and_says_who_is_absent(found: list[Place], tmp_path: Path) -> None:
    page = write_report([tmp_path / "quick"], tmp_path / "out.html").markdown.read_text()
    assert "League of implementations" in page
    assert "torchao 1.2" in page
    assert "Not here: transformer_engine is not installed: pip install" in page


# For real
