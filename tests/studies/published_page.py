"""Others' published training runs with their MFU recomputed, as sections of a report about MFU.

    python tests/studies/published_page.py results/published reports/published/mfu.html     our rows, with these sections

`published/*.csv` hold what was published: one figure a line with its conditions, tokens/s of one GPU and the MFU that its
authors printed. FLOPs a token are counted from the sizes of the model, matrix products alone: 6 for each weight of a Linear
layer (the head among them, the embedding not) and 12 L Q T for attention (PaLM, arXiv:2204.02311, appendix B), of which the
causal count keeps half. In an FP8 run the Linear layers of the blocks run in FP8, head and attention in bf16.
"""

from __future__ import annotations

import csv
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import PercentFormatter

from harness.machine.hardware import named
from harness.machine.mfu import Utilization, utilization
from harness.report import write_report
from harness.report.drawing import MUTED, Chart, mark, sheet, styled
from harness.report.section import Section
from harness.report.table import Cell, Column, Table, make_table, number
from harness.store import text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.machine.hardware import Device

DATA = Path(__file__).with_name("published")
INTRO = (
    "All of these were measured by others, who are named in the last column; none of them was measured by this project. "
    "What is ours is the arithmetic: FLOPs a token from the sizes of the model, times the published tokens/s, over the "
    'published dense peak of the GPU. "palm" counts the whole of attention\'s T x T, "causal" the half that runs. '
    "Only HFU counts what is recomputed. Each figure is one run without an interval."
)
# Share of the blocks' forward pass that is run again: of its products, of attention; None: not published.
AGAIN: Mapping[str, tuple[float, float] | None] = {
    "nothing": (0.0, 0.0),
    "by operator": (0.5, 0.0),  # torchtitan: every second product, attention is kept
    "every second block": (0.5, 0.5),
    "blocks": (1.0, 1.0),
    "not published": None,
}
IN_BF16 = {"bf16": 1.0, "rowwise_with_gw_hp": 1 / 3}  # share of the blocks' products, by recipe


@cache
def data(name: str) -> list[dict[str, str]]:
    """The lines of one file."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def line(name: str, key: str, value: str) -> dict[str, str]:
    """The only line with that value."""
    (found,) = (row for row in data(name) if row[key] == value)
    return found


class Run:
    """One published figure, by its line of `runs.csv`."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.name, self.precision, self.source = row["run"], row["precision"], row["source"]
        self.seq, self.tokens_per_s = int(row["seq"]), float(row["tokens_per_s"])
        self.machine, self.printed = row["machine"], row["printed_percent"]
        own = line("models", "model", row["model"])
        size = {key: int(value) for key, value in own.items() if key != "model"}
        width = size["width"]
        self.head = width * size["vocab"]
        attention, ffn = 2 * width * (width + size["kv"]), size["ffn_matrices"] * width * size["ffn"]
        self.blocks = size["layers"] * (attention + ffn)
        embeddings = width * self.seq if size["positions"] else self.head
        self.parameters = self.blocks + self.head + embeddings
        self.parameters += size["layers"] * size["vectors_block"] + size["vectors_rest"]
        self.attention = 12.0 * size["layers"] * width * self.seq  # FLOPs a token of the whole T x T

    @property
    def device(self) -> Device:
        """The entry of the peak table that its shares are divided by."""
        return named(line("machines", "machine", self.machine)["device"])

    @property
    def is_fp8(self) -> bool:
        """Whether its blocks run in FP8."""
        return self.precision != "bf16"

    @property
    def publisher(self) -> str:
        """Who measured it: the first word of the source's name."""
        return "IBM, Meta" if self.source.startswith("IBM") else self.source.replace(",", " ").split(" ")[0]

    def utilization(self, formula: str) -> Utilization:
        """All shares by one rule of counting, "palm" or "causal"."""
        fp8 = 1 - IN_BF16.get(self.precision, 0.0)
        attention = self.attention * (0.5 if formula == "causal" else 1.0)
        blocks = 6.0 * self.blocks * fp8
        flops = {"fp8": blocks, "bf16": 6.0 * (self.blocks + self.head) - blocks + attention}
        again = AGAIN[self.row["recomputed"]]
        recomputed = None
        if (
            again is not None
        ):  # of the forward pass, a third of all; products of weights run in the recipe's dtype
            forward = 2.0 * self.blocks * again[0]
            recomputed = {"fp8": forward, "bf16": attention / 3 * again[1]}
            if not self.is_fp8:
                recomputed = {"bf16": forward + attention / 3 * again[1]}
        return utilization(
            flops,
            1.0 / self.tokens_per_s,
            self.device,
            formula=formula,
            tokens=1.0,
            recomputed=recomputed,
        )

    def by_their_count(self) -> float:
        """The printed MFU formed again from tokens/s by its authors' own count, in percent."""
        count = line("counts", "count", self.row["printed_count"])
        weights = self.parameters if int(count["everything"]) else self.blocks + self.head
        per_token = 6.0 * weights + self.attention
        peak = self.device.tflops["fp8" if int(count["own_dtype"]) and self.is_fp8 else "bf16"]
        return 100 * per_token * self.tokens_per_s / (peak * 1e12)

    def off_by(self) -> float:
        """Points by which the printed MFU and tokens/s disagree beyond rounding; 0.0 where they agree."""
        formed = self.by_their_count()
        ends = self.printed.split(" to ")
        # Half a unit of the last digit; 0.1 % for tokens/s that are rounded and peaks of 989 and 989.4.
        slack = 0.5 * 10.0 ** -len(ends[0].partition(".")[2]) + 0.001 * formed
        low, high = float(ends[0]), float(ends[-1])
        return 0.0 if low - slack <= formed <= high + slack else formed - (low if formed < low else high)


@cache
def runs() -> tuple[Run, ...]:
    """All figures, in the order of the file."""
    return tuple(map(Run, data("runs")))


def sections() -> tuple[Section, ...]:
    """One: the figure, the runs by publisher, how the shares are formed and what gives no MFU."""
    by: dict[str, list[Run]] = {}
    for run in runs():
        by.setdefault(run.publisher, []).append(run)
    only = Section(
        "published",
        f"{len(runs())} published runs of others, MFU recomputed",
        INTRO,
        first=[_summary(by)],
        charts=[_chart()],
        tables=[*(_runs_table(name, own) for name, own in by.items()), _peaks(), _counts(), _not_formed()],
    )
    return (only,)


def _summary(by: Mapping[str, Sequence[Run]]) -> Table:
    def agreeing(own: Sequence[Run]) -> Cell:
        agree = [r.off_by() == 0.0 for r in own if r.printed]
        return Cell(f"{sum(agree)} of {len(agree)}", sum(agree)) if agree else Cell("", None)

    def shares(own: Sequence[Run], fp8: bool) -> Cell:
        found = [r.utilization("palm").mfu_mixed or 0.0 for r in own if r.is_fp8 == fp8]
        if not found:
            return Cell("", None)
        ends = f"{100 * min(found):.1f} to {100 * max(found):.1f} %"
        return Cell(ends, min(found), note=text.plural(len(found), "run"))

    columns = (
        Column("measured by", lambda r: r[0]),
        number("figures", lambda r: len(r[1]), str),
        number("mixed MFU of bf16 runs, palm", lambda r: shares(r[1], False)),
        number("mixed MFU of FP8 runs, palm", lambda r: shares(r[1], True)),
        number("printed an MFU", lambda r: sum(bool(x.printed) for x in r[1]), str),
        number("of these follow from their tokens/s", lambda r: agreeing(r[1])),
    )
    return make_table("published-summary", columns, [*by.items(), ("all", runs())], sortable=False)


def _runs_table(name: str, own: Sequence[Run]) -> Table:
    def where(run: Run) -> Cell:
        what = run.row["recomputed"]
        again = "nothing recomputed" if what == "nothing" else f"recomputed: {what}"
        return Cell(run.name, run.name, note=f"{run.machine}, length {run.seq:,}, {again}")

    def printed(run: Run) -> Cell:
        if not run.printed:
            return Cell("", None)
        formed, off = run.by_their_count(), run.off_by()
        note = f"agrees: {formed:.2f} % by their count"
        if off:
            note = f"differs by {off:+.2f} points: {formed:.2f} % by their count; they do not say why"
        return Cell(f"{run.printed} %", float(run.printed.split(" ")[-1]), "bad" if off else "", note)

    columns = (
        Column("run", where),
        Column("precision", "precision"),
        number("tokens/s/GPU", "tokens_per_s", text.count),
        number("model TFLOP/s", lambda r: r.utilization("palm").model_tflops, hint="palm"),
        _share("mixed MFU", "palm", "mfu_mixed"),
        _share("mixed MFU", "causal", "mfu_mixed"),
        _share("of bf16 peak", "palm", "mfu_bf16_peak"),
        _share("of FP8 peak", "palm", "mfu_fp8_peak"),
        _share("HFU", "causal", "hfu"),
        number("printed MFU", printed),
        Column("measured by", "source"),
    )
    caption = f"Measured by {name}: {text.plural(len(own), 'figure')}."
    return make_table(f"published-runs-{name}", columns, own, caption)


def _percent(value: float | None) -> Cell:
    return Cell(text.NONE, None, "muted") if value is None else Cell(f"{100 * value:.1f} %", value)


def _share(title: str, formula: str, field: str) -> Column:
    return number(f"{title}, {formula}", lambda run: _percent(getattr(run.utilization(formula), field)))


def _peaks() -> Table:
    def tflops(rate: str) -> Column:
        title = f"{'FP8' if rate == 'fp8' else rate} TFLOP/s"
        return number(title, lambda m: named(m["device"]).tflops[rate], "{:g}".format)

    columns = (
        Column("ran on", "machine"),
        Column("divided by the peak of", lambda m: named(m["device"]).key),
        tflops("bf16"),
        tflops("fp8"),
        Column("what to know", "remark"),
        Column("source of the peak", lambda m: named(m["device"]).source),
    )
    caption = "Peaks: dense, as their makers publish them (docs/hardware.md)."
    return make_table("published-peaks", columns, data("machines"), caption, sortable=False)


def _counts() -> Table:
    def printed_by(count: Mapping[str, str]) -> str:
        own = (r.source for r in runs() if r.row["printed_count"] == count["count"])
        return "; ".join(dict.fromkeys(own))

    columns = (
        Column("printed by", printed_by),
        Column("6 N + 12 L Q T, with N", "words"),
        Column("source", "source"),
    )
    caption = "How the printed MFUs were formed; each is formed again that way before it is compared."
    return make_table("published-counts", columns, data("counts"), caption, sortable=False)


def _not_formed() -> Table:
    columns = (Column("published", "published"), Column("why", "why"))
    caption = "Published, and no MFU can be formed from it."
    return make_table("published-not-formed", columns, data("not_formed"), caption, sortable=False)


@styled
def _chart() -> Chart:
    """The same FP8 runs over three denominators: what a single printed number hides."""
    fp8 = [(r, r.utilization("palm")) for r in runs() if r.is_fp8]
    fp8.sort(key=lambda pair: pair[1].mfu_mixed or 0.0, reverse=True)
    labels = [text.short(f"{r.publisher}: {r.name}", 62) for r, _ in fp8]
    drawn = sheet("published-mfu", 1.0 + 0.19 * len(fp8), grid="x", rows=labels)
    axes = drawn.axes
    axes.tick_params(axis="y", labelsize=7.5)
    columns = (("of FP8 peak", "mfu_fp8_peak"), ("mixed", "mfu_mixed"), ("of bf16 peak", "mfu_bf16_peak"))
    for i, (label, field) in enumerate(columns):
        axes.plot([getattr(u, field) for _, u in fp8], range(len(fp8)), **mark(i, label=label))
    for y, (_, u) in enumerate(fp8):
        ends = (u.mfu_fp8_peak or 0.0, u.mfu_bf16_peak or 0.0)
        axes.hlines(y, *ends, color=MUTED, linewidth=0.6, zorder=0)
    printed = [(float(r.printed.split(" ")[-1]) / 100, y) for y, (r, _) in enumerate(fp8) if r.printed]
    axes.plot(*zip(*printed, strict=True), **mark(11, label="printed by its authors", markersize=8))
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("MFU of others' FP8 runs, recomputed (palm)")
    caption = (
        f"{len(fp8)} FP8 runs that others measured and published; none is a measurement of this project. One run is one "
        "line: the same tokens/s over the FP8 peak, over each dtype's own, and over the bf16 peak."
    )
    return drawn.chart("One run, three denominators", caption)


if __name__ == "__main__":
    rows, page = map(Path, sys.argv[1:])
    write_report([rows], page, focus="mfu", figures=True, others=sections())
