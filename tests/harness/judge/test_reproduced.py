"""A peer beside its authors' own figures. Oracles: torchao's README of float8nocompile (1.06x to 1.10x at 4,096 tokens), the rows
of 2026-11-27 (0.859x at 16,384 tokens of 4 blocks), reports/studies/speedups/published.csv."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from report_fixtures import H200

from harness import store
from harness.judge.reproduced import Found, OwnFigure, reproduction, reproductions
from harness.store.case import arm_of, parse
from harness.store.compare import BESIDE, TIMES, pairs_of, with_rates
from harness.store.published import RATE, SPEEDUP, Published, of_peer, of_row
from harness.store.rows import rows_of

ROOT = Path(__file__).parents[3]
NOCOMPILE = parse("nocompile_tensorwise_eager")
THEIRS = {"model": "llama3_8b", "tokens": 4096}
EXAMPLE = {
    "recipe": "tensorwise",
    "mode": "eager",
    "low": 1.2,
    "high": 1.2,
    "shape": THEIRS,
    "device": "1 GPU",
}
EXAMPLE |= {"source": "https://example.org/speed"}


def found(value, shape=THEIRS, cut="", arm=NOCOMPILE, unit=SPEEDUP):
    return reproduction(arm, of_peer(arm.peer), [OwnFigure(value, unit, shape, cut)])


@pytest.mark.parametrize("part", [1.08, 0.859])
def test_all_of_a_model_counts_before_a_part_of_it(part) -> None:
    ran = [OwnFigure(part, SPEEDUP, THEIRS, "4 of 32 layers"), OwnFigure(1.08, SPEEDUP, THEIRS)]
    for each in (ran, ran[::-1]):
        assert reproduction(NOCOMPILE, of_peer(NOCOMPILE.peer), each).found == Found.REPRODUCED


@pytest.mark.parametrize(
    ("arm", "ran"),
    [
        (NOCOMPILE, []),
        (NOCOMPILE, [OwnFigure(1.08, SPEEDUP, THEIRS | {"model": "gpt2"})]),
        (
            parse("torchao_tensorwise_eager"),
            [OwnFigure(1.25, SPEEDUP, {"model": "llama3_8b", "tokens": 8192})],
        ),  # theirs is compiled
        (
            parse("deepgemm_blockwise_eager"),
            [OwnFigure(1500.0, SPEEDUP, {"M": 4096, "K": 16384, "N": 7168})],
        ),  # another unit
    ],
)
def test_what_was_not_measured_is_called_so(arm, ran) -> None:
    assert reproduction(arm, of_peer(arm.peer), ran).found == Found.NOT_MEASURED


def test_a_rate_of_a_product_is_compared_at_its_size() -> None:
    size = {"M": 4096, "K": 16384, "N": 7168}
    codes = [
        found(rate, size, "", parse("deepgemm_blockwise_eager"), RATE).found for rate in (1450.0, 1200.0)
    ]
    assert codes == [Found.REPRODUCED, Found.NOT_REPRODUCED]


def times_of(run):
    return rows_of(with_rates(frame := store.read([run]))[frame["metric"].isin(TIMES)])


def test_the_published_rows_contradict_float8nocompile_and_never_measured_torchao_compiled() -> None:
    day = ROOT / "results/published/h200/2026-11-27"
    codes = {}
    for run in ("eager", "nocompile"):
        times = times_of(day / run)
        codes |= {name: each.found for name, each in reproductions(times, pairs_of(times)).items()}
    assert codes == {
        "nocompile_tensorwise_eager": Found.NOT_REPRODUCED,
        "torchao_tensorwise_eager": Found.NOT_MEASURED,
    }


def test_a_row_speaks_for_a_peer_that_this_tree_does_not_know() -> None:
    row = {
        "run_id": "r", "case_id": "c", "arm": "acme_tensorwise_eager", "status": "ok", "regime": "isolated", "tflops": float("nan"),
        "timing": "{}", "arm_fields": '{"recipe": "tensorwise", "mode": "eager", "peer": "acme"}', "env": H200,
        "axes": '{"batch": 1, "model": "llama3_8b", "seq": 4096}',
        "resolved": {"peer_published": [Published(**EXAMPLE).stored, {"nonsense": 1}, "nonsense"]},
    }  # fmt: skip
    pair = {
        "run_id": "r",
        "case_id": "c",
        "arm": row["arm"],
        "fp8": True,
        "speedup": 0.7,
        "regime": "isolated",
        "condition": "",
    }
    row["resolved"] = json.dumps(row["resolved"])
    assert [each.low for each in of_row(row)] == [1.2]
    assert arm_of(row).peer == "acme"
    assert reproductions([row], [pair])[row["arm"]].found == Found.NOT_REPRODUCED
    beside = [pair | {"condition": BESIDE, "speedup": speedup} for speedup in (0.7, 1.2)]
    for each in beside:
        assert reproductions([row], [each])[row["arm"]].found == Found.NOT_MEASURED, "it decides nothing"
    rate = row | {"tflops": 1.2}
    rate["resolved"] = json.dumps({"peer_published": [Published(**EXAMPLE | {"unit": RATE}).stored]})
    founds = [
        reproductions([rate | {"timing": t}], [])[row["arm"]].found for t in ("{}", '{"contended": true}')
    ]
    assert founds == [Found.REPRODUCED, Found.NOT_MEASURED]


@pytest.mark.parametrize(
    "fault",
    [{"low": 0.0}, {"high": 1.0}, {"unit": "percent"}, {"source": "a page"}, {"shape": {}}, {"device": ""}],
    ids=str,
)
def test_a_figure_without_its_shape_device_or_link_is_refused(fault) -> None:
    with pytest.raises(ValueError, match=r"figure|unit"):
        Published(**EXAMPLE | fault)


def test_figures_equal_those_that_the_model_of_a_step_is_held_against() -> None:
    """Rounded to the digits of the authors' own pages."""
    with (ROOT / "reports/studies/speedups/published.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))

    def speedups(source, recipe, gpu):
        return [
            float(line["measured"])
            for line in lines
            if source in line["source"] and line["recipe"] == recipe and gpu in line["gpu"]
        ]

    docs = "torchao docs"
    for peer, recipe, source, theirs, gpu in (
        ("torchao", "tensorwise", docs, "tensorwise", "H100"),
        ("torchao", "rowwise", docs, "rowwise", "H100"),
        ("torchao", "rowwise_with_gw_hp", docs, "rowwise_with_gw_hp", "MI300X"),
        ("torchaomx", "mxfp8", docs, "mxfp8_rceil", "B200"),
        ("nocompile", "tensorwise", "float8nocompile", "nocompile", "H100"),
        ("te", "tensorwise", "TransformerEngine", "current", "H200"),
        ("te", "delayed", "TransformerEngine", "delayed", "H200"),
        ("te", "blockwise", "TransformerEngine", "block", "H200"),
    ):
        (own,) = (each for each in of_peer(peer) if each.recipe == recipe)
        measured = speedups(source, theirs, gpu)
        assert (own.low, own.high) == pytest.approx((min(measured), max(measured)), abs=1e-3), (peer, recipe)
