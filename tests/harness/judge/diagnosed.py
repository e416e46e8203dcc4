"""Findings by a word, and rows that look into one tensor's casts."""

from __future__ import annotations

from curves_for_tests import case_of
from report_fixtures import frame
from stored import row

from harness.judge.diagnosis import findings


def look(arm, metric, part, values, recipe="tensorwise", seed=0, **resolved):
    """A diagnosis series of one tensor of one arm."""
    case = case_of(seed)
    rounds = tuple(50 * i for i in range(len(values)))
    said = {"recipe": recipe, **resolved}
    return row(case, arm, values, metric, baseline="base", part=part, resolved=said, rounds=rounds)


def found(tmp_path, rows, word, **more):
    """The findings whose symptom holds a word."""
    return [f for f in findings(frame(tmp_path, rows, **more)) if word in f.symptom]
