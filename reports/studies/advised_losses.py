"""What `harness.advise` knows of losses and of four bits: verdicts on our own runs, and the ledger's comparisons with bf16 and FP8.

Of losses against bf16 the ledger has none with curves yet: its bf16 sides are reference points, by samples to the target alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import evidence
import mlperf
import numpy as np

from harness.advise.losses import PRECISIONS
from harness.judge.verdict.paired import PASS_CONFIDENCE
from harness.judge.verdict.result import percent
from harness.judge.verdict.rows import is_candidate, judge, setups
from harness.store import read

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OWN = (
    "results/published/cpu/2026-11-23/nanogpt_char_eight_seeds",
    "results/published/cpu/2026-11-29/nanogpt_char_four_bits",
)
# Parameters, all of which are trained, of the benchmarks whose reference is known to run in bf16
PARAMETERS = {"llama31_8b": 8_030_261_248, "llama31_405b": 405_853_388_800}
LEDGER_CONFIDENCE = 0.95  # of the ledger's intervals
ADAPTED = {"llama2_70b_lora": 68_976_648_192}  # of which adapters alone are trained


def interval(low: float, high: float, confidence: float) -> dict[str, str]:
    """The columns of an interval of a gap: shares of the loss in percent, and the level; empty where there is none."""
    ends = [f"{100 * end:.3f}" for end in (low, high)] if math.isfinite(low) else ["", ""]
    return {"low": ends[0], "high": ends[1], "confidence": f"{confidence:g}" * bool(ends[0])}


def ledger_interval(row: Mapping[str, str]) -> dict[str, str]:
    """That of the ledger: by arms, the wider one, where there are enough, else by runs."""
    low, high = (float(row[f"gap_{end}_arms"] or row[f"gap_{end}_runs"] or "nan") for end in ("low", "high"))
    return interval(low, high, LEDGER_CONFIDENCE)


def table(ledger: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """The lines of harness/advise/losses.csv.

    Args:
        ledger: the lines of reports/published/ledger.csv.
    """
    lines = []
    for folder in OWN:
        frame = read([evidence.ROOT / folder])
        (setup,) = (each for each in setups(frame) if not each.axes["schedule"])
        for found in judge(frame):
            if not is_candidate(found.fields) or found.against != "base" or found.axes["schedule"]:
                continue
            steps, a_step = setup.axes["steps"], setup.fact(found.arm, "tokens_per_step")
            late = found.verdict.gate("L4")
            lines.append({
                "precision": found.fields.recipe,
                "model": str(setup.axes["model"]),
                "parameters": str(setup.fact(found.arm, "parameters")),
                "tokens": str(steps * a_step),
                "word": found.verdict.outcome,
                "gap": percent(late.effect) if late else "no gap",
                **interval(*((late.low, late.high) if late else (math.nan, math.nan)), PASS_CONFIDENCE),
                "seeds": str(len(setup.arms[found.arm])),
                "source": folder,
            })  # fmt: skip
    arms = mlperf.arms()
    for row in ledger:
        precision = row["candidate"].partition(",")[0]
        judged = row["word"] and row["base"].startswith("BF16")
        if judged and precision in PRECISIONS and row["benchmark"] in PARAMETERS:
            lines.append({
                "precision": precision,
                "model": row["benchmark"],
                "parameters": str(PARAMETERS[row["benchmark"]]),
                "tokens": str(round(np.mean([arms[name].samples.mean() for name in row["candidate_arms"].split()]) * int(row["seq"]))),
                "word": row["word"],
                "gap": percent(float(row["gap"])) if row["gap"] else "no gap",
                **ledger_interval(row),
                "seeds": row["candidate_runs"],
                "source": f"reports/published/ledger.csv, {row['number']}",
            })  # fmt: skip
    return lines


def four_bits(ledger: Iterable[Mapping[str, str]], names: Mapping[str, str]) -> list[dict[str, str]]:
    """The lines of harness/advise/four_bits.csv: four bits against FP8, a line a machine that both sides used, or one without.

    Args:
        ledger: the lines of reports/published/ledger.csv.
        names: of models, by the benchmark.
    """
    arms = mlperf.arms()
    return [
        {
            "precision": row["candidate"],
            "against": row["base"],
            "model": names[row["benchmark"]],
            "parameters": str({**PARAMETERS, **ADAPTED}[row["benchmark"]]),
            "tokens": str(
                round(
                    np.mean([arms[name].samples.mean() for name in row["candidate_arms"].split()])
                    * int(row["seq"] or 0)
                )
            ),
            "target": row["target"],
            "word": row["word"],
            "gap": percent(float(row["gap"])) if row["gap"] else "",
            **ledger_interval(row),
            "arms": row["scope"],
            "samples": f"{float(row['samples_ratio']):.3f} ({float(row['samples_low_arms'] or row['samples_low_runs']):.3f} to "
            f"{float(row['samples_high_arms'] or row['samples_high_runs']):.3f})",
            "differs": str(len(row["differs"].split("; ")) if row["differs"] else 0),
            "gpu": gpus.rpartition(" ")[2],
            "gpus": gpus,
            "time": time.partition(", ")[0],
            "time_arms": time.partition(", ")[2],
            "source": f"reports/published/ledger.csv, {row['number']}",
        }
        for row in ledger
        if row["candidate"].startswith(("NVFP4", "MXFP4")) and row["base"].startswith("FP8")
        for gpus, _, time in (part.partition(": ") for part in (row["time"] or "").split("; "))
    ]
