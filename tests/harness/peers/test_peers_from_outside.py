"""What a peer of another package must offer. Oracle: the arms that the suites make of it; one that would have none is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import fp8core
from fp8core import RECIPES
from fp8core.extensions import Extension, ExtensionError, ExtensionTable
from harness import peers
from harness.peers import Peer, nanochat_style, scaled_mm
from harness.store import case
from harness.suites import SUITES

GEMM, LINEAR = scaled_mm.PEER, nanochat_style.PEER


def looked_up(monkeypatch: pytest.MonkeyPatch, made: object) -> Peer:
    of = Extension("peers", "acme", "acme-fp8", "1.2", "acme:PEER", lambda: made)
    monkeypatch.setattr(fp8core.extensions, "installed", lambda table: (of,))
    table: ExtensionTable[Any] = ExtensionTable("peers", {}, peers._fault)
    found: Peer = table["acme"]
    return found


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
        (LINEAR, {"published": (1.25,)}, "published holds something else"),
    ],
    ids=["name", "nothing", "no recipe", "scales", "no mode", "mode", "recipe", "published"],
)
def test_one_that_would_have_no_arm_is_refused(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, changes: dict[str, Any], said: str
) -> None:
    assert looked_up(monkeypatch, replace(peer, arm="acme")).recipes == peer.recipes
    with pytest.raises(ExtensionError) as error:
        looked_up(monkeypatch, replace(peer, **{"arm": "acme", **changes}))
    assert said in str(error.value)
    assert "acme-fp8 1.2" in str(error.value)


@pytest.mark.parametrize(
    ("table", "names"),
    [(RECIPES, case._PEERS), (peers.PEERS, (*case._RECIPES, *case.WITHOUT_FP8))],
    ids=["recipes", "peers"],
)
def test_no_recipe_is_called_like_a_peer_and_no_peer_like_a_recipe(
    table: ExtensionTable[Any], names: tuple[str, ...]
) -> None:
    """Oracle: the words that the names of arms are made of."""
    for name in names:
        of = Extension(table.name, name, "acme-fp8", "1.2", "acme:X", lambda: None)
        assert "fp8-harness has that name itself" in table._claim_fault(name, of, [of]), name


def test_no_extension_sets_a_suite_of_ours_while_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SUITES` is a table too, whose entries are modules."""
    of = Extension("peers", "acme", "acme-fp8", "1.2", "acme:PEER", lambda: SUITES.update(gemm=None))
    monkeypatch.setattr(fp8core.extensions, "installed", lambda table: (of,))
    with pytest.raises(
        ExtensionError, match="suite 'gemm' may not be changed while peer 'acme' of package acme-fp8"
    ):
        ExtensionTable("peers", {}, peers._fault)["acme"]
    assert SUITES["gemm"].__name__ == "harness.suites.gemm"
