"""Stored training runs, and what the report makes of them."""

from __future__ import annotations

from pathlib import Path

from report_fixtures import write_run

from harness.report.runs import load


def machine(path):
    """The only machine of a run."""
    (found,) = load([path], Path()).machines
    return found


def run_of(tmp_path, *cases, **more):
    return machine(write_run(tmp_path, cases, **more))


def table(made):
    """Rows as {column title: text}."""
    titles = [c.title for c in made.columns]
    return [{t: cell.text for t, cell in zip(titles, row, strict=True)} for row in made.rows]
