"""Peers: other implementations, measured in the same rounds on the same operands, none required.

To add one: its file in this folder, which ends in `PEER = Peer(...)`, and its line in `PEERS`. The suites make an
arm of each recipe and mode that it offers, and check it like every other arm: a peer that is wrong gets no speed.
A peer that is not there is a skipped row whose reason is the pip line that brings it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.peers import (
    aiter,
    deepgemm,
    nanochat_style,
    scaled_mm,
    torchao,
    torchao_mx,
    torchao_nocompile,
    transformer_engine,
    triton_tutorial,
)
from harness.peers.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.store.arm import Arm

__all__ = ["PEERS", "Peer", "peer_of"]

PEERS: Mapping[str, Peer] = {
    "torchao": torchao.PEER,
    "torchao_nocompile": torchao_nocompile.PEER,
    "torchao_mx": torchao_mx.PEER,
    "transformer_engine": transformer_engine.PEER,
    "deepgemm": deepgemm.PEER,
    "aiter": aiter.PEER,
    "triton_tutorial": triton_tutorial.PEER,
    "nanochat_style": nanochat_style.PEER,
    "scaled_mm": scaled_mm.PEER,
}


def peer_of(arm: Arm) -> Peer | None:
    """The implementation that an arm is of; None for ours. KeyError where no peer has that word."""
    return {peer.arm: peer for peer in PEERS.values()}[arm.peer] if arm.peer else None
