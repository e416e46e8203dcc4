"""Execution: FP8 that did not run, cannot run here, does not fit into memory or cannot pay."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from harness.advise import fp8_break_even
from harness.advise.advised_arms import FLOOR, advised_arms
from harness.judge.diagnosis.finding import Finding, few, gib
from harness.store.cause import Cause
from harness.store.compare import TIMES
from harness.store.proof import ProofOutcome, proof_outcome

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from harness.judge.diagnosis.finding import Material, Record

FIRST_FP8_CAPABILITY = 8.9  # Ada; Hopper is 9.0


def fp8_did_not_run(material: Material) -> Iterator[Finding]:
    """An FP8 arm that converted no layer, ran fewer FP8 GEMMs than it should, or equals its control bit for bit."""
    short: dict[str, list[str]] = {}
    unconverted: set[str] = set()
    for r in material.records:
        if r.metric not in (*TIMES, "loss"):
            continue
        counted, expected = r.resolved.get("fp8_gemms"), r.resolved.get("fp8_gemms_expected")
        if proof_outcome(r.resolved) is ProofOutcome.UNPROVEN:
            continue  # see `fp8_not_proved`
        if r.cause is Cause.NOT_FP8:
            short.setdefault(f"{r.suite} {r.arm}", []).append(r.reason)
        elif r.recipe and r.resolved.get("fp8_layers") == []:
            short.setdefault(f"{r.suite} {r.arm}", []).append(f"no layer converted; {_skipped(r.resolved)}")
            unconverted.add(f"{r.suite} {r.arm}")
        elif proof_outcome(r.resolved) is ProofOutcome.DISPROVED:
            short.setdefault(f"{r.suite} {r.arm}", []).append(str(r.resolved["verify"]))
        elif r.recipe and counted is not None and expected is not None and counted < expected:
            short.setdefault(f"{r.suite} {r.arm}", []).append(f"{counted} of {expected} GEMMs in FP8")
    for v in material.verdicts:
        if v.verdict.not_fp8:
            short.setdefault(f"divergence {v.arm}", []).append(v.verdict.not_fp8)
    for arm, reasons in short.items():
        if reasons:
            yield Finding(
                f"{arm} did not run in FP8",
                few(reasons),
                "the filter or the sizes left no layer to convert: it computes in high precision under FP8's name"
                if arm in unconverted
                else "GEMMs that should be FP8 were not observed as FP8; the rows do not show their layers",
                "fp8core.audit(model) names each skipped layer with its reason; fp8core.verify(step_fn, model) counts FP8 GEMMs",
            )


def fp8_not_proved(material: Material) -> Iterator[Finding]:
    """An arm in which `fp8core.verify` found nothing wrong, and which it could not compare as a whole."""
    unproven: dict[str, list[str]] = {}
    for r in material.records:
        if r.metric in (*TIMES, "loss") and (
            r.cause is Cause.UNPROVEN or proof_outcome(r.resolved) is ProofOutcome.UNPROVEN
        ):
            unproven.setdefault(f"{r.suite} {r.arm}", []).append(str(r.resolved.get("verify") or r.reason))
    for arm, lines in unproven.items():
        yield Finding(
            f"{arm} could not be proved to run in FP8",
            few(lines),
            "not known: nothing wrong was found, and part of the step could not be compared; the lines name it",
            "make the named part comparable, or free memory for the proof; then fp8core.verify(step_fn, model)",
        )


def unsupported_hardware(material: Material) -> Iterator[Finding]:
    """A GPU without FP8 tensor cores."""
    for gpu, capability in sorted(
        {
            (str(r.env.get("gpu")), str(r.env.get("gpu_capability")))
            for r in material.records
            if r.env.get("gpu")
        }
    ):
        number = re.fullmatch(r"\d+\.\d+", capability)
        if number and float(capability) < FIRST_FP8_CAPABILITY:
            own = [r for r in material.records if str(r.env.get("gpu")) == gpu]
            emulated = len({(r.case_id, r.arm) for r in own if r.resolved.get("emulated")})
            skipped = len({(r.case_id, r.arm) for r in own if r.status == "skipped"})
            yield Finding(
                f"{gpu} has no FP8 tensor cores",
                (f"compute capability {capability}; {emulated} arms emulated, {skipped} skipped",),
                f"FP8 GEMMs need compute capability {FIRST_FP8_CAPABILITY} (Ada) or newer; older GPUs gain nothing",
                "train.mixed_precision=bf16 here; measure FP8 on Ada, Hopper or newer",
            )


def out_of_memory(material: Material) -> Iterator[Finding]:
    """An arm that runs out of memory where its case's baseline, which has no FP8, did not.

    What it is that did not fit is said where both arms stored their memory by part, and is else not known.
    """
    fits = {(r.run_id, r.case_id, r.arm): r for r in material.records if r.status == "ok"}
    done = set()
    for r in material.records:
        if r.status != "failed" or r.cause is not Cause.OOM:
            continue
        base = fits.get((r.run_id, r.case_id, r.baseline))
        if base is None or base.recipe or (r.setting, r.arm) in done:
            continue
        done.add((r.setting, r.arm))
        memory = r.resolved.get("memory") or base.resolved.get("memory") or {}
        parts = _sizes(memory)
        shown = ", ".join(f"{k} {gib(v)}" for k, v in sorted(parts.items(), key=lambda item: -item[1]))
        yield Finding(
            f"{r.suite} {r.arm} runs out of memory, {r.baseline} does not",
            (r.reason, *([f"predicted by part: {shown}"] if shown and "remedies" not in r.resolved else [])),
            _what_takes_more(r, base),
            _remedies(r, parts),
        )


def _sizes(memory: object) -> dict[str, float]:
    parts = memory.items() if isinstance(memory, dict) else ()
    return {str(k): v for k, v in parts if isinstance(v, int | float) and not isinstance(v, bool) and v > 0}


def _what_takes_more(row: Record, base: Record) -> str:
    """By which parts of its memory an arm was predicted to exceed its baseline."""
    mine, theirs = _sizes(row.resolved.get("memory")), _sizes(base.resolved.get("memory"))
    lacking = [name for name, sizes in ((row.arm, mine), (row.baseline, theirs)) if not sizes]
    if lacking:
        return (
            f"not known: the rows of {' and '.join(lacking)} do not say what their memory holds, part by part"
        )
    more = {k: v - theirs.get(k, 0.0) for k, v in mine.items() if v > theirs.get(k, 0.0)}
    if not more:
        return f"not known: by prediction no part of its memory exceeds that of {row.baseline}"
    shown = ", ".join(f"{k} {gib(v)}" for k, v in sorted(more.items(), key=lambda item: -item[1]))
    return f"by prediction it holds more than {row.baseline}: {shown}"


def _remedies(row: Record, parts: Mapping[str, float]) -> str:
    """The two ways out with the bytes that each frees: as the suite predicted them, else bounds from the parts."""
    predicted = row.resolved.get("remedies")
    if isinstance(predicted, dict) and predicted:
        return " or ".join(f"axes.{way}, which frees {gib(size)}" for way, size in predicted.items())
    batch, of_batch = (
        row.axes.get("batch"),
        sum(parts.get(k, 0) for k in ("activations", "logits", "workspace")),
    )
    halved = f"axes.batch={batch // 2}" if isinstance(batch, int) and batch > 1 else "a smaller batch"
    kept = parts.get("activations", 0)
    return (
        f"{halved}, which frees {f'about {gib(of_batch / 2)}' if of_batch else 'bytes not known'}, or "
        f"axes.checkpointing=full, which frees {f'at most {gib(kept)}' if kept else 'bytes not known'}"
    )


def cannot_pay(material: Material) -> Iterator[Finding]:
    """FP8 that is slower than bf16 because its matrices are too small for what the casts cost."""
    for symptom, evidence, cause in fp8_break_even.losses(material.frame, material.ratios):
        yield Finding(
            symptom,
            evidence,
            cause,
            "bf16 for these layers (a module filter by size), a larger batch, or a larger model",
        )


def advice_was_wrong(material: Material) -> Iterator[Finding]:
    """An arm that converted what was advised, and is slower than bf16 by more than an advice may cost."""
    for a in advised_arms(material.frame, material.ratios):
        if a.outcome == "below":
            shown = f"predicted {a.predicted:.2f}x" if a.converted else "nothing was converted"
            yield Finding(
                f"{a.arm} of {a.model} is below {FLOOR:g} of {a.baseline}, with the layers that were advised",
                (f"{a.speedup:.3f}x, 95 % interval {a.low:.3f} to {a.high:.3f}; {shown}",),
                "a rate that the advice rests on is not this GPU's, or something runs that it does not count",
                "python -m harness sweep=ceilings here, then ceilings=RUN with axes.convert=advised; until then bf16",
            )


def _skipped(resolved: Mapping[str, Any]) -> str:
    reasons = resolved.get("skipped_layers")
    if not isinstance(reasons, dict) or not reasons:
        return "no reasons stored"
    return "; ".join(few([f"{name}: {why}" for name, why in reasons.items()]))
