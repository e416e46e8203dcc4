"""One effect, whoever asks. Oracle: times with a known ratio; numpy and scipy for the intervals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gate_fixtures import run, time_row

from harness import store
from harness.gate.render import GateAnswer, as_json
from harness.judge.diff import changes
from harness.store import stats
from harness.store.compare import paired_ratios
from harness.store.differences import ENV_ID_FIELDS, comparable, differences, in_words

if TYPE_CHECKING:
    from pathlib import Path

NARROW = 0.0003  # of the logarithms: the interval is a thousandth wide


def times(factor: float, seed: int, rounds: int = 12) -> list[float]:
    noise = np.random.default_rng(seed).normal(0, NARROW, rounds)
    return list(factor * np.exp(noise - noise.mean()))


@pytest.mark.parametrize(
    ("factor", "direction", "verdict"),
    [
        (1.05, "slower", "INCONCLUSIVE"),
        (1.25, "slower", "REGRESSED"),
        (0.95, "faster", "INCONCLUSIVE"),
    ],
)
def test_report_diff_and_gate_see_the_same_effect_and_say_whose_policy_decides(
    factor: float, direction: str, verdict: str, tmp_path: Path
) -> None:
    """+5.0 % with a narrow interval is slower in all three.

    That one stored process a side decides no such ratio is the gate's policy, and is said.
    """
    before, after = [time_row(1, times(1.0, 1))], [time_row(1, times(factor, 2))]
    judgement = run(tmp_path, before, after, session="")
    frames = [store.read(tmp_path / side) for side in ("baseline", "candidate")]
    (moved,) = changes(*frames).times
    both = [
        time_row(1, times(1.0, 1), arm="bf16", baseline="bf16"),
        time_row(1, times(factor, 2)),
    ]
    run_of = run(tmp_path / "one", both, both, session="")
    (pair,) = paired_ratios(run_of.baseline.first).to_dict("records")
    finding = next(f for f in judgement.findings if f.rounds)
    assert finding.decision.effect is not None
    assert [pair["verdict"], moved.verdict, finding.decision.effect.direction] == [direction] * 3
    assert [1 / pair["speedup"], moved.ratio, finding.decision.effect.ratio] == pytest.approx(
        [factor] * 3, rel=1e-9
    )
    assert str(finding.verdict) == verdict
    told = json.loads(as_json(GateAnswer.of(judgement)))["findings"][0]
    assert told["direction"] == direction
    assert told["policy"].startswith("policy of the gate: changes up to ")
    assert changes(*frames).data()["policy"].startswith("policy of diff: ")
    if verdict == "INCONCLUSIVE":
        assert finding.reason.startswith("one process a side cannot tell")


def test_many_at_once_are_each_alone() -> None:
    random = np.random.default_rng(1)
    rows = [random.normal(0, 1, n) for n in (3, 0, 5, 3, 1)]
    for one, logs in zip(stats.all_paired(rows), rows, strict=True):
        alone = stats.paired(logs)
        assert str(one) == str(alone)
        assert one.direction == alone.direction


# What differs between environments


def test_one_list_of_differences_whoever_asks() -> None:
    one = {"driver": "570", "torch": "2.12", "numpy": "1", "git_commit": "a", "gpu": "H200"}
    other = {"driver": "575", "torch": "2.13", "numpy": "2", "git_commit": "b", "gpu": "H200", "mig": True}
    found = differences((one, other))
    assert list(found) == ["mig", "driver", "torch", "git_commit", "numpy"]
    assert found["mig"] == (None, True)
    assert list(comparable(one, other)) == [n for n in ENV_ID_FIELDS if n in ("mig", "driver", "torch")]
    assert in_words(comparable(one, other), most=2) == "mig: None != True, driver: 570 != 575 and 1 more"
    assert differences((one, one, other), ("driver",)) == {"driver": ("570", "570", "575")}
    assert in_words({}) == ""
