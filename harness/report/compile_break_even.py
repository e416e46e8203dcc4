"""Paying: after how many calls a compiled arm has won back the time of its compilation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.report.records import arm_records
from harness.report.runs import once
from harness.report.table import resolved_of
from harness.store.arm import Arm, arm_of
from harness.store.compare import SECONDS

if TYPE_CHECKING:
    from harness.report.runs import Machine

FACTS = ("compile_graphs", "compile_graph_breaks", "recompiles")  # of `resolved`, about a compilation


@once
def compilations(machine: Machine) -> dict[tuple[str, str, str], dict[str, Any]]:
    """What each compiled arm cost and gains, by (run, case, arm).

    Fields, where known: `suite`, `axes`, `cold_s` and `warm_s` of the first call, `FACTS`, and of the isolated time
    `gain_s`, what one call takes less than the eager arm of the same precision, with `cold_pays` and `warm_pays`, the
    number of calls after which that is won back (inf: never).
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for r in machine.rows:
        if r["metric"] == "compile_s" and r["status"] == "ok":
            about = found.setdefault(
                (r["run_id"], r["case_id"], r["arm"]),
                {"suite": r["suite"], "axes": r["axes"], "eager": _eager(arm_of(r))},
            )
            resolved = resolved_of(r)
            warm = r["part"] == "warm" or resolved.get("compile_cache") == "warm"
            about["warm_s" if warm else "cold_s"] = r["value"]
            about |= {name: resolved.get(name) for name in FACTS}
    times: dict[tuple[str, str, str], tuple[float, Any]] = {}
    for suite in {about["suite"] for about in found.values()}:
        for r in arm_records(machine, suite):
            if r["status"] == "ok" and r["regime"] in ("isolated", ""):
                tokens = resolved_of(r).get("tokens_per_step")
                times[r["run_id"], r["case_id"], r["arm"]] = (r["value"] * SECONDS[r["unit"]], tokens)
    for (run, case, arm), about in found.items():
        mine, eager = times.get((run, case, arm)), times.get((run, case, about["eager"]))
        if mine is None or eager is None or mine[1] != eager[1]:  # steps of different batches are no pair
            continue
        about["gain_s"] = gain = eager[0] - mine[0]
        for which in ("cold", "warm"):
            if f"{which}_s" in about:
                about[f"{which}_pays"] = about[f"{which}_s"] / gain if gain > 0 else math.inf
    return found


def _eager(arm: Arm) -> str:
    """Name of the arm that does the same without the compiler; "" where the arm is not known to use it."""
    casts = "" if arm.casts == "kernels" else arm.casts  # eager casts are kernels anyway
    return str(replace(arm, mode="eager", casts=casts)) if arm.mode == "compile" else ""
