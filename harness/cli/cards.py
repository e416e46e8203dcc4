"""Command lines that would mix what several cards measured, where a sweep compares cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness import store
from harness.judge.fleet.cards import CHECKSUM, card_id, card_name
from harness.store.errors import UsageError
from harness.store.outside import parse
from harness.store.private import of_run

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.engine.settings import SweepConfig


def refuse_shares(config: SweepConfig, slots: int) -> None:
    """Refuses a command line that deals the cases of such a sweep out.

    Args:
        config: of the command line.
        slots: shards or devices among which the cases would be dealt.

    Raises:
        UsageError: there are several.
    """
    if slots > 1 and _compares_cards(config):
        raise UsageError(
            f"sweep={config.name} compares cards, each of which must measure every case, and {slots} shards or devices "
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
