"""Studies that measure by a suite of their own. Oracles: their published runs, and faults planted on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import accumulation
import codes
import outliers
import own_suite
import pytest
import torch
from torch import Tensor

from fp8core.cast import cast_saturating
from fp8core.tensor import Float8Tensor, quantize
from harness import store
from harness.store.case import Case
from harness.suites import SUITES

if TYPE_CHECKING:
    from fp8core.formats import Format

PUBLISHED = Path(__file__).parents[2] / "results" / "published" / "cpu" / "2026-11-21"
SUM = Case.of("accumulation", {"K": 2048, "data": "positive"})


@pytest.mark.parametrize(
    ("suite", "words", "metric"),
    [
        (outliers, ["axes.data=[outliers_1e4]", "arms=[rowwise,blockwise]"], "bulk_sqnr_db"),
        (codes, ["axes.source=[bf16]", "arms=[plain,saturating]"], "mismatches"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_published_run_is_made_again(
    suite: ModuleType, words: list[str], metric: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same cases and arms, by the same ids, give the figures of the stored rows."""
    name = suite.__name__
    monkeypatch.setattr(SUITES, "data", dict(SUITES.data))
    monkeypatch.chdir(tmp_path)
    assert own_suite.run(name, suite, [*words, "device=cpu", "report=false", "quiet=true"]) == 0

    def figures(folder: Path) -> dict[tuple[str, str], float]:
        rows = store.read([folder])
        rows = rows[(rows["metric"] == metric) & (rows["status"] == "ok")]
        return dict(zip(zip(rows["case_id"], rows["arm"], strict=True), rows["value"], strict=True))

    made, published = figures(tmp_path / "results"), figures(PUBLISHED / name)
    assert made
    for of, value in made.items():
        assert value == pytest.approx(published[of], rel=1e-6), of


def checked(suite: ModuleType, which: Case, arm: str) -> Any:
    return suite.build(which, arm, "cpu").check()


def half(a: Any, b: Any, *_: object, **__: object) -> Tensor:
    """The second half of K forgotten."""
    kept = a.qdata.shape[1] // 2
    return (a.qdata.double()[:, :kept] @ b.qdata.double()[:kept] * a.scale_inv * b.scale_inv).float()


def saturating(x: Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
    """Deaf to a row's outlier."""
    right = quantize(x, *args, **kwargs)
    scale_inv = right.scale_inv / 16
    return Float8Tensor((x.float() / scale_inv).clamp(-448, 448).to(right.qdata.dtype), scale_inv, x.dtype)


def one_code_off(x: Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
    right = quantize(x, *args, **kwargs)
    right.qdata.view(torch.uint8)[0, 0] ^= 1
    return right


def ties_fall(x: Tensor, fmt: Format) -> Tensor:
    return cast_saturating(x.float() * (1 - 2**-20), fmt)  # a tie, and what lies just above it


WRONG_CODES = {  # inputs -> a cast that is wrong on them alone
    "overflow": lambda x, fmt: x.float().clamp(-fmt.max / 2, fmt.max / 2).to(fmt.dtype),
    "nan": lambda x, fmt: torch.nan_to_num(x.float()).to(fmt.dtype),
    "normal": ties_fall,
    "subnormal": lambda x, fmt: cast_saturating(torch.where(x.abs() < fmt.min_normal, 0, x), fmt),
}


def faults() -> Iterator[tuple[ModuleType, Case, str, str, Any, str]]:
    yield accumulation, SUM, "slow", "scaled_mm", half, "short accumulator"
    for data in ("randn", "outliers_1e4"):
        which = Case.of("outliers", {"data": data, "role": "output", "M": 128, "K": 1024, "N": 64})
        for wrong in (saturating, one_code_off):
            yield outliers, which, "rowwise", "quantize", wrong, "codes differ"
    for inputs, cast in WRONG_CODES.items():
        which = Case.of("codes", {"source": "bf16", "dtype": "e4m3fn", "inputs": inputs})
        yield codes, which, "saturating", "cast_saturating", cast, "0 expected"


@pytest.mark.parametrize(("suite", "which", "arm", "where", "wrong", "words"), list(faults()))
def test_what_is_wrong_is_refused(
    suite: ModuleType,
    which: Case,
    arm: str,
    where: str,
    wrong: Any,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert checked(suite, which, arm).ok
    monkeypatch.setattr(suite, where, wrong)
    numerics = checked(suite, which, arm)
    assert not numerics.ok
    assert re.search(words, numerics.reason), numerics.reason


@pytest.mark.parametrize("data", ["positive", "randn"])
@pytest.mark.parametrize("mode", accumulation.FIGURES)
def test_accumulation_names_the_sum_that_was_formed(
    mode: Any, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def multiplied(a: Any, b: Any, *_: object, **__: object) -> Tensor:
        product = accumulation.summed(a.qdata.double(), b.qdata.double(), mode)
        return (product * a.scale_inv.double() * b.scale_inv.double()).float()

    monkeypatch.setattr(accumulation, "scaled_mm", multiplied)
    work = accumulation.build(Case.of("accumulation", {"K": 2048, "data": data}), "slow", "cpu")
    numerics = work.check()
    assert numerics.ok, numerics.reason
    assert work.resolved["agrees_best_with"] == mode
    assert numerics.values[accumulation.FIGURES[mode]] > 120


@pytest.mark.parametrize(
    ("suite", "which", "arm"),
    [
        (accumulation, Case.of("accumulation", {"K": 100, "data": "randn"}), "slow"),
        (accumulation, SUM, "fast"),
        (accumulation, SUM, "triton_fast"),
        (codes, Case.of("codes", {"source": "bf16", "dtype": "e4m3fn", "inputs": "nan"}), "kernels"),
        (outliers, Case.of("outliers", {"role": "grad_weight", "M": 128}), "rowwise_with_gw_hp"),
    ],
)
def test_an_arm_that_cannot_run_here_is_skipped(suite: ModuleType, which: Case, arm: str) -> None:
    """On a CPU, by the sizes, or since the recipe casts nothing there."""
    assert suite.unsupported(which, arm, "cpu") is not None
