"""What `append` takes, `read` returns: drawn rows, odd values among them. Oracle: the columns of `Measurement.as_row`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import store
from harness.store.case import parse
from harness.store.errors import DEFAULT, Cause
from harness.store.measurement import Measurement

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

HEALTHY = Measurement(
    "s", "healthy", "a", '{"M":1}', "time_ms", "ok", samples=(1.0, 2.0, 4.0), rounds=(0, 1, 2)
)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def appended(folder: Path, rows: list[Measurement]) -> tuple[list[Measurement], pd.DataFrame]:
    """The rows as `append` says that it stored them, and as they are read; one run, closed."""
    run = store.RunWriter(folder, run_id="r", sweep="w", env_id="e", env={"gpu": None}, about={})
    stored = run.append(rows)
    run.close("finished")
    return stored, store.read(folder)


def same(column: str, read: Any, written: Any) -> bool:
    """Bit for bit; pandas has NaN for no number."""
    if column in ("samples", "rounds", "sample_clock_mhz"):
        return len(read) == len(written) and all(same("", a, b) for a, b in zip(read, written, strict=True))
    if isinstance(written, float) or written is None:
        return math.isnan(read) if written is None else float(read).hex() == float(written).hex()
    return bool(read == written)


DEEP = [nested(levels) for levels in (90, 150, 20_000)]
# One of each kind: controls, quotes, digits, other scripts, marks that combine or turn round, surrogates, other planes
LETTERS = "\0\t\n\r\x1b\x7f\x85 \"'\\/%{}[],:0aZ\xa0é\xad߿ࠀ\u0301\u200d\u202e\u2028\ufeff\uffff\ud800\udfff\ue000٣ß漢😀\U0010ffff"
texts = st.one_of(
    st.text(LETTERS, max_size=20),
    st.sampled_from(["\ud800", "a/b c", "x" * 5000, "\0", "é" * 3000, "/home/x/y"]),
)
floats = st.one_of(st.floats(allow_nan=False), st.sampled_from([1e-310, -0.0, 1.7e308, 2.0**60]))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    texts,
    st.integers(),
    st.sampled_from([10**51, -(10**400), object(), {1}]),
)
values = st.one_of(
    st.recursive(
        scalars, lambda of: st.lists(of, max_size=3) | st.dictionaries(texts, of, max_size=3), max_leaves=6
    ),
    st.sampled_from(range(len(DEEP))).map(DEEP.__getitem__),
)
facts = st.dictionaries(
    st.one_of(
        texts,
        st.sampled_from(["memory", "parameters", "tokens_per_step", "fp8_gemms", "extensions", "advice"]),
    ),
    values,
    max_size=3,
)
AXES = [
    "{}",
    '{"M":1}',
    '{"M":[1]}',
    "{",
    '{"M":1e999}',
    '{"M":NaN}',
    '{"m":"\\ud800"}',
    "[" * 300,
    '{"m":"' + "x" * 70_000 + '"}',
]


@st.composite
def rows(draw: st.DrawFn) -> Measurement:
    status: Any = draw(st.sampled_from(["ok", "partial", "failed", "skipped"]))
    number = draw(st.integers(1, 5)) if status in ("ok", "partial") else 0
    causes = [DEFAULT[status], *([] if status == "ok" else [Cause.OOM, Cause.BUDGET])]
    lists: Any = st.lists(floats, min_size=number, max_size=number).map(tuple)
    counts = st.lists(st.sampled_from([0, 1, 2, 2**31]), min_size=number, max_size=number).map(tuple)
    arm = draw(st.one_of(texts, st.sampled_from(["bf16_eager", "rowwise_eager:again"])))
    return Measurement(
        suite=draw(texts), case_id=draw(texts), arm=arm, axes=draw(st.sampled_from(AXES)),
        metric=draw(st.sampled_from(["time_ms", "loss", "sqnr_db"])), status=status,
        seed=draw(st.one_of(st.integers(-9, 9), st.sampled_from([2**63, 10**30]))), baseline=draw(texts),
        regime=draw(st.sampled_from(["", "isolated"])), part=draw(texts), resolved=draw(facts), samples=draw(lists),
        rounds=draw(st.one_of(st.just(()), counts)), sample_clock_mhz=draw(st.one_of(st.just(()), lists, st.just((1.0,)))),
        reason="" if status == "ok" else "why " + draw(texts),
        flops=draw(st.dictionaries(texts, st.one_of(st.floats(), st.integers(), values), max_size=2)),
        bytes_moved=draw(st.one_of(st.none(), st.floats(), st.integers(), st.just(2**70))), timing=draw(facts),
        tries=draw(st.sampled_from([1, 2, 2**40])), cause=draw(st.sampled_from(causes)),
        arm_fields=draw(st.sampled_from([None, parse(arm)])),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(drawn=st.lists(rows(), min_size=1, max_size=4))
def test_what_append_takes_read_returns(
    drawn: list[Measurement], tmp_path_factory: pytest.TempPathFactory
) -> None:
    stored, frame = appended(tmp_path_factory.mktemp("runs") / "r", [HEALTHY, *drawn])
    assert frame.attrs["problems"] == []
    assert stored[0] is HEALTHY
    for given_row, kept, (_, read) in zip([HEALTHY, *drawn], stored, frame.iterrows(), strict=True):
        assert kept is given_row or (kept.status, kept.cause) == ("failed", Cause.UNSTORABLE)
        wrong = [name for name, value in kept.as_row().items() if not same(name, read[name], value)]
        assert not wrong, [(read[name], kept.as_row()[name]) for name in wrong]


UNSTORABLE: dict[str, tuple[dict[str, Any], str]] = {
    "flops that are no number": ({"flops": {"bf16": math.nan}}, "flops: bf16"),
    "infinite flops": ({"flops": {"bf16": math.inf}}, "flops: bf16"),
    "memory in words": ({"resolved": {"memory": "12 GiB"}}, "memory is '12 GiB'; expected object of number"),
    "parameters in words": ({"resolved": {"parameters": "7B"}}, "parameters is '7B'; expected number"),
    "an integer of 400 digits": ({"resolved": {"n": 10**400}}, "digits"),
    "150 levels": ({"resolved": {"n": nested(150)}}, "levels deep"),
    "20,000 levels": ({"timing": {"n": nested(20_000)}}, "RecursionError"),
    "an object of the suite's own": ({"resolved": {"dtype": object()}}, "not JSON serializable"),
    "bytes moved that are no number": ({"bytes_moved": math.inf}, "bytes_moved"),
    "a round beyond int32": ({"rounds": (0, 1, 2**31)}, "2147483648"),
    "a long name": ({"part": "x" * 200_000}, "200,000 bytes"),
    "a long case": ({"axes": '{"model":"' + "x" * 70_000 + '"}'}, "axes: 70,012 bytes"),
    "a median that is none": ({"samples": (math.inf, -math.inf), "rounds": (0, 1)}, "value"),
}


@pytest.mark.parametrize("case", UNSTORABLE)
def test_a_value_that_cannot_be_stored_fails_its_row_when_it_is_written(case: str, tmp_path: Path) -> None:
    changes, words = UNSTORABLE[case]
    bad = replace(HEALTHY, case_id="bad", **changes)
    (_, failed, _), frame = appended(tmp_path / "r", [HEALTHY, bad, replace(HEALTHY, arm="b")])
    assert frame["status"].tolist() == ["ok", "failed", "ok"]
    assert frame["cause"].tolist() == ["", "unstorable", ""]
    assert words in failed.reason
    assert frame["reason"][1] == failed.reason
    assert frame["case_id"][1] == "bad"
