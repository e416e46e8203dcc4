"""The one table of published FP8 speedups, `published.csv` beside this file, as cases that can be predicted.

A row is a run in bf16 and one in FP8 that others published: tokens/s or a ratio, with conditions, source and date. Which
half it belongs to was settled by `speedups.halves` before anything was tuned to any row; `seen` says what was known of it by then:

    tuned    it stood in view when parts of the model were chosen
    scored   a prediction was compared with it before, and decided nothing
    read     its figure stood in the project's notes, and no prediction was ever compared with it
    new      nobody here had read it

`known` is false where a condition that the prediction needs was not published (`note`); then only the sign counts.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from speedups import libraries
from speedups.case import Case

if TYPE_CHECKING:
    from collections.abc import Mapping

PATH = Path(__file__).with_name("published.csv")
SEEN = ("tuned", "scored", "read", "new")
_FLAGS = ("compiled", "gather_fp8", "tp_gather_fp8", "tp_overlap", "copied")


@dataclass(frozen=True, slots=True)
class Row:
    """A published speedup.

    Attributes:
        case: what is predicted and what was measured.
        half: as written in the file, `speedups.halves.half` of its key.
        seen: one of `SEEN`.
        date: of the source.
    """

    case: Case
    half: str
    seen: str
    date: str


def _row(cells: Mapping[str, str]) -> Row:
    recipe = getattr(libraries, cells["library"])
    case = Case(
        key=cells["case"],
        model=cells["model"],
        machine=cells["gpu"],
        recipe=replace(recipe, shares_input=recipe.shares_input and cells["shared_input"] == "true"),
        measured=float(cells["measured"]),
        source=cells["source"],
        batch=int(cells["batch"]),
        seq=int(cells["seq"]),
        bf16=float(cells["bf16_tokens_per_s"]) if cells["bf16_tokens_per_s"] else None,
        plan={
            "checkpointing": cells["checkpointing"].replace(" ", "_"),
            **{name: int(cells[name]) for name in ("accumulation", "dp", "tp")},
            **{name: cells[name] == "true" for name in _FLAGS},
        },
        left_out=tuple(cells["left_out"].split()),
        layer=_layer(cells["layer"]),
        known=cells["known"] == "true",
        note=cells["note"],
    )
    return Row(case, cells["half"], cells["seen"], cells["date"])


def _layer(cell: str) -> tuple[int, int, int] | None:
    if not cell:
        return None
    tokens, K, N = map(int, cell.split("x"))
    return tokens, K, N


with PATH.open(newline="") as file:
    RAW: tuple[Mapping[str, str], ...] = tuple(csv.DictReader(file))
ROWS: tuple[Row, ...] = tuple(map(_row, RAW))
CASES: tuple[Case, ...] = tuple(row.case for row in ROWS)
