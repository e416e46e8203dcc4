"""What a peer of another package must offer. Oracle: the arms that the suites make of it; one that would have none is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fp8core
from fp8core.extensions import Extension, ExtensionError, Table
from harness import peers
from harness.peers import Peer, nanochat_style, scaled_mm

GEMM, LINEAR = scaled_mm.PEER, nanochat_style.PEER


def looked_up(monkeypatch: pytest.MonkeyPatch, made: object) -> Peer:
    of = Extension("peers", "acme", "acme-fp8", "1.2", "acme:PEER", lambda: made)
    monkeypatch.setattr(fp8core.extensions, "installed", lambda table: (of,))
    table: Table[Any] = Table("peers", {}, peers._fault)
    found: Peer = table["acme"]
    return found


@pytest.mark.parametrize("peer", [GEMM, LINEAR], ids=["gemm", "linear"])
def test_a_peer_like_ours_is_taken(monkeypatch: pytest.MonkeyPatch, peer: Peer) -> None:
    assert looked_up(monkeypatch, replace(peer, arm="acme")).recipes == peer.recipes


@pytest.mark.parametrize(
    ("peer", "changes", "said"),
    [
        (GEMM, {"arm": "scaled_mm"}, "its arm is 'scaled_mm'; expected the entry point's name 'acme'"),
        (GEMM, {"gemm": None}, "none of linear, cast and gemm"),
        (GEMM, {"recipes": ()}, "no recipes"),
        (
            GEMM,
            {"recipes": ("mxfp8",)},
            "recipes mxfp8 are unknown to what it offers; expected some of tensorwise, rowwise",
        ),
        (LINEAR, {"modes": ()}, "no modes"),
        (LINEAR, {"modes": ("graph",)}, "modes graph are unknown; expected some of eager, compile"),
        (LINEAR, {"recipes": ("its_own",)}, "recipes its_own are unknown"),
    ],
    ids=["name", "nothing", "no recipe", "scales", "no mode", "mode", "recipe"],
)
def test_one_that_would_have_no_arm_is_refused(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ExtensionError) as error:
        looked_up(monkeypatch, replace(peer, **{"arm": "acme", **changes}))
    assert said in str(error.value)
    assert "acme-fp8 1.2" in str(error.value)
