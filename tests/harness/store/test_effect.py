"""One effect, whoever asks. Oracle: times with a known ratio; numpy and scipy for the intervals."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gate_fixtures import run, time_row
from report_fixtures import frame
from stored import row

from harness import store
from harness.gate.decide import UnitVerdict
from harness.gate.render import GateAnswer, as_json
from harness.gate.unit import UnitState
from harness.judge.diff import changes
from harness.store import stats
from harness.store.compare import METHODS, paired_ratios
from harness.store.differences import ENV_ID_FIELDS, comparable, differences, in_words
from harness.timing.closures import Compared
from harness.timing.config import Timing
from harness.training.ab.result import ARMS, TrialResult, TrialRound

if TYPE_CHECKING:
    from pathlib import Path

    from harness.store.measurement import Measurement

BF16 = {"bf16": "", "bf16:again": "bf16"}  # with its A/A control
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
        *(replace(time_row(1, times(1.0, 1), arm=arm), baseline=base) for arm, base in BF16.items()),
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


@dataclass(frozen=True)
class Drawn:
    """Rounds of bf16, bf16 again and FP8, and the conditions under which FP8 was timed."""

    samples: dict[str, list[float]]
    conditions: dict[str, object]

    @classmethod
    def of(cls, random: np.random.Generator) -> Drawn:
        """Speedups near 1, noises narrow and wide, a control that may be far off or missing, few rounds."""
        count, noise = random.choice([2, 3, 5, 12]), random.choice([0.0005, 0.005, 0.03])
        level = {
            "base": 1.0,
            "base:again": random.choice([1, 1, 1, 1.15]),
            "fp8": random.choice([0.8, 0.98, 1, 1.04]),
        }
        samples = {arm: list(x * np.exp(random.normal(0, noise, count))) for arm, x in level.items()}
        samples["base:again"] *= random.random() < 0.8
        condition = random.choice(["", "", "contended", "throttled"])
        return cls(
            samples, {"method": "cuda_events", "l2": "cold"} | ({str(condition): True} if condition else {})
        )

    def row(self, arm: str) -> Measurement:
        """A stored row of an arm; of one without samples, a failed one."""
        about = {"method": "cuda_events", "l2": "cold"} | (self.conditions if arm == "fp8" else {})
        why = "" if self.samples[arm] else "gone"
        return row("c", arm, self.samples[arm], baseline="base" * (arm != "base"), timing=about, reason=why)

    def timing(self, arm: str) -> Timing:
        """The same rounds as `harness.measure` has them."""
        own = self.conditions if arm == "fp8" else {}
        flags = {name: bool(own.get(name)) for name in ("throttled", "contended")}
        samples, failure = tuple(self.samples[arm]), "" if self.samples[arm] else "gone"
        return Timing(
            samples, tuple(range(len(samples))), (), "isolated", "cuda_events", "cold", 1, 1.0, "time_cap", "converged",
            failure=failure, **flags,
        )  # fmt: skip

    def trial(self) -> TrialResult:
        """The same rounds as a trial has them."""
        names = dict(zip(("base", "base:again", "fp8"), ARMS, strict=True))
        rounds = [
            TrialRound(i, {names[arm]: (1e3 * own[i],) for arm, own in self.samples.items() if own})
            for i in range(len(self.samples["base"]))
        ]
        return TrialResult("rowwise", "cuda", tuple(rounds), proved=True, proof="planted")


@pytest.mark.parametrize("seed", range(40))
def test_measure_a_trial_diff_and_stored_rows_give_one_answer(seed: int, tmp_path: Path) -> None:
    """Oracle: `paired_ratios` of the same rounds as stored rows."""
    drawn = Drawn.of(np.random.default_rng(seed))
    (stored,) = paired_ratios(frame(tmp_path / "a", list(map(drawn.row, drawn.samples)))).to_dict("records")
    timings = {arm: drawn.timing(arm) for arm in drawn.samples}
    found = Compared("base", timings, timings.pop("base:again"), {}, "cuda")
    mine = found.to_frame().loc["fp8"].to_dict()
    names = ("speedup", "low", "high", "rounds", "verdict", "reason")
    assert [mine[name] for name in names] == [
        pytest.approx(stored[name], nan_ok=True) if isinstance(stored[name], float) else stored[name]
        for name in names
    ]
    assert found.floor == pytest.approx(stored["floor"], nan_ok=True)
    if not stored["condition"]:  # the steps of a trial that were disturbed are left out block by block
        may = {"on": {"faster"}, "off": {"slower", "same"}, "cannot tell": {"unclear", "same", "slower"}}
        assert stored["verdict"] in may[drawn.trial().decision]
    runs = [
        frame(tmp_path / str(i), [replace(drawn.row(arm), arm="fp8", baseline="")])
        for i, arm in enumerate(("base", "fp8"))
    ]
    (moved,) = changes(*runs).times
    assert moved.cause == stored["condition"], "one run under a condition is as two arms of which one is"
    if moved.cause:
        assert moved.verdict == "unclear"


def test_times_by_two_methods_decide_nothing_in_any_of_them(tmp_path: Path) -> None:
    """Oracle: `paired_ratios`, which has compared no two methods ever since."""
    before = [time_row(1, times(1.0, 1))]
    after = [replace(time_row(1, times(0.7, 2)), timing={"method": "perf_counter"})]
    judgement = run(tmp_path, before, after)
    (moved,) = changes(*(store.read(tmp_path / side) for side in ("baseline", "candidate"))).times
    assert (moved.verdict, moved.cause) == ("unclear", METHODS)
    assert [(f.verdict, f.state) for f in judgement.findings if f.rounds] == [
        (UnitVerdict.INCONCLUSIVE, UnitState.EXCLUDED)
    ]


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
