"""Tables that other packages add to. Oracle: the entries that each case plants, and what then is in the table."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

import fp8core
from fp8core import RECIPES, Recipe
from fp8core.extensions import Extension, ExtensionError, Table, installed, of_type
from fp8core.gemm import backend_named

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWWISE = RECIPES["rowwise"]


def planted(
    name: str, load: Callable[[], Any], package: str = "acme-fp8", table: str = "recipes"
) -> Extension:
    return Extension(table, name, package, "1.2", f"acme.{name}:X", load)


def table(monkeypatch: pytest.MonkeyPatch, *extensions: Extension) -> Table[Recipe]:
    """A table of one recipe of ours, "rowwise", to which these extensions add."""
    monkeypatch.setattr(fp8core.extensions, "installed", lambda name: extensions)
    return Table("recipes", {"rowwise": ROWWISE}, of_type(Recipe), ("bf16",))


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


def test_a_package_s_entry_points_are_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Recipe and backend by the files that an installer writes; the recipe names the backend."""
    info = tmp_path / "acme_fp8-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fp8\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text(
        "[fp8_harness.recipes]\nacme_e4m3 = acme_fp8:RECIPE\n[fp8_harness.backends]\nacme_mm = acme_fp8:BACKEND\n"
    )
    (tmp_path / "acme_fp8.py").write_text(
        "from dataclasses import replace\nfrom fp8core import RECIPES\nfrom fp8core.gemm.reference import Reference\n"
        "BACKEND = Reference('acme_mm')\nRECIPE = replace(RECIPES['tensorwise'], name='acme_e4m3')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    installed.cache_clear()
    try:
        (found,) = installed("recipes")
        assert found.owner == "acme-fp8 0.3"
        assert "acme_fp8" not in sys.modules
        recipes = Table("recipes", dict(RECIPES.own), of_type(Recipe))
        monkeypatch.setattr(fp8core.gemm.BACKENDS, "_claims", None)
        assert backend_named("acme_mm").name == "acme_mm"
        assert recipes["acme_e4m3"].with_backend("acme_mm").backend == "acme_mm"
    finally:
        installed.cache_clear()
        fp8core.BACKENDS.pop("acme_mm", None)
        sys.modules.pop("acme_fp8", None)
