"""The section of others' published runs: MFU recomputed with every denominator named, in tables and one figure."""

from __future__ import annotations

from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING

from matplotlib.ticker import PercentFormatter

from harness.report.drawing import MUTED, Chart, mark, sheet, styled
from harness.report.published_runs import COUNTS, MACHINES, Count, Run, runs
from harness.report.section import Section
from harness.report.table import Cell, Column, Table, make_table, number
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INTRO = (
    "All of these were measured by others, who are named in the last column; none of them was measured by this project. "
    "What is ours is the arithmetic: FLOPs a token from the sizes of the model, times the published tokens/s, over the "
    'published dense peak of the GPU. "palm" counts the whole of attention\'s T x T, "causal" the half that runs. '
    "Only HFU counts what is recomputed. Each figure is one run without an interval."
)
# What was published and gives no MFU -> why.
NOT_FORMED: Mapping[str, str] = {
    "IBM and Meta, 2024-11: 1.8B and 8B": "the sizes of the 1.8B model are not published; 8B is printed as 8K and 10K "
    "tokens/s, to one digit",
    "Crusoe, 2025: 70B on 1600 to 1920 H200, up to 1856 B200": "only ratios and hours, no tokens/s",
    "Llama 4 Scout on GB200, torchao's 2-layer MoE on B200, KempnerForge's MoE": "how many tokens each expert got, and so "
    "the FLOPs that ran, is not published; the peak of GB200 is 2250 or 2500 TFLOP/s by two sources",
    "torchtitan, nvfp4.md: 8B in NVFP4 and MXFP8 on 4 Blackwell GPUs": "neither the GPU nor the length of a sequence is "
    "published, so that peak and attention are unknown",
    "KempnerForge, configs/train/7b_16gpu_fp8.toml": "a configuration without a figure: no tokens/s",
    "nanochat, RFC of 2023, TransformerEngine": "only ratios of whole steps, or single layers",
    "Databricks, 2024-03: 1.4 to 1.5 times on 64 H100": "only ratios, no tokens/s",
    "FP8-LM, COAT": "only ratios and percentages, no tokens/s",
}


@cache
def sections() -> tuple[Section, ...]:
    """One section: how the shares are formed, the figure, the runs by publisher, and what gives no MFU."""
    by_publisher: dict[str, list[Run]] = {}
    for run in runs():
        by_publisher.setdefault(run.publisher, []).append(run)
    return (
        Section(
            "published",
            f"{len(runs())} published runs of others, MFU recomputed",
            INTRO,
            first=[_summary(by_publisher)],
            charts=[_chart()],
            tables=[
                *(_runs_table(name, own) for name, own in by_publisher.items()),
                _peaks_table(),
                _counts_table(),
                _not_formed(),
            ],
        ),
    )


def _summary(by_publisher: Mapping[str, Sequence[Run]]) -> Table:
    columns = (
        Column("measured by", itemgetter(0)),
        number("figures", lambda r: len(r[1]), str),
        number("mixed MFU of bf16 runs, palm", lambda r: _range_cell([x for x in r[1] if not x.is_fp8])),
        number("mixed MFU of FP8 runs, palm", lambda r: _range_cell([x for x in r[1] if x.is_fp8])),
        number("printed an MFU", lambda r: sum(x.printed is not None for x in r[1]), str),
        number("of these follow from their tokens/s", lambda r: _agreeing(r[1])),
    )
    every = {**by_publisher, "all": runs()}
    return make_table("published-summary", columns, list(every.items()), sortable=False)


def _agreeing(own: Sequence[Run]) -> Cell:
    printed = [r for r in own if r.printed]
    agree = sum(r.off_by() == 0.0 for r in printed)
    return Cell(f"{agree} of {len(printed)}", agree) if printed else Cell("", None)


def _range_cell(own: Sequence[Run]) -> Cell:
    shares = [share for r in own if (share := r.utilization("palm").mfu_mixed) is not None]
    if not shares:
        return Cell("", None)
    low, high = min(shares), max(shares)
    return Cell(f"{100 * low:.1f} to {100 * high:.1f} %", low, note=text.plural(len(shares), "run"))


def _runs_table(name: str, own: Sequence[Run]) -> Table:
    caption = f"Measured by {name}: {text.plural(len(own), 'figure')}."
    columns = (
        Column("run", _named),
        Column("precision", "precision"),
        number("tokens/s/GPU", "tokens_per_s", text.count),
        number("model TFLOP/s", lambda r: r.utilization("palm").model_tflops, hint="palm"),
        _share("mixed MFU", "palm", "mfu_mixed", _MIXED),
        _share("mixed MFU", "causal", "mfu_mixed", "the same, attention without the masked half"),
        _share("of bf16 peak", "palm", "mfu_bf16_peak", _OF_BF16),
        _share(
            "of FP8 peak", "palm", "mfu_fp8_peak", "all FLOPs against the FP8 peak; low where bf16 has a part"
        ),
        _share("HFU", "causal", "hfu", "as mixed MFU, with what is recomputed"),
        number(
            "printed MFU", _printed, hint="by its authors; below it whether it follows from their tokens/s"
        ),
        Column("measured by", "source"),
    )
    return make_table(f"published-runs-{name}", columns, own, caption)


_MIXED = "sum of F_d / P_d over the time, each dtype against its own peak"
_OF_BF16 = "all FLOPs against the bf16 peak: comparable with the literature"


def _share(title: str, formula: str, field: str, hint: str) -> Column:
    """The column of one of the shares, by one rule of counting; N/A where it cannot be formed."""

    def cell(run: Run) -> Cell:
        value = getattr(run.utilization(formula), field)
        return Cell(text.NONE, None, "muted") if value is None else Cell(f"{100 * value:.1f} %", value)

    return number(f"{title}, {formula}", cell, hint=hint)


def _named(run: Run) -> Cell:
    where = f"{run.machine}, length {run.seq:,}, {_recomputed(run.recomputed)}"
    return Cell(run.name, run.name, note=where)


def _recomputed(what: str) -> str:
    return f"recomputed: {what}" if what != "nothing" else "nothing recomputed"


def _printed(run: Run) -> Cell:
    if run.printed is None:
        return Cell("", None)
    formed, off = run.by_their_count(), run.off_by()
    note = f"agrees: {formed:.2f} % by their count"
    if off:
        note = f"differs by {off:+.2f} points: {formed:.2f} % by their count; they do not say why"
    return Cell(run.printed.text, run.printed.high, "bad" if off else "", note)


def _peaks_table() -> Table:
    devices = {machine: next(r for r in runs() if r.machine == machine).device for machine in MACHINES}
    columns = (
        Column("ran on", itemgetter(0)),
        Column("divided by the peak of", lambda m: m[1].key),
        number("bf16 TFLOP/s", lambda m: m[1].tflops["bf16"], "{:g}".format),
        number("FP8 TFLOP/s", lambda m: m[1].tflops["fp8"], "{:g}".format),
        Column("what to know", lambda m: MACHINES[m[0]][1]),
        Column("source of the peak", lambda m: m[1].source),
    )
    caption = "Peaks: dense, as their makers publish them (docs/hardware.md)."
    return make_table("published-peaks", columns, list(devices.items()), caption, sortable=False)


def _counts_table() -> Table:
    def printed_by(count: Count) -> str:
        return "; ".join(dict.fromkeys(r.source for r in runs() if r.printed and r.printed.count is count))

    columns = (
        Column("printed by", printed_by),
        Column("6 N + 12 L Q T, with N", "words"),
        Column("source", "source"),
    )
    caption = "How the printed MFUs were formed; each is formed again that way before it is compared."
    return make_table("published-counts", columns, list(COUNTS.values()), caption, sortable=False)


def _not_formed() -> Table:
    columns = (Column("published", itemgetter(0)), Column("why", itemgetter(1)))
    caption = "Published, and no MFU can be formed from it."
    return make_table("published-not-formed", columns, list(NOT_FORMED.items()), caption, sortable=False)


@styled
def _chart() -> Chart:
    """The same FP8 runs over three denominators: what a single printed number hides."""
    shown = sorted(
        (r for r in runs() if r.is_fp8), key=lambda r: r.utilization("palm").mfu_mixed or 0.0, reverse=True
    )
    labels = [text.short(f"{r.publisher}: {r.name}", 62) for r in shown]
    drawn = sheet("published-mfu", 1.0 + 0.19 * len(shown), grid="x", rows=labels)
    axes = drawn.axes
    axes.tick_params(axis="y", labelsize=7.5)
    columns = (("of FP8 peak", "mfu_fp8_peak"), ("mixed", "mfu_mixed"), ("of bf16 peak", "mfu_bf16_peak"))
    for i, (label, field) in enumerate(columns):
        shares = [getattr(r.utilization("palm"), field) for r in shown]
        axes.plot(shares, range(len(shown)), **mark(i, label=label))
    for y, r in enumerate(shown):
        found = r.utilization("palm")
        if found.mfu_fp8_peak is not None and found.mfu_bf16_peak is not None:
            axes.hlines(y, found.mfu_fp8_peak, found.mfu_bf16_peak, color=MUTED, linewidth=0.6, zorder=0)
    printed = [(r.printed.high / 100, y) for y, r in enumerate(shown) if r.printed]
    x, y_of = zip(*printed, strict=True)
    axes.plot(x, y_of, **mark(11, label="printed by its authors", markersize=8))
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("MFU of others' FP8 runs, recomputed (palm)")
    caption = (
        f"{len(shown)} FP8 runs that others measured and published; none is a measurement of this project. One run is one "
        "line: the same tokens/s over the FP8 peak, over each dtype's own, and over the bf16 peak."
    )
    return drawn.chart("One run, three denominators", caption)
