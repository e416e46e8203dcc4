"""Cards that compute wrongly. Oracles: fleets with planted checksums; a bit that is flipped in a real product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fleet_fixtures import CHECK, card, env, judged, names
from report_fixtures import write_run
from torch import Tensor

from harness.__main__ import main
from harness.engine.bench import Bench, Setting
from harness.engine.plan import PlannedCase
from harness.engine.rows import row
from harness.store.cause import Cause
from harness.store.measurement import Measurement
from harness.suites import checksum
from harness.timing.rounds import TimingConfig, timer_for

PLANNED = PlannedCase("checksum", checksum, CHECK, ("bf16_eager",))
QUICK = TimingConfig(
    min_rounds=1,
    max_rounds=1,
    min_samples=1,
    min_seconds=0.0,
    block_ms=0.1,
    warmup_min_iterations=1,
    warmup_min_seconds=0.0,
    warmup_max_seconds=0.1,
)


def suspects(folder: Path) -> list[tuple[str, str]]:
    (group,) = judged(folder)
    return [(o.card[:4], o.kind) for o in group.outliers]


def measured(monkeypatch: pytest.MonkeyPatch, wrong_at: int | None) -> list[Measurement]:
    """The rows of the suite on this CPU; in one repeat of the product a bit is flipped."""
    make, calls = checksum._product, []

    def product(a: Tensor, b: Tensor, arm: str) -> Callable[[], Tensor]:
        multiply = make(a, b, arm)

        def run() -> Tensor:
            result = multiply().clone()
            if len(calls) == wrong_at:
                result.view(torch.int16)[3, 3] ^= 1
            calls.append(1)
            return result

        return run

    with monkeypatch.context() as patched:
        patched.setattr(checksum, "_product", product)
        return Bench(Setting("cpu", QUICK, control=False), timer_for("cpu")).measure(PLANNED)


@pytest.mark.parametrize("well", [0, 1, 3])
def test_a_card_that_contradicts_itself_is_corrupt_by_itself(
    well: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With any number of others, and none of these is suspect; its first result, the right one, is no vote."""
    for name in (*names(well), "beef"):
        rows = measured(monkeypatch, 5 if name == "beef" else None)
        write_run(tmp_path / name, [rows], run_id=name, sweep="fleet", env=env(name))
    (group,) = judged(tmp_path)
    (outlier,) = [o for o in group.outliers if o.kind not in ("slow", "fast")]  # times are a shared CPU's
    assert (outlier.card[:4], outlier.suite, outlier.kind) == ("beef", "checksum", "corrupt")
    assert "other bits than the first" in outlier.reason
    assert main(["fleet", str(tmp_path)]) == 1
    assert "1 card computed wrongly" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(Cause.NUMERICS, "corrupt"), (Cause.RUN, "fails")],
)
def test_a_failed_row_of_the_suite_is_wrong_bits_or_another_failure(
    cause: Cause, kind: str, tmp_path: Path
) -> None:
    for name in (*names(3), "beef"):
        rows = [row(PLANNED, "bf16_eager", "ok", samples=(1.0,), regime="isolated")]
        if name == "beef":
            rows = [row(PLANNED, "bf16_eager", "failed", reason="why", cause=cause)]
        write_run(tmp_path / name, [rows], run_id=name, sweep="fleet", env=env(name))
    assert suspects(tmp_path) == [("beef", kind)]


@pytest.mark.parametrize("order", [("badbad", "c0ffee"), ("c0ffee", "badbad")], ids=str)
def test_wrong_bits_stay_wrong_whatever_comes_later(order: tuple[str, str], tmp_path: Path) -> None:
    for night, own in zip(("first", "second"), order, strict=True):
        for name in (*names(4), "beef"):
            card(tmp_path / night, name, checksum=own if name == "beef" else "c0ffee")
    assert suspects(tmp_path) == [("beef", "corrupt")]


def test_a_refuted_result_stays_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for night, wrong_at in (("first", 5), ("second", None)):
        rows = measured(monkeypatch, wrong_at)
        write_run(tmp_path / night, [rows], run_id=night, sweep="fleet", env=env("beef"))
    assert suspects(tmp_path) == [("beef", "corrupt")]


@pytest.mark.parametrize(
    ("given", "suspect"),
    [
        ({"aaaa": ["1"], "bbbb": ["2"]}, ["aaaa", "bbbb"]),  # no majority: both
        ({"aaaa": ["1"], "bbbb": ["1", "2"]}, ["bbbb"]),
        ({"aaaa": ["1", "2"]}, ["aaaa"]),  # alone, of two nights
        ({"aaaa": ["1", "2"], "bbbb": ["2", "1"]}, ["aaaa", "bbbb"]),
        (
            {"aaaa": ["1", "2"], "bbbb": ["1"], "cccc": ["2"]},
            ["aaaa", "bbbb", "cccc"],
        ),  # two of three for either
        ({"aaaa": ["1"]}, []),
        ({"aaaa": ["1"], "bbbb": ["1"], "cccc": ["2"]}, ["cccc"]),
    ],
    ids=str,
)
def test_most_cards_are_right(given: dict[str, list[str]], suspect: list[str], tmp_path: Path) -> None:
    for name, values in given.items():
        for night, value in enumerate(values):
            card(tmp_path / str(night), name, checksum=value)
    assert suspects(tmp_path) == [(name, "corrupt") for name in suspect]
