"""Tables that other packages add to. Oracle: the entries that each case plants, and what then is in the table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import fp8core
from fp8core import RECIPES, Recipe
from fp8core.extensions import Extension, ExtensionError, ExtensionTable, of_type

if TYPE_CHECKING:
    from collections.abc import Callable

ROWWISE = RECIPES["rowwise"]


def planted(
    name: str, load: Callable[[], Any], package: str = "acme-fp8", table: str = "recipes"
) -> Extension:
    return Extension(table, name, package, "1.2", f"acme.{name}:X", load)


def table(monkeypatch: pytest.MonkeyPatch, *extensions: Extension) -> ExtensionTable[Recipe]:
    """A table of one recipe of ours, "rowwise", to which these extensions add."""
    monkeypatch.setattr(fp8core.extensions, "installed", lambda name: extensions)
    return ExtensionTable("recipes", {"rowwise": ROWWISE}, of_type(Recipe), ("bf16",))


def never() -> None:
    pytest.fail("it was imported")


def raises(error: BaseException) -> Callable[[], Any]:
    def load() -> None:
        raise error

    return load


def test_an_extension_is_imported_when_its_name_is_looked_up_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[str] = []
    recipes = table(
        monkeypatch, planted("acme", lambda: loads.append("acme") or replace(ROWWISE, name="acme"))
    )
    assert "acme" in recipes
    assert recipes["rowwise"] is ROWWISE
    assert loads == []
    assert recipes["acme"].name == "acme"
    assert recipes["acme"] is recipes["acme"]
    assert loads == ["acme"]
    assert recipes.owner("acme").owner == "acme-fp8 1.2"
    assert list(recipes) == ["rowwise", "acme"]
    assert list(recipes.own) == ["rowwise"]


@pytest.mark.parametrize("name", ["rowwise", "bf16"])
def test_ours_keep_their_names(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    taken = planted(name, never)
    recipes = table(monkeypatch, taken)
    assert list(recipes) == ["rowwise"]
    assert recipes["rowwise"] is ROWWISE
    assert recipes.is_contested(taken)
    assert recipes.owner("rowwise") is None
    (why,) = recipes.absent.values()
    assert "acme-fp8 1.2" in why


def test_two_packages_with_one_name_are_both_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = table(monkeypatch, planted("acme", never), planted("acme", never, "other-fp8"))
    with pytest.raises(ExtensionError, match=r"acme-fp8 1\.2 .*other-fp8 1\.2"):
        recipes["acme"]
    assert list(recipes) == ["rowwise"]
    assert len(recipes.absent) == 2


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (raises(ImportError("no module\nnamed acme")), "ImportError: no module"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (lambda: {"name": "acme"}, "dict"),
        (lambda: ROWWISE, "its name is 'rowwise'"),
    ],
    ids=["import", "exit", "dict", "another name"],
)
def test_what_cannot_be_used_is_refused_where_it_is_named(
    monkeypatch: pytest.MonkeyPatch, load: Callable[[], Any], said: str
) -> None:
    recipes = table(
        monkeypatch, planted("acme", load), planted("sound", lambda: replace(ROWWISE, name="sound"))
    )
    with pytest.raises(ExtensionError) as error:
        recipes["acme"]
    (line,) = str(error.value).splitlines()
    assert said in line
    assert "acme-fp8 1.2" in line
    assert list(recipes) == ["rowwise", "sound"], "the others are there all the same"
    assert list(recipes.absent.values()) == [line]
