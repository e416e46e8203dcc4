"""Ran: which files the timed processes read, and what that says about a change. Bytes and records decide, no name of a file does.

| a file of a side's own work tree that differs between the two trees | is |
|---|---|
| that the command starts or names, or that what it starts opens | the benchmark: the base commit's judges both |
| that is imported, compiled, executed, or opened by such a file | the code |
| that nothing reads | not judged |

An editable install points every process of an environment at one checkout: both sides would run it, and equal code is never
slower. So no file that differs may be read from the other tree, from the checkout, or as a copy from elsewhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.options import Exit, GateError, Loud
from harness.gate.trees import differing, digest, inside, replace_files
from harness.store.text import some

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from harness.gate.trees import Walk

RECORDER = Path(__file__).with_name("recorder.py")
CACHE = "CACHEDIR.TAG"  # what marks a folder as one of a cache, which is no part of a change
SYSTEM = tuple(
    f"/{name}/" for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr")
)
WAYS_OUT = (
    "let each work tree be imported: --command 'PYTHONPATH=src:$PYTHONPATH ...', or an environment a tree: --setup 'python -m venv "
    ".venv && .venv/bin/pip install -e .' --command '.venv/bin/python ...'"
)


@dataclass
class SideFiles:
    """What the processes of one side did, as paths below its tree where they lie there.

    Attributes:
        tree: its work tree.
        sources: its files before the set-up.
        started, code: files that were started, and that were imported or executed.
        data: files that were opened, each with the file that did.
        outside: other files that they read.
        looked: what imports and the code looked for in the tree.
        texts: hashes of sources that were compiled.
        ended: how processes of the last run ended of themselves.
        prefixes: where their Pythons are installed.
    """

    tree: Path
    sources: Walk
    started: set[str] = field(default_factory=set)
    code: set[str] = field(default_factory=set)
    data: set[tuple[str, str]] = field(default_factory=set)
    outside: set[Path] = field(default_factory=set)
    looked: set[Path] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    prefixes: set[str] = field(default_factory=set)

    def names(self, file: Path) -> list[str]:
        """A file below the tree: as it was named, with the links that lead there, and as it is; none where it is outside."""
        found = []
        for path in (file, file.resolve()):
            if name := inside(self.tree, path):
                found += [
                    name,
                    *(p.as_posix() for p in Path(name).parents if (self.tree / p).is_symlink()),
                ]
        return list(dict.fromkeys(found))

    def add_record(self, lines: Iterable[str], executed: Iterable[Path]) -> set[int]:
        """Takes what the processes of a run wrote; returns their numbers."""
        recorded, read = set(), [("code", "", str(file)) for file in executed]
        self.ended.clear()
        for kind, by, what in (line.split("\t") for line in lines):
            if kind == "process":
                recorded.add(int(by))
                self.prefixes.add(what + os.sep)
            elif kind in ("text", "ended"):
                (self.texts if kind == "text" else self.ended).add(what)
            elif kind == "missing":
                self.looked.add(Path(what))
            else:
                read.append((kind, by, what))
        for kind, by, what in read:
            file = Path(what)
            names = self.names(file)
            if kind == "data":
                self.data |= {(opener, name) for name in names for opener in self.names(Path(by)) or [""]}
            else:
                (self.started if kind == "started" else self.code).update(names)
            real = file.resolve()
            if real.is_file() and not inside(self.tree, real):
                self.outside.add(real)
            elif not file.exists():
                self.looked.add(file)
        return recorded

    def benchmark(self) -> set[str]:
        """What was started, what the line itself opened, and what those that were started opened and nothing compiled."""
        return self.started | {
            name for by, name in self.data if not by or (by in self.started and not self._compiled(name))
        }

    def read(self) -> set[str]:
        """All files of the tree that were read."""
        return self.started | self.code | {name for _, name in self.data}

    def is_text(self, name: str) -> bool:
        """Whether a name is that of a file of the commit which is no program for a machine."""
        return (
            name in self.sources
            and (self.tree / name).is_file()
            and b"\0" not in (self.tree / name).read_bytes()
        )

    def _compiled(self, name: str) -> bool:
        file = self.tree / name
        data = file.read_bytes() if file.is_file() else b""
        return f"{len(data)} {sum(data)}" in self.texts


@dataclass
class FilesRan:
    """Both sides, the checkout that they come from, and what may be concluded of the change.

    Attributes:
        sides: by name.
        original: the checkout.
        named: files that the command names.
        unseen: programs of which it is not known what they read.
        built: files that the set-up made and that were executed, and whether they differ.
    """

    sides: Mapping[str, SideFiles]
    original: Path
    named: frozenset[str] = frozenset()
    unseen: set[str] = field(default_factory=set)
    built: dict[str, bool] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """Files of the two trees that differ, before the set-up."""
        return differing(*(side.sources for side in self.sides.values()))

    @property
    def changed(self) -> set[str]:
        """Files that differ between the sides, and what the set-up built otherwise of all that was imported or executed."""
        one, other = self.sides.values()
        for name in (one.code | other.code) - one.sources.keys() - other.sources.keys() - self.built.keys():
            self.built[name] = digest(one.tree / name, one.tree) != digest(other.tree / name, other.tree)
        return {*self.sources, *(name for name, differs in self.built.items() if differs)}

    @property
    def seen(self) -> list[str]:
        """Files of the change that were read."""
        one, other = self.sides.values()
        return sorted(self.changed & (one.read() | other.read()))

    def add_record(self, name: str, folder: Path, programs: Mapping[int, Path]) -> None:
        """Takes what the processes of a run wrote into a folder, and the programs that ran."""
        file = folder / "lines"
        text = file.read_text(encoding="utf-8", errors="surrogateescape") if file.exists() else ""
        recorded = self.sides[name].add_record(text.splitlines(), programs.values())
        self.unseen |= {program.name for pid, program in programs.items() if pid not in recorded}

    def changed_benchmark(self) -> list[str]:
        """Files of the benchmark that differ, which have to be the base commit's.

        Raises:
            GateError: one may be the code as well (exit 6).
        """
        one, other = self.sides.values()
        benchmark = self.named | one.benchmark() | other.benchmark()
        found = [name for name in self.sources if name in benchmark]
        if both := (one.code | other.code).intersection(found):
            raise GateError(
                Exit.INCONCLUSIVE,
                f"{some(sorted(both), 5)} may be the benchmark, which the base commit's has to judge, or the code: it was started "
                "and imported; --accept-changed-benchmark judges each side by its own",
            )
        return found

    def take_over(self, names: Iterable[str]) -> None:
        """Makes files of the candidate those of the base commit."""
        base, candidate = (self.sides[name] for name in ("baseline", "candidate"))
        replace_files(base.tree, candidate.tree, names)
        for name in names:
            candidate.sources.pop(name, None)
            if name in base.sources:
                candidate.sources[name] = base.sources[name]

    def check(self) -> None:
        """Refuses where a side did not read its own.

        Raises:
            GateError: a file that differs was read elsewhere, or one of the checkout was looked for in vain (exit 6).
        """
        changed = self.changed
        for name, side in self.sides.items():
            unread = changed - side.read()
            for file in sorted(side.outside):
                if where := self._elsewhere(side, file, changed, unread):
                    raise GateError(
                        Exit.INCONCLUSIVE,
                        f"the {name} read {file}, in {where}, which is a file that differs: the two sides did not each run their "
                        f"own code; {WAYS_OUT}",
                    )
            for place in sorted(side.looked):
                if left := self._left_behind(side, place):
                    raise GateError(
                        Exit.INCONCLUSIVE,
                        f"the {name} looked for {left}, which lies in the checkout and, as git ignores it, in neither work tree; "
                        "commit it, or make it with --setup",
                    )

    def _elsewhere(self, side: SideFiles, file: Path, changed: set[str], unread: set[str]) -> str:
        """The wrong place that holds a file that differs; "" where it is another file."""
        trees = {
            other.tree: f"the work tree of the {name}"
            for name, other in self.sides.items()
            if other is not side
        } | {self.original: "the original checkout (an editable install?)"}
        for tree, what in trees.items():
            if inside(tree, file) in changed:
                return what
        for name in unread:
            if Path(name).name == file.name and (
                Path(name).parent.name == file.parent.name
                or (
                    file.stat().st_size
                    and digest(file) in [other.sources.get(name) for other in self.sides.values()]
                )
            ):
                return f"neither work tree: a copy of {name}"
        return ""

    def _left_behind(self, side: SideFiles, place: Path) -> str:
        """The file of the checkout that was looked for, and which no tree holds; "" where there is none."""
        looked = inside(side.tree, place)
        for suffix in ("", ".py", "/__init__.py", *EXTENSION_SUFFIXES) if looked else ():
            name = f"{looked}{suffix}"
            file = self.original / name
            if (
                file.is_file()
                and not (side.tree / name).exists()
                and not any(name in other.sources for other in self.sides.values())
                and not any((folder / CACHE).exists() for folder in file.parents)
            ):
                return name
        return ""

    def notes(self, *, allowed: bool) -> list[str]:
        """What the verdict has to say of what ran."""
        seen = self.seen
        rest = sorted(self.changed.difference(seen))
        lines = [f"of the change these files were read: {some(seen, 5)}"] if seen else []
        if rest:
            lines.append(f"not read: {some(rest, 5)}")
        outside = sorted(
            str(file) for side in self.sides.values() for file in side.outside
            if not str(file).startswith((*SYSTEM, *side.prefixes))
        )  # fmt: skip
        if outside:
            lines.append(f"read from outside of both work trees: {some(outside, 5)}")
        if self.unseen and self.changed and not seen:
            lines.append(
                Loud(
                    f"WHAT RAN WAS NOT SEEN ({some(sorted(self.unseen), 4)}): that the change ran is not shown, the figures alone are judged"
                )
            )
        elif self.changed and not seen and allowed:
            lines.append(Loud("NO FILE OF THE CHANGE WAS READ (--unproven-tree ok)"))
        return lines
