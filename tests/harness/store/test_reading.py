"""A part of the rows: the oracle is the whole frame, cut in pandas; what is decoded is counted at the file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from harness import store
from harness.store import reading
from harness.store.errors import Cause, UsageError
from harness.store.measurement import Measurement
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Mapping

PUBLISHED = Path(__file__).parents[3] / "results" / "published" / "cpu"


def row(
    case: str,
    arm: str = "a",
    metric: str = "time_ms",
    cause: Cause = Cause.NONE,
    *,
    value: float = 1.0,
    suite: str = "s",
    axes: str = "{}",
) -> Measurement:
    status, samples = ("failed", ()) if cause else ("ok", (value,))
    return Measurement(
        suite, case, arm, axes, metric, status, samples=samples, cause=cause, reason=str(cause)
    )  # type: ignore[arg-type]


def append(folder: Path, *measurements: Measurement, run_id: str = "") -> None:
    run = store.RunWriter(
        folder, run_id=run_id or folder.name, sweep="w", env_id="e1", env={"gpu": None}, about={}
    )
    run.append(measurements)
    run.close("finished")


def cut(frame: pd.DataFrame, where: Mapping[str, list[Any]]) -> pd.DataFrame:
    for name, values in where.items():
        column = frame[name] if name in frame else frame["axes"].map(lambda text, n=name: parse(text).get(n))
        frame = frame[column.isin(values)]
    return frame.reset_index(drop=True)


@pytest.fixture(scope="module")
def whole() -> pd.DataFrame:
    return store.read(PUBLISHED / "2026-11-21")


@pytest.mark.parametrize(
    "where",
    [
        {"suite": "cast"},
        {"metric": ["time_ms", "bytes_moved"], "status": "ok"},
        {"M": [64, 512]},
        {"suite": ["linear", "gemm"], "M": 64, "cause": ["", "unsupported"]},
        {"arm": "bf16_eager", "retryable": False},
        {"value": []},
    ],
)
def test_a_selection_is_the_whole_cut_in_pandas(whole: pd.DataFrame, where: dict[str, Any]) -> None:
    """Published runs: files of several versions of the schema."""
    columns = ["value", "arm", "metric", "cause", "arm_fields", "case_axes", "samples"]
    part = store.read(PUBLISHED / "2026-11-21", columns=columns, where=where)
    lists = {name: value if isinstance(value, list) else [value] for name, value in where.items()}
    assert_frame_equal(part, cut(whole, lists)[columns])
    assert part.attrs["files"] == whole.attrs["files"]


@settings(max_examples=20, deadline=None)
@given(
    attempts=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["c1", "c2"]),
                st.sampled_from(["a", "b"]),
                st.sampled_from(["time_ms", "loss", "sqnr_db"]),
                st.sampled_from([Cause.NONE, Cause.BUDGET, Cause.NUMERICS]),
            ),
            min_size=1, max_size=4, unique_by=lambda each: each[:3],
        ),
        min_size=1, max_size=4,
    ),
    where=st.fixed_dictionaries(
        {},
        optional={
            "metric": st.sampled_from([["time_ms"], ["loss", "sqnr_db"]]),
            "status": st.sampled_from([["ok"], ["failed"]]),
            "arm": st.just(["b"]),
            "case_id": st.just(["c1"]),
        },
    ),
)  # fmt: skip
def test_no_selection_brings_back_a_replaced_attempt(
    attempts: list[list[tuple[str, str, str, Cause]]],
    where: dict[str, list[str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("runs") / "r1"
    for at, rows in enumerate(attempts):
        append(folder, *(row(case, arm, metric, cause, value=1.0 + at) for case, arm, metric, cause in rows))
    columns = ["case_id", "arm", "metric", "status", "value"]
    part = store.read(folder, columns=columns, where=where)
    assert_frame_equal(part, cut(store.read(folder), where)[columns])
    every = store.read(folder, columns=columns, where=where, all_attempts=True)
    assert_frame_equal(every, cut(store.read(folder, all_attempts=True), where)[columns])


def test_a_value_that_changes_while_it_is_read_is_of_one_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that is stored between the two looks at the files."""
    folder = tmp_path / "r1"
    append(folder, row("c1", value=1.0))
    real, done = reading.read_parts, []

    def read_parts(*args: Any) -> Any:
        found = real(*args)
        if not done:
            done.append(True)
            append(folder, row("c1", value=2.0))
        return found

    monkeypatch.setattr(reading, "read_parts", read_parts)
    assert store.read(folder, where={"metric": "time_ms"})["value"].tolist() == [2.0]


def test_a_flag_is_no_number(tmp_path: Path) -> None:
    append(tmp_path / "r1", row("c1", axes='{"fast":true}'), row("c2", axes='{"fast":1}'), row("c3"))
    assert store.read(tmp_path, where={"fast": True})["case_id"].tolist() == ["c1"]
    assert store.read(tmp_path, where={"fast": [1, True]})["case_id"].tolist() == ["c1", "c2"]
    assert store.read(tmp_path, where={"fast": None})["case_id"].tolist() == ["c3"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"columns": ["metrik"]}, "nearest: metric"),
        ({"columns": "metric"}, "columns=['metric']"),
        ({"where": {"metrik": "x"}}, "unknown column or axis 'metrik'"),
        ({"where": {"MM": 64}}, "unknown column or axis 'MM'"),
        ({"where": {"samples": 1.0}}, "holds lists"),
        ({"where": {"seed": "one"}}, "the column holds int64"),
        ({"where": {"metric": {"time_ms": 1}}}, "the column holds string"),
    ],
)
def test_what_there_is_not_is_refused(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    append(tmp_path / "r1", row("c1", axes='{"M":64}'))
    with pytest.raises(UsageError) as refused:
        store.read(tmp_path, **arguments)
    assert words in str(refused.value)
