"""What a fleet's rows say: how far cards of one model lie apart, which of them is out of line, which computes wrongly.

A card is a GPU of a host, both known by a hash (`gpu_uuid_hash`, `host_hash`); where a run was measured on a CPU, the host
is the card. Cards are alike if model, software and code agree. Power limit, driver and what else may differ between cards
that are alike are listed: they explain an outlier and do not excuse it. Of a case that a card measured several times the
newest attempt counts, whole; but a card that was wrong once has been wrong, whatever later attempts give.

**Rule of times.** Compared are cards that are alike, on each measurement that at least three of them have. A card's
deviation there is the logarithm of its time over the median of the cards; its score in a suite and regime is the median
of its deviations there, and how far a score may lie from the middle one says `harness.judge.fleet.limit`. A median over
measurements keeps one noisy case from condemning a card; a score by suite shows a fault of the memory (copies) beside
one of the cores (products), and one by regime a card that throttles under sustained load alone.

**Rule of results.** The suite `checksum` multiplies fixed operands. A card whose product was not the exact one, or not
the one that it gave a moment before, computes wrongly whatever the others do. Alike cards must give the same bits;
whichever gave bits that most of the others did not is wrong, be it once, and where no value has a majority all are suspect.

**Rule of failures.** A card on which something fails is out of line if it runs on at least half of those that tried.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.judge.fleet.limit import limits
from harness.judge.fleet.request import CHECKSUM, card_name
from harness.store import differences as environments
from harness.store.arm import without_controls
from harness.store.cause import REFUTED
from harness.store.compare import TIMES
from harness.store.json_columns import parse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    import pandas as pd

ENOUGH = 3  # cards, below which the odd one can't be told from the others
CLOCK_SHARE = 0.97  # of the others' clock, below which the clock is taken for the cause
# What decides how fast code is, or which kernel runs: cards that differ here are not compared
SOFTWARE = ("torch", "triton", "cuda", "hip", "cublas", "cudnn", "torchao", "threads", "gpu_sm_count")
# What may differ between cards that are
VARIES = ("driver", "power_limit_w", "max_sm_clock_mhz", "ecc", "git_commit", "git_dirty", "os", "python")
_PLACE = ["suite", "regime"]  # of a score
_ARM = ["suite", "arm", "regime"]  # which a card has to have measured to be judged by
_KEY = ["suite", "case_id", "arm", "metric", "regime"]  # of a measurement
_RUN = ["suite", "case_id", "arm"]  # rows of an arm that never ran have no regime


@dataclass(frozen=True, slots=True)
class Outlier:
    """A card that is out of line, in one suite and regime or by its results (regime "")."""

    card: str
    suite: str
    regime: str
    kind: str  # slow, fast, corrupt, fails
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
    slowest: str
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
        lacking: of the cards that were judged by some of the times alone, the others, as "suite arm regime".
    """

    model: str
    software: str
    cards: list[str]
    not_judged: str
    spreads: list[Spread]
    outliers: list[Outlier]
    differences: dict[str, dict[str, list[str]]]
    checksums_compared: int
    judged_by_times: list[str]
    judged_by_results: list[str]
    lacking: dict[str, list[str]]


def judge(frame: pd.DataFrame, tolerance: float) -> list[Group]:
    """The groups of alike cards, the largest first.

    Args:
        frame: rows of the store with all attempts: cards that were given one run id must not replace each other.
        tolerance: deviation that is no fault, 0.05 for 5 %.
    """
    rows = (
        without_controls(frame)
        .sort_values("attempt", kind="stable", ignore_index=True)
        .fillna({"regime": "", "attempt": 0})
    )
    rows["card"] = [card_name(parse(text)) for text in rows["env"]]
    rows["alike"] = [_alike(parse(text)) for text in rows["env"]]
    found = [_group(own, tolerance) for _, own in rows.groupby("alike")]
    return sorted(found, key=lambda group: (-len(group.cards), group.cards[0]))


def _alike(env: Mapping[str, Any]) -> str:
    # Rows of before the code was hashed have its commit. MIG counts as off where it could not be asked for: a slice has
    # fewer multiprocessors and less memory than its card.
    software = [str(env.get(name)) for name in SOFTWARE]
    return "\n".join([_model(env), *software, str(_code(env)), str(bool(env.get("mig")))])


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
    now = tried[(tried["attempt"] == newest) & tried["metric"].isin(list(TIMES)) & ~wrong[tried.index]]
    times = now[(now["status"] == "ok") & (now["value"] > 0) & np.isfinite(now["value"])]
    times = times.drop_duplicates([*_KEY, "card"], keep="last")
    logs = times.assign(log=np.log(times["value"]))
    by_key = logs.groupby(_KEY)["log"]
    shared = logs.assign(off=logs["log"] - by_key.transform("median"))[by_key.transform("size") >= ENOUGH]
    arms = _sets(shared, _ARM)
    every: set[tuple[str, ...]] = set().union(*arms.values())
    lacking = {card: sorted(" ".join(filter(None, arm)) for arm in every - own) for card, own in arms.items()}
    given = _given(rows[of_results & ~wrong])
    several = {key: by_card for key, by_card in given.items() if len(by_card) > 1}
    refuted = {row["card"]: _of(row) for row in rows[wrong].iloc[::-1].to_dict("records")}
    not_judged = f"{len(envs)} of this model, software and code: an outlier takes {ENOUGH} to tell"
    if len(envs) >= ENOUGH:
        not_judged = "" if len(shared) else f"no measurement that {ENOUGH} of the cards have in common"
    outliers = [
        *_corrupt(given, refuted),
        *_failing(times, now[now["status"] == "failed"]),
        *_out_of_line(shared, times, envs, tolerance),
    ]
    return Group(
        model=_model(env),
        software=f"torch {env.get('torch')}, code {str(_code(env) or 'unknown')[:12]}",
        cards=list(envs),
        not_judged=not_judged,
        spreads=list(_spreads(shared, times)),
        outliers=outliers,
        differences=_differences(envs),
        checksums_compared=len(several),
        judged_by_times=[card for card, missing in lacking.items() if not missing],
        judged_by_results=sorted(refuted.keys() | {card for by_card in several.values() for card in by_card}),
        lacking={card: missing for card, missing in lacking.items() if missing},
    )


def _sets(rows: pd.DataFrame, columns: list[str]) -> dict[str, set[tuple[str, ...]]]:
    """What each card has of some columns, as tuples."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for card, *values in rows[["card", *columns]].itertuples(index=False):
        found.setdefault(card, set()).add(tuple(values))
    return dict(sorted(found.items()))


def _of(row: Mapping[Any, Any]) -> str:
    return f"product {row['arm']} of case {row['case_id']}: {row['reason']}"


def _differences(envs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for name, seen in environments.differences(list(envs.values()), VARIES).items():
        for card, value in zip(envs, seen, strict=True):
            found.setdefault(name, {}).setdefault(str(value), []).append(card)
    return found


def _out_of_line(
    shared: pd.DataFrame, times: pd.DataFrame, envs: Mapping[str, Mapping[str, Any]], tolerance: float
) -> Iterator[Outlier]:
    places = shared.groupby(_PLACE)
    for place, own in places:
        suite, regime = map(str, place)
        scores = own.groupby("card")["off"].median()
        (middle,), (limit,) = limits(scores.to_numpy()[None], tolerance, places.ngroups)
        for card, score in (scores - middle).items():
            if abs(score) > limit:
                off = float(np.expm1(score))
                here = times[(times["suite"] == suite) & (times["regime"] == regime)]
                why = (
                    f"{abs(off):.1%} {'above' if off > 0 else 'below'} the middle of {len(scores)} cards, "
                    f"limit {np.expm1(limit):.1%}; {_cause(str(card), here, envs)}"
                )
                yield Outlier(str(card), suite, regime, "slow" if off > 0 else "fast", off, why)


def _cause(card: str, times: pd.DataFrame, envs: Mapping[str, Mapping[str, Any]]) -> str:
    """What else is different about a card that is out of line, by its times of one place."""
    times = times.assign(clock=[_middle_clock(clocks) for clocks in times["sample_clock_mhz"]])
    is_mine = times["card"] == card
    mine, others = times[is_mine].set_index(_KEY), times[~is_mine].groupby(_KEY)["clock"].median()
    notes = []
    if throttled := sum(parse(text).get("throttled") is True for text in mine["timing"]):
        notes.append(f"throttled in {throttled} of {len(mine)} measurements")
    share = (mine["clock"] / others).median()
    if share < CLOCK_SHARE:
        notes.append(f"SM clock {share:.0%} of the others'")
    for name in ("power_limit_w", "driver"):
        others_have = Counter(str(env.get(name)) for other, env in envs.items() if other != card)
        ((usual, _),) = others_have.most_common(1)
        if str(envs[card].get(name)) != usual:
            notes.append(f"{name} {envs[card].get(name)}, most others {usual}")
    if notes:
        return ", ".join(notes)
    if np.isnan(share):
        return "no clock was read, so the cause is unknown"
    return "at the others' clock and power limit: memory, cooling of the memory, or a fault"


def _middle_clock(clocks: Collection[float]) -> float:
    read = [clock for clock in clocks if np.isfinite(clock)]
    return float(np.median(read)) if read else np.nan


def _spreads(shared: pd.DataFrame, times: pd.DataFrame) -> Iterator[Spread]:
    """Each arm's spread; its speedup over the cases that a card measured in both arms, in the same rounds."""
    same = ["card", "suite", "case_id", "metric", "regime"]
    base = times[[*same, "arm", "value"]].rename(columns={"arm": "baseline", "value": "base"})
    for place, own in shared.groupby([*_PLACE, "arm"]):
        suite, regime, arm = map(str, place)
        levels = own.groupby("card")["off"].median()
        slowest = max(levels.index, key=lambda card: (levels[card], card))
        pairs = own.merge(base, on=[*same, "baseline"])
        speedups = np.exp((np.log(pairs["base"]) - pairs["log"]).groupby(pairs["card"]).mean())
        yield Spread(
            *(suite, regime, arm, len(levels), own.groupby(_KEY).ngroups),
            *(float(np.expm1(levels.min())), float(np.expm1(levels[slowest])), slowest),
            *((float(speedups.median()), float(speedups.min())) if len(speedups) else (None, None)),
        )


def _given(rows: pd.DataFrame) -> dict[tuple[str, str], dict[str, set[str]]]:
    """The checksums that each card ever gave, by case and arm; more than one where a card contradicts itself."""
    found: dict[tuple[str, str], dict[str, set[str]]] = {}
    for row in rows.to_dict("records"):
        if (value := parse(row["resolved"]).get("checksum")) is not None:
            by_card = found.setdefault((row["case_id"], row["arm"]), {})
            by_card.setdefault(row["card"], set()).add(str(value))
    return dict(sorted(found.items()))


def _corrupt(
    given: Mapping[tuple[str, str], Mapping[str, set[str]]], refuted: Mapping[str, str]
) -> Iterator[Outlier]:
    """Cards whose results are wrong, and why: refuted by the card's own check, or of other bits than most cards'."""
    found = dict(refuted)
    for (case, arm), by_card in given.items():
        (first, votes), *others = Counter(v for values in by_card.values() for v in values).most_common()
        known = 2 * votes > len(by_card) and all(count < votes for _, count in others)
        said = f"{votes} of {len(by_card)} cards give {first}" if known else "no value has a majority"
        for card, values in by_card.items():
            if values != ({first} if known else set()):
                gave = " and ".join(sorted(values))
                why = f"product {arm} of case {case} has checksum {gave}, {said}: a card computes wrongly"
                found.setdefault(card, why)
    for card, why in sorted(found.items()):
        yield Outlier(card, CHECKSUM, "", "corrupt", 0.0, why)


def _failing(times: pd.DataFrame, failed: pd.DataFrame) -> Iterator[Outlier]:
    """Cards on which something fails that runs on at least half of the cards that tried."""
    broken, timed = _sets(failed, _RUN), _sets(times, _RUN)
    fails = Counter(key for own in broken.values() for key in own)
    runs = Counter(key for card, own in timed.items() for key in own - broken.get(card, set()))
    failed = failed.sort_values(_RUN, kind="stable").drop_duplicates(["card", *_RUN], keep="last")
    for card, own in failed.groupby("card"):
        alone = own[[runs[tuple(key)] >= fails[tuple(key)] for key in own[_RUN].to_numpy()]]
        if len(alone):
            first = alone.iloc[0]
            more = f" and {len(alone) - 1} more" if len(alone) > 1 else ""
            why = f"{first['arm']} of case {first['case_id']}{more}: {first['reason']}"
            yield Outlier(str(card), first["suite"], "", "fails", 0.0, why)
