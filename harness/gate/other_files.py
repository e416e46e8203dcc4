"""Benchmark files of other programs, as the document that pytest-benchmark would have written.

asv (results of version 2; asv 0.6.6 wrote the tests' file) and nvbench (its JSON of version 1: one mean a state).
"""

from __future__ import annotations

import itertools
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from harness.store.outside import from_json, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

GPU_MEAN = "nv/cold/time/gpu/mean"  # seconds on the GPU of one call with a cold L2


def asv(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A file of results: samples where they were recorded, else the median; the unit as `benchmarks.json` two folders up says it.

    A benchmark that failed or was skipped (null, NaN) is left out, as pytest-benchmark leaves it out.

    Raises:
        AttributeError, IndexError, KeyError, OSError, TypeError, ValueError: it is not as asv writes it.
    """
    about = path.absolute().parent.parent / "benchmarks.json"
    described = from_json(read_text(about)) if about.is_file() else {}

    def tests() -> Iterator[dict[str, Any]]:
        for name, values in document["results"].items():
            row = dict(zip(document["result_columns"], values, strict=False))
            unit = described.get(name, {}).get("unit")
            combinations = list(itertools.product(*row.get("params") or []))
            for i, figure in enumerate(row["result"] or []):
                if figure is None or math.isnan(figure):
                    continue
                samples = (row.get("samples") or {i: None})[i]
                yield {
                    "fullname": f"{name}({', '.join(combinations[i])})" if row.get("params") else name,
                    "stats": {"data": samples} if samples else {"median": figure},
                    **({"unit": unit} if unit else {}),
                }

    machine = document["params"]
    return {
        "datetime": datetime.fromtimestamp(document["date"] / 1e3, UTC).isoformat(),
        "commit_info": {"id": document["commit_hash"]},
        "machine_info": {
            "node": machine.get("machine"), "system": machine.get("os"), "python_version": document.get("python"),
            "cpu": {"brand_raw": machine.get("cpu"), "count": int(machine.get("num_cpu") or 0) or None},
        },
        "benchmarks": list(tests()),
    }  # fmt: skip


def nvbench(document: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A file of `--json`: the mean GPU time of each state that was not skipped.

    Raises:
        AttributeError, IndexError, KeyError, OSError, TypeError, ValueError: it is not as nvbench writes it.
    """

    def tests() -> Iterator[dict[str, Any]]:
        for benchmark in document["benchmarks"]:
            for state in benchmark["states"]:
                means = [s for s in state.get("summaries") or [] if s["tag"] == GPU_MEAN]
                if means and not state.get("is_skipped"):
                    (seconds,) = (float(d["value"]) for d in means[0]["data"] if d["name"] == "value")
                    fullname = f"{benchmark['name']} {state['name']}"
                    yield {"fullname": fullname, "stats": {"median": seconds}, "unit": "s"}

    gpus = sorted({device["name"] for device in document["devices"]})
    return {"machine_info": {"gpu": ", ".join(gpus)}, "benchmarks": list(tests())}
