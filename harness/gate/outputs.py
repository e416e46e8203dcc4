"""Outputs: where an answer is told. No file of an earlier gate outlives the start of the next, whatever comes of that."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness.store import run_files
from harness.store.errors import UsageError
from harness.store.parquet import find_run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.gate.options import Options
    from harness.gate.render import Answer

OUTPUTS = ("json", "markdown", "junit", "comment")


def clear_outputs(options: Options) -> None:
    """Removes what an earlier gate left where this one is to write.

    Raises:
        UsageError: an output is one of the inputs, which are never removed, or can't be written.
    """
    paths = [path for name in OUTPUTS if (path := getattr(options, name)) is not None]
    inputs = list(_inputs(options))
    for path in paths:
        place = path.resolve()
        if any(place == one or _is_stored(place, one) for one in inputs):
            raise UsageError(f"{path} is an input of this gate; name another file")
    for path in paths:
        if path.is_file() and not path.absolute().is_relative_to("/dev"):  # /dev/stdout is no file of a gate
            try:
                path.resolve().unlink()
            except OSError as error:
                raise UsageError(f"cannot replace {path} of an earlier gate ({error.strerror})") from error
    if wrong := [path for path in paths if path.is_dir() or not path.parent.is_dir()]:
        raise UsageError(f"cannot write {wrong[0]}: expected a file in a folder that is there")


def _inputs(options: Options) -> Iterator[Path]:
    """Every file and folder that the gate is to read."""
    if options.policy is not None:
        yield options.policy.resolve()
    for name in (*(options.baseline or ()), *(options.candidate or ())):
        try:
            yield find_run(name, options.results_dir).resolve()
        except UsageError:  # it is refused where it is read
            continue


def _is_stored(place: Path, run: Path) -> bool:
    """Whether a file is part of a stored run, and not just a file beside its parts."""
    return place.is_relative_to(run) and (place.suffix == ".parquet" or place.name == run_files.ABOUT)


def tell(answer: Answer, options: Options) -> None:
    """Says the answer in every form that was asked for; a refusal itself is said by the caller.

    Raises:
        UsageError: a file of a judgement can't be written.
    """
    from harness.gate import render

    judged = answer.judgement is not None
    if options.annotations:
        sys.stdout.write(render.github_lines(answer))
    if judged or not answer.code:
        sys.stdout.write(render.terminal(answer))
        sys.stdout.flush()
    for path, form in (
        (os.environ.get("GITHUB_STEP_SUMMARY"), render.markdown),
        (options.json, render.as_json),
        (options.markdown, render.markdown),
        (options.junit, render.junit),
        (options.comment, render.comment),
    ):
        summary = isinstance(path, str)  # of a GitHub job: appended to
        try:
            if path:
                with Path(path).open("a" if summary else "w", encoding="utf-8") as file:
                    file.write(form(answer) + "\n" * summary)
        except OSError as error:
            said = f"cannot write {path} ({error.strerror})"
            if judged and not summary:  # no verdict is worth less because a page could not show it
                raise UsageError(f"{said}; the verdict is printed above") from error
            sys.stderr.write(f"warning: {said}\n")
