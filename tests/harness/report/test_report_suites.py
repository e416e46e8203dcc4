"""Sections of single suites: the league, what runs in parallel, what is gathered, what is predicted. Oracles: rows and ratios
that these tests make up; nothing here was measured.
"""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from report_cases import gemm_cases
from report_fixtures import CPU, H200, TIMING, Invented, absent, figure, write_run
from report_pages import machine, run_of, table

from harness.engine.rows import REFUSES as OF_ROWS
from harness.report import write_report
from harness.report.compatibility import REFUSES, matrix, reasons
from harness.report.gathers import gathers_table
from harness.report.league import places
from harness.report.scaling import scale_table
from harness.store.case import Case
from harness.store.cause import Cause
from harness.store.measurement import Measurement

# Entered only where it was measured

ENTER = """
import sys
from pathlib import Path
from harness.report import write_report
write_report([Path(sys.argv[1])], Path(sys.argv[2]))
print(*sorted(name for name in sys.modules if name.startswith("harness.report.")))
"""


def test_a_report_of_gemms_enters_no_section_of_another_suite(tmp_path):
    run = write_run(tmp_path / "run", gemm_cases(Invented(), 720.0)[:3])
    words = [sys.executable, "-c", ENTER, str(run), str(tmp_path / "r.html")]
    entered = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
    assert "harness.report.league" in entered
    others = ("compatibility", "gathers", "scaling", "steps", "training", "trials")
    assert not [name for name in others if f"harness.report.{name}" in entered]


# The league

LAYERS = [Case.of("linear", {"M": m, "K": 64, "N": 64}) for m in (1024, 4096)]
TE = "transformer_engine is not installed: pip install 'transformer_engine[pytorch]'"
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
    "compiled linears stand beside our eager step": (
        [[times(STEP, bf16_eager=9.0, tensorwise_eager=8.0, torchao_tensorwise_linears=6.0, nocompile_tensorwise_eager=10.0)]],
        [("torchao_tensorwise_linears", 1, 8 / 6, 1.5), ("tensorwise_eager", 1, 1.0, 9 / 8), ("nocompile_tensorwise_eager", 1, 0.8, 0.9)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_places_of_a_league_are_of_the_cases_that_all_measured(tmp_path, name):
    runs, expected = RUNS[name]
    assert league_of(tmp_path, *runs) == expected


def test_the_league_takes_the_worst_sqnr_and_says_who_is_absent(tmp_path):
    cases = []
    for case, db in zip(LAYERS, (28.0, 27.0), strict=True):
        rows = times(case, bf16_eager=3.0, rowwise_eager=2.0, torchao_rowwise_eager=1.0)
        rows.append(figure(case, "torchao_rowwise_eager", "sqnr_db", db))
        cases.append([*rows, absent(case, "te_tensorwise_eager", "skipped", TE, cause=Cause.MISSING)])
    page = write_report([write_run(tmp_path, cases, env=H200)], tmp_path / "out.html").markdown.read_text()
    row = "| linear layer | rowwise\\_eager | torchao\\_rowwise\\_eager | torchao 1.2 | 2 | 2.00x | 3.00x | 27.0 |"
    assert row.replace("\\", "") in page.replace("\\", "")
    assert "Not here: transformer_engine is not installed: pip install" in page


# In parallel

ABOUT = {"sweep": "parallel", "env": CPU, "env_id": "cpu"}


def ran(way, arm, apart, bound, **more):
    made = figure(Case.of("parallel", {"cell": way, "steps": 3}), arm, "loss_deviation", apart)
    return replace(made, rounds=(2,), resolved={"doc": "a way", "world": 2, "bound": bound, **more})


def not_run(way, arm, status, reason, cause=Cause.NONE):
    case = Case.of("parallel", {"cell": way, "steps": 3})
    return absent(case, arm, status, reason, metric="loss", cause=cause)


WAYS = [
    ran("ddp", "no_fp8", 0.0, 0.0),
    ran("ddp", "tensorwise", 2e-5, 1e-3, emulated="no kernel"),
    not_run("ddp", "static", "failed", "rank 1 of 2: ValueError: bad"),
    ran("tp", "no_fp8", 0.0, 1e-6),
    not_run("tp", "tensorwise", "skipped", f"{REFUSES}convert first | then cut", Cause.REFUSED),
    not_run("tp", "static", "skipped", "2 ranks need 2 GPUs; here are 1"),
]


def test_each_row_is_a_cell_of_the_matrix_with_its_reason_below(tmp_path):
    """A later run that has one of the cells counts for that one."""
    found = run_of(tmp_path, WAYS, run_id="20260101T000000Z-0000000-aaaa", **ABOUT)
    made = matrix(found)
    assert [column.title for column in made.columns] == ["way", "ranks", "no_fp8", "tensorwise", "static"]
    assert [[(cell.text, cell.note, cell.style) for cell in row] for row in made.rows] == [
        [("ddp", "a way", ""), ("2", "", ""), ("runs", "bit for bit", ""), ("runs", "2.0e-05, bound 0.0010", ""), ("failed", "", "bad")],
        [("tp", "a way", ""), ("2", "", ""), ("runs", "bit for bit", ""), ("refuses", "", "muted"), ("unsupported here", "", "muted")],
    ]  # fmt: skip
    assert [tuple(row.values()) for row in table(reasons(found))] == [
        ("failed", "ddp", "static", "rank 1 of 2: ValueError: bad"),
        ("refuses", "tp", "tensorwise", "convert first | then cut"),
        ("runs, emulated", "ddp", "tensorwise", "no kernel"),
        ("unsupported here", "tp", "static", "2 ranks need 2 GPUs; here are 1"),
    ]
    assert REFUSES == OF_ROWS  # what writes the rows and what reads them
    later = [ran("ddp", "static", 0.0, 0.0)]
    write_run(tmp_path, [later], run_id="20260102T000000Z-0000000-bbbb", **ABOUT)
    page = write_report([tmp_path / "parallel"], tmp_path / "r.html").markdown.read_text()
    assert "| ddp; a way | 2 | runs; bit for bit | runs; 2.0e-05, bound 0.0010 | runs; bit for bit |" in page


def test_gathered_bytes_stand_beside_those_of_the_baseline(tmp_path):
    case = Case.of("allgather", {"ranks": 2, "param_dtype": "bf16"})
    rows = [absent(case, "torchao", "skipped", f"{REFUSES}torchao failed", "bf16", metric="loss")]
    values = {"loss": 1.5, "step_ms": 4.0, "exposed_ms": 1.0}
    for arm, size, kind, apart, more in (
        ("fp8", 101.0, "uint8", 0.0, {"baseline": "bf16"}),
        ("late", 101.0, "uint8", 1e-3, {"baseline": "bf16"}),
        ("bf16", 200.0, "bfloat16", None, {}),
    ):
        counts = {
            "all_gather": ("wire_bytes", size),
            "reduce_scatter": ("wire_bytes", 64.0),
            "all_reduce": ("collectives", 3.0),
        }
        own = [
            replace(figure(case, arm, *one, **more), part=f"{name} {kind}") for name, one in counts.items()
        ]
        own += [figure(case, arm, "loss_deviation", apart, **more)] if apart is not None else []
        own += [figure(case, arm, name, value, **more) for name, value in values.items()]
        rows = [replace(one, resolved={"weights": {"linear": 1000, "other": 8}}) for one in own] + rows
    made = gathers_table(run_of(tmp_path, rows, **ABOUT))
    titles = ("arm", "all-gather (bytes)", "of the baseline's", "all-reduces", "reduce-scatter (bytes)", "last loss",
              "same loss", "exposed (ms)")  # fmt: skip
    assert [[row.get(title, "") for title in titles] for row in table(made)] == [
        ["bf16", "200", "1.000", "3", "64", "1.500000", "", "1.00"],
        ["late", "101", "0.5050", "3", "64", "1.500000", "0.0010 apart", "1.00"],
        ["fp8", "101", "0.5050", "3", "64", "1.500000", "yes", "1.00"],
        ["torchao", "skipped", "", "", "", "", "", ""],
    ]
    assert "1,000 weights" in made.caption


# Predicted


def predictions(world, arm, memory, fits=True):
    case = Case.of("scale", {"model": "llama_tiny", "world": world, "node": 8})
    resolved = {"tokens_per_s": 1000.0, "mfu_mixed": 0.5, "fits": fits}
    values = [("predicted_step_ms", 20.0, ""), ("predicted_step_ms", 3.0, "communication"), ("sent_bytes", 7e9, ""),
              ("predicted_memory_bytes", memory, ""), ("predicted_memory_bytes", 1e9, "activations"),
              ("sent_bytes", 7e9, "weights_forward")]  # fmt: skip
    return [
        replace(figure(case, arm, metric, value, resolved=resolved), part=part)
        for metric, value, part in values
    ]


def test_predicted_steps_in_the_order_of_their_size_of_the_newest_run(tmp_path):
    rows = [
        *predictions(64, "bf16", 9e10, False),
        *predictions(8, "bf16", 5e10),
        *predictions(8, "tensorwise", 6e10),
    ]
    run_of(tmp_path, rows, run_id="20260101T000000Z-0000000-aaaa", **ABOUT)
    made = scale_table(
        run_of(tmp_path, predictions(8, "bf16", 7e10), run_id="20260102T000000Z-0000000-bbbb", **ABOUT)
    )
    assert table(made)[0]["memory (GB)"] == "70.0"
    made = scale_table(machine(tmp_path / "parallel"))
    titles = ("GPUs", "arm", "step (ms)", "exposed (ms)", "memory (GB)", "weights forward (GB)")
    assert [[row[title] for title in titles] for row in table(made)] == [
        ["8", "bf16", "20.00", "3.00", "70.0", "7.00"],
        ["8", "tensorwise", "20.00", "3.00", "60.0", "7.00"],
        ["64", "bf16", "20.00", "3.00", "90.0", "7.00"],
    ]
    memory = [c.title for c in made.columns].index("memory (GB)")
    assert [(row[memory].style, row[memory].note) for row in made.rows][2] == ("bad", "more than it has")
    assert "gradients (GB)" not in table(made)[0], "nobody sends any"
