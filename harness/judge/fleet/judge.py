"""What a fleet's rows say: how far cards of one model lie apart, which of them is out of line, which computes wrongly.

A card is a GPU of a host, both known by a hash (`gpu_uuid_hash`, `host_hash`); where a run was measured on a CPU, the host
is the card. Cards are alike if model, software and code agree. Of a case that a card measured several times the
newest attempt counts, whole; but a card that was wrong once has been wrong, whatever later attempts give.

    slow, fast   in a suite and regime, the median of log(time / median of the cards) lies beyond the limit
    spread       the fastest and the slowest card lie too far apart, though none is far from the middle; of two cards, this
                 is all that can be said
    low          cards may be alike and slow: the best large product is below half of what such cards reach by the peak
                 table, or the clock far below that of the published rates
    fails        something fails here that runs on at least half of the cards that tried it; a checksum that fails always counts
    corrupt      a product of fixed operands was not the exact one, not the one that the card gave a moment before, or not
                 that of most of its like

**Limits.** The tolerance is what cards that are well may differ by: 5 %, taken as 2.44 standard deviations of 2 %. It is widened
for the number of comparisons (Bonferroni, normal scores), and never less than 3.5 robust standard deviations of the scores
at hand (1.4826 times the median absolute deviation; Iglewicz and Hoaglin, How to Detect and Handle Outliers, ASQC 1993).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge import gathered
from harness.judge.fleet.cards import CHECKSUM, card_id, card_name
from harness.machine.hardware import of_env
from harness.machine.mfu import is_fp8
from harness.store.case import without_controls
from harness.store.compare import SECONDS, TIMES
from harness.store.differences import differences
from harness.store.errors import REFUTED
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    Card = str


ENOUGH = 3  # cards, below which the odd one is not known: two are compared with each other alone
# What decides how fast code is, or which kernel runs: cards that differ here are not compared
SOFTWARE = ("torch", "triton", "cuda", "hip", "cublas", "cudnn", "torchao", "threads", "gpu_sm_count")
# What may differ between cards that are
VARIES = ("driver", "power_limit_w", "max_sm_clock_mhz", "ecc", "git_commit", "git_dirty", "os", "python")
RATE = (
    0.04  # of healthy fleets may have a card out of line; of three cards, one of which is the middle, 0.05 do
)
SPREAD_RATE = 0.01  # may have scores that spread too far
TOLERANCE_SDS = 2.44  # standard deviations of healthy cards in a tolerance: log(1.05) / 0.02
SIGMAS = 3.5
MAD_TO_SD = 1.4826  # of a normal distribution: 1 / quantile(0.75)
PRODUCTS = ("gemm", "ceilings", CHECKSUM)  # suites whose times are those of one product
LONG_S = 1e-4  # at the peak, above which no launch explains a slow product
REACHES = 0.7  # of its published peak: a good product on a model of which nobody published one
LEAST = 0.5  # of what its model reaches; a card limited by power loses less
LEAST_CLOCK = 0.6  # of the published rates' clock
LEAST_CLOCK_SMALL, SMALL_W = 0.4, 150  # a card of 72 W runs at about half of it
_PLACE = ["suite", "regime"]  # of a score
_ARM = ["suite", "arm", "regime"]  # which a card has to have measured to be judged by
_KEY = ["suite", "case_id", "arm", "metric", "regime"]  # of a measurement
_BITS = ["case_id", "arm"]
_RUN = ["suite", "case_id", "arm"]  # rows of an arm that never ran have no regime


@dataclass(frozen=True, slots=True)
class Outlier:
    """A card that is out of line, in one suite and regime or by its results (regime "")."""

    card: Card
    suite: str
    regime: str
    kind: str  # see the module
    off: float  # its time over the middle one, minus 1; 0 where no time is meant
    reason: str


@dataclass(frozen=True, slots=True)
class Spread:
    """How far the cards lie apart in one arm of a suite, in one regime.

    Attributes:
        cards, cases: that were compared.
        low, high: fastest and slowest card's time over the middle one, minus 1, at the median of the cases.
        slowest: name of the slowest.
        speedup: over the arm's baseline, geometric mean over the cases: of the middle card; None for a baseline.
        slowest_speedup: of the card where it is smallest: what may be claimed of every card of this fleet.
    """

    suite: str
    regime: str
    arm: str
    cards: int
    cases: int
    low: float
    high: float
    slowest: Card
    speedup: float | None
    slowest_speedup: float | None


@dataclass(frozen=True, slots=True)
class CardGroup:
    """Alike cards and what is found among them.

    Attributes:
        software: that all of them ran, in words.
        cards: their names; cards with one name and other software are in another group.
        not_judged: why no card can be judged by its times; empty where some can.
        differences: between them: field -> value -> names of the cards.
        checksums_compared: results that at least two cards have a checksum of.
        judged_by_times: cards that were judged by every arm, suite and regime that others were judged by.
        judged_by_results: by what the suite `checksum` gave.
        levels: of the cards that the peak table has, the best large product as a share of what such a card reaches.
        lacking: of the cards that were judged by some of the times alone, the others, as "suite arm regime".
    """

    model: str
    software: str
    cards: list[Card]
    not_judged: str
    spreads: list[Spread]
    outliers: list[Outlier]
    differences: dict[str, dict[str, list[Card]]]
    checksums_compared: int
    judged_by_times: list[Card]
    judged_by_results: list[Card]
    levels: dict[Card, float]
    lacking: dict[Card, list[str]]


def judge(frame: pd.DataFrame, tolerance: float) -> list[CardGroup]:
    """The groups of alike cards, the largest first.

    Args:
        frame: rows of the store with all attempts: cards that were given one run id must not replace each other.
        tolerance: deviation that is no fault, 0.05 for 5 %.
    """
    rows = without_controls(frame).sort_values("attempt", kind="stable", ignore_index=True)
    rows = rows.fillna({"regime": "", "attempt": 0})
    envs = {text: parse(text) for text in rows["env"].unique()}
    names = {card_id(env): card_name(env) for env in envs.values()}
    rows["card"] = rows["env"].map({text: names[card_id(env)] for text, env in envs.items()})
    alike = rows["env"].map({text: _alike(env) for text, env in envs.items()})
    found = [_group(own, tolerance) for _, own in rows.groupby(alike)]
    return sorted(found, key=lambda group: (-len(group.cards), group.cards[0]))


def limit(comparisons: int, tolerance: float, rate: float = RATE) -> float:
    """How far a score, a logarithm, may be off so that at most `rate` of healthy fleets pass it in any comparison."""
    sigmas = NormalDist().inv_cdf(1 - rate / (2 * comparisons))
    return math.log1p(tolerance) * max(1.0, sigmas / TOLERANCE_SDS)


def _alike(env: Mapping[str, Any]) -> str:
    # MIG counts as off where it could not be asked for: a slice has fewer multiprocessors and less memory than its card.
    software = (str(env.get(name)) for name in SOFTWARE)
    return "\n".join([_model(env), *software, str(_code(env)), str(bool(env.get("mig")))])


def _code(env: Mapping[str, Any]) -> object:
    return env.get("code") or env.get("git_commit")  # rows of before the code was hashed have its commit


def _model(env: Mapping[str, Any]) -> str:
    if env.get("gpu"):
        return f"{env['gpu']}, {env.get('gpu_memory_gib')} GiB"
    return f"CPU {env.get('cpu') or 'model unknown'}"


def _group(rows: pd.DataFrame, tolerance: float) -> CardGroup:
    envs = {str(card): parse(text) for card, text in rows.groupby("card")["env"].last().items()}
    env = next(iter(envs.values()))
    of_results = rows["suite"] == CHECKSUM
    wrong = of_results & (rows["status"] == "failed") & rows["cause"].isin(list(REFUTED))
    tried = rows[rows["status"] != "skipped"]  # what was skipped does not replace what was measured
    is_new = tried["attempt"] == tried.groupby(["card", "case_id"])["attempt"].transform("last")
    now = tried[is_new & tried["metric"].isin(list(TIMES)) & ~wrong[tried.index]]
    times = _logs(now)
    by_key, enough = times.groupby(_KEY)["log"], min(ENOUGH, max(2, len(envs)))
    shared = times.assign(off=times["log"] - by_key.transform("median"))[by_key.transform("size") >= enough]
    arms = {
        str(card): {*own[_ARM].itertuples(index=False, name=None)} for card, own in shared.groupby("card")
    }
    every = set[tuple[str, ...]]().union(*arms.values())
    lacking = {card: sorted(" ".join(filter(None, arm)) for arm in every - own) for card, own in arms.items()}
    results = rows[of_results & ~wrong].copy()
    results["bits"] = [parse(text).get("checksum") for text in results["resolved"]]
    results = results.dropna(subset="bits")
    several = results.groupby(_BITS).filter(lambda own: own["card"].nunique() > 1)
    refuted = {
        r["card"]: f"product {r['arm']} of case {r['case_id']}: {r['reason']}"
        for r in rows[wrong].iloc[::-1].to_dict("records")
    }
    not_judged = "1 of this model, software and code: a comparison takes 2"
    if len(envs) > 1:
        not_judged = "" if len(shared) else f"no measurement that {enough} of the cards have in common"
    levels = _levels(times, envs)
    return CardGroup(
        model=_model(env),
        software=f"torch {env.get('torch')}, code {str(_code(env) or 'unknown')[:12]}",
        cards=list(envs),
        not_judged=not_judged,
        spreads=list(_spreads(shared, times)),
        outliers=[
            *_corrupt(results, refuted),
            *_failing(now),
            *_out_of_line(shared, tolerance),
            *_low(times, envs, levels),
        ],
        differences={
            name: dict(gathered(zip(map(str, values), envs, strict=True)))
            for name, values in differences(list(envs.values()), VARIES).items()
        },
        checksums_compared=several.groupby(_BITS).ngroups,
        judged_by_times=[card for card, missing in lacking.items() if not missing],
        judged_by_results=sorted({*refuted, *several["card"]}),
        levels=levels,
        lacking={card: missing for card, missing in lacking.items() if missing},
    )


def _logs(rows: pd.DataFrame) -> pd.DataFrame:
    """The times among rows with their logarithms and the median of their clocks, the last of each card and measurement."""
    times = rows[(rows["status"] == "ok") & (rows["value"] > 0) & np.isfinite(rows["value"])]
    clocks = [np.median([c for c in mhz if np.isfinite(c)] or [np.nan]) for mhz in times["sample_clock_mhz"]]
    times = times.assign(log=np.log(times["value"]), clock=clocks)
    return times.drop_duplicates([*_KEY, "card"], keep="last")


def _out_of_line(shared: pd.DataFrame, tolerance: float) -> Iterator[Outlier]:
    regimes = shared.groupby(_PLACE)
    for place, own in regimes:
        suite, regime = map(str, place)
        scores = own.groupby("card")["off"].median()
        count, off = len(scores), scores - scores.median()
        most = max(limit(count * regimes.ngroups, tolerance), SIGMAS * MAD_TO_SD * off.abs().median())
        for card in off.index[off.abs() > most]:
            share, kind = math.expm1(off[card]), "slow" if off[card] > 0 else "fast"
            why = f"{share:+.1%} of the middle of {count} cards, limit {math.expm1(most):.1%}; {_clock(card, own)}"
            yield Outlier(str(card), suite, regime, kind, share, why)
        pairs = count * (count - 1) // 2 * regimes.ngroups
        apart, furthest = off.max() - off.min(), math.sqrt(2) * limit(pairs, tolerance, SPREAD_RATE)
        if apart > furthest and not (off.abs() > most).any():
            why = f"{math.expm1(apart):.1%} above the fastest of {count} cards, limit {math.expm1(furthest):.1%}"
            yield Outlier(str(off.idxmax()), suite, regime, "spread", float(math.expm1(apart)), why)


def _clock(card: object, own: pd.DataFrame) -> str:
    is_mine = own["card"] == card
    share = own["clock"][is_mine].median() / own["clock"][~is_mine].median()
    return "no clock was read" if math.isnan(share) else f"SM clock {share:.0%} of the others'"


def _levels(times: pd.DataFrame, envs: Mapping[Card, Mapping[str, Any]]) -> dict[Card, float]:
    found: dict[Card, float] = {}
    for row in times[times["suite"].isin(PRODUCTS)].to_dict("records"):
        flops = {dtype: count for dtype, count in parse(row["flops"]).items() if count}
        device = of_env(envs[row["card"]])
        if device is None or len(flops) != 1:
            continue
        ((dtype, count),) = flops.items()
        peak = 1e12 * (device.peak_tflops(dtype) or math.nan)
        if count / peak >= LONG_S:
            best = [1e12 * r.tflops for r in device.reached if r.rate == ("fp8" if is_fp8(dtype) else dtype)]
            rate = count / (row["value"] * SECONDS[row["unit"]])
            found[row["card"]] = max(rate / max(best, default=REACHES * peak), found.get(row["card"], 0.0))
    return found


def _low(
    times: pd.DataFrame, envs: Mapping[Card, Mapping[str, Any]], levels: Mapping[Card, float]
) -> Iterator[Outlier]:
    clocks = times.groupby("card")["clock"].median()
    for card, env in envs.items():
        device = of_env(env)
        if device is None:
            continue
        if (level := levels.get(card, 1.0)) < LEAST:
            why = f"its best product runs at {level:.0%} of what {device.key} cards reach"
            yield Outlier(card, "gemm", "", "low", 1 / level - 1, why)
        clock, small = clocks.get(card, math.nan), device.max_power_w < SMALL_W
        if clock < (LEAST_CLOCK_SMALL if small else LEAST_CLOCK) * device.clock_mhz:
            why = (
                f"SM clock {clock:.0f} MHz; the published rates of {device.key} are at {device.clock_mhz:.0f}"
            )
            yield Outlier(card, "", "", "low", 0.0, why)


def _spreads(shared: pd.DataFrame, times: pd.DataFrame) -> Iterator[Spread]:
    """Each arm's spread; its speedup over the cases that a card measured in both arms, in the same rounds."""
    logs = times.set_index(["card", *_KEY])["log"].rename("base")
    pairs = shared.join(logs, on=["card", "suite", "case_id", "baseline", "metric", "regime"])
    for place, own in pairs.groupby([*_PLACE, "arm"]):
        suite, regime, arm = map(str, place)
        levels = own.groupby("card")["off"].median()
        slowest = max(levels.index, key=lambda card: (levels[card], card))
        gains = (own["base"] - own["log"]).groupby(own["card"]).mean().dropna().map(math.exp)
        low, high = (math.expm1(level) for level in (levels.min(), levels[slowest]))
        speedups = (float(gains.median()), float(gains.min())) if len(gains) else (None, None)
        yield Spread(
            suite, regime, arm, len(levels), own.groupby(_KEY).ngroups, low, high, slowest, *speedups
        )


def _corrupt(results: pd.DataFrame, refuted: Mapping[Card, str]) -> Iterator[Outlier]:
    """Cards whose results are wrong, and why: refuted by the card's own check, or of other bits than most cards'."""
    found = dict(refuted)
    for place, own in results.groupby(_BITS):
        case, arm = map(str, place)
        given: dict[Card, set[str]] = {str(card): {*of["bits"]} for card, of in own.groupby("card")}
        (first, votes), *others = Counter(
            value for values in given.values() for value in values
        ).most_common()
        is_known = 2 * votes > len(given) and all(count < votes for _, count in others)
        majority = f"{votes} of {len(given)} cards give {first}" if is_known else "no value has a majority"
        for card, values in given.items():
            if not is_known or values != {first}:
                gave = " and ".join(sorted(values))
                found.setdefault(card, f"product {arm} of case {case} has checksum {gave}, {majority}")
    return (Outlier(card, CHECKSUM, "", "corrupt", 0.0, why) for card, why in sorted(found.items()))


def _failing(now: pd.DataFrame) -> Iterator[Outlier]:
    found: dict[Card, list[tuple[str, str]]] = {}
    for key, own in now.groupby(_RUN):
        suite, case, arm = map(str, key)
        broken = own[own["status"] == "failed"].drop_duplicates("card", keep="last")
        if suite == CHECKSUM or 2 * len(broken) <= own["card"].nunique():
            for card, reason in zip(broken["card"], broken["reason"], strict=True):
                found.setdefault(card, []).append((suite, f"{arm} of case {case}: {reason}"))
    for card, ((suite, why), *more) in sorted(found.items()):
        yield Outlier(card, suite, "", "fails", 0.0, why + f", and {len(more)} more" * bool(more))
