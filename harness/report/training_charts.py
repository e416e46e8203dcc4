"""Training charts: loss curves with the band of other seeds, and the paired gap with its margin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from harness.judge.verdict import MARGIN, ema
from harness.judge.verdict.curves import half_life, pair
from harness.judge.verdict.rows import CONTROL, NEGATIVE
from harness.report.drawing import BAND, INK, MUTED, Chart, evenly, sheet, signed, styled
from harness.report.looks import look
from harness.report.training import is_candidate, setup_label
from harness.store import stats
from harness.store.arm import GOLDEN

if TYPE_CHECKING:
    from harness.judge.verdict.rows import Setup
    from harness.report.runs import Machine
    from harness.store.stats import Vector

MOST_SETUPS = 6
MOST_POINTS = 240  # of a line; more cannot be seen and make the page heavy
DASHES: tuple[Any, ...] = (
    "-",
    "--",
    "-.",
    ":",
    (0, (5, 1, 1, 1, 1, 1)),
    (0, (7, 2)),
    (0, (1, 2)),
    (0, (3, 1, 1, 1)),
)


def losses(machine: Machine) -> list[Chart]:
    """Loss curves and gaps of each set-up that has a control."""
    setups = [s for s in machine.trainings if _smoothed(s, CONTROL)[1].size]
    charts = []
    for i, setup in enumerate(setups[:MOST_SETUPS]):
        key = f"{machine.env_id}-{i}"
        charts += [_curves(machine, setup, f"loss-{key}"), *_gaps(machine, setup, f"gap-{key}")]
    return charts


@styled
def _curves(machine: Machine, setup: Setup, key: str) -> Chart:
    drawn = sheet(key, 3.6, grid="y")
    axes = drawn.axes
    steps, base = _smoothed(setup, CONTROL)
    _, other = _smoothed(setup, f"{CONTROL}_other")
    centre = base.mean(axis=0)
    caption = "A line an arm: the mean over seeds of the smoothed training loss."
    if other.shape[0] > 1 and other.shape[1] == steps.size:
        half = stats.t_quantile(0.975, other.shape[0] - 1) * other.std(axis=0, ddof=1)
        at = evenly(steps.size, MOST_POINTS)
        axes.fill_between(
            steps[at],
            (centre - half)[at],
            (centre + half)[at],
            color=BAND,
            linewidth=0,
            label="other seeds, 95 %",
        )
        caption += f" Band: control +/- t sd of {other.shape[0]} runs of other seeds."
    shown = [CONTROL, *(a for a in setup.arms if a == NEGATIVE or is_candidate(setup.records[a]))]
    ends = [centre.min(), centre[centre.size // 20]]
    for i, arm in enumerate(shown):
        x, y = _smoothed(setup, arm)
        if not y.size:
            continue
        mean, at = y.mean(axis=0), evenly(x.size, MOST_POINTS)
        colour = look(machine, setup.records[arm])["color"]
        axes.plot(x[at], mean[at], linewidth=1.2, color=colour, linestyle=DASHES[i % len(DASHES)], label=arm)
        if arm != NEGATIVE:
            ends.append(mean.min())
    room = 0.06 * (max(ends) - min(ends)) or 0.01 * abs(max(ends)) or 1.0  # a curve may be flat
    axes.set_ylim(min(ends) - room, max(ends) + 4 * room)
    axes.set_xlim(steps[0], steps[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats)")
    axes.yaxis.set_major_locator(MaxNLocator(6))
    return drawn.chart(f"Loss: {setup_label(machine, setup.axes)}", caption)


@styled
def _gaps(machine: Machine, setup: Setup, key: str) -> list[Chart]:
    """The smoothed gap of each arm that is paired with the control, in percent of the control's loss."""
    records = setup.records
    arms = [a for a in setup.arms if a == NEGATIVE or is_candidate(r := records[a]) or r.variant == GOLDEN]
    found = {arm: gap for arm in arms if (gap := _gap(setup, arm)) is not None}
    if not found:
        return []
    drawn = sheet(key, 3.6, grid="")
    axes = drawn.axes
    limit = 100 * MARGIN
    inside = [np.abs(mean).max() for _, mean in found.values() if np.abs(mean).max() <= 12 * limit]
    top = max([1.25 * limit, *(1.1 * v for v in inside)])
    noise = _gap(setup, f"{CONTROL}_eps", spread=True)
    caption = "Candidate minus control of the same seed, smoothed, mean over seeds."
    if noise is not None:
        x, three = noise
        at = evenly(x.size, MOST_POINTS)
        axes.fill_between(x[at], -three[at], three[at], color=BAND, linewidth=0, label=f"{CONTROL}_eps, 3 sd")
        caption += " Band: 3 sd between seeds of the perturbed control."
    axes.axhline(0, color=MUTED, linewidth=0.6)
    for side in (limit, -limit):
        axes.axhline(side, color=INK, linewidth=0.9, linestyle="--", label="margin" if side > 0 else None)
    beyond = []
    for i, (arm, (x, mean)) in enumerate(found.items()):
        at = evenly(x.size, MOST_POINTS)
        colour = look(machine, records[arm])["color"]
        axes.plot(x[at], mean[at], linewidth=1.2, color=colour, linestyle=DASHES[i % len(DASHES)], label=arm)
        if np.abs(mean).max() > top:
            beyond.append(f"{arm} reaches {mean[np.abs(mean).argmax()]:+.3g} %")
        switch = next((r.switch_step for r in setup.arms[arm].values() if r.switch_step), None)
        if switch is not None:
            axes.axvline(switch, color=colour, linewidth=0.8, linestyle=":")
            caption += f" {arm} switches at step {switch}."
    if beyond:
        caption += f" Beyond the scale: {', '.join(beyond)}."
    axes.set_ylim(-top, top)
    axes.set_xlim(x[0], x[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("gap (% of the loss)")
    signed(axes.yaxis)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    return [drawn.chart(f"Paired gap: {setup_label(machine, setup.axes)}", caption)]


def _smoothed(setup: Setup, arm: str) -> tuple[Vector, Vector]:
    """Steps, and the smoothed loss of each whole run of an arm, [S, T]; empty where there is none."""
    runs = [r for r in setup.arms.get(arm, {}).values() if r.loss.first_nonfinite is None]
    longest = max((r.loss.steps for r in runs), key=len, default=np.zeros(0))
    whole = [r.loss.values for r in runs if r.loss.steps.size == longest.size]
    if not whole or longest.size < 2:
        return longest, np.zeros((0, 0))
    return longest, ema(np.array(whole), longest, half_life(longest.size))


def _gap(setup: Setup, arm: str, *, spread: bool = False) -> tuple[Vector, Vector] | None:
    """Steps, and the mean smoothed gap in percent of the loss, or three sd of it between seeds; None without pairs."""
    pairs = pair(setup.arms.get(arm, {}), setup.arms[CONTROL])
    if not pairs.seeds or pairs.steps.size < 2 or (spread and len(pairs.seeds) < 2):
        return None
    life = half_life(pairs.length)
    gap = 100 * ema(pairs.gap, pairs.steps, life, from_zero=True) / ema(pairs.control, pairs.steps, life)
    return pairs.steps, 3 * gap.std(axis=0, ddof=1) if spread else gap.mean(axis=0)
