"""Situations of the fleet: cards that were not judged, or are wrong."""

from __future__ import annotations

import json
from functools import partial

from fleet_fixtures import BASE_MS, CASES, CASTS, card, env, failed, names, time
from report_fixtures import absent, write_run
from situations import Place, situation

from harness.__main__ import main

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
