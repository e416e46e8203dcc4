"""Arms of bare products under the names that they had until 2026-11. Oracle: tables of names written by hand."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_fixtures import Invented, write_run

from harness import store
from harness.gate.collect import Row
from harness.gate.policy import Match
from harness.store.arm import Arm, arm_of, parse, stored_arm
from harness.store.case import Case
from harness.store.compare import paired_ratios
from harness.store.compare import summary as summarise
from harness.store.measurement import Measurement
from harness.suites import gemm

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd


def _written(folder: Path, rows: list[dict[str, object]], run_id: str, *, fields: bool) -> pd.DataFrame:
    """Rows of suite gemm as an older version wrote them, read back."""
    about = {"suite": "gemm", "case_id": "c", "axes": "{}", "metric": "time_ms", "status": "ok"}
    made = [Measurement(**about, samples=(1.0,), rounds=(0,), **row) for row in rows]  # type: ignore[arg-type]
    run = write_run(folder, [made], run_id=run_id)
    if fields:  # `arm_fields` as version 3 printed them; today's writer refuses them
        (file,) = run.rglob("*.parquet")
        table = pq.read_table(file)
        texts = [json.dumps(FORMER_FIELDS[name]) for name in table["arm"].to_pylist()]
        at = table.column_names.index("arm_fields")
        pq.write_table(table.set_column(at, "arm_fields", pa.array(texts, pa.string())), file)
    return store.read(run)


def _former_record(recipe: str, mode: str, **more: object) -> dict[str, object]:
    return {"recipe": recipe, "mode": mode, "casts": "", "variant": "", "peer": "", "control": False} | more


FORMER_FIELDS = {  # as results/published/cpu/2026-11-21/quick holds them, and one of a recipe that no table knows
    "bf16": _former_record("bf16", ""),
    "bf16:again": _former_record("bf16", "", control=True),
    "fp8_rowwise": _former_record("rowwise", "product"),
    "fp8_rowwise_fast_triton": _former_record("rowwise", "product", variant="fast_triton"),
    "fp8_mine": _former_record("mine", "product"),
    "fp8_mine_triton": _former_record("mine", "product", variant="triton"),
    "deepgemm_blockwise": _former_record("blockwise", "", peer="deepgemm"),
}
TODAY = {
    "bf16": "bf16_eager",
    "bf16:again": "bf16_eager:again",
    "fp8_rowwise": "rowwise_eager",
    "fp8_rowwise_fast_triton": "rowwise_fast_triton_eager",
    "fp8_mine": "mine_eager",
    "fp8_mine_triton": "mine_triton_eager",
    "deepgemm_blockwise": "deepgemm_blockwise_eager",
}
BASELINES = {
    "bf16:again": "bf16",
    "fp8_rowwise": "bf16",
    "fp8_rowwise_fast_triton": "fp8_rowwise_fast",
    "fp8_mine_triton": "fp8_mine",
    "deepgemm_blockwise": "fp8_blockwise_triton",
}


@pytest.mark.parametrize("fields", [True, False])
def test_stored_products_have_the_names_of_today(tmp_path: Path, fields: bool) -> None:
    """Oracle: `TODAY`, written by hand. Without records, nothing is guessed about a recipe that no table knows."""
    rows = [
        {"arm": arm, "baseline": BASELINES.get(arm, "")}
        for arm in FORMER_FIELDS
        if fields or "mine" not in arm
    ]
    frame = _written(tmp_path, rows, "old", fields=fields)
    assert list(frame["arm"]) == [TODAY[str(row["arm"])] for row in rows]
    assert [str(arm_of(r)) for r in frame.to_dict("records")] == list(frame["arm"])
    assert dict(zip(frame["arm"], frame["baseline"], strict=True)) == {
        "bf16_eager": "",
        "bf16_eager:again": "bf16_eager",
        "rowwise_eager": "bf16_eager",
        "rowwise_fast_triton_eager": "rowwise_fast_eager",
        **({"mine_eager": "", "mine_triton_eager": "mine_eager"} if fields else {}),
        "deepgemm_blockwise_eager": "blockwise_triton_eager",
    }


def test_an_older_run_and_a_newer_one_are_one_series_for_diff_and_gate(tmp_path: Path) -> None:
    """Oracle: the same rows under the names of today."""
    former = _written(
        tmp_path, [{"arm": "bf16"}, {"arm": "fp8_rowwise", "baseline": "bf16"}], "old", fields=True
    )
    today = _written(
        tmp_path,
        [{"arm": "bf16_eager"}, {"arm": "rowwise_eager", "baseline": "bf16_eager"}],
        "new",
        fields=False,
    )
    for column in ("arm", "baseline", "arm_fields"):
        assert list(former[column]) == list(today[column])


def test_rows_are_selected_by_former_names_too(tmp_path: Path) -> None:
    """Oracle: `TODAY`, and rows of another suite where `bf16` is the name of today. No other row comes along."""
    rows: list[dict[str, object]] = [
        {"arm": arm, "baseline": BASELINES.get(arm, "")} for arm in TODAY if "mine" not in arm
    ]
    _written(tmp_path, rows, "old", fields=False)
    steps = {"bf16": {"ms": 4.0}, "bf16_eager": {"ms": 4.0}, "rowwise": {"ms": 2.0, "baseline": "bf16"}}
    write_run(tmp_path, [Invented().times(Case.of("scale", {"M": 32}), steps)], run_id="scale")

    def selected(column: str, *values: str) -> list[tuple[str, str]]:
        frame = store.read(tmp_path, columns=["suite", "arm"], where={column: values, "metric": "time_ms"})
        assert list(frame.columns) == ["suite", "arm"]
        return sorted(set(frame.itertuples(index=False, name=None)))

    assert selected("arm", "bf16") == [("gemm", "bf16_eager"), ("scale", "bf16")]
    assert selected("arm", "bf16_eager") == [("gemm", "bf16_eager"), ("scale", "bf16_eager")]
    assert selected("arm", "bf16:again", "fp8_rowwise") == [
        ("gemm", "bf16_eager:again"),
        ("gemm", "rowwise_eager"),
    ]
    assert selected("arm", "deepgemm_blockwise") == [("gemm", "deepgemm_blockwise_eager")]
    assert selected("baseline", "bf16") == [
        ("gemm", "bf16_eager:again"),
        ("gemm", "rowwise_eager"),
        ("scale", "rowwise"),
    ]
    assert selected("arm", "fp8_rowwize") == []
    assert len(store.read(tmp_path, columns=["arm"], where={"arm": "fp8_rowwise"})) == 1


@pytest.mark.parametrize("suite", ["divergence", "scale", "my_own", ""])
def test_names_of_other_suites_are_left_alone(suite: str) -> None:
    assert parse("bf16", suite) == Arm("bf16")
    assert parse("fp8_rowwise", suite) == Arm(variant="fp8_rowwise")
    assert stored_arm(suite, "fp8_rowwise", "", None)[0] == "fp8_rowwise"
    assert stored_arm(suite, "bf16", "", Arm("bf16").as_json)[0] == "bf16"


def test_a_policy_may_name_an_arm_by_its_former_name() -> None:
    match = Match((("arm", "fp8_*"),))
    assert match.fits({"suite": "gemm", "arm": "rowwise_eager"})
    assert not match.fits({"suite": "linear", "arm": "rowwise_eager"})
    assert not match.fits({"suite": "gemm", "arm": "bf16_eager"})
    assert Match((("arm", "rowwise_*"),)).fits({"suite": "gemm", "arm": "rowwise_eager"})


def test_products_and_layers_share_names_and_no_figure(tmp_path: Path) -> None:
    """One recipe in two suites: figures keep to their suite. Oracle: the times that were put in."""
    arms = {"bf16_eager": {"ms": 4.0}, "rowwise_eager": {"ms": 2.0, "baseline": "bf16_eager"}}
    layer = {"bf16_eager": {"ms": 4.0}, "rowwise_eager": {"ms": 5.0, "baseline": "bf16_eager"}}
    axes = {"M": 32, "K": 32, "N": 32}
    cases = [
        Invented().times(Case.of("gemm", {**axes, "role": "output"}), arms),
        Invented().times(Case.of("linear", axes), layer),
    ]
    frame = store.read(write_run(tmp_path, cases))
    ratios = paired_ratios(frame)
    found = {r["suite"]: r["speedup"] for r in ratios.to_dict("records")}
    assert found == {"gemm": pytest.approx(2.0, rel=0.02), "linear": pytest.approx(0.8, rel=0.02)}
    means = summarise(ratios)
    assert sorted(means["suite"]) == ["gemm", "linear"], "never one mean of both"


def test_an_older_commit_in_a_gate_is_paired_with_this_one() -> None:
    """Its worker names its arms as it did; oracle: the names of today's suite."""
    about = {"suite": "gemm", "case_id": "c", "axes": "{}", "seed": 0, "metric": "sqnr_db", "status": "ok"}
    about |= {"arm": "fp8_rowwise_fast", "baseline": "bf16", "arm_fields": None}
    for fields in (None, Arm("rowwise", "product", variant="fast").as_json):
        row = Row(about | {"arm_fields": fields}, samples=[28.5], rounds=[0]).measurement()
        assert (row.arm, row.baseline) == ("rowwise_fast_eager", "bf16_eager")
        assert row.arm_fields == gemm.ARMS["rowwise_fast_eager"].arm
