"""Sections of single suites: the league, what runs in parallel, what is gathered, what is predicted. Oracles: rows and ratios
that these tests make up; nothing here was measured.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from report_fixtures import H200, TIMING, write_run
from report_pages import machine

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report.league import places
from harness.report.parallel import REFUSES
from harness.store.case import Case
from harness.store.measurement import Measurement

# Entered only where it was measured

# The league

LAYERS = [Case.of("linear", {"M": m, "K": 64, "N": 64}) for m in (1024, 4096)]
PEERS = {
    "scaled_mm": "scaled_mm",
    "torchao": "torchao",
    "te": "transformer_engine",
    "nanochat": "nanochat",
    "nocompile": "torchao_nocompile",
}


def times(case, baseline="bf16_eager", **ms):
    """A time row an arm, of a peer where its name begins with one's."""
    rows = []
    for arm, value in ms.items():
        row = Measurement(case.suite, case.case_id, arm, case.axes_json, "time_ms", "skipped", reason="-")
        peer = next((of for word, of in PEERS.items() if arm.startswith(f"{word}_")), "")
        resolved = {"peer": peer, "peer_version": "1.2"} if peer else {}
        row = replace(
            row, status="ok", reason="", samples=(value,) * 8, rounds=tuple(range(8)), resolved=resolved
        )
        row = replace(row, baseline="" if arm == "bf16_eager" else baseline, regime="isolated")
        rows.append(replace(row, timing=TIMING, flops={"e4m3": 1e9}))
    return rows


def league_of(folder, *runs):
    """(arm, cases, against ours, over bf16) in the order of the table, of several runs."""
    for i, cases in enumerate(runs):
        write_run(folder, cases, run_id=f"r{i}", env=H200)
    found = [(p["arm"], p["cases"], p["against_ours"], p["over_bf16"]) for p in places(machine(folder))]
    return [
        tuple(pytest.approx(x, nan_ok=True) if isinstance(x, float) else x for x in each) for each in found
    ]


PRODUCT, STEP = Case.of("gemm", {"M": 1024, "K": 64, "N": 64}), Case.of("train", {"model": "gpt2"})
BOTH, EXTRA = LAYERS, [Case.of("linear", {"M": m, "K": 64, "N": 64}) for m in (32, 48)]
RUNS = {
    "ours was not measured": (
        [[times(BOTH[0], bf16_eager=3.0, nanochat_tensorwise_eager=5.0)]],
        [("nanochat_tensorwise_eager", 1, math.nan, 0.6)],
    ),
    # Ours gains 2x in the first case and 1.25x in the second. A peer that has the second alone is set against that; one
    # that has both stands apart; a case without bf16, and one without ours, count for nobody.
    "shared cases alone": (
        [[times(BOTH[0], bf16_eager=10.0, rowwise_eager=5.0, te_rowwise_eager=2.0),
          times(BOTH[1], bf16_eager=10.0, rowwise_eager=8.0, torchao_rowwise_eager=7.0, te_rowwise_eager=10.0),
          times(EXTRA[0], rowwise_eager=9.0, torchao_rowwise_eager=1.0),
          times(EXTRA[1], bf16_eager=9.0, torchao_rowwise_eager=1.0)]],
        [("te_rowwise_eager", 2, math.sqrt(2.5 * 0.8), math.sqrt(5.0)), ("rowwise_eager", 2, 1.0, math.sqrt(2.5)),
         ("torchao_rowwise_eager", 1, 8 / 7, 10 / 7), ("rowwise_eager", 1, 1.0, 1.25)],
    ),
    # The last run lacks the peer: its times of the others were not made in the same rounds.
    "the newest run that has all": (
        [[times(BOTH[0], bf16_eager=10.0, rowwise_eager=5.0, torchao_rowwise_eager=5.0)],
         [times(BOTH[0], bf16_eager=10.0, rowwise_eager=4.0, torchao_rowwise_eager=5.0)],
         [times(BOTH[0], bf16_eager=10.0, rowwise_eager=1.0)]],
        [("rowwise_eager", 1, 1.0, 2.5), ("torchao_rowwise_eager", 1, 0.8, 2.0)],
    ),
    "products are led back to bf16 over our arm": (
        [[[*times(PRODUCT, bf16_eager=4.0, rowwise_eager=2.0), *times(PRODUCT, "rowwise_eager", scaled_mm_rowwise_eager=1.6)]]],
        [("scaled_mm_rowwise_eager", 1, 1.25, 2.5), ("rowwise_eager", 1, 1.0, 2.0)],
    ),
    "steps of a peer stand beside ours": (
        [[times(STEP, bf16_eager=9.0, tensorwise_eager=8.0, nocompile_tensorwise_eager=10.0)]],
        [("tensorwise_eager", 1, 1.0, 9 / 8), ("nocompile_tensorwise_eager", 1, 0.8, 0.9)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_places_of_a_league_are_of_the_cases_that_all_measured(tmp_path, name):
    runs, expected = RUNS[name]
    assert league_of(tmp_path, *runs) == expected


def test_what_writes_the_rows_of_a_refusal_and_what_reads_them_agree():
    assert REFUSES == OF_ROWS
