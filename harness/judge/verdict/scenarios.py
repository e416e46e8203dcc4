"""Scenarios of the self-test: what is planted, beside its honest twin, and the error rates that are promised for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from harness.judge.verdict.simulated import Scenario

SCATTER = (
    3.1  # standard deviations of a binomial rate that a bound allows for: 0.1 % of correct rates lie beyond
)
NUMBERS = (3, 5, 8, 20, 60)  # of seeds
SPREADS = (0.25, 0.6, 0.8)  # between seeds, in margins


@dataclass(frozen=True, slots=True)
class Bound:
    """A promised rate of one row.

    Attributes:
        what: an outcome of the verdict, or a gate with a status: "L4 PASS".
        limit: the rate that is promised.
        at_least: whether the limit is the least rate, not the largest.
    """

    what: str
    limit: float
    at_least: bool = False

    def is_kept(self, rate: float, draws: int) -> bool:
        """Whether a rate over so many draws agrees with the limit, but for the scatter of the draws."""
        scatter = SCATTER * math.sqrt(self.limit * (1 - self.limit) / draws)
        return rate >= self.limit - scatter if self.at_least else rate <= self.limit + scatter


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a group, what is planted and what is promised."""

    group: str
    scenario: Scenario
    bounds: tuple[Bound, ...] = ()


NEVER_FAILS = Bound("FAIL", 0.01)
HARDLY_PASSES = Bound("PASS", 0.05)
LEVEL = (HARDLY_PASSES, Bound("L4 PASS", 0.05), Bound("L4h PASS", 0.05), Bound("L4 FAIL", 0.05))


def _with_twin(fault: Scenario, twin: Scenario, *bounds: Bound) -> tuple[Row, Row]:
    return Row("planted", fault, bounds), Row("planted", twin, (NEVER_FAILS,))


def _caught(rate: float = 0.95) -> Bound:
    return Bound("FAIL", rate, at_least=True)


PLANTED: tuple[Row, ...] = (
    Row("planted", Scenario("no gap"), (NEVER_FAILS, Bound("PASS", 0.95, at_least=True))),
    Row("planted", Scenario("gap of half a margin", offset=0.5), (NEVER_FAILS,)),
    Row("planted", Scenario("gap of minus one margin", offset=-1.0), LEVEL),
    Row("planted", Scenario("gap of two margins", offset=2.0), (HARDLY_PASSES, _caught())),
    *_with_twin(
        Scenario("one spike of 1 nat in one run", one_spike=(1.0, 0.0)),
        Scenario("one spike of 1 nat in one run, in both arms", one_spike=(1.0, 1.0)),
    ),
    Row(
        "planted",
        Scenario("one spike of 1 nat in one run of the control", one_spike=(0.0, 1.0)),
        (NEVER_FAILS,),
    ),
    *_with_twin(
        Scenario("early bump of 2 % that heals", bump=(0.02, 0.0)),
        Scenario("early bump of 2 % in both arms", bump=(0.02, 0.02)),
        Bound("L3 PASS", 0.05),
    ),
    *_with_twin(
        Scenario("early bump of 10 % that heals", bump=(0.10, 0.0)),
        Scenario("early bump of 10 % in both arms", bump=(0.10, 0.10)),
        HARDLY_PASSES,
    ),
    *_with_twin(
        Scenario("drift to half a margin", drift=(0.5, 0.0)),
        Scenario("drift to half a margin in both arms", drift=(0.5, 0.5)),
    ),
    *_with_twin(
        Scenario("drift to two margins", drift=(2.0, 0.0)),
        Scenario("drift to two margins in both arms", drift=(2.0, 2.0)),
        HARDLY_PASSES,
    ),
    *_with_twin(
        Scenario("divergence by 0.1 nats at the end", divergence=(0.1, 0.0)),
        Scenario("divergence by 0.1 nats in both arms", divergence=(0.1, 0.1)),
        HARDLY_PASSES,
    ),
    *_with_twin(
        Scenario("NaN in one run", nan=(True, False)),
        Scenario("NaN in one run, in both arms", nan=(True, True)),
        HARDLY_PASSES,
        _caught(),
    ),
    *_with_twin(
        Scenario("copies of one pair of runs", copies="runs", offset=0.5),
        Scenario("different runs", offset=0.5),
        HARDLY_PASSES,
        NEVER_FAILS,
    ),
    Row("planted", Scenario("copies of one control run", copies="control"), (HARDLY_PASSES,)),
)

EQUIVALENCE: tuple[Row, ...] = tuple(
    Row("equivalence", Scenario(f"gap {offset:g} M", seeds=seeds, sd=sd, offset=offset), bounds)
    for offset, bounds in ((0.0, (NEVER_FAILS,)), (1.0, LEVEL))
    for sd in SPREADS
    for seeds in NUMBERS
)
HEAVY_TAILS: tuple[Row, ...] = tuple(
    Row(
        "heavy tails",
        Scenario(f"gap {offset:g} M, Student t noise", seeds=seeds, sd=sd, offset=offset, tails="t3"),
        bounds,
    )
    for offset, bounds in ((0.0, (NEVER_FAILS,)), (1.0, LEVEL))
    for sd in (0.25, 0.8)
    for seeds in NUMBERS
)
ACROSS: tuple[Row, ...] = tuple(
    Row(
        "correlated seeds",
        Scenario(
            f"gap {offset:g} M, correlation {across:g}", seeds=seeds, sd=0.6, offset=offset, across=across
        ),
    )
    for offset in (0.0, 1.0)
    for across in (0.2, 0.5)
    for seeds in (5, 20)
)
_SAME_LAW = tuple(
    Scenario(f"{rate:g} spikes a run in both arms{said}", spikes=(rate, rate), clumping=clumping)
    for rate in (0.4, 2.0)
    for clumping, said in ((0.0, ""), (2.0, ", clumped"))
)
SPIKES: tuple[Row, ...] = (
    *(
        Row("spikes, same law", replace(scenario, seeds=seeds), (NEVER_FAILS,))
        for scenario in _SAME_LAW
        for seeds in (3, 5, 6, 7, 10, 20)
    ),
    *(
        Row(
            "spikes, control only",
            Scenario("2 spikes a run in the control", seeds=seeds, spikes=(0.0, 2.0)),
            (NEVER_FAILS,),
        )
        for seeds in (5, 20)
    ),
    *(
        Row(
            "spikes, power",
            Scenario(
                f"{times:g} times the control's 0.4 spikes a run", seeds=seeds, spikes=(0.4 * times, 0.4)
            ),
        )
        for times in (2, 3, 5)
        for seeds in (5, 10)
    ),
    *(
        Row(
            "spikes, power",
            Scenario(
                "one spike in every run, none in the control", seeds=seeds, spike_in_every_run=(True, False)
            ),
        )
        for seeds in (5, 7, 10)
    ),
)
ROWS: tuple[Row, ...] = (*PLANTED, *EQUIVALENCE, *HEAVY_TAILS, *ACROSS, *SPIKES)
