"""What a new torch, triton or torchao moves: `python tests/studies/canary.py [--names] [--update]`.

Three things are looked at. Private names: each name with a leading underscore that `fp8core` and `harness` take from these
libraries, found by ast (attributes of their objects are not), has to be there with the signature that canary.json holds. Counts: operators called, graphs, graph
breaks and FP8 products of `sweep=gate_ci`, against the committed baseline, whatever the release. Codes: every check of a
result in that sweep, and its figures. What moved is named, a line each, and the exit code is 1; 0 where nothing did, 2 where
something could not be looked at. `--names` looks at the names alone; `--update` writes canary.json from what is installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARIES = ("torch", "triton", "torchao")
EXPECTED = Path(__file__).with_name("canary.json")
TREE = ("fp8core", "harness")
BASELINE = ROOT / "results" / "baseline" / "cpu"
MEASURE = ("gate", "--measure", "--machine-free", "--pairs", "1", "--blocks", "1", "--budget-s", "0")
WORDS = ("sweep=gate_ci", "device=cpu")
POLICY = (
    ROOT / ".ci" / "gate-policy.yaml"
)  # what figures may differ by: another CPU or release sums in another order
FIGURES = ("mismatches", "sqnr_db", "sqnr_row_min_db", "saturated_frac", "underflow_frac")
ABSENT = "absent"


def private_names(folders: Iterable[Path]) -> dict[str, list[str]]:
    """Each private dotted name of the libraries that the Python files below some folders use, with where."""
    found: dict[str, list[str]] = {}
    for path in sorted(p for folder in folders for p in folder.rglob("*.py")):
        for name, line in _names_of(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{line}"
            found.setdefault(name, []).append(where)
    # `torch._dynamo` is used by whoever uses `torch._dynamo.config`: the longest name says it all
    return {n: w for n, w in sorted(found.items()) if not any(m.startswith(n + ".") for m in found)}


def _names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    aliases = {library: library for library in LIBRARIES}
    nodes, objects = list(ast.walk(tree)), set()
    names: list[tuple[str, str, int]] = []  # what an import has named already, the whole name, the line
    for node in nodes:
        if isinstance(node, ast.Import):
            for a in node.names:
                names.append(("", a.name, node.lineno))
                top = a.name.partition(".")[0]
                aliases[a.asname or top] = a.name if a.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                aliases[a.asname or a.name] = f"{node.module}.{a.name}"
                names.append(("", f"{node.module}.{a.name}", node.lineno))
                objects.add(f"{node.module}.{a.name}")
    for node in nodes:
        found = _dotted(node, aliases) if isinstance(node, ast.Attribute) else _by_text(node, aliases)
        if found:
            names.append((*found, getattr(node, "lineno", 0)))
    for named, name, line in names:
        parts, start = name.split("."), len(named.split(".")) if named in objects else 0
        # Of an object that was imported, only a private attribute is a further name: `counters.clear` is `counters`.
        if parts[0] in LIBRARIES and any(map(_is_private, parts[start:])):
            yield _cut(parts), line


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _cut(parts: Sequence[str]) -> str:
    """A name up to what a library defines: not the attributes of a class or of a variable behind a private name."""
    last = max(i for i, p in enumerate(parts) if _is_private(p))
    ends = (i for i in range(last, len(parts)) if parts[i].lstrip("_")[:1].isupper())
    return ".".join(parts[: next(ends, len(parts) - 1) + 1])


def _dotted(node: ast.AST, aliases: Mapping[str, str]) -> tuple[str, str] | None:
    """The name that an import gave the front of a chain of attributes, and the whole chain."""
    if isinstance(node, ast.Name):
        return (aliases[node.id],) * 2 if node.id in aliases else None
    if isinstance(node, ast.Attribute) and (front := _dotted(node.value, aliases)):
        return front[0], f"{front[1]}.{node.attr}"
    return None


def _by_text(node: ast.AST, aliases: Mapping[str, str]) -> tuple[str, str] | None:
    """`getattr(torch, "_x", None)` and `hasattr`."""
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
        front, name = _dotted(node.args[0], aliases), node.args[1]
        if front and isinstance(name, ast.Constant) and isinstance(name.value, str):
            return front[0], f"{front[1]}.{name.value}"
    return None


def signature_of(name: str) -> str:
    """What is installed under a dotted name: its parameters, its schemas, or its kind; `absent` where nothing is."""
    try:
        thing = _resolved(name)
    except (ImportError, AttributeError):
        return ABSENT
    if inspect.ismodule(thing):
        return "module"
    if schemas := _schemas(name, thing):
        return "; ".join(schemas)
    kind = "class" if inspect.isclass(thing) else ""
    if not callable(thing):
        return f"a {type(thing).__name__}"
    try:
        return kind + ("" if kind and issubclass(thing, Enum) else _parameters(inspect.signature(thing)))
    except (ValueError, TypeError):
        return kind or "callable"


def _resolved(name: str) -> Any:
    parts = name.split(".")
    thing: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 2):
        try:
            thing = getattr(thing, part)
        except AttributeError:
            thing = importlib.import_module(".".join(parts[:index]))
    return thing


def _schemas(name: str, thing: Any) -> list[str]:
    """What the overloads of an operator take, in the words of the dispatcher."""
    import torch

    if hasattr(thing, "_schema"):
        return [str(thing._schema)]
    front, _, last = name.rpartition(".")
    packet = getattr(torch.ops.aten, last, None) if front == "torch" and inspect.isbuiltin(thing) else thing
    return (
        sorted(str(getattr(packet, o)._schema) for o in packet.overloads())
        if hasattr(packet, "overloads")
        else []
    )


def _parameters(signature: inspect.Signature) -> str:
    """Names, kinds and defaults; annotations may be written another way from one release to the next."""
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def moved_names(names: Mapping[str, Sequence[str]], expected: Mapping[str, str]) -> list[str]:
    """A line for each private name that is gone or takes something else than expected."""
    lines = []
    for name, places in names.items():
        now, then = signature_of(name), expected.get(name)
        used = f"used in {places[0]}" + (f" and {len(places) - 1} more places" if len(places) > 1 else "")
        if now == ABSENT and then != ABSENT:
            lines.append(f"private name gone: {name}, {used}")
        elif then is not None and now != then and then != ABSENT:
            lines.append(f"private name changed: {name}: {then} -> {now}, {used}")
    return lines


def moved_rows(before: Any, after: Any) -> list[str]:
    """A line for each count, figure or status of the baseline's rows that another run has otherwise.

    Raises:
        RuntimeError: the baseline measured nothing, so that nothing can have moved.
    """
    from harness.gate.policy import load_policy
    from harness.store.measurement import METRICS

    rules = load_policy(POLICY).units
    theirs = {_key(r): r for r in after.itertuples()}
    reasons = {_key(r)[:3]: r.reason for r in after.itertuples() if r.status != "ok"}
    if not (before["status"] == "ok").any():
        raise RuntimeError(
            "the committed baseline holds no measured row to compare with: make gate ARGS=update"
        )
    lines: dict[str, None] = {}  # a fact stands in every row of its arm
    for r in before.itertuples():
        if r.status != "ok" or r.suite == "control":
            continue
        what, now = f"{r.suite}/{r.arm} {r.axes}", theirs.get(_key(r))
        if now is None or now.status != "ok":
            reason = now.reason if now is not None else reasons.get(_key(r)[:3], f"no row {r.metric}")
            lines[f"no longer measured: {what}: {reason}"] = None
            continue
        if r.metric in FIGURES and not _agree(r.value, now.value, rules[METRICS[r.metric].unit]):
            lines[f"figure moved: {r.metric} of {what}: {r.value:.9g} -> {now.value:.9g}"] = None
        then, found = json.loads(r.resolved or "{}"), json.loads(now.resolved or "{}")
        for name, value in then.items():
            if isinstance(value, int) and not isinstance(value, bool) and found.get(name) != value:
                lines[f"count moved: {name} of {what}: {value} -> {found.get(name)}"] = None
    return list(lines)


def _agree(then: float, now: float, rule: Any) -> bool:
    """Whether two figures differ by no more than the gate's rule for their unit allows, up or down."""
    if math.isinf(then) or math.isinf(now):
        return then == now
    return abs(now - then) <= rule.tolerance * abs(then) + rule.absolute


def _key(row: Any) -> tuple[str, ...]:
    return (row.suite, row.case_id, row.arm, row.metric, row.regime or "", row.part or "")


def measured() -> Any:
    """The rows of `sweep=gate_ci`, measured here.

    Raises:
        RuntimeError: it could not be measured; the last line of what was said.
    """
    from harness import store

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness", *MEASURE, "--results-dir", folder, *WORDS]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
            raise RuntimeError(f"sweep=gate_ci cannot be measured (exit {done.returncode}): {last}")
        return store.read(folder)


def installed() -> dict[str, str]:
    """Versions of the libraries."""
    out = {}
    for library in LIBRARIES:
        try:
            out[library] = version(library)
        except PackageNotFoundError:
            out[library] = "not installed"
    return out


def main(argv: Sequence[str]) -> int:
    """Prints what moved; the exit code says whether anything did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--names", action="store_true", help="look at private names alone")
    parser.add_argument("--update", action="store_true", help="write canary.json from what is installed")
    options = parser.parse_args(argv)
    names, versions = private_names(ROOT / folder for folder in TREE), installed()
    if options.update:
        table = {"versions": versions, "names": {name: signature_of(name) for name in names}}
        EXPECTED.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
        print(f"{len(names)} private names -> {EXPECTED}")
        return 0
    table = json.loads(EXPECTED.read_text(encoding="utf-8"))
    print("installed", ", ".join(f"{k} {v}" for k, v in versions.items()))
    print("expected ", ", ".join(f"{k} {v}" for k, v in table["versions"].items()))
    lines = moved_names(names, table["names"])
    for name, places in names.items():
        print(
            f"  {name}: {len(places)} places" + ("" if name in table["names"] else "; not yet in canary.json")
        )
    code = 1 if lines else 0
    if not options.names:
        from harness import store

        try:
            lines += moved_rows(store.read(BASELINE), measured())
            code = 1 if lines else 0
        except RuntimeError as error:
            lines.append(f"not looked at: {error}")
            code = 2
    if missing := [k for k, v in versions.items() if v == "not installed"]:
        lines.append(f"not looked at: {', '.join(missing)} not installed")
        code = code or 2
    print("\n".join(lines) if lines else f"nothing moved: {len(names)} private names")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
