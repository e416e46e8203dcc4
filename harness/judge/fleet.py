"""`python -m harness fleet RUN...`: cards of one model side by side. Imports no torch.

A card is a GPU of a host, both known by a hash (`gpu_uuid_hash`, `host_hash`); where a run was measured on a CPU, the host
is the card. Cards are alike if model, software and code agree. Of a case that a card measured several times the
newest attempt counts, whole; but a card that was wrong once has been wrong, whatever later attempts give.

    slow, fast   in a suite and regime, the median of log(time / median of the cards) lies beyond the limit
    low          cards may be alike and slow: the best large product runs at less than half of what such cards reach
    fails        what runs on another card fails here; a checksum that fails always counts
    corrupt      a product of fixed operands was not the exact one, not the one that the card gave a moment before, or not
                 that of most of its like

**Limit.** The tolerance is what cards that are well may differ by: 5 %, taken as 2.44 standard deviations of 2 %. It is
widened for the number of comparisons (Bonferroni, normal scores).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from harness import store
from harness.advise.rates import rates_of
from harness.machine import terminal
from harness.machine.ceilings import BF16, ceilings
from harness.machine.hardware import of_env
from harness.store.case import without_controls
from harness.store.compare import TIMES
from harness.store.errors import REFUTED, UsageError
from harness.store.outside import parse
from harness.store.printer import Table, Tone, picked, show, table
from harness.store.private import hashed, of_run, salt_file
from harness.store.text import percent, plural, some
from harness.store.words import key, options_of, word

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    Finding = tuple[Any, ...]  # a `Score` but for its first field

CHECKSUM = "checksum"  # the suite whose results are compared by their bits
# What decides how fast code is, or which kernel runs: cards that differ here are not compared. A slice of a card (MIG) has
# fewer multiprocessors and less memory; where MIG could not be asked for, it counts as off.
ALIKE = (
    "gpu_memory_gib",
    "gpu_sm_count",
    "mig",
    "torch",
    "triton",
    "cuda",
    "hip",
    "cublas",
    "cudnn",
    "torchao",
    "threads",
)
RATE = 0.02  # of the bounds that Bonferroni adds up; cards share a median, so that a few more fleets have a card out
TOLERANCE_SDS = 2.44  # standard deviations of healthy cards in a tolerance: log(1.05) / 0.02
LONG_S = 1e-4  # at that rate, above which no launch explains a slow product
LEAST = 0.5  # of what its model reaches; a card limited by power loses less
LACKING = "lacking"  # kind of a score that is missing
PEAKS = "peak table"  # in the place of a suite, of what is compared with it


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """python -m harness fleet: compares cards of one model: how far they lie apart, who is out of line, corrupt results
    exit 0 no outlier; 1 an outlier, or a card is missing; 2 the request could not be carried out, or a file could not be read
    """

    runs: list[str] = word("RUN", "a folder of a run or of runs, or a run id")
    tolerance: float = key("percent by which healthy cards may differ (5)", 5.0, span=(1e-9, 99.999999999))
    expect: str = key("cards that there must be: their number, or names of cards and hosts: a,b,c", "0")
    json: bool = key("as plain values", False)
    results_dir: str = key("where run ids are looked up", "results")


class Score(NamedTuple):
    """What was found of a card in one suite and regime, or by its results (regime "").

    Attributes:
        alike: what it shares with the cards that it was compared with.
        kind: why it is out of line, see the module; "" where it is in line.
        off: its time over the middle card's, minus 1, at the median of its measurements; NaN where no time is meant.
        spread: how far its measurements lie apart in that.
    """

    alike: str
    card: str
    suite: str
    regime: str
    kind: str
    reason: str
    off: float = np.nan
    spread: float = np.nan


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is found among cards.

    Attributes:
        scores: of every card by everything that it, or others like it, were judged by.
        unread: files that could not be read, and why.
        missing: cards that were expected and have no row.
    """

    scores: Sequence[Score]
    unread: Sequence[str]
    missing: Sequence[str]

    @property
    def outliers(self) -> list[Score]:
        """Cards that are out of line."""
        return [score for score in self.scores if score.kind not in ("", LACKING)]

    @property
    def found(self) -> Mapping[str, Sequence[str]]:
        """What is held against a positive word, by code, the gravest first; else the positive word with all cards.

        out, missing, unread, not_judged, alike (of a card it is not known how fast it should be) or in_line.
        """
        cards = {score.card for score in self.scores}
        known = {score.card for score in self.scores if score.suite == PEAKS}
        against = {
            "out": [score.card for score in self.outliers],
            "missing": self.missing,
            "unread": self.unread,
            "not_judged": [score.card for score in self.scores if score.kind == LACKING],
        }
        found = {code: sorted({*names}) for code, names in against.items() if names}
        return found or {"in_line" if known >= cards else "alike": sorted(cards)}

    @property
    def code(self) -> str:
        """The gravest of what was found."""
        return next(iter(self.found))

    @property
    def tone(self) -> Tone:
        """Good where all cards are judged and in line, bad where one is out of it or missing."""
        return (
            "bad" if self.code in ("out", "missing") else "good" if self.code in ("alike", "in_line") else ""
        )

    def lines(self) -> list[str]:
        """What was found, in one line; then each group of alike cards."""
        return [
            "; ".join(f"{code.replace('_', ' ')}: {some(names)}" for code, names in self.found.items()),
            *dict.fromkeys(score.alike for score in self.scores),
        ]

    def tables(self) -> list[Table]:
        """How far the cards lie apart, outliers first."""
        rows = [
            (*score[1:5], percent(score.off), percent(score.spread), score.reason)
            for score in sorted(self.scores, key=lambda score: not score.kind)
        ]
        caption = "Time over the middle card's, minus 1, and how far a card's measurements lie apart in that"
        return [table(caption, ("card", "suite", "regime", "out", ">off", ">spread", "why"), rows)]

    def data(self) -> dict[str, Any]:
        """Plain values."""
        score = "alike card suite regime kind off spread reason"
        return picked(self, "code unread missing") | {
            "outliers": [picked(each, score) for each in self.outliers],
            "scores": [picked(each, score) for each in self.scores],
        }


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code.

    Raises:
        UsageError: no run, an unknown word, a tolerance that is none, or runs without a row.
    """
    if (options := options_of(FleetOptions, argv)) is None:
        return 0
    frame = store.open_run(
        [store.find_run(run, options.results_dir) for run in options.runs], all_attempts=True
    )
    if not len(frame):
        raise UsageError(f"no rows in {'; '.join([*options.runs, *frame.attrs['problems']])}")
    scores = judge(frame, options.tolerance / 100)
    missing = _missing({score.card for score in scores}, options.expect, frame.attrs["files"])
    found = Fleet(scores, frame.attrs["problems"], missing)
    show(found, terminal.console(), as_program=options.json)
    return 1 if found.tone == "bad" else 2 if found.unread else 0


def _missing(cards: Collection[str], expect: str, files: Collection[str]) -> list[str]:
    """Cards that were expected and have no row, by name where names were given; rows hold the hash of a host's, by a salt."""
    if expect.isdigit():
        lack = int(expect) - len(cards)
        return [f"{plural(lack, 'card')} of {expect}"] if lack > 0 else []
    salted = {
        run for file in files if salt_file((run := store.run_folder(Path(file))).parent.parent).exists()
    }
    known = {name for card in cards for name in (card, *card.removeprefix("host ").split("@"))}
    hosts = {
        name: {of_run({"host_hash": hashed(name)}, run)["host_hash"][:8] for run in salted}
        for name in map(str.strip, expect.split(","))
    }
    return [name for name, hashes in hosts.items() if not known & {name, *hashes}]


def refuse_shares(suites: Collection[str | None]) -> None:
    """Refuses a command line that deals the cases of a sweep with these suites out to several shards or devices.

    Raises:
        UsageError: the sweep compares cards.
    """
    if CHECKSUM in suites:
        raise UsageError(
            "this sweep compares cards, each of which must measure every case, and several shards or devices would deal them "
            "out: leave shard= out and give the command once a card (devices=0, devices=1, ... where a machine has several), "
            "each time with a run_id of its own"
        )


def refuse_another_card(suites: Collection[str | None], folder: Path, env: Mapping[str, Any]) -> None:
    """Refuse to continue a run whose rows another card made, if the sweep compares cards.

    Args:
        suites: of the sweep.
        folder: of the run.
        env: of the card that would continue it.

    Raises:
        UsageError: it is another one.
    """
    own, name = card_of(of_run(env, folder))
    if CHECKSUM in suites and {card_of(parse(text))[0] for text in store.open_run(folder)["env"]} - {own}:
        raise UsageError(
            f"another card measured what {folder.name} holds, this is {name}: this sweep compares cards, so each "
            "takes a run_id of its own; fleet is given all of their runs"
        )


def judge(frame: pd.DataFrame, tolerance: float) -> list[Score]:
    """What is found of every card, by groups of alike ones.

    Args:
        frame: rows of the store with all attempts: cards that were given one run id must not replace each other.
        tolerance: deviation that is no fault, 0.05 for 5 %.
    """
    rows = (
        without_controls(frame)
        .sort_values("attempt", kind="stable", ignore_index=True)
        .fillna({"regime": "", "attempt": 0})
    )
    rows["bits"] = [str(parse(text).get("checksum", "")) for text in rows["resolved"]]
    envs = [parse(text) for text in rows["env"]]
    names = dict(map(card_of, envs))
    rows["card"] = [names[card_of(env)[0]] for env in envs]
    groups = rows.groupby(list(map(_alike, envs)))
    return [
        Score(f"{plural(own['card'].nunique(), 'card')}: {alike}", *found)
        for alike, own in groups
        for found in _found(own, tolerance)
    ]


def limit(cards: int, places: int, tolerance: float) -> float:
    """How far a score, a logarithm, may be from the middle one, so that few healthy fleets have any beyond it.

    Args:
        cards: that have a score.
        places: pairs of suite and regime in which they have one.
        tolerance: see `judge`.
    """
    sd = np.log1p(tolerance) / TOLERANCE_SDS
    # The middle of two is their mean, half as far from each as the other is
    return NormalDist(0, sd if cards > 2 else sd * 0.5**0.5).inv_cdf(1 - RATE / (2 * cards * places))


def card_of(env: Mapping[str, Any]) -> tuple[str, str]:
    """What is equal in all runs of a GPU in any results folder, or of a CPU in one; and a short name of it and its host."""
    host, gpu = (env.get("host_hash") or "unknown")[:8], env.get("gpu_uuid_hash")
    return (gpu, f"{gpu[:8]}@{host}") if gpu else (host, f"host {host}")


def _alike(env: Mapping[str, Any]) -> str:
    code = env.get("code") or env.get("git_commit")  # rows of before the code was hashed have its commit
    return ", ".join(
        [
            env.get("gpu") or f"CPU {env.get('cpu')}",
            f"code {code}",
            *(f"{name} {env[name]}" for name in ALIKE if env.get(name)),
        ]
    )


def _found(rows: pd.DataFrame, tolerance: float) -> Iterator[Finding]:
    """What is found of alike cards: fields of `Score` but for the first."""
    cards = rows["card"].unique()
    is_wrong = (rows["suite"] == CHECKSUM) & rows["cause"].isin(REFUTED)
    # What was skipped does not replace what was measured
    tried = rows[(rows["status"] != "skipped") & ~is_wrong]
    is_new = tried["attempt"] == tried.groupby(["card", "case_id"])["attempt"].transform("last")
    now = tried[is_new & tried["metric"].isin(TIMES)]
    times = now[(now["status"] == "ok") & (now["value"] > 0)]
    results = rows[~is_wrong & (rows["bits"] != "")].assign(regime="bits", metric=CHECKSUM, value=1.0)
    # Logarithms of times, and 0 for a result, by measurement and card
    keys = ["suite", "arm", "regime", "case_id", "metric"]
    logs = pd.concat([times, results]).pivot_table("value", keys, "card", "last").reindex(columns=cards)
    have = logs.count(axis=1)
    lacks = logs[have >= min(2, len(cards) - 1)].isna()
    logs = logs[have >= 2].map(np.log)
    is_timed = (logs.index.get_level_values("metric") != CHECKSUM).any()
    for card in cards:
        lacking = {" ".join(key[:3]) for key in lacks.index[lacks[card]]} if is_timed else {"any time"}
        yield from ((card, "", "", LACKING, arm) for arm in sorted(lacking))
    yield from _faults(rows[is_wrong], now, results)
    yield from _levels(times)
    places = logs.sub(logs.median(axis=1), axis=0).groupby(["suite", "regime"])
    for place, own in places:
        scores = own.median().dropna()
        most = limit(len(scores), len(places), tolerance)
        why = f"{plural(len(own), 'measurement')} of {len(scores)} cards, limit {np.expm1(most):.1%}"
        for card, score in (scores - scores.median()).items():
            kind = "" if abs(score) <= most else "slow" if score > 0 else "fast"
            apart = own[card].max() - own[card].min()
            yield card, *place, kind, why, np.expm1(score), np.expm1(apart)


def _levels(times: pd.DataFrame) -> Iterator[Finding]:
    """The best long bf16 product of each card that the peak table has, over what such a card reaches."""
    for card, own in times.groupby("card"):
        device, reached = of_env(parse(own["env"].iloc[-1])), ceilings(own)
        if device and reached:
            rate = rates_of(device)["bf16"] / 1e12
            products = (
                p for p in reached.products if p.kind == BF16 and p.tflops * p.seconds >= rate * LONG_S
            )
            for level in sorted(p.tflops / rate for p in products)[-1:]:
                why = f"its best product runs at {level:.0%} of what such cards reach"
                yield card, PEAKS, "", "low" if level < LEAST else "", why, 1 / level - 1


def _faults(refuted: pd.DataFrame, now: pd.DataFrame, results: pd.DataFrame) -> Iterator[Finding]:
    """What fails on some cards; and results that the card's own check refuted, or of other bits than most cards'."""
    failed = now[now["status"] == "failed"]
    is_everywhere = _count(failed, "card") == _count(now, "card")[failed.index]
    is_common = 2 * _count(results, "card", "bits") > _count(results, "card")
    odd = results[~is_common | (_count(results, "bits", "card") > 1)]
    found = [
        refuted.assign(kind="corrupt"),
        odd.assign(kind="corrupt", reason="checksum " + odd["bits"] + ", not the one of most cards"),
        failed.assign(kind=np.where(is_everywhere & (failed["suite"] != CHECKSUM), LACKING, "fails")),
    ]
    for row in pd.concat(found).drop_duplicates(["card", "suite", "kind"]).itertuples():
        why = f"{row.arm} of case {row.case_id}: {row.reason}"
        yield row.card, row.suite, "", row.kind, why


def _count(rows: pd.DataFrame, of: str, *by: str) -> pd.Series:
    """How many different ones of a column there are of the arm of each row's case."""
    return rows.groupby(["suite", "arm", "case_id", *by])[of].transform("nunique")
