"""The end of a sweep of sweeps: what it measured, in at most twenty lines, for a log that keeps only its end.

Each line is read from stored rows; what was not measured is left out, and what failed is counted. No torch.
"""

from __future__ import annotations

import json
import math
import statistics
from typing import TYPE_CHECKING, Any

from harness.advise.advised_arms import advised_arms
from harness.advise.advised_arms import lines as of_advised
from harness.judge import step_targets, verdict
from harness.judge.model_title import title_of
from harness.judge.smoke import failed_kernels, failed_recipes
from harness.judge.verdict.result import MIN_SEEDS
from harness.machine import mfu
from harness.machine.ceilings import ceilings
from harness.machine.hardware import of_env
from harness.store.arm import controls, without_controls
from harness.store.compare import FP8_DTYPES, against, paired_ratios, rows_of, summary, with_rates
from harness.store.json_columns import parse
from harness.store.text import case_label, constant_axes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pandas as pd

    from harness.advise.measured import Check

LINES = 20
NOT_JUDGED = ("peers",)  # sweeps whose cases repeat those of others
# karpathy/nanoGPT, README: best validation loss 1.4697 of config/train_shakespeare_char.py on one A100; read 2026-11.
NANOGPT_LOSS, NANOGPT_WITHIN = 1.47, 0.02
NANOGPT = {"model": "nanogpt_char", "data": "shakespeare", "batch": 64, "seq": 256, "steps": 5000}
CAST_BAR, LAYER_BAR = 0.92, 0.15  # of the copy bandwidth; median error of a prediction


def lines(frame: pd.DataFrame, predicted: Sequence[Check] = ()) -> list[str]:
    """The summary.

    Args:
        frame: rows of all runs of one machine.
        predicted: layers, beside what was measured of them.

    Returns:
        At most `LINES` lines, what is asked first coming first; the last one counts what was left out.
    """
    found = [
        *_tests(frame),
        *_smoke(frame),
        *_failed(frame),
        *(f"step: {one}" for one in step_targets.held(frame)),
        *of_advised(advised_arms(frame)),
        *_steps(frame),
        *_loss(frame),
        *_beside_copies(frame),
        *_ceilings(frame),
        *_shares(frame),
        _prediction(predicted),
        *_numerics(frame),
        *_kernels(frame),
    ]
    if len(found) <= LINES:
        return found
    return [*found[: LINES - 1], f"and {len(found) - LINES + 1} more in the report"]


def _tests(frame: pd.DataFrame) -> Iterator[str]:
    """The counts of each run of tests."""
    own = frame[(frame["suite"] == "tests") & (frame["metric"] == "tests_failed")]
    for r in rows_of(own[own["status"] == "skipped"]):
        yield f"tests: none ran, {r['reason']}"
    for r in rows_of(own[own["status"] == "ok"]):
        counts = _resolved(r)
        failed = counts["failures"] + counts["errors"]
        yield f"tests: {counts['passed']} passed, {failed} failed, {counts['skipped']} skipped"


def _ceilings(frame: pd.DataFrame) -> Iterator[str]:
    found = ceilings(frame)
    if found is None:
        return
    parts = [f"{rate} matmul {tflops:.4g} TFLOP/s" for rate, tflops in sorted(found.achieved.items())]
    for kind, curve in found.moves.items():
        parts.append(f"{kind} {max(rate for _, rate in curve) / 1e12:.2f} TB/s")
    if found.launch_s is not None:
        parts.append(f"launch {found.launch_s * 1e6:.1f} us")
    yield "ceilings: " + ", ".join(parts)


def _shares(frame: pd.DataFrame) -> Iterator[str]:
    """What casts and products reach of the ceilings measured here: of a copy as large, and of the best large product."""
    own = with_rates(frame[(frame["status"] == "ok") & (frame["metric"] == "time_ms")])
    own = own[(own["regime"] != "sustained") & ~controls(own)]
    found = ceilings(frame[frame["suite"] == "ceilings"])
    if found is None:
        return
    casts: dict[str, list[float]] = {}
    for r in rows_of(own[(own["suite"] == "cast") & ~own["arm"].isin(("copy", "read"))]):
        copy = found.bandwidth(r["bytes_moved"])
        if copy is not None and not _resolved(r).get("peer"):
            casts.setdefault(r["arm"], []).append(1e9 * r["gb_per_s"] / copy)
    if casts:
        arm = max(casts, key=lambda name: statistics.median(casts[name]))
        yield (
            f"casts ({arm}): best {max(casts[arm]):.0%}, median {statistics.median(casts[arm]):.0%} of a copy of the "
            f"same size, {len(casts[arm])} cases; asked {CAST_BAR:.0%}"
        )
    fastest: dict[str, dict[str, float]] = {}  # kind -> case -> rate
    for r in rows_of(own[own["suite"] == "gemm"]):
        # The ceilings are of exact accumulation; fast products would be held against another sum.
        comparable = not _resolved(r).get("peer") and not _resolved(r).get("use_fast_accum")
        if math.isfinite(r["tflops"]) and comparable:
            fp8 = any(name.startswith(FP8_DTYPES) for name in parse(r["flops"]))
            rates = fastest.setdefault("fp8" if fp8 else "bf16", {})
            rates[r["case_id"]] = max(rates.get(r["case_id"], 0.0), r["tflops"])
    parts = []
    for kind in sorted(fastest.keys() & found.achieved.keys()):
        shares = [rate / found.achieved[kind] for rate in fastest[kind].values()]
        parts.append(
            f"{kind} best {max(shares):.0%}, median {statistics.median(shares):.0%} of {found.achieved[kind]:.4g} TFLOP/s "
            f"({len(shares)} shapes)"
        )
    if parts:
        yield f"products, the fastest arm of each shape: {', '.join(parts)}"


def _prediction(predicted: Sequence[Check]) -> str:
    """How far `advise` is from the layers that were measured."""
    if not predicted:
        return "prediction of layers: not measured (needs layers of a GPU of the peak table)"
    errors = [abs(check.error) for check in predicted]
    middle, worst = statistics.median(errors), max(predicted, key=lambda check: abs(check.error))
    return (
        f"prediction of {len(errors)} layers: median error {middle:.1%}, asked {LAYER_BAR:.0%}: "
        f"{'PASS' if middle <= LAYER_BAR else 'FAIL'}; worst {worst.error:+.0%}, {worst.arm} {worst.case}"
    )


def _loss(frame: pd.DataFrame) -> Iterator[str]:
    """The verdict on each arm that trained, and the best validation loss of each, by set-up: its axes without the seed."""
    verdicts: dict[str, list[str]] = {}  # axes of a set-up -> words
    for v in verdict.judge(frame):
        why = f" ({v.verdict.reasons[0]})" if v.verdict.reasons else ""
        verdicts.setdefault(_setup(v.axes), []).append(
            f"{v.arm} against {v.against} {v.verdict.outcome}{why}"
        )
    best: dict[str, dict[str, list[tuple[Any, float]]]] = {}  # set-up -> arm -> seeds and losses
    own = frame[(frame["suite"] == "divergence") & (frame["metric"] == "heldout_loss")]
    for r in rows_of(own[own["status"] == "ok"]):
        axes = parse(r["axes"])
        arms = best.setdefault(_setup(axes), {})
        arms.setdefault(r["arm"], []).append((axes.get("seed", r["seed"]), min(r["samples"])))
    setups = list(dict.fromkeys([*verdicts, *best]))
    for setup, words in verdicts.items():
        yield f"loss of {_setup_label(setup, setups)}: {'; '.join(words)}"
    for setup, arms in best.items():
        of = f" of {_setup_label(setup, setups)}" if len(setups) > 1 else ""
        told = ", ".join(
            f"{arm} {_mean(losses):.3f} (seeds {', '.join(f'{value:.3f}' for _, value in losses)})"
            for arm, losses in arms.items()
        )
        published = NANOGPT.items() <= parse(setup).items()
        yield f"best validation loss{of}: {told}" + (f"; {_as_published(arms)}" if published else "")


def _setup(axes: Mapping[str, Any]) -> str:
    """The axes without the seed, as JSON."""
    return json.dumps({name: value for name, value in axes.items() if name != "seed"}, sort_keys=True)


def _setup_label(setup: str, setups: Sequence[str]) -> str:
    """The model, and what else tells a set-up from the others."""
    axes = parse(setup)
    shared = constant_axes(setups) if len(setups) > 1 else set(axes)
    return case_label(axes, without=shared - {"model"})


def _mean(losses: Sequence[tuple[Any, float]]) -> float:
    return statistics.mean(value for _, value in losses)


def _as_published(arms: Mapping[str, Sequence[tuple[Any, float]]]) -> str:
    asked = f"published {NANOGPT_LOSS} +- {NANOGPT_WITHIN}"
    if min(len({seed for seed, _ in losses}) for losses in arms.values()) < MIN_SEEDS:
        return f"{asked}: INCONCLUSIVE, fewer than {MIN_SEEDS} seeds"
    off = [arm for arm, losses in arms.items() if abs(_mean(losses) - NANOGPT_LOSS) > NANOGPT_WITHIN]
    return f"{asked}: FAIL, {', '.join(off)}" if off else f"{asked}: PASS"


def _numerics(frame: pd.DataFrame) -> Iterator[str]:
    codes = frame[(frame["suite"] == "codes") & (frame["metric"] == "mismatches") & (frame["status"] == "ok")]
    if len(codes):
        wrong = codes.groupby("arm")["value"].sum()
        yield "codes that differ from the format's: " + ", ".join(
            f"{arm} {wrong[arm]:.0f}" for arm in sorted(wrong.index)
        )
    sums = frame[(frame["suite"] == "accumulation") & (frame["status"] == "ok")]
    by_metric = sums[sums["metric"].str.endswith("sqnr_db")].groupby(["arm", "metric"])["value"].min()
    told = []
    for arm in sorted({arm for arm, _ in by_metric.index}):
        figures = by_metric[arm].sort_values(ascending=False)
        told.append(
            f"{arm} "
            + " / ".join(f"{figure:.0f} {name.removesuffix('_sqnr_db')}" for name, figure in figures.items())
        )
    if told:
        yield f"sums, dB against each model of them: {'; '.join(told)}"


def _steps(frame: pd.DataFrame) -> Iterator[str]:
    """A line for each training step, with every arm: the rows that a reader misses most.

    Of each arm the whole step, with its ratio, mixed MFU where the peak is known, and the ratio of forward and backward
    passes alone. Finished rounds of a step that was cut off are marked so.
    """
    times = ("time_ms", "forward_backward_ms")
    own = frame[(frame["suite"] == "train") & frame["metric"].isin(times) & ~frame["sweep"].isin(NOT_JUDGED)]
    timed = own[own["status"].isin(["ok", "partial"])]
    whole = {(r["run_id"], r["case_id"], r["arm"]): r for r in rows_of(timed[timed["metric"] == "time_ms"])}
    ratios = rows_of(paired_ratios(own, partial=True, metrics=times))
    passes = {(r["run_id"], r["case_id"], r["arm"]): r["speedup"] for r in ratios if r["metric"] != "time_ms"}
    arms: dict[tuple[str, str], list[str]] = {}
    for r in ratios:
        if r["metric"] != "time_ms" or math.isnan(r["speedup"]):
            continue
        key = r["run_id"], r["case_id"]
        mine = arms.setdefault(key, [])
        if not mine:
            used = _mfu(whole.get((*key, r["baseline"])))
            mine.append(f"{r['baseline']} {r['baseline_value']:.4g} {r['unit']}{used}")
        alone = passes.get((*key, r["arm"]), math.nan)
        mine.append(
            f"{r['arm']} {r['value']:.4g}, {r['speedup']:.3f}x ({r['low']:.3f} to {r['high']:.3f}) of {r['baseline']}"
            + (f", passes alone {alone:.3f}x" if not math.isnan(alone) else "")
            + _mfu(whole.get((*key, r["arm"])))
            + (f" [{step_targets.cut_off(r['rounds'])}]" if r["cut_off"] else "")
        )
    for (run_id, case_id), said in arms.items():
        titles = [title_of(row) for key, row in whole.items() if key[:2] == (run_id, case_id)]
        yield f"step of {titles[0]}: " + "; ".join(said)


def _mfu(row: Mapping[str, Any] | None) -> str:
    """Mixed MFU of a step, causal attention counted as it runs; "" where a peak is not known."""
    if row is None:
        return ""
    found = mfu.of_row({**row, "status": "ok"}, of_env(parse(row["env"])))
    executed = [u for u in found if u.formula in mfu.EXECUTED] or list(found)
    share = executed[-1].mfu_mixed if executed else None
    return f", mixed MFU {share:.1%}" if share is not None else ""


def _beside_copies(frame: pd.DataFrame) -> Iterator[str]:
    """What casts reach of a copy of the same tensor that was timed in the same rounds."""
    own = frame[(frame["suite"] == "cast") & (frame["metric"] == "time_ms")]
    own = own[own["status"].isin(["ok", "partial"]) & ~own["regime"].isin(["sustained"])]
    moved = {(r["run_id"], r["case_id"], r["arm"]): r["bytes_moved"] for r in rows_of(own)}
    said: dict[str, list[str]] = {}
    for arm in dict.fromkeys(without_controls(own)["arm"]):
        if arm == "copy":
            continue
        for r in rows_of(against(own, arm, "copy", partial=True)):
            key = r["run_id"], r["case_id"]
            if math.isnan(r["speedup"]) or (*key, "copy") not in moved:
                continue
            share = r["speedup"] * moved[*key, arm] / moved[*key, "copy"]
            axes = parse(r["axes"])
            cut = f", {step_targets.cut_off(r['rounds'])}" if r["cut_off"] else ""
            said.setdefault(arm, []).append(f"{share:.0%} ({axes['M']}x{axes['K']}{cut})")
    if said:
        told = "; ".join(f"{arm} {', '.join(shares)}" for arm, shares in said.items())
        yield f"casts, share of the bandwidth of a copy in the same rounds: {told}"


def _smoke(frame: pd.DataFrame) -> Iterator[str]:
    """Kernels and recipes that failed on this device; that all are right where all were checked."""
    kernels, recipes = failed_kernels(frame), failed_recipes(frame)
    if kernels or recipes:
        names = [f"kernel {name}" for name in kernels] + [f"recipe {name}" for name in recipes]
        first = next(iter((kernels or recipes).values()))
        yield f"smoke: FAILED and left out: {', '.join(names)}; first: {first[:160]}"


def _kernels(frame: pd.DataFrame) -> Iterator[str]:
    """Geometric means of the other suites: products and layers over bf16, casts over the eager one."""
    timed = frame[frame["suite"].isin(["cast", "gemm", "linear"]) & (frame["metric"] == "time_ms")]
    timed = timed[~timed["sweep"].isin(NOT_JUDGED)]
    ratios = paired_ratios(timed)
    ratios = ratios[
        (ratios["fp8"].astype(bool) | (ratios["baseline"] == "eager")) & (ratios["regime"] == "isolated")
    ]
    found: dict[tuple[str, str], list[str]] = {}
    for r in rows_of(summary(ratios)):
        if r["pairs"]:
            of = f"{r['arm']} {r['geometric_mean']:.3f}x"
            found.setdefault((r["suite"], r["baseline"]), []).append(of)
    for (suite, baseline), said in found.items():
        yield f"{suite} over {baseline}, geometric means: {', '.join(said)}"


def _failed(frame: pd.DataFrame) -> Iterator[str]:
    failed = frame[frame["status"] == "failed"]
    if len(failed):
        yield f"failed: {len(failed)} rows, first {failed.iloc[0]['arm']}: {failed.iloc[0]['reason'][:120]}"


def _resolved(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return parse(row["resolved"])
