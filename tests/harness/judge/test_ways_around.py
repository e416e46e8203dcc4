"""Ways around the rule that a sceptic found: each passed once. Oracle: what is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

import harness
from harness.store.errors import UsageError

Frames = list[pd.DataFrame]


def curve(seed: int, T: int = 200, sd: float = 0.00125) -> pd.DataFrame:
    """A fall from 4.2 to 2.04 nats, with noise at every value."""
    x = np.arange(1, T + 1) / T
    noise = np.random.default_rng(seed).normal(size=T) * sd
    return pd.DataFrame(
        {
            "step": np.arange(1, T + 1) * 10,
            "val_loss": (2 + 2 * np.exp(-4 * x) - 0.075 * np.log(x)) * (1 + noise),
        }
    )


def side(first: int, n: int = 5, **more: Any) -> Frames:
    return [curve(first + i, **more) for i in range(n)]


def ends(frames: Frames, count: int, times: float, runs: int = 9) -> Frames:
    """The last so many values of so many runs, times so much."""
    for frame in frames[:runs]:
        frame.iloc[-count:, 1] *= times
    return frames


def each(frames: Frames, **columns: Any) -> Frames:
    return [
        frame.assign(**{k: made(frame, i) if callable(made) else made for k, made in columns.items()})
        for i, frame in enumerate(frames)
    ]


def paired(digits: int) -> tuple[Frames, Frames]:
    base = [
        curve(0, sd=0).assign(
            seed=i,
            val_loss=lambda f, i=i: f["val_loss"] * (1 + np.random.default_rng(i).normal(size=200) * 0.003),
        )
        for i in range(5)
    ]
    return base, [frame.round(digits) for frame in base]


def train(seed: int) -> Callable[[pd.DataFrame, int], Any]:
    return lambda frame, i: curve(seed + i, sd=0.003)["val_loss"]


def holes(frame: pd.DataFrame, i: int) -> pd.Series[Any]:
    return curve(400 + i, sd=0.003)["val_loss"].where(np.arange(200) % 10 != 3)


LOST = [300, 310, 320, 330, 900, 910, 1500, 1510, 1520, 1530]
WAYS: dict[str, tuple[Frames, Frames, dict[str, Any], str]] = {
    "all end far up": (side(0), ends(side(100), 1, 15), {}, "ends_high"),
    "two of five end far up": (side(0, T=10, sd=7e-4), ends(side(100, T=10, sd=7e-4), 1, 4, 2), {}, "ends_high"),
    "one run leaves at its end": (side(0, 3, T=1000), ends(side(100, 3, T=1000), 8, 4, 1), {}, "ends_high"),
    **{
        name: (each(side(0), **{name: 1}), each(side(100), **{name: 8}), {}, "differs")
        for name in ("dataset_name", "data_path", "rope_scaling", "num_timesteps", "tokens_per_step", "epoch", "data.id", "finance_split", "rank", "data_seed")
    },
    "a rate of each run": (each(side(0), lr=lambda f, i: i + 1), each(side(100), lr=lambda f, i: 10 * (i + 1)), {}, "differs"),
    "twice the tokens": (each(side(0), tokens=lambda f, i: f["step"]), each(side(100), tokens=lambda f, i: 2 * f["step"]), {}, "differs"),
    "NaN in the training loss": (each(side(0), train_loss=train(300)), each(side(100), train_loss=holes), {}, "other_loss_column"),
    "a column lacks in one run": ([*side(0, 1), *each(side(1, 4), train_loss=train(300))], each(side(100), train_loss=train(400)), {}, "other_loss_column"),
    "norms that are infinite": (each(side(0), grad_norm=train(300)), each(side(100), grad_norm=lambda f, i: train(400)(f, i).where(f["step"] % 40 > 0, np.inf)), {}, "grad_norm"),
    "no loss at ten steps": (each(side(0), lr=1), each(side(100), lr=1, val_loss=lambda f, i: f["val_loss"].where(~f["step"].isin(LOST))), {}, "missing"),
    "between the common steps": (side(0), [pd.concat([f, f.assign(step=f["step"] - 5, val_loss=3 * f["val_loss"])]).sort_values("step") for f in side(100)], {}, "off_grid"),
    "a target that was passed": (side(0), [f[f["step"] <= 1200] for f in side(100)], {"target": 2.5}, "stopped_early"),
    "a rate as the cluster": (each(side(0), lr=1), each(side(100), lr=3), {"cluster": "lr"}, "differs"),
    "the base's files, rounded": (*paired(4), {"paired": "seed"}, "equals_base"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_no_way_around(way: str) -> None:
    base, candidate, options, code = WAYS[way]
    found = harness.verdict(base, candidate, **options)
    assert (found.outcome, code in found.codes) == ("INCONCLUSIVE", True), found.codes


def test_what_was_no_way_around_passes_and_says_what_was_compared() -> None:
    assert harness.verdict(side(0), ends(side(100), 1, 1.5, 1)).outcome == "PASS"  # one lone spike
    both = [each(side(first), cfg=lambda f, i: [{"a": [1]}] * 200) for first in (0, 100)]
    assert harness.verdict(*both).outcome == "PASS"
    found = harness.verdict(each(side(0), recipe="bf16"), each(side(100), recipe="fp8"))
    assert "recipe bf16 against fp8" in found.lines()[0]
    waived = harness.verdict(side(0), side(100), differs=["copies", "nonsense"])
    assert "known to differ" not in waived.lines()[0]  # nothing was waived
    for wrong in ({"differs": "lr"}, {"window": 2.5}):
        with pytest.raises(UsageError):
            harness.verdict(side(0), side(100), **wrong)
