"""Extensions: entries of a table that another installed package brings, by an entry point of the group `fp8_harness.<table>`.

Reading the entry points imports nothing: an extension is imported when its name is looked up, or when its table is iterated.
Whatever is wrong with one raises where its name is looked up and nowhere else; `ExtensionTable.absent` lists it for those who iterate.
While one is imported no table may be changed: only its entry points say what it brings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    # Name of a table, name in it, and what was imported: why that is no such entry; "" where it is one
    Rule = Callable[[str, object], str]

PREFIX = "fp8_harness."
OURS = "fp8-harness"
T = TypeVar("T")
_NAME = re.compile("[a-z][a-z0-9_]*")  # what an arm's name is made of


_importing: ContextVar[Extension | None] = ContextVar("_importing", default=None)
_tables: list[ref[ExtensionTable[Any]]] = []


class ExtensionError(ValueError):
    """An extension was looked up and cannot be used; one line with its package, entry point and reason."""


@dataclass(frozen=True, slots=True)
class Extension:
    """One entry point of an installed package.

    Attributes:
        table: what it adds to: "recipes", "backends", "peers", "suites" or "models".
        name: of the entry in that table.
        package: distribution that brings it.
        version: of the package; "" where its metadata has none.
        target: `module:attribute`, or a module.
        load: imports the target and returns it.
    """

    table: str
    name: str
    package: str
    version: str
    target: str
    load: Callable[[], Any]

    @property
    def owner(self) -> str:
        """Package and version."""
        return f"{self.package} {self.version}".strip()

    def __str__(self) -> str:
        return f"{self.table.removesuffix('s')} {self.name!r} of package {self.owner} (entry point {self.target})"


@cache
def installed(table: str) -> tuple[Extension, ...]:
    """The extensions of one table, by name and package; nothing of theirs is imported."""
    found = [
        Extension(table, e.name, *_package(e.dist), e.value, e.load)
        for e in entry_points(group=PREFIX + table)
    ]
    return tuple(sorted(found, key=lambda e: (e.name, e.package)))


def _package(distribution: Any) -> tuple[str, str]:
    return (
        (str(distribution.name), str(distribution.version or ""))
        if distribution
        else ("an unnamed package", "")
    )


def of_type(kind: type, name_field: str = "name") -> Rule:
    """The rule that an entry is an instance of a class, and calls itself by the name of its entry point."""

    def fault(name: str, made: object) -> str:
        if not isinstance(made, kind):
            return f"it is of type {type(made).__name__}; expected a {kind.__module__}.{kind.__qualname__}"
        own = getattr(made, name_field, None)
        return "" if own == name else f"its {name_field} is {own!r}; expected the entry point's name {name!r}"

    return fault


def refuse_while_importing(table: str, name: str) -> None:
    """Lets no extension change a table while it is imported: it would take the place of an entry of ours unseen.

    Args:
        table: whose entry is to be set or removed.
        name: of the entry.

    Raises:
        ExtensionError: an extension is being imported.
    """
    if (extension := _importing.get()) is not None:
        raise ExtensionError(
            f"{table.removesuffix('s')} {name!r} may not be changed while {extension} is imported; bring an entry "
            f"of your own by an entry point of the group {PREFIX}{table}"
        )


class ExtensionTable(MutableMapping[str, T]):
    """Our entries by name, then those of extensions. Ours always keep their names.

    Args:
        name: of the table, as the group of its entry points ends.
        entries: ours. What is set or loaded later is kept here too, so that hot paths may read this dict.
        rule: what an entry of an extension must be.
        reserved: further names that no extension may have, since ours are written with them.
    """

    def __init__(self, name: str, entries: dict[str, T], rule: Rule, reserved: Collection[str] = ()) -> None:
        self.name, self._entries, self._rule, self._reserved = name, entries, rule, frozenset(reserved)
        self._owners: dict[str, Extension] = {}  # of the entries that extensions have brought
        self._refused: dict[Extension, str] = {}
        self._claims: dict[str, list[Extension]] | None = None
        _tables.append(ref(self))

    @property
    def own(self) -> dict[str, T]:
        """The entries that no extension brings."""
        return {name: entry for name, entry in self._entries.items() if name not in self._owners}

    @property
    def absent(self) -> Mapping[Extension, str]:
        """The extensions that cannot be used, each with a sentence that names its package; imports all of them."""
        for name in self._others():
            self._load(name)
        return self._refused

    def owner(self, name: str) -> Extension | None:
        """The extension that an entry is of; None for ours, and for a name that is not in the table."""
        if name not in self._entries and name in self._others():
            self._load(name)
        return self._owners.get(name)

    def is_contested(self, extension: Extension) -> bool:
        """Whether its name alone is why it is refused."""
        return bool(self._claim_fault(extension.name, extension, self._others()[extension.name]))

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            for claim in self._others().get(name, ()):
                self._load(name)
                if claim in self._refused:
                    raise ExtensionError(self._refused[claim])
        return self._entries[name]

    def __setitem__(self, name: str, entry: T) -> None:
        refuse_while_importing(self.name, name)
        self._entries[name] = entry
        self._owners.pop(name, None)

    def __delitem__(self, name: str) -> None:
        refuse_while_importing(self.name, name)
        del self._entries[name]
        self._owners.pop(name, None)

    def __contains__(self, name: object) -> bool:
        """Whether `table[name]` is an entry, or an extension's whose fault it would raise; imports nothing."""
        return name in self._entries or name in self._others()

    def __iter__(self) -> Iterator[str]:
        for name in self._others():
            self._load(name)
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _others(self) -> Mapping[str, list[Extension]]:
        """All extensions by the names that they claim; those whose claim is refused are noted."""
        if self._claims is None:
            self._claims = {}
            for extension in installed(self.name):
                self._claims.setdefault(extension.name, []).append(extension)
            for name, claims in self._claims.items():
                for extension in claims:
                    if fault := self._claim_fault(name, extension, claims):
                        self._refused[extension] = f"{extension} is refused: {fault}"
        return self._claims

    def _claim_fault(self, name: str, extension: Extension, claims: list[Extension]) -> str:
        if (name in self._entries and name not in self._owners) or name in self._reserved:
            return f"{OURS} has that name itself; rename the entry point, or uninstall {extension.package}"
        if not _NAME.fullmatch(name):
            return "a name begins with a letter a-z and has letters a-z, digits and _ alone"
        others = ", ".join(other.owner for other in claims if other is not extension)
        return f"{others} has that name too; uninstall one of them" if others else ""

    def _load(self, name: str) -> None:
        """Import the one extension of that name, once; what goes wrong is noted."""
        extension = self._others()[name][0]
        if name in self._entries or extension in self._refused:
            return
        # While it is imported it may look at this table itself, which then is without it
        self._refused[extension] = f"{extension} is being imported"
        before = [(table, dict(table._entries)) for at in _tables if (table := at()) is not None]
        token = _importing.set(extension)
        try:
            made = extension.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's module may raise anything
            text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self._refused[extension] = f"{extension} cannot be imported: {text}; mend or uninstall it"
            return
        finally:
            _importing.reset(token)
            changed = [what for table, entries in before for what in table._put_back(entries)]
        if fault := f"it changed {', '.join(changed)} of {OURS}" if changed else self._rule(name, made):
            self._refused[extension] = f"{extension} is refused: {fault}"
            return
        del self._refused[extension]
        self._entries[name], self._owners[name] = made, extension

    def _put_back(self, entries: dict[str, T]) -> list[str]:
        """Puts back what was changed past `__setitem__`; its names."""
        changed = [name for name, entry in entries.items() if self._entries.get(name) is not entry]
        self._entries.update((name, entries[name]) for name in changed)
        return [f"{self.name.removesuffix('s')} {name!r}" for name in changed]
