"""Situations of the fleet: cards that were not judged, or are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fleet_fixtures import BASE_MS, CASES, CASTS, card, env, failed, names, time
from link_fixtures import hosts, sent, write
from report_fixtures import absent, write_run
from situations import Place, situation

from harness.__main__ import main

if TYPE_CHECKING:
    from harness.store.measurement import Measurement

# exit code, cards that were judged by all times, cards out of line
of_fleet = partial(
    situation, "fleet", word="exit code, cards judged by times, cards out of line", positive=[0, 4, 0]
)


def judged(place: Place, count: int = 3) -> list[int]:
    """What the command says of all runs, beside those of so many healthy cards."""
    for name in names(count):
        card(place.folder, name)
    place.capture.readouterr()
    code = main(["fleet", str(place.folder), "json=true"])
    said = json.loads(place.capture.readouterr().out)
    timed = {name for group in said["groups"] for name in group["judged_by_times"]}
    return [code, len(timed), len({outlier["card"] for outlier in said["outliers"]})]


def links(place: Place, rows: list[list[Measurement]]) -> list[object]:
    """Exit code, and whether the sentence on the links begins with what is said of links that are in line."""
    write(place.folder, rows)
    place.capture.readouterr()
    code = main(["fleet", str(place.folder), "json=true"])
    said = json.loads(place.capture.readouterr().out)["links"]
    return [code, said["verdict"].startswith("no link out of line")]


of_links = partial(situation, "fleet", word="exit code, all links in line", positive=[0, True])


@of_links(what="a GPU that lost NVLink, so that all its links are alike and slow", instead=[1, False])
def lost_nvlink(place: Place, planted: bool) -> object:
    ends = hosts(1, 8)
    if planted:
        own = ends[3].gpu
        ends = [
            replace(e, nvlinked=tuple(g for g in e.nvlinked or () if own not in (g, e.gpu))) for e in ends
        ]
    return links(place, sent(ends, lambda a, b, turn: 10.0 if planted and 3 in (a, b) else 1.0, kibs=[1024]))


@of_links(what="the pair of two ranks is in no row", instead=[2, False])
def missing_link(place: Place, planted: bool) -> object:
    rows = sent(hosts(4), kibs=[1024])
    return links(place, [own for own in rows if not planted or own[0].part not in ("0>1", "1>0")])


@of_fleet(what="one card: nothing to compare it with", instead=[0, 0, 0])
def one_card(place: Place, planted: bool) -> object:
    return judged(place, 1 if planted else 4)


@of_fleet(what="four runs of one card", instead=[0, 0, 0])
def one_card_four_times(place: Place, planted: bool) -> object:
    for i in range(4):
        card(place.folder / str(i), "0000" if planted else f"000{i}", run_id=f"run-{i}")
    return judged(place, 0)


@of_fleet(what="the rows of a card cannot be read", instead=[2, 3, 0])
def unreadable_card(place: Place, planted: bool) -> object:
    card(place.folder, "0003")
    if planted:
        for part in (place.folder / "0003").rglob("*.parquet"):
            part.write_bytes(b"junk")
    return judged(place)


@of_fleet(what="a card has no time of any product", instead=[0, 3, 0])
def card_without_products(place: Place, planted: bool) -> object:
    cases = CASTS if planted else (*CASTS, *CASES)
    rows = [[time(c, arm, ms * c.integer("M") / 1024) for arm, ms in BASE_MS.items()] for c in cases]
    write_run(place.folder / "0003", rows, run_id="run-0003", sweep="fleet", env=env("0003"))
    return judged(place)


@of_fleet(what="every case of a card was skipped", instead=[0, 3, 0])
def skipped_card(place: Place, planted: bool) -> object:
    if planted:
        rows = [[absent(CASES[0], "bf16", "skipped", "no GPU")]]
        write_run(place.folder / "0003", rows, run_id="run-0003", sweep="fleet", env=env("0003"))
    return judged(place, 3 if planted else 4)


@of_fleet(what="every case of a card failed", instead=[1, 3, 1])
def failed_card(place: Place, planted: bool) -> object:
    if planted:
        rows = [failed(c, "boom") for c in CASES]
        write_run(place.folder / "0003", rows, run_id="run-0003", sweep="fleet", env=env("0003"))
    return judged(place, 3 if planted else 4)


@of_fleet(what="a card that is as fast as the others computes other bits", instead=[1, 4, 1])
def wrong_bits(place: Place, planted: bool) -> object:
    card(place.folder, "0003", checksum="bad" if planted else "c0ffee")
    return judged(place)
