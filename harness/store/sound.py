"""Sound: what holds for all rows that a harness writes. A file with one that breaks it is another's, or damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from harness.store.arm import from_json
from harness.store.json_columns import parse
from harness.store.measurement import Better, Status
from harness.store.schema import JSON_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator

_NULLABLE = {"value", "bytes_moved"}  # where there is no number
# None: not known
_NUMBER, _OBJECT = (int, float, type(None)), (dict, type(None))
_RESOLVED = {
    **dict.fromkeys(("tokens_per_step", "parameters"), _NUMBER),
    **dict.fromkeys(("fp8_gemms", "fp8_gemms_expected"), (int,)),
    **dict.fromkeys(("flops_causal", "flops_recomputed", "memory", "lr_schedule", "advice"), _OBJECT),
}  # what is computed with
_LONGEST = 2**16  # characters of the axes of a case
_WORDS = {"status": get_args(Status), "better": get_args(Better)}


def refuse_unsound(table: pa.Table) -> None:
    """Checks rows, in the columns that they have.

    Raises:
        ValueError: rows that no harness writes; the first fault is named.
    """
    for fault in _faults(table):
        raise ValueError(f"holds rows that no harness writes: {fault}")


def _faults(table: pa.Table) -> Iterator[str]:
    for name in {*table.column_names} - _NULLABLE:
        if table[name].null_count:
            yield f"{name!r} is missing"
    for name, words in _WORDS.items():
        if name in table.column_names:
            yield from (f"{name} {w!r}" for w in table[name].unique().to_pylist() if w not in words)
    for name in JSON_COLUMNS:
        if name in table.column_names:
            texts = {text for chunk in table[name].chunks for text in chunk.dictionary.to_pylist()}
            yield from (
                f"{name!r}: {fault}" for text in sorted(texts) if (fault := _fault_of_text(name, text))
            )
    yield from _faults_of_samples(table)


def _fault_of_text(name: str, text: str) -> str:
    """What is wrong with a text of a JSON column; "" for nothing."""
    if name == "axes" and len(text) > _LONGEST:
        return f"a case in {len(text)} characters"
    try:
        given = parse(text)
        if name == "arm_fields":
            from_json(text)
    except ValueError as error:
        return str(error)
    for key, value in given.items():
        if (
            (name in ("axes", "env") and key != "isa" and isinstance(value, dict | list))
            or (name == "flops" and type(value) not in (int, float))
            or (name == "resolved" and not isinstance(value, _RESOLVED.get(key, object)))
        ):
            return f"{key} is {value!r:.60}"
    return ""


def _faults_of_samples(table: pa.Table) -> Iterator[str]:
    if "samples" not in table.column_names:
        return
    samples = table["samples"].combine_chunks()
    counts, drawn = compute.list_value_length(samples), samples.flatten()
    if drawn.null_count or compute.any(compute.is_nan(drawn)).as_py():
        yield "samples that are no number"
    for name in {"rounds", "sample_clock_mhz"} & {*table.column_names}:
        sizes = compute.list_value_length(table[name])
        if not compute.all(
            compute.or_(compute.equal(sizes, 0), compute.equal(sizes, counts)), min_count=0
        ).as_py():
            yield f"another number of {name} than of samples"
    if "status" in table.column_names:
        measured = compute.is_in(table["status"], pa.array(["ok", "partial"]))
        if not compute.all(compute.equal(measured, compute.greater(counts, 0)), min_count=0).as_py():
            yield "a status that contradicts its samples"
    if "value" in table.column_names:
        sizes, drawn = counts.to_numpy(), drawn.to_numpy()
        held = sizes > 0
        starts, values = (np.cumsum(sizes) - sizes)[held], table["value"].to_numpy()[held]
        inside = [
            least.reduceat(drawn, starts) if held.any() else values for least in (np.minimum, np.maximum)
        ]
        if not ((inside[0] <= values) & (values <= inside[1])).all():
            yield "a value that its samples do not have between them"
