"""The report's table of predictions. Oracle: the rows that it is made of."""

from __future__ import annotations

import pandas as pd

from harness.report.runs import Machine
from harness.report.scaling import scale_table
from harness.store import SCHEMA
from harness.store.case import Case
from harness.store.measurement import Measurement


def machine(frame: pd.DataFrame) -> Machine:
    return Machine("env", ({},), (), frame)


def rows(world: int, arm: str, memory: float, fits: bool, run: str = "a") -> list[dict[str, object]]:
    made = Case.of("scale", {"model": "llama_tiny", "world": world, "node": 8})
    resolved = {"tokens_per_s": 1000.0, "mfu_mixed": 0.5, "fits": fits}

    def one(metric: str, value: float, part: str = "") -> dict[str, object]:
        row = Measurement(
            "scale",
            made.case_id,
            arm,
            made.axes_json,
            metric,
            "ok",
            part=part,
            resolved=resolved,
            samples=(value,),
        ).as_row()
        return {**dict.fromkeys(SCHEMA.names), **row, "run_id": run}

    return [
        one("predicted_step_ms", 20.0),
        one("predicted_step_ms", 3.0, "communication"),
        one("predicted_memory_bytes", memory),
        one("sent_bytes", 7e9, "weights_forward"),
        one("sent_bytes", 7e9),
    ]


def test_a_row_a_job_in_the_order_of_their_size() -> None:
    found = [*rows(64, "bf16", 9e10, False), *rows(8, "bf16", 5e10, True), *rows(8, "tensorwise", 6e10, True)]
    table = scale_table(machine(pd.DataFrame(found)))
    titles = [c.title for c in table.columns]
    shown = [dict(zip(titles, row, strict=True)) for row in table.rows]
    assert [(r["GPUs"].text, r["arm"].text) for r in shown] == [
        ("8", "bf16"),
        ("8", "tensorwise"),
        ("64", "bf16"),
    ]
    assert [r["memory (GB)"].style for r in shown] == ["", "", "bad"]
    assert shown[2]["memory (GB)"].note == "more than it has"
    assert (shown[0]["step (ms)"].order, shown[0]["exposed (ms)"].order) == (20.0, 3.0)
    assert shown[0]["weights forward (GB)"].text == "7.00"
    assert "gradients (GB)" not in titles, "nobody sends any"


def test_the_newest_run_counts() -> None:
    old, new = rows(8, "bf16", 5e10, True, "20260101"), rows(8, "bf16", 6e10, True, "20260102")
    for order in ([*old, *new], [*new, *old]):
        [row] = scale_table(machine(pd.DataFrame(order))).rows
        assert "60" in [cell.text.removesuffix(".0") for cell in row]


def test_without_predictions_there_is_no_table() -> None:
    assert not scale_table(machine(pd.DataFrame(rows(8, "bf16", 1.0, True)).query("suite == 'train'"))).rows
