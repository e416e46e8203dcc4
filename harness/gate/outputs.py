"""Outputs: the files that a gate writes. None of an earlier gate outlives the start of the next, whatever comes of that."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.gate.exit_code import Exit
from harness.store import run_files
from harness.store.errors import UsageError
from harness.store.parquet import find_run

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from harness.gate.judge import Judgement

OUTPUTS = ("json", "markdown", "junit", "comment")
INPUTS = ("baseline", "candidate")  # each a list of runs or files


def clear_outputs(options: argparse.Namespace) -> None:
    """Removes what an earlier gate left where this one is to write.

    Raises:
        UsageError: an output is one of the inputs, two outputs are one file, or one can't be written. An input is never
            removed.
    """
    paths = {name: path for name in OUTPUTS if (path := getattr(options, name)) is not None}
    inputs = list(_inputs(options))
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        place = path.resolve()
        if any(place == one or _is_stored(place, one) for one in inputs):
            raise UsageError(f"--{name} {path} is an input of this gate; name another file")
        if place in seen and not _is_device(path):
            raise UsageError(f"--{name} and --{seen[place]} are the same file, {path}; name two")
        seen[place] = name
    for path in paths.values():
        if path.is_file() and not _is_device(path):
            try:
                path.resolve().unlink()
            except OSError as error:
                raise UsageError(f"cannot replace {path} of an earlier gate ({error.strerror})") from error
    for path in paths.values():
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: {path.parent} is no folder")
        if path.is_dir():
            raise UsageError(f"cannot write {path}: it is a folder")


def _inputs(options: argparse.Namespace) -> Iterator[Path]:
    """Every file and folder that the gate is to read."""
    if options.policy is not None:
        yield options.policy.resolve()
    for names in (getattr(options, kind) for kind in INPUTS):
        for name in names or []:
            try:
                yield find_run(name, options.results_dir).resolve()
            except UsageError:  # it is refused where it is read
                continue


def _is_stored(place: Path, run: Path) -> bool:
    """Whether a file is part of a stored run, and not just a file beside its parts."""
    return place.is_relative_to(run) and (place.suffix == ".parquet" or place.name == run_files.ABOUT)


def _is_device(path: Path) -> bool:
    """Whether it is the system's and no file of a gate: /dev/stdout, /dev/null."""
    return path.absolute().is_relative_to("/dev")


def write_judgement(judgement: Judgement, options: argparse.Namespace) -> None:
    """Writes the verdicts in every form that was asked for.

    Raises:
        UsageError: a file can't be written.
    """
    from harness.gate import publish, render

    _summarise(render.markdown(judgement))
    for path, form in (
        (options.json, render.as_json),
        (options.markdown, render.markdown),
        (options.junit, publish.junit),
        (options.comment, publish.comment),
    ):
        try:
            if path is not None:
                path.write_text(form(judgement), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot write {path} ({error.strerror}); the verdict is printed above"
            ) from error


def write_without_units(code: Exit, head: str, text: str, options: argparse.Namespace) -> None:
    """Writes into every output that no unit was judged, and why."""
    from harness.gate import publish, render

    words = f"### Gate: {head}\n\n{' '.join(text.split())}\n"
    _summarise(words)
    if options.annotations and code is not Exit.OK:
        sys.stdout.write(publish.annotation_of(code, text))
    document = {"format": render.FORMAT, "verdict": head, "exit_code": int(code), "reason": text}
    for path, form in (
        (options.json, json.dumps(document, indent=1) + "\n"),
        (options.markdown, words),
        (options.junit, publish.junit_of(code, f"{head}: {text}")),
        (options.comment, publish.comment_of(head, text)),
    ):
        try:
            if path is not None:
                path.write_text(form, encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"warning: cannot write {path} ({error.strerror})\n")


def _summarise(markdown: str) -> None:
    """Appends to the step summary of a GitHub job; elsewhere there is none."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if not summary:
        return
    try:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(markdown + "\n")
    except OSError as error:  # no verdict is worth less because a page could not show it
        sys.stderr.write(f"warning: cannot write the step summary {summary} ({error.strerror})\n")
