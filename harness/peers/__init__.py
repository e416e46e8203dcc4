"""Peers: other implementations, measured in the same rounds on the same operands, none required.

To add one: its file in this folder, which ends in `PEER = Peer(...)`, and its line in `PEERS`; from another package, an
entry point of the group `fp8_harness.peers` (`fp8core.extensions`). The suites make an
arm of each recipe and mode that it offers, and check it like every other arm: a peer that is wrong gets no speed.
A peer that is not there is a skipped row whose reason is the pip line that brings it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8core.extensions import ExtensionTable, of_type
from fp8core.recipe import RECIPES
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
from harness.peers.peer import GEMM_RECIPES, MODES, Peer
from harness.store.case import WITHOUT_FP8
from harness.store.published import Published

if TYPE_CHECKING:
    from harness.store.case import Arm

__all__ = ["PEERS", "Peer", "peer_of"]

_OURS: dict[str, Peer] = {
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


def _fault(name: str, made: object) -> str:
    """A peer from outside has one name, the first word of its arms; what it offers must make arms of some suite."""
    if fault := of_type(Peer, "arm")(name, made):
        return fault
    assert isinstance(made, Peer)
    if not (made.linear or made.cast or made.gemm):
        return "it offers none of linear, cast and gemm"
    if (made.linear or made.cast) and not made.modes:
        return f"it offers linear or cast and no modes; expected some of {', '.join(MODES)}"
    if (made.linear or made.gemm) and not made.recipes:
        return "it offers linear or gemm and no recipes"
    if unknown := [mode for mode in made.modes if mode not in MODES]:
        return f"modes {', '.join(unknown)} are unknown; expected some of {', '.join(MODES)}"
    if any(not isinstance(each, Published) for each in made.published):
        return "published holds something else than harness.store.published.Published"
    known = GEMM_RECIPES if made.gemm else RECIPES.own
    if unknown := [recipe for recipe in made.recipes if recipe not in known]:
        return (
            f"recipes {', '.join(unknown)} are unknown to what it offers; expected some of {', '.join(known)}"
        )
    return ""


# A name that is a recipe's would make two arms of one name
PEERS = ExtensionTable(
    "peers", _OURS, _fault, {*(peer.arm for peer in _OURS.values()), *RECIPES.own, *WITHOUT_FP8}
)


def peer_of(arm: Arm) -> Peer | None:
    """The implementation that an arm is of; None for ours. KeyError where no peer has that word."""
    return {peer.arm: peer for peer in PEERS.values()}[arm.peer] if arm.peer else None
