"""Arms as records. Oracles: the names that sweeps and published files hold, and the records that suites declare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import write_run

from fp8core.recipe import RECIPES
from harness import store
from harness.store.case import (
    CONTROL_SUFFIX,
    Arm,
    Case,
    arm_of,
    arms_of,
    from_json,
    parse,
    without_controls,
)
from harness.store.measurement import Measurement
from harness.suites import SUITES, divergence

# Names and records


@pytest.mark.parametrize("suite", SUITES)
def test_every_arm_of_every_suite_is_a_record_whose_name_reads_back(suite: str) -> None:
    """Oracle: the suite's table. Every sweep takes its arms from these tables; so every name that it can produce is here."""
    for name, info in SUITES[suite].ARMS.items():
        declared = info.record(name)
        for record in (declared, replace(declared, control=True)):
            assert str(record) == name + CONTROL_SUFFIX * record.control
            assert parse(str(record)) == record
            assert from_json(record.as_json) == record
        assert declared.fp8_recipe in ("", *RECIPES)
        assert info.baseline == "" or info.baseline in SUITES[suite].ARMS


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '"x"', "{", '{"recipe": 1}', '{"control": "no"}', '{"mode": null}']
)
def test_damaged_fields_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"arm_fields|Expecting"):
        from_json(text)


# Rows


def test_a_row_stores_the_record_of_its_arm(tmp_path: Path) -> None:
    """Declared, or else that of its name; one that disagrees with the name is no row. Nulls by a plain reader count alike."""
    about: dict[str, Any] = {
        "suite": "own",
        "case_id": "c",
        "axes": "{}",
        "metric": "time_ms",
        "status": "ok",
    }
    about |= {"samples": (1.0,)}
    declared = Measurement(arm="amax_golden", arm_fields=Arm("amax_golden"), **about)
    named = Measurement(arm="tensorwise_fused_eager:again", **about)
    frame = store.read(write_run(tmp_path, [[declared, named]]))
    found = [Arm("amax_golden"), Arm("tensorwise", "eager", "fused", control=True)]
    assert arms_of(frame) == [arm_of(r) for r in frame.to_dict("records")] == found
    assert arms_of(frame.drop(columns=["arm_fields"]).iloc[1:]) == found[1:]
    assert list(without_controls(frame)["arm"]) == ["amax_golden"]
    assert str(found[1].computes) == "tensorwise"
    with pytest.raises(ValueError, match="rowwise_eager"):
        Measurement(arm="tensorwise_eager", arm_fields=Arm("rowwise", "eager"), **about)


@pytest.mark.parametrize("name", ["amax_golden", "own_to_base", "rowwise_golden"])
def test_a_recipe_named_like_a_variant_is_that_recipe_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`amax_golden` became an emulated arm, `own_to_base` one that changes precision; `rowwise_golden` is taken by an arm."""
    monkeypatch.setitem(RECIPES, name, replace(RECIPES["rowwise"], name=name))
    if name == "rowwise_golden":
        with pytest.raises(ValueError, match="'rowwise_golden'"):
            divergence._arms()
        return
    monkeypatch.setattr(divergence, "ARMS", divergence._arms())
    assert divergence.recipe_of(name) == RECIPES[name]
    emulated = divergence.recipe_of(str(Arm(name, variant="golden")))
    assert emulated is not None
    assert emulated.backend.startswith("reference")
    axes = {
        name: axis.default if axis.default is not None else axis.choices[0]
        for name, axis in divergence.AXES.items()
        if not axis.optional
    }
    job = divergence.job_of(Case.of("divergence", axes), name, "cpu")
    assert not job.perturb
    assert not job.schedule.rules
