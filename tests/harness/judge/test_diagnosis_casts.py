"""Alarms about casts. Oracle: each symptom is planted in rows; its finding must appear with the planted figures, else nothing."""

from __future__ import annotations

import math

import pytest
from curves_for_tests import control, rows_of_runs, shifted
from diagnosed import found, look

BASE = control()


def test_delayed_scales_that_never_move(tmp_path):
    looks = [1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    rows = rows_of_runs("base", BASE) + rows_of_runs("delayed", shifted(BASE), recipe="delayed")
    for part, scales in (("q:input", [6.0] * 6), ("q:weight", [6.0, 5.0, 4.0, 3.0, 2.0, 1.0])):
        rows.append(look("delayed", "scale_log2", part, scales, "delayed"))
        rows.append(look("delayed", "amax", part, looks, "delayed"))
    (finding,) = found(tmp_path, rows, "never move")
    assert finding.symptom == "delayed: 1 delayed scale never moves"
    assert finding.evidence == ("q:input: scale 2^6 at all 6 looks, amax 1 to 30",)
    assert "update_scales" in finding.change


def test_scales_that_stand_still_because_the_tensor_does_are_healthy(tmp_path):
    rows = [
        look("delayed", "scale_log2", "q:input", [6.0] * 6, "delayed"),
        look("delayed", "amax", "q:input", [1.0] * 6, "delayed"),
    ]
    assert found(tmp_path, rows, "never move") == []


@pytest.mark.parametrize(
    ("metric", "part", "values", "kind"),
    [
        ("saturated_frac", "q:input", [0.0, 1e-5], "saturated"),
        ("underflow_frac", "q:input", [0.02], "underflow"),
        ("sqnr_db", "q:input", [31.0, 27.0], "SQNR"),
        ("sqnr_db", "q:grad_output", [21.0], "SQNR"),
    ],
)
def test_alarms_of_single_tensors(tmp_path, metric, part, values, kind):
    (finding,) = found(tmp_path, [look("tensorwise", metric, part, values)], "alarm")
    assert finding.symptom == f"tensorwise: {kind} alarm in 1 tensor"
    assert part in finding.evidence[0]


@pytest.mark.parametrize(
    ("metric", "part", "values", "recipe"),
    [
        (
            "saturated_frac",
            "q:input",
            [1e-5],
            "delayed",
        ),  # clipping between two updates is delayed scaling's nature
        ("underflow_frac", "q:input", [0.009], "tensorwise"),
        ("sqnr_db", "q:grad_output", [25.0], "tensorwise"),
        ("sqnr_db", "q:input", [math.inf], "tensorwise"),
    ],
)
def test_healthy_tensors_raise_no_alarm(tmp_path, metric, part, values, recipe):
    assert found(tmp_path, [look("tensorwise", metric, part, values, recipe)], "alarm") == []
