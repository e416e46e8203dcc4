"""What a fleet's rows say: how far cards of one model lie apart, which of them is out of line, which computes wrongly.

A card is a GPU of a host, both known by a hash (`gpu_uuid_hash`, `host_hash`); where a run was measured on a CPU, the host
is the card. Cards are alike if model, software and code agree. Power limit, driver and what else may differ between cards
that are alike are listed: they explain an outlier and do not excuse it. Of a case that a card measured several times the
newest attempt counts, whole; but a card that was wrong once has been wrong, whatever later attempts give.

**Rule of times.** Compared are cards that are alike, on each measurement that at least three of them have, or
both of two. A card's
deviation there is the logarithm of its time over the median of the cards; its score in a suite and regime is the median
of its deviations there, and how far a score may lie from the middle one says `limits`. A median over
measurements keeps one noisy case from condemning a card; a score by suite shows a fault of the memory (copies) beside
one of the cores (products), and one by regime a card that throttles under sustained load alone.

**Rule of results.** The suite `checksum` multiplies fixed operands. A card whose product was not the exact one, or not
the one that it gave a moment before, computes wrongly whatever the others do. Alike cards must give the same bits;
whichever gave bits that most of the others did not is wrong, be it once, and where no value has a majority all are suspect.

**Rule of spread.** Where no card is far from the middle because the cards themselves lie far apart, they are not in line: two
groups are named as such, else the slowest card with the spread. The limit, of the fastest to the slowest, is passed by 1 % of
healthy fleets. Of two cards this is all that can be said.

**Rule of levels.** Cards may be alike and slow. Each is held against its model in the peak table by its best large product,
against its own earlier runs, and against the clock of the published rates.

**Rule of failures.** A card on which something fails is out of line if it runs on at least half of those that tried; one whose
checksum fails always is.

**The limit of a score.** The tolerance is what cards that are well may differ by: 5 %, taken as 2.44 standard deviations of
2 %. A judgement compares every card in every score, and what is rare in one comparison is likely in one of hundreds. So the
tolerance is widened until at most `RATE` of healthy fleets of that many cards and scores have any card out of line, if their
scores are normal, independent and spread by no more than that. Where the scores at hand spread further, 3.5 robust standard
deviations of them (1.4826 times the median absolute deviation; Iglewicz and Hoaglin, How to Detect and Handle Outliers, ASQC
1993) are the limit; no rate is kept then. docs/fleet.md has the table (reports/studies/fleet_rates.py).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness import store
from harness.machine.hardware import of_env
from harness.machine.mfu import floor_seconds, is_fp8
from harness.store.case import without_controls
from harness.store.compare import SECONDS, TIMES
from harness.store.differences import differences
from harness.store.errors import REFUTED, UsageError
from harness.store.outside import parse
from harness.store.private import of_run
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.engine.settings import SweepConfig


CHECKSUM = "checksum"  # the suite whose results are compared by their bits


def card_name(env: Mapping[str, Any]) -> str:
    """The short name of the GPU of an environment, or of its host where there is none."""
    host = str(env.get("host_hash") or "unknown")[:8]
    return f"{str(env['gpu_uuid_hash'])[:8]}@{host}" if env.get("gpu_uuid_hash") else f"host {host}"


def card_id(env: Mapping[str, Any]) -> str:
    """What is equal in all runs of a GPU, in any results folder; of a CPU in one."""
    return str(env.get("gpu_uuid_hash") or card_name(env))


def refuse_shares(config: SweepConfig, places: int) -> None:
    """Refuses a command line that deals the cases of such a sweep out.

    Args:
        config: of the command line.
        places: shards or devices among which the cases would be dealt.

    Raises:
        UsageError: there are several.
    """
    if places > 1 and _compares_cards(config):
        raise UsageError(
            f"sweep={config.name} compares cards, each of which must measure every case, and {places} shards or devices "
            "would deal them out: leave shard= out and give the command once a card (devices=0, devices=1, ... where a "
            "machine has several), each time with a run_id of its own"
        )


def refuse_another_card(config: SweepConfig, folder: Path, env: Mapping[str, Any]) -> None:
    """Refuse to continue a run of such a sweep whose rows another card made.

    Args:
        config: of the command line.
        folder: of the run.
        env: of the card that would continue it.

    Raises:
        UsageError: it is another one.
    """
    if not _compares_cards(config):
        return
    rows = store.open_run(folder)
    own = {card_id(env), card_id(of_run(env, folder))}  # the first in older rows
    cards = {card_id(stored): card_name(stored) for stored in map(parse, rows["env"].unique())}
    others = sorted(name for card, name in cards.items() if card not in own)
    if others:
        raise UsageError(
            f"{folder.name} holds what card {others[0]} measured and this is {card_name(env)}: sweep={config.name} "
            "compares cards, so each takes a run_id of its own; fleet is given all of their runs"
        )


def _compares_cards(config: SweepConfig) -> bool:
    return CHECKSUM in config.suites


if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import pandas as pd

    from harness.store.stats import Vector

    Card = str

ENOUGH = (
    3  # cards, below which the odd one can't be told from the others: two are compared with each other alone
)
CLOCK_SHARE = 0.97  # of the others' clock, below which the clock is taken for the cause
# What decides how fast code is, or which kernel runs: cards that differ here are not compared
SOFTWARE = ("torch", "triton", "cuda", "hip", "cublas", "cudnn", "torchao", "threads", "gpu_sm_count")
# What may differ between cards that are
VARIES = ("driver", "power_limit_w", "max_sm_clock_mhz", "ecc", "git_commit", "git_dirty", "os", "python")
RATE = 0.05  # of healthy fleets may have a card out of line
SPREAD_RATE = 0.01  # may have scores that spread too far
PRODUCTS = ("gemm", "ceilings", CHECKSUM)  # suites whose times are those of one product
LONG_S = 1e-4  # at the peak, above which no launch explains a slow product
REACHES = 0.7  # of its published peak: a good product on a model of which nobody published one
LEAST = 0.5  # of what its model reaches; a card limited by power loses less
LEAST_CLOCK = 0.6  # of the published rates' clock
LEAST_CLOCK_SMALL, SMALL_W = 0.4, 150  # a card of 72 W runs at about half of it
TOLERANCE_SDS = 2.44  # standard deviations of healthy cards in a tolerance: log(1.05) / 0.02
SIGMAS = 3.5
MAD_TO_SD = 1.4826  # of a normal distribution: 1 / quantile(0.75)
# Cards, in as many fleets as that makes, but `FEWEST`: the rate is met to a tenth of itself
DRAWN = 2_000_000
FEWEST = 4000
_PLACE = ["suite", "regime"]  # of a score
_ARM = ["suite", "arm", "regime"]  # which a card has to have measured to be judged by
_KEY = ["suite", "case_id", "arm", "metric", "regime"]  # of a measurement
_RUN = ["suite", "case_id", "arm"]  # rows of an arm that never ran have no regime


@dataclass(frozen=True, slots=True)
class Outlier:
    """A card that is out of line, in one suite and regime or by its results (regime "")."""

    card: Card
    suite: str
    regime: str
    kind: str  # slow, fast, corrupt, fails; group, spread: see the rule of spread; low: see that of levels
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
class Group:
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


def judge(frame: pd.DataFrame, tolerance: float) -> list[Group]:
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


def _alike(env: Mapping[str, Any]) -> str:
    # Rows of before the code was hashed have its commit. MIG counts as off where it could not be asked for: a slice has
    # fewer multiprocessors and less memory than its card.
    return "\n".join(
        [_model(env), *(str(env.get(name)) for name in SOFTWARE), str(_code(env)), str(bool(env.get("mig")))]
    )


def _code(env: Mapping[str, Any]) -> object:
    return env.get("code") or env.get("git_commit")


def _model(env: Mapping[str, Any]) -> str:
    if env.get("gpu"):
        return f"{env['gpu']}, {env.get('gpu_memory_gib')} GiB"
    return f"CPU {env.get('cpu') or 'model unknown'}"


def _group(rows: pd.DataFrame, tolerance: float) -> Group:
    envs = {str(card): parse(text) for card, text in rows.groupby("card")["env"].last().items()}
    env = next(iter(envs.values()))
    of_results = rows["suite"] == CHECKSUM
    wrong = of_results & (rows["status"] == "failed") & rows["cause"].isin(list(REFUTED))
    tried = rows[rows["status"] != "skipped"]  # what was skipped does not replace what was measured
    newest = tried.groupby(["card", "case_id"])["attempt"].transform("last")
    timed = tried[tried["metric"].isin(list(TIMES)) & ~wrong[tried.index]]
    is_new = timed["attempt"] == newest[timed.index]
    now, times, earlier = timed[is_new], _logs(timed[is_new]), _logs(timed[~is_new])
    levels = _levels(times, envs)
    by_key, enough = times.groupby(_KEY)["log"], ENOUGH if len(envs) >= ENOUGH else 2
    shared = times.assign(off=times["log"] - by_key.transform("median"))[by_key.transform("size") >= enough]
    arms = _by_card(shared, _ARM)
    every = set[tuple[str, ...]]().union(*arms.values())
    lacking = {card: sorted(" ".join(filter(None, arm)) for arm in every - own) for card, own in arms.items()}
    given = _given(rows[of_results & ~wrong])
    several = [by_card for by_card in given.values() if len(by_card) > 1]
    refuted = {
        r["card"]: f"product {r['arm']} of case {r['case_id']}: {r['reason']}"
        for r in rows[wrong].iloc[::-1].to_dict("records")
    }
    not_judged = "1 of this model, software and code: a comparison takes 2"
    if len(envs) > 1:
        not_judged = "" if len(shared) else f"no measurement that {enough} of the cards have in common"
    return Group(
        model=_model(env),
        software=f"torch {env.get('torch')}, code {str(_code(env) or 'unknown')[:12]}",
        cards=list(envs),
        not_judged=not_judged,
        spreads=list(_spreads(shared, times)),
        outliers=[
            *_corrupt(given, refuted),
            *_failing(times, now[now["status"] == "failed"]),
            *_out_of_line(shared, times, envs, tolerance),
            *_low(times, envs, levels),
            *_slower(times, earlier, tolerance),
        ],
        differences=_differences(envs),
        checksums_compared=len(several),
        judged_by_times=[card for card, missing in lacking.items() if not missing],
        judged_by_results=sorted(refuted.keys() | {card for by_card in several for card in by_card}),
        levels=levels,
        lacking={card: missing for card, missing in lacking.items() if missing},
    )


def _logs(rows: pd.DataFrame) -> pd.DataFrame:
    """The times among rows with their logarithms and the median of their clocks, the last of each card and measurement."""
    times = rows[(rows["status"] == "ok") & (rows["value"] > 0) & np.isfinite(rows["value"])]
    clocks = [np.median([c for c in mhz if np.isfinite(c)] or [np.nan]) for mhz in times["sample_clock_mhz"]]
    times = times.assign(log=np.log(times["value"]), clock=clocks)
    return times.drop_duplicates([*_KEY, "card"], keep="last")


def _by_card(rows: pd.DataFrame, columns: list[str]) -> dict[Card, set[tuple[str, ...]]]:
    """What each card has of some columns, as tuples."""
    found: dict[Card, set[tuple[str, ...]]] = {}
    for card, *values in rows[["card", *columns]].itertuples(index=False):
        found.setdefault(card, set()).add(tuple(values))
    return dict(sorted(found.items()))


def _differences(envs: Mapping[Card, Mapping[str, Any]]) -> dict[str, dict[str, list[Card]]]:
    found: dict[str, dict[str, list[Card]]] = {}
    for name, seen in differences(list(envs.values()), VARIES).items():
        for card, value in zip(envs, seen, strict=True):
            found.setdefault(name, {}).setdefault(str(value), []).append(card)
    return found


def _out_of_line(
    shared: pd.DataFrame, times: pd.DataFrame, envs: Mapping[Card, Mapping[str, Any]], tolerance: float
) -> Iterator[Outlier]:
    places = shared.groupby(_PLACE)
    for place, own in places:
        suite, regime = map(str, place)
        scores = own.groupby("card")["off"].median()
        (middle,), (limit,) = limits(scores.to_numpy()[None], tolerance, places.ngroups)
        off = np.expm1(scores - middle)
        is_out = (scores - middle).abs() > limit
        for card in scores.index[is_out]:
            here = times[(times["suite"] == suite) & (times["regime"] == regime)]
            why = (
                f"{abs(off[card]):.1%} {'above' if off[card] > 0 else 'below'} the middle of {len(scores)} cards, "
                f"limit {np.expm1(limit):.1%}; {_cause(str(card), here, envs)}"
            )
            yield Outlier(card, suite, regime, "slow" if off[card] > 0 else "fast", float(off[card]), why)
        furthest = widening(len(scores), places.ngroups, whole=True) * math.log1p(tolerance)
        if not is_out.any() and scores.max() - scores.min() > furthest:
            yield from _apart(scores.sort_values(), suite, regime)


def _apart(scores: pd.Series[float], suite: str, regime: str) -> Iterator[Outlier]:
    """Cards that lie too far apart for any to be named by its distance: the slower of two groups, else the slowest card."""
    gaps = scores.diff().iloc[2:-1]  # a group has two cards
    cut = int(np.argmax(gaps)) + 2 if len(gaps) else len(scores) - 1
    inside = max(scores.iloc[cut - 1] - scores.iloc[0], scores.iloc[-1] - scores.iloc[cut])
    is_group = bool(len(gaps)) and gaps.max() > inside
    cut = cut if is_group else len(scores) - 1
    fast, slow = scores.iloc[:cut], scores.iloc[cut:]
    for card, score in slow.items():
        off = float(np.expm1(score - fast.median()))
        why = f"{off:.1%} above the middle of {some(list(fast.index))}"
        said = "one of two groups" if is_group else "the cards spread too far to say which of them are well"
        yield Outlier(str(card), suite, regime, "group" if is_group else "spread", off, f"{said}: {why}")


def _levels(times: pd.DataFrame, envs: Mapping[Card, Mapping[str, Any]]) -> dict[Card, float]:
    found: dict[Card, float] = {}
    for row in times[times["suite"].isin(PRODUCTS)].to_dict("records"):
        flops = {d: f for d, f in parse(row["flops"]).items() if f}
        device = of_env(envs[row["card"]])
        least = floor_seconds(flops, {d: device.peak_tflops(d) for d in flops}) if device and flops else None
        if device and least and least >= LONG_S and len(flops) == 1:
            (dtype,) = flops
            best = [r.tflops for r in device.reached if r.rate == ("fp8" if is_fp8(dtype) else dtype)]
            share = max(best) / (device.peak_tflops(dtype) or math.nan) if best else REACHES
            level = least / share / (row["value"] * SECONDS[row["unit"]])
            found[row["card"]] = max(level, found.get(row["card"], 0.0))
    return found


def _low(
    times: pd.DataFrame, envs: Mapping[Card, Mapping[str, Any]], levels: Mapping[Card, float]
) -> Iterator[Outlier]:
    """Cards whose best product, or whose clock, is far below that of their model."""
    clocks = times.groupby("card")["clock"].median()
    for card, env in envs.items():
        device, level = of_env(env), levels.get(card, 1.0)
        if level < LEAST:
            why = f"its best product runs at {level:.0%} of what {device.key if device else ''} cards reach"
            yield Outlier(card, "gemm", "", "low", 1 / level - 1, why)
        clock = clocks.get(card, math.nan)
        small = device is not None and device.max_power_w < SMALL_W
        if device and clock < (LEAST_CLOCK_SMALL if small else LEAST_CLOCK) * device.clock_mhz:
            why = (
                f"SM clock {clock:.0f} MHz; the published rates of {device.key} are at {device.clock_mhz:.0f}"
            )
            yield Outlier(card, "", "", "low", 0.0, why)


def _slower(times: pd.DataFrame, earlier: pd.DataFrame, tolerance: float) -> Iterator[Outlier]:
    """Cards that are slower than they were in an earlier attempt of the same cases."""
    before = earlier.groupby(["card", *_KEY])["log"].median().rename("before")
    both = times.join(before, on=["card", *_KEY], how="inner")
    if both.empty:  # pandas does not group what has no row
        return
    scores = (both["log"] - both["before"]).groupby([both[name] for name in ("card", *_PLACE)]).median()
    limit = widening(max(ENOUGH, both["card"].nunique()), max(1, both.groupby(_PLACE).ngroups))
    far = scores[scores > limit * math.log1p(tolerance)].reset_index(name="score")
    for card, suite, regime, score in far.itertuples(index=False):
        off = math.expm1(score)
        yield Outlier(card, suite, regime, "low", off, f"{off:.1%} above its own earlier runs")


def _cause(card: Card, times: pd.DataFrame, envs: Mapping[Card, Mapping[str, Any]]) -> str:
    """What else is different about a card that is out of line, by its times of one place."""
    is_mine = times["card"] == card
    mine, others = times[is_mine].set_index(_KEY), times[~is_mine].groupby(_KEY)["clock"].median()
    notes = []
    if throttled := sum(parse(text).get("throttled") is True for text in mine["timing"]):
        notes.append(f"throttled in {throttled} of {len(mine)} measurements")
    share = (mine["clock"] / others).median()
    if share < CLOCK_SHARE:
        notes.append(f"SM clock {share:.0%} of the others'")
    for name in ("power_limit_w", "driver"):
        values = {other: str(env.get(name)) for other, env in envs.items()}
        own = values.pop(card)
        ((usual, _),) = Counter(values.values()).most_common(1)
        if own != usual:
            notes.append(f"{name} {own}, most others {usual}")
    if notes:
        return ", ".join(notes)
    if np.isnan(share):
        return "no clock was read, so the cause is unknown"
    return "at the others' clock and power limit: memory, cooling of the memory, or a fault"


def _spreads(shared: pd.DataFrame, times: pd.DataFrame) -> Iterator[Spread]:
    """Each arm's spread; its speedup over the cases that a card measured in both arms, in the same rounds."""
    same = ["card", "suite", "case_id", "metric", "regime", "baseline"]
    base = times[[*same[:-1], "arm", "log"]].rename(columns={"arm": "baseline", "log": "base"})
    for place, own in shared.groupby([*_PLACE, "arm"]):
        suite, regime, arm = map(str, place)
        levels = own.groupby("card")["off"].median()
        slowest = max(levels.index, key=lambda card: (levels[card], card))
        pairs = own.merge(base, on=same)
        speedups = (pairs["base"] - pairs["log"]).groupby(pairs["card"]).mean().map(math.exp)
        low, high = (float(np.expm1(level)) for level in (levels.min(), levels[slowest]))
        gains = (float(speedups.median()), float(speedups.min())) if len(speedups) else (None, None)
        yield Spread(suite, regime, arm, len(levels), own.groupby(_KEY).ngroups, low, high, slowest, *gains)


def _given(rows: pd.DataFrame) -> dict[tuple[str, str], dict[Card, set[str]]]:
    """The checksums that each card ever gave, by case and arm; more than one where a card contradicts itself."""
    found: dict[tuple[str, str], dict[Card, set[str]]] = {}
    for row in rows.to_dict("records"):
        if (value := parse(row["resolved"]).get("checksum")) is not None:
            by_card = found.setdefault((row["case_id"], row["arm"]), {})
            by_card.setdefault(row["card"], set()).add(str(value))
    return dict(sorted(found.items()))


def _corrupt(
    given: Mapping[tuple[str, str], Mapping[Card, set[str]]], refuted: Mapping[Card, str]
) -> Iterator[Outlier]:
    """Cards whose results are wrong, and why: refuted by the card's own check, or of other bits than most cards'."""
    found = dict(refuted)
    for (case, arm), by_card in given.items():
        (first, votes), *others = Counter(v for values in by_card.values() for v in values).most_common()
        known = 2 * votes > len(by_card) and all(count < votes for _, count in others)
        said = f"{votes} of {len(by_card)} cards give {first}" if known else "no value has a majority"
        for card, values in by_card.items():
            if not known or values != {first}:
                gave = " and ".join(sorted(values))
                why = f"product {arm} of case {case} has checksum {gave}, {said}: a card computes wrongly"
                found.setdefault(card, why)
    return (Outlier(card, CHECKSUM, "", "corrupt", 0.0, why) for card, why in sorted(found.items()))


def _failing(times: pd.DataFrame, failed: pd.DataFrame) -> Iterator[Outlier]:
    """Cards on which something fails that runs on at least half of the cards that tried."""
    broken, timed = _by_card(failed, _RUN), _by_card(times, _RUN)
    fails = Counter(key for own in broken.values() for key in own)
    runs = Counter(key for card, own in timed.items() for key in own - broken.get(card, set()))
    failed = failed.sort_values(_RUN, kind="stable").drop_duplicates(["card", *_RUN], keep="last")
    for card, own in failed.groupby("card"):
        keys = own[_RUN].itertuples(index=False, name=None)
        alone = own[[key[0] == CHECKSUM or runs[key] >= fails[key] for key in keys]]
        if len(alone):
            first = alone.iloc[0]
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            why = f"{first['arm']} of case {first['case_id']}{more}: {first['reason']}"
            yield Outlier(str(card), first["suite"], "", "fails", 0.0, why)


def limits(scores: Vector, tolerance: float, of: int) -> tuple[Vector, Vector]:
    """The middle score of each fleet and how far a card's may be from it.

    Args:
        scores: [fleets, cards], logarithms.
        tolerance: deviation that is no fault, 0.05 for 5 %.
        of: scores that each card is judged by, this one among them.
    """
    middle, sd = _robust(scores)
    return middle, np.maximum(widening(scores.shape[1], of) * math.log1p(tolerance), SIGMAS * sd)


@functools.cache
def widening(cards: int, of: int, whole: bool = False) -> float:
    """The factor on the logarithm of the tolerance that keeps `RATE`, by simulation; at least 1.

    Args:
        cards: of the fleet, at least 2.
        of: scores that each is judged by, at least 1.
        whole: from the fastest to the slowest card, however far they spread, at `SPREAD_RATE`.
    """
    shape = max(FEWEST, DRAWN // cards), cards
    scores = np.random.default_rng([cards, of]).normal(0.0, 1 / TOLERANCE_SDS, shape)
    middle, sd = _robust(scores)
    furthest = np.abs(scores - middle[:, None]).max(axis=1)
    needed = np.ptp(scores, axis=1) if whole else np.where(furthest > SIGMAS * sd, furthest, 0.0)
    return max(1.0, float(np.quantile(needed, (1 - (SPREAD_RATE if whole else RATE)) ** (1 / of))))


def _robust(scores: Vector) -> tuple[Vector, Vector]:
    """Median and standard deviation of each fleet, robust to a minority of its cards."""
    middle = np.median(scores, axis=1)
    return middle, MAD_TO_SD * np.median(np.abs(scores - middle[:, None]), axis=1)
