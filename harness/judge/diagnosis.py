"""Diagnosis: what is probably wrong with a run, found in its stored rows, each finding with its figures and a way out.

One function a symptom, all in `CHECKS`, in the order of the findings; a symptom that the rows do not show yields
nothing. Those of loss curves are in `harness.judge.instability`. The symptoms are those that guides for FP8 training warn of and leave to the reader: FP8 that never ran, hardware
without it, a loss that diverges at once or spikes, memory that FP8 needs and bf16 did not, layers too small to pay, scales
that never move.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.store.case import NEGATIVE, WITHOUT_FP8
from harness.store.compare import TIMES
from harness.store.errors import Cause
from harness.store.measurement import ProofOutcome, proof_outcome
from harness.store.outside import parse
from harness.store.printer import picked
from harness.store.rows import Rows, grouped, rows_of
from harness.store.text import bytes_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import pandas as pd

    from harness.judge.verdict import ArmVerdict
    from harness.store.printer import Table, Tone

    Row = dict[str, Any]

FIRST_FP8_CAPABILITY = 8.9  # Ada; Hopper is 9.0
# Of a Gaussian tensor the casts reach 31.5 dB (e4m3) and 25.5 dB (e5m2, which only gradients use); alarms 3 dB below.
SQNR_ALARM = {"input": 28.0, "weight": 28.0, "grad_output": 22.0}
UNDERFLOW_ALARM = 0.01
CASTS = {
    "saturated": (
        "a scale that is too large: under dynamic scaling nothing may saturate",
        "check the scale of these layers: fp8core.verify(step_fn, model)",
    ),
    "underflow": (
        "values much smaller than the largest one under the same scale round to zero",
        "a recipe with finer scales (rowwise, blockwise) for these layers",
    ),
    "SQNR": (
        "a tensor that its scale and format fit worse than a Gaussian one",
        "a recipe with finer scales, or these layers in bf16",
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is probably wrong.

    Attributes:
        symptom: what is seen, in one sentence that names the arm.
        evidence: the figures that it rests on.
        cause: the likely reason.
        change: the command or the change that helps.
    """

    symptom: str
    evidence: tuple[str, ...]
    cause: str
    change: str


def _recipe(row: Row) -> str:
    """ "" of an arm without FP8."""
    name = str(parse(row["resolved"]).get("recipe") or "")
    return "" if name in ("none", "None", *WITHOUT_FP8) else name


def _scaling(row: Row) -> str:
    """How a row's recipe scales: dynamic, delayed or static. Rows from before it was stored are of recipes with these names."""
    stated = parse(row["resolved"]).get("scaling")
    return str(stated or next((word for word in ("delayed", "static") if word in _recipe(row)), "dynamic"))


def setting_of(row: Row) -> dict[str, Any]:
    """The set-up that a row belongs to: its axes without the seed."""
    return {k: v for k, v in parse(row["axes"]).items() if k != "seed"}


def _name(row: Row) -> str:
    return f"{row['suite']} {row['arm']}"


@dataclass(frozen=True, slots=True, eq=False)
class DiagnosisInput:
    """What the checks look at."""

    frame: pd.DataFrame
    rows: Rows
    verdicts: Sequence[ArmVerdict]
    pairs: Sequence[Row] | None = None  # of `harness.store.compare.pairs_of`, where they are at hand


def few(items: Sequence[str], most: int = 3) -> tuple[str, ...]:
    """The first few items, each once, and how many more there are."""
    items = list(dict.fromkeys(items))
    more = len(items) - most
    return (*items[:most], *([f"and {more} more"] if more > 0 else []))


def findings(
    frame: pd.DataFrame,
    verdicts: Sequence[ArmVerdict] | None = None,
    pairs: Sequence[Row] | None = None,
    rows: Rows | None = None,
) -> list[Finding]:
    """Everything that the rows show to be wrong, in the order of `CHECKS`; each finding once.

    Args:
        frame: rows as read by `harness.store.read`.
        verdicts: of `harness.judge.verdict.judge` on the same rows, where they are at hand.
        pairs: of `harness.store.compare.pairs_of`, likewise.
        rows: those of the frame, likewise.
    """
    measured = set(frame["suite"])
    if verdicts is None and "divergence" in measured:
        from harness.judge.verdict import judge

        verdicts = judge(frame)
    material = DiagnosisInput(frame, rows or Rows(frame), verdicts or (), pairs)
    checks = [check for check, suites in CHECKS.items() if not suites or suites & measured]
    return list(dict.fromkeys(finding for check in checks for finding in check(material)))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of a run, as a result of the printer."""

    found: Sequence[Finding]

    @property
    def tone(self) -> Tone:
        """Bad where anything is probably wrong; that nothing was found proves nothing."""
        return "bad" if self.found else ""

    def lines(self) -> list[str]:
        """A finding, its figures, cause and way out; no line where nothing was found."""
        out = []
        for f in self.found:
            out += [f"finding  {f.symptom}", *(f"         {e}" for e in f.evidence)]
            out += [f"         cause: {f.cause}", f"         change: {f.change}"]
        return out

    def tables(self) -> list[Table]:
        """None: a report draws one."""
        return []

    def data(self) -> dict[str, Any]:
        """Plain values."""
        return {"findings": [picked(f, "symptom evidence cause change") for f in self.found]}


def fp8_did_not_run(material: DiagnosisInput) -> Iterator[Finding]:
    """An FP8 arm that converted no layer, ran fewer FP8 GEMMs than it should, or equals its control bit for bit."""
    lines, unconverted = [], set()
    for r in _measured(material):
        why, is_unconverted = _not_fp8(r)
        if why:
            lines.append((_name(r), why))
        if is_unconverted:
            unconverted.add(_name(r))
    lines += [(f"divergence {v.arm}", v.verdict.not_fp8) for v in material.verdicts if v.verdict.not_fp8]
    for arm, reasons in grouped(lines).items():
        cause = "GEMMs that should be FP8 were not observed as FP8; the rows do not show their layers"
        if arm in unconverted:
            cause = "the filter or the sizes left no layer to convert: it computes in high precision under FP8's name"
        yield Finding(
            f"{arm} did not run in FP8",
            few(reasons),
            cause,
            "fp8core.audit(model) names each skipped layer with its reason; fp8core.verify(step_fn, model) counts FP8 GEMMs",
        )


def _not_fp8(row: Row) -> tuple[str, bool]:
    """Why a row's arm did not run in FP8, and whether no layer was converted; "" where nothing says so.

    What could not be proved is `fp8_not_proved`.
    """
    resolved = parse(row["resolved"])
    outcome = proof_outcome(resolved)
    counted, expected = resolved.get("fp8_gemms"), resolved.get("fp8_gemms_expected")
    if outcome is ProofOutcome.UNPROVEN:
        return "", False
    if row["cause"] == Cause.NOT_FP8:
        return row["reason"] or "no reason stored", False
    if _recipe(row) and resolved.get("fp8_layers") == []:
        skipped = resolved.get("skipped_layers")
        named = [f"{name}: {why}" for name, why in skipped.items()] if isinstance(skipped, dict) else []
        return f"no layer converted; {'; '.join(few(named)) or 'no reasons stored'}", True
    if outcome is ProofOutcome.DISPROVED:
        return str(resolved.get("verify") or outcome), False
    if _recipe(row) and counted is not None and expected is not None and counted < expected:
        return f"{counted} of {expected} GEMMs in FP8", False
    return "", False


def _measured(material: DiagnosisInput) -> Iterator[Row]:
    """Times and losses; of those that say the same, one."""
    names = ["suite", "arm", "cause", "reason", "resolved"]
    rows = material.frame.loc[material.rows.where(metric=(*TIMES, "loss")), names]
    yield from rows_of(rows.drop_duplicates())


def fp8_not_proved(material: DiagnosisInput) -> Iterator[Finding]:
    """An arm in which `fp8core.verify` found nothing wrong, and which it could not compare as a whole."""
    lines = (
        (_name(r), str(parse(r["resolved"]).get("verify") or r["reason"]))
        for r in _measured(material)
        if r["cause"] == Cause.UNPROVEN or proof_outcome(parse(r["resolved"])) is ProofOutcome.UNPROVEN
    )
    for arm, reasons in grouped(lines).items():
        yield Finding(
            f"{arm} could not be proved to run in FP8",
            few(reasons),
            "not known: nothing wrong was found, and part of the step could not be compared; the lines name it",
            "make the named part comparable, or free memory for the proof; then fp8core.verify(step_fn, model)",
        )


def unsupported_hardware(material: DiagnosisInput) -> Iterator[Finding]:
    """A GPU without FP8 tensor cores."""
    envs = [parse(env) for env in material.frame["env"].unique()]
    gpus = {(str(env["gpu"]), str(env.get("gpu_capability"))) for env in envs if env.get("gpu")}
    for gpu, capability in sorted(gpus):
        if re.fullmatch(r"\d+\.\d+", capability) and float(capability) < FIRST_FP8_CAPABILITY:
            texts = [env for env in material.frame["env"].unique() if str(parse(env).get("gpu")) == gpu]
            own = material.rows.pick(env=texts)
            emulated = len({(r["case_id"], r["arm"]) for r in own if parse(r["resolved"]).get("emulated")})
            skipped = len({(r["case_id"], r["arm"]) for r in own if r["status"] == "skipped"})
            yield Finding(
                f"{gpu} has no FP8 tensor cores",
                (f"compute capability {capability}; {emulated} arms emulated, {skipped} skipped",),
                f"FP8 GEMMs need compute capability {FIRST_FP8_CAPABILITY} (Ada) or newer; older GPUs gain nothing",
                "arms without FP8 here; measure FP8 on Ada, Hopper or newer",
            )


def unstable(material: DiagnosisInput) -> Iterator[Finding]:
    """A loss that diverges early, or spikes."""
    from harness.judge import instability  # the loss verdict

    yield from instability.found(material)


def out_of_memory(material: DiagnosisInput) -> Iterator[Finding]:
    """An arm that runs out of memory where its case's baseline, which has no FP8, did not.

    The finding names the parts that did not fit where both arms stored their memory by part; else they are not known.
    """
    failed = material.rows.pick(status="failed", cause=Cause.OOM)
    cases = {r["case_id"] for r in failed}
    ok = material.rows.pick(status="ok", case_id=cases) if cases else ()
    fits = {(r["run_id"], r["case_id"], r["arm"]): r for r in ok}
    done = set()
    for r in failed:
        base, baseline = fits.get((r["run_id"], r["case_id"], r["baseline"])), r["baseline"]
        if base is None or _recipe(base) or (str(setting_of(r)), r["arm"]) in done:
            continue
        done.add((str(setting_of(r)), r["arm"]))
        mine, theirs = (_sizes(of, "memory") for of in (r, base))
        lacking = [name for name, sizes in ((r["arm"], mine), (baseline, theirs)) if not sizes]
        more = {k: v - theirs.get(k, 0.0) for k, v in mine.items() if v > theirs.get(k, 0.0)}
        cause = f"not known: by prediction no part of its memory exceeds that of {baseline}"
        if lacking:
            cause = f"not known: the rows of {' and '.join(lacking)} do not say what their memory holds, part by part"
        elif more:
            parts = sorted(more.items(), key=lambda part: -part[1])
            cause = f"by prediction it holds more than {baseline}: {', '.join(f'{k} {bytes_(v)}' for k, v in parts)}"
        remedies = _sizes(r, "remedies").items()  # what the suite predicts of its own keys
        ways = " or ".join(f"axes.{way}, which frees {bytes_(size)}" for way, size in remedies)
        symptom = f"{_name(r)} runs out of memory, {baseline} does not"
        yield Finding(symptom, (r["reason"],), cause, ways or "a smaller case, or a device with more memory")


def _sizes(row: Row, field: str) -> dict[str, float]:
    sizes = parse(row["resolved"]).get(field)
    parts = sizes.items() if isinstance(sizes, dict) else ()
    return {str(k): v for k, v in parts if isinstance(v, int | float) and not isinstance(v, bool) and v > 0}


def cannot_pay(material: DiagnosisInput) -> Iterator[Finding]:
    """FP8 that is slower than bf16 because its matrices are too small for what the casts cost."""
    from harness.advise.fp8_break_even import losses  # the table of GPUs

    for found in losses(material.frame, material.pairs):
        yield Finding(
            *found, "bf16 for these layers (a module filter by size), a larger batch, or a larger model"
        )


def advice_was_wrong(material: DiagnosisInput) -> Iterator[Finding]:
    """An arm that converted what was advised, and is slower than bf16 by more than an advice may cost."""
    from harness.advise.advised_arms import FLOOR, advised_arms

    for a in advised_arms(material.frame, material.pairs):
        if a.outcome == "below":
            shown = f"predicted {a.predicted:.2f}x" if a.converted else "nothing was converted"
            yield Finding(
                f"{a.arm} of {a.model} is below {FLOOR:g} of {a.baseline}, with the layers that were advised",
                (f"{a.speedup:.3f}x, 95 % interval {a.low:.3f} to {a.high:.3f}; {shown}",),
                "a rate that the advice rests on is not this GPU's, or something runs that it does not count",
                "python -m harness sweep=ceilings here, then ceilings=RUN with axes.convert=advised; until then bf16",
            )


def frozen_scales(material: DiagnosisInput) -> Iterator[Finding]:
    """Delayed scales that stay where they are while the tensors move."""
    series: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for r in material.rows.pick(part=bool, metric=("scale_log2", "amax"), status="ok"):
        if _recipe(r) and _scaling(r) == "delayed":
            key = (r["run_id"], str(setting_of(r)), r["arm"], r["part"])
            series.setdefault(key, {})[r["metric"]] = np.array(r["samples"])
    lines = []
    for (_, _, arm, part), found in series.items():
        if len(found) == 2 and found["scale_log2"].size >= 5:
            scales, sizes = found["scale_log2"], found["amax"]
            sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
            if sizes.size and np.ptp(scales) == 0 and sizes.max() > 2 * sizes.min():
                course = f"scale 2^{scales[0]:g} at all {scales.size} looks, amax {sizes.min():.3g} to {sizes.max():.3g}"
                lines.append((arm, f"{part}: {course}"))
    for arm, tensors in grouped(lines).items():
        yield Finding(
            f"{arm}: {len(tensors)} delayed scale{' never moves' if len(tensors) == 1 else 's never move'}",
            few(tensors),
            "the amax history is recorded and never turned into scales",
            "call fp8core.update_scales(model) once a step, after optimizer.step()",
        )


def unhealthy_casts(material: DiagnosisInput) -> Iterator[Finding]:
    """Layers whose casts saturate, underflow or lose more than a Gaussian tensor's would."""
    alarms: dict[str, dict[str, list[tuple[float, str, str]]]] = {}  # by arm and kind
    for r in material.rows.pick(part=bool, status="ok", arm=lambda arm: arm != NEGATIVE):
        part, metric = r["part"], r["metric"]
        if not _recipe(r):
            continue
        values = [value for value in r["samples"] if math.isfinite(value)]
        if not values:
            continue
        most, least = max(values), min(values)
        own = alarms.setdefault(r["arm"], {kind: [] for kind in CASTS})
        if metric == "saturated_frac" and most > 0 and _scaling(r) == "dynamic":
            own["saturated"].append((-most, part, f"{100 * most:.3g} % saturated"))
        elif metric == "underflow_frac" and most > UNDERFLOW_ALARM:
            own["underflow"].append((-most, part, f"{100 * most:.3g} % underflow"))
        elif metric == "sqnr_db" and least < SQNR_ALARM.get(part.rpartition(":")[2], -math.inf):
            own["SQNR"].append((least, part, f"SQNR {least:.1f} dB"))
    for arm, kinds in alarms.items():
        for kind, lines in kinds.items():
            worst: dict[str, str] = {}
            for _, part, text in sorted(lines):  # of all seeds, the worst first
                worst.setdefault(part, f"{part} {text}")
            if worst:
                symptom = f"{arm}: {kind} alarm in {len(worst)} tensor{'' if len(worst) == 1 else 's'}"
                yield Finding(symptom, few(list(worst.values())), *CASTS[kind])


# Each with the suites whose rows it reads; none: those of all
CHECKS: Mapping[Callable[[DiagnosisInput], Iterator[Finding]], set[str]] = {
    fp8_did_not_run: set(),
    fp8_not_proved: set(),
    unsupported_hardware: set(),
    unstable: {"divergence"},
    out_of_memory: set(),
    cannot_pay: {"linear", "train"},
    advice_was_wrong: {"train"},
    frozen_scales: set(),
    unhealthy_casts: set(),
}
