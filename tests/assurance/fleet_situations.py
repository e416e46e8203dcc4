"""Situations of the fleet: cards that were not judged, or are wrong."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

from fleet_fixtures import BASE_MS, CASES, CASTS, CHECK, card, env, failed, names, time
from report_fixtures import absent, figure, write_run
from situations import Place, situation

from harness.__main__ import main
from harness.store.case import Case

if TYPE_CHECKING:
    from collections.abc import Mapping

of_fleet = partial(situation, "fleet", word="exit code, word, cards out of line", positive=[0, "alike", 0])


def judged(place: Place, count: int = 3) -> list[object]:
    """What the command says of all runs, beside those of so many healthy cards."""
    for name in names(count):
        card(place.folder, name)
    place.capture.readouterr()
    code = main(["fleet", str(place.folder), "json=true"])
    said = json.loads(place.capture.readouterr().out)
    return [code, said["code"], len({outlier["card"] for outlier in said["outliers"]})]


of_level = partial(situation, "fleet", word="exit code, word, cards out of line", positive=[0, "in_line", 0])
LARGE = Case.of("gemm", {"M": 16384, "K": 4096, "N": 14336})


def level(place: Place, *words: str, **each: Mapping[str, object]) -> list[object]:
    """What the command says of cards, each with a large product that takes so many ms: 2.6 is 93 % of what an H200 reaches."""
    for name, about in each.items():
        product = time(LARGE, "bf16_eager", about.get("ms", 2.6))
        more = {key: value for key, value in about.items() if key != "ms"}
        card(place.folder / str(about.get("run_id")), name, extra=[[product]], **more)
    place.capture.readouterr()
    code = main(["fleet", str(place.folder), "json=true", *words])
    said = json.loads(place.capture.readouterr().out)
    return [code, said["code"], len({outlier["card"] for outlier in said["outliers"]})]


def alike(count: int = 4, **about: object) -> dict[str, dict[str, object]]:
    return dict.fromkeys(names(count), about)


@of_level(what="every card takes three times as long as its model does", instead=[1, "out", 4])
def all_cards_slow(place: Place, planted: bool) -> object:
    return level(place, **alike(slow=3.0, ms=7.8) if planted else alike())


@of_level(what="every card runs at less than half of its clock", instead=[1, "out", 4])
def all_clocks_low(place: Place, planted: bool) -> object:
    return level(place, **alike(clock=800.0, slow=2.2, ms=5.7) if planted else alike())


@of_level(what="half of the cards take 30 % longer", instead=[1, "out", 4])
def two_groups(place: Place, planted: bool) -> object:
    cards = alike()
    return level(place, **cards | {name: {"slow": 1.3} for name in names(2) if planted})


@of_level(what="no two of five cards are equally fast", instead=[1, "out", 4])
def spread_out(place: Place, planted: bool) -> object:
    slow = {name: 1 + 0.12 * i * planted for i, name in enumerate(names(5))}
    return level(place, **{name: {"slow": factor} for name, factor in slow.items()})


@of_level(what="a card of the expected ones has no rows", instead=[1, "missing", 0])
def missing_card(place: Place, planted: bool) -> object:
    return level(place, f"expect={5 if planted else 4}", **alike())


@of_level(what="a host of the expected ones has no rows", instead=[1, "missing", 0])
def missing_host(place: Place, planted: bool) -> object:
    return level(place, f"expect=node1{',node7' * planted}", **alike())


@of_fleet(what="one card: nothing to compare it with", instead=[0, "not_judged", 0])
def one_card(place: Place, planted: bool) -> object:
    return judged(place, 1 if planted else 4)


@of_fleet(what="four runs of one card", instead=[0, "not_judged", 0])
def one_card_four_times(place: Place, planted: bool) -> object:
    for i in range(4):
        card(place.folder / str(i), "0000" if planted else f"000{i}", run_id=f"run-{i}")
    return judged(place, 0)


@of_fleet(what="the rows of a card cannot be read", instead=[2, "unread", 0])
def unreadable_card(place: Place, planted: bool) -> object:
    card(place.folder, "0003")
    if planted:
        for part in (place.folder / "0003").rglob("*.parquet"):
            part.write_bytes(b"junk")
    return judged(place)


def products_left_out(place: Place, planted: bool, others: int, name: str = "0003") -> object:
    cases = CASTS if planted else (*CASTS, *CASES)
    rows = [[time(c, arm, ms * c.integer("M") / 1024) for arm, ms in BASE_MS.items()] for c in cases]
    rows.append([figure(CHECK, "rowwise_eager", "mismatches", 0.0, resolved={"checksum": "c0ffee"})])
    write_run(place.folder / name, rows, run_id=f"run-{name}", sweep="fleet", env=env(name))
    return judged(place, others)


@of_fleet(what="a card has no time of any product", instead=[0, "not_judged", 0])
def card_without_products(place: Place, planted: bool) -> object:
    return products_left_out(place, planted, 3)


@of_fleet(what="one of three cards has no time of any product", instead=[0, "not_judged", 0])
def one_of_three_without_products(place: Place, planted: bool) -> object:
    return products_left_out(place, planted, 2)


@of_fleet(what="two of four cards have no time of any product", instead=[0, "not_judged", 0])
def two_of_four_without_products(place: Place, planted: bool) -> object:
    products_left_out(place, planted, 0, "0004")
    return products_left_out(place, planted, 2)


@of_fleet(what="one of two cards has no time of any product", instead=[0, "not_judged", 0])
def one_of_two_without_products(place: Place, planted: bool) -> object:
    return products_left_out(place, planted, 1)


@of_fleet(what="every case of a card was skipped", instead=[0, "not_judged", 0])
def skipped_card(place: Place, planted: bool) -> object:
    if planted:
        rows = [[absent(CASES[0], "bf16", "skipped", "no GPU")]]
        write_run(place.folder / "0003", rows, run_id="run-0003", sweep="fleet", env=env("0003"))
    return judged(place, 3 if planted else 4)


@of_fleet(what="every case of a card failed", instead=[1, "out", 1])
def failed_card(place: Place, planted: bool) -> object:
    if planted:
        rows = [failed(c, "boom") for c in CASES]
        write_run(place.folder / "0003", rows, run_id="run-0003", sweep="fleet", env=env("0003"))
    return judged(place, 3 if planted else 4)


@of_fleet(what="a card that is as fast as the others computes other bits", instead=[1, "out", 1])
def wrong_bits(place: Place, planted: bool) -> object:
    card(place.folder, "0003", checksum="bad" if planted else "c0ffee")
    return judged(place)


@of_fleet(what="a card has no result that the others have", instead=[0, "not_judged", 0])
def card_without_results(place: Place, planted: bool) -> object:
    card(place.folder, "0003", checksum="" if planted else "c0ffee")
    return judged(place)


@of_fleet(what="an arm failed on every card", instead=[0, "not_judged", 0])
def failed_on_every_card(place: Place, planted: bool) -> object:
    for name in names(4):
        card(place.folder / "all", name, fails="boom" if planted else "")
    return judged(place, 0)


@of_fleet(what="a card failed at a case that all others left out", instead=[0, "not_judged", 0])
def failed_alone(place: Place, planted: bool) -> object:
    extra = [failed(Case.of("gemm", {"M": 64, "K": 64, "N": 64}), "boom")] if planted else []
    card(place.folder, "0003", extra=extra)
    return judged(place)
