"""A trial's answer in words: at most 20 lines. Pure functions; no torch."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from harness.machine import hardware, mfu
from harness.training.ab.plan import BASE, FP8, GATHER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.machine.hardware import Device
    from harness.store.effect import Effect
    from harness.training.ab.result import TrialResult

_WAITS = 0.1  # a loader that takes this share of a step is told
_LEFT_OUT = 3  # blocks that are named one by one; one less where there are more arms


def lines(result: TrialResult) -> list[str]:
    """The answer."""
    lost = [(r.index, arm, why) for r in result.rounds for arm, why in r.faults.items()]
    named = _LEFT_OUT - (GATHER in result.arms)
    more = [f"{len(lost) - named} more blocks were left out"] if len(lost) > named else []
    return [
        *_headline(result),
        *_decision(result),
        *([] if result.refused else [*_step(result), *_between_steps(result)]),
        *([result.slow_rank] if result.slow_rank else []),
        *([] if result.refused else [*_use(result), *_memory(result)]),
        *[proof for proof in (result.proof, result.gather_proof) if proof],
        *[
            f"round {index}, block of {_label(result, arm)} left out: {why}"
            for index, arm, why in lost[:named]
        ],
        *more,
        *([] if result.refused else _loss(result)),
        *(["; ".join(result.notes)] if result.notes else []),
        _end(result),
    ]


def _label(result: TrialResult, arm: str) -> str:
    """An arm as the answer names it."""
    if arm == GATHER:
        return "FP8 with FP8 all-gather"
    if arm == FP8:
        return "FP8 with high-precision all-gather" if GATHER in result.arms else "FP8"
    return "bf16" if arm == BASE else "bf16 again"


def _fp8_arms(result: TrialResult) -> list[str]:
    return [arm for arm in (FP8, GATHER) if arm in result.arms]


def _ratio(found: Effect) -> str:
    if not found.has_interval:
        return "not measured"
    return f"{found.speedup:.3f}x ({math.exp(-found.log_high):.3f} to {math.exp(-found.log_low):.3f})"


def _headline(result: TrialResult) -> list[str]:
    line = f"FP8 ({result.recipe}) against bf16 in this loop: "
    if result.refused:
        return [f"{line}no ratio: {result.refused}"]
    found = result.effect
    line += _ratio(found)
    if found.has_interval:
        floor = "unknown" if math.isnan(result.floor) else f"{result.floor:.3f}x"
        line += f", {found.rounds} paired rounds, noise floor {floor}"
    if GATHER not in result.arms:
        return [line]
    return [
        line + "; weights gathered in high precision",
        f"with FP8 all-gather: {_ratio(result.between(GATHER, BASE))} of bf16, "
        f"{_ratio(result.between(GATHER, FP8))} of FP8 without it",
    ]


def _decision(result: TrialResult) -> list[str]:
    pairs = [(FP8, BASE, "for speed")]
    if GATHER in result.arms:
        pairs += [
            (GATHER, BASE, "for speed, with FP8 all-gather"),
            (GATHER, FP8, "FP8 all-gather, once FP8 is on"),
        ]
    found = []
    said = ""
    for arm, other, what in pairs:
        doubt = result.doubt_of(arm, other)
        why = "" if not doubt else ", for the same reason" if doubt == said else f", because {doubt}"
        found.append(f"{what}: {result.decision_of(arm, other)}{why}")
        said = doubt
    return found


def _step(result: TrialResult) -> list[str]:
    times = {arm: result.median_ms(arm) for arm in (BASE, *_fp8_arms(result))}
    if any(math.isnan(times[arm]) for arm in (BASE, FP8)):
        return []
    line = "step: " + ", ".join(
        f"{'not measured' if math.isnan(ms) else f'{ms:.4g} ms'} in {_label(result, arm)}"
        for arm, ms in times.items()
    )
    if result.tokens:
        rates = [f"{1e3 * result.tokens / ms:,.0f}" for ms in times.values() if not math.isnan(ms)]
        line += f"; {_listed(rates)} tokens/s a rank"
    if result.ranks > 1:
        line += f"; the slowest of {result.ranks} ranks"
    return [line]


def _between_steps(result: TrialResult) -> list[str]:
    """What runs between the steps, where it matters."""
    base, fp8, gap = result.median_ms(BASE), result.median_ms(FP8), result.gap_ms
    if math.isnan(fp8) or math.isnan(base) or math.isnan(gap) or gap < _WAITS * base:
        return []
    line = f"between steps: {gap:.4g} ms (data loader, logging); with it the loop gains {(base + gap) / (fp8 + gap):.3f}x"
    if result.tokens:
        line += f" and comes to {1e3 * result.tokens / (fp8 + gap):,.0f} tokens/s a rank in FP8"
    if gap > base:
        line += (
            ". The loop waits for its loader longer than for the model: mend that first; the ratio is that of "
            "the steps alone"
        )
    return [line]


def _use(result: TrialResult) -> list[str]:
    """Energy and MFU, of a trial that has times."""
    if math.isnan(result.median_ms(FP8)) or math.isnan(result.median_ms(BASE)):
        return []
    if result.device != "cuda":
        return [
            f"energy and MFU: not stated, a {result.device} has no energy counter that is read and no peak here"
        ]
    return [_energy(result), _mfu(result)]


def _energy(result: TrialResult) -> str:
    arms = (BASE, *_fp8_arms(result))
    if not all(result.joules.get(arm) for arm in arms):
        return f"energy: not measured: {result.unmetered or 'a reading of the counter failed'}"
    parts = [
        f"{statistics.fmean(joules for _, joules in result.joules[arm]):.4g} J in {_label(result, arm)}"
        for arm in arms
    ]
    blocks = min(len(result.joules[arm]) for arm in arms)
    each = "a GPU" if result.ranks > 1 else "of the whole board"
    return f"energy of a step with what runs between steps, {each}: {', '.join(parts)}; {blocks} blocks or more of each"


def _mfu(result: TrialResult) -> str:
    """Mixed MFU with the peaks that it is divided by."""
    name, memory = result.gpu or ("the GPU", 0.0)
    device = hardware.lookup(name, memory) if result.gpu else None
    if device is None:
        return f"MFU: not stated, {name} is not in the table of peaks"
    used = {arm: use(result, arm, device) for arm in (BASE, *_fp8_arms(result))}
    if any(found is None or found.mfu_mixed is None for found in used.values()):
        return "MFU: not stated, the dtype of some product, or its peak, is not known"
    shares = {arm: found for arm, found in used.items() if found is not None}
    if any((found.mfu_mixed or 0.0) > 1 for found in shares.values()):
        return (
            f"MFU: not stated: it would be above the peaks of {name}; time, FLOPs (the masked half of attention is among "
            "them) or device are wrong"
        )
    dtypes = {dtype for arm in used for dtype, amount in result.flops[arm].items() if amount}
    peaks = ", ".join(f"{dtype} {device.peak_tflops(dtype):.4g}" for dtype in sorted(dtypes))
    mixed = ", ".join(f"{found.mfu_mixed:.1%} in {_label(result, arm)}" for arm, found in shares.items())
    of_bf16 = _listed([f"{found.mfu_bf16_peak:.1%}" for found in shares.values()])
    return f"mixed MFU: {mixed}, each dtype by its own peak ({name}: {peaks} TFLOP/s); of the bf16 peak alone {of_bf16}"


def use(result: TrialResult, arm: str, device: Device) -> mfu.Utilization | None:
    """The MFU columns of an arm's median step; None without FLOPs or a time."""
    flops: Mapping[str, float] = result.flops.get(arm, {})
    ms = result.median_ms(arm)
    if not flops or math.isnan(ms):
        return None
    return mfu.utilization(flops, ms / 1e3, device, formula="palm", tokens=result.tokens)


def _memory(result: TrialResult) -> list[str]:
    peaks = [
        f"{_label(result, arm)} {result.peak_bytes[arm] / 2**30:.2f} GiB"
        for arm in (BASE, *_fp8_arms(result))
        if arm in result.peak_bytes
    ]
    return [f"peak memory: {', '.join(peaks)}"] if peaks else []


def _loss(result: TrialResult) -> list[str]:
    gap = result.loss_gap
    if gap is None:
        return []
    return [
        f"loss of FP8's blocks: {gap[0]:+.2%} ({gap[1]:+.2%} to {gap[2]:+.2%}) of bf16's; blocks share one model, so this "
        "cannot say how FP8 trains: sweep=divergence does"
    ]


def _end(result: TrialResult) -> str:
    in_fp8, in_bf16 = result.steps_run
    end = f"{in_fp8 + in_bf16} steps: {in_fp8} in FP8, {in_bf16} in bf16; the model was left in {result.ends_in}"
    if result.restored is not None:
        end += f", and put back were: {', '.join(result.restored)}"
    if result.not_restored:
        end += f". NOT put back: {result.not_restored}"
    return end


def _listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
