"""Drawing: the one helper that every figure is made with, and its way from matplotlib into inline SVG.

Figures are drawn in placeholder colours, which are replaced by CSS variables of the page (`page.css`), so one SVG
serves both colour schemes. Series differ in marker or dash as well as colour. The bytes depend on the data alone.
An arm looks the same in every figure of a page: colour and marker say its recipe, the fill says whose it is.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import escape
from matplotlib import rc_context, rcParamsDefault
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from harness.report.runs import once
from harness.store import text
from harness.store.case import WITHOUT_FP8, Arm
from harness.store.rows import grouped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from harness.report.runs import Machine
    from harness.report.table import Row

INK, MUTED, GRID, BAND, PAPER = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = tuple(f"#0a000{i}" for i in range(8))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BAND: "--band", PAPER: "--paper"}
VARIABLES |= {colour: f"--series-{i}" for i, colour in enumerate(SERIES)}
MARKERS = "osD^vPX*"
FILLS = ("full", "none", "left", "right", "top", "bottom")
STYLE: Any = {
    **rcParamsDefault,  # whatever the reader's matplotlibrc says: the same rows give the same bytes
    "text.parse_math": False,  # a name with two dollar signs is a name
    "font.sans-serif": ["DejaVu Sans"],  # measures the letters; the page draws them in its own font
    "svg.fonttype": "none",
    "svg.hashsalt": "fp8-harness",
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.titlecolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(
        ("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "xtick.labelcolor"), MUTED
    ),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.linewidth", "grid.linewidth"), 0.6),
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "legend.fontsize": 8.5,
    "lines.markersize": 4.5,
}
# The least that an axis spans, so that a difference without meaning is not drawn as wide as the page: one bit of a
# significand is 6.02 dB; a speedup is read against +/- 10 %.
LEAST_DB = 12.0
LEAST_RATIO = (1 / 1.1, 1.1)
WIDTH = 9.5  # inches of a figure: the width of the page's column
LEGEND_ROW = 0.18  # inches

styled = rc_context(STYLE)  # decorates what draws: matplotlib reads its settings at every step


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: a title, the SVG and a caption with the conditions that the numbers depend on."""

    key: str
    title: str
    svg: str
    caption: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", text.slug(self.key))  # it holds names of suites and arms
        object.__setattr__(self, "svg", _named(self.svg, self.title))


@dataclass(frozen=True, slots=True)
class Sheet:
    """A figure while it is drawn; `chart` ends it. Whoever draws is decorated with `styled`."""

    key: str
    figure: Figure
    panels: list[Axes]

    @property
    def axes(self) -> Axes:
        """The only panel, or the first."""
        return self.panels[0]

    def legend(self) -> None:
        """Above the figure, in rows of at most five: every label of any panel once; nothing where none is labelled."""
        found: Row = {}
        for panel in self.panels:
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
                found.setdefault(label, handle)
        if found:
            across = len(found) if len(found) < 6 else 4
            more = math.ceil(len(found) / across) - 1  # the first row takes nothing from the panels
            self.figure.set_figheight(self.figure.get_figheight() + LEGEND_ROW * more)
            place: Any = {"loc": "outside upper left", "ncols": across, "borderpad": 0, "labelcolor": INK}
            self.figure.legend(list(found.values()), list(found), **place)

    def chart(self, title: str, caption: str) -> Chart:
        """The finished figure with its legend; the title is also what a screen reader says."""
        self.legend()
        return Chart(self.key, title, svg(self.figure, self.key), caption)


def sheet(
    key: str, height: float, across: int = 1, down: int = 1, *, width: float = WIDTH, grid: str = "both",
    rows: Sequence[str] = (), **shared: Any,
) -> Sheet:  # fmt: skip
    """An empty figure.

    Args:
        key: its id within the page, and its file's name.
        height: in inches.
        across: panels side by side.
        down: panels below each other.
        width: in inches.
        grid: lines of the "x" axis, of "y", of "both", or of neither (""); they lie below all marks.
        rows: names of the rows, the first on top, where the vertical axis has names.
        **shared: for `Figure.subplots`: `sharex`, `sharey`, `height_ratios`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False, **shared).ravel().tolist()
    for axes in panels:
        if rows:
            axes.set_yticks(range(len(rows)), list(rows))
            axes.set_ylim(len(rows) - 0.4, -0.6)
        if grid:
            axes.grid(True, axis=grid)
            axes.set_axisbelow(True)
    return Sheet(key, figure, panels)


def evenly(count: int, most: int) -> list[int]:
    """Indices of at most so many of `count` points, evenly spread, both ends among them: more cannot be seen.

    >>> evenly(3, 5), evenly(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    return list(range(count)) if count <= most else [round(i * (count - 1) / (most - 1)) for i in range(most)]


# Looks


def subject(arm: Arm) -> str:
    """What a colour stands for: the recipe, else whose arm it is; "" of an arm without FP8.

    >>> subject(Arm("rowwise", "compile", peer="torchao")), subject(Arm(peer="te")), subject(Arm("bf16", "eager"))
    ('rowwise', 'te', '')
    """
    return "" if arm.recipe in WITHOUT_FP8 else arm.recipe or arm.peer or arm.variant or arm.casts or arm.mode


def look(machine: Machine, arm: Arm, **more: Any) -> Row:
    """Keywords of `Axes.plot` for the marks of an arm: by recipe the colour and the marker, by whose it is the fill."""
    name = subject(arm)
    if not name:
        return {"marker": "p", "color": INK, "linestyle": "none", "fillstyle": "none"} | more
    whose = _whose_by_subject(machine)
    place, kinds = [*whose, name].index(name), whose.get(name, [])
    fill = FILLS[kinds.index(_whose(arm)) % len(FILLS)] if _whose(arm) in kinds else "full"
    marker = MARKERS[(place + place // 8) % 8]  # beyond the eighth a colour has another marker
    return {"marker": marker, "color": SERIES[place % 8], "linestyle": "none", "fillstyle": fill} | more


def _whose(arm: Arm) -> tuple[str, str, str]:
    return arm.peer, arm.variant, arm.casts


@once
def _whose_by_subject(machine: Machine) -> Mapping[str, list[tuple[str, str, str]]]:
    """The recipes and implementations of the page, by name, and whose arms each has."""
    whose = grouped((name, _whose(arm)) for arm in machine.arms if (name := subject(arm)))
    return {name: sorted(set(own)) for name, own in sorted(whose.items())}


# Axes


def ticks(axis: Axis, most: int, signed: bool = False, **more: Any) -> None:
    """At most so many ticks of a linear axis; of a gap with their sign, 0 without one."""
    axis.set_major_locator(MaxNLocator(most, **more))
    if signed:
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+g}" if v else "0"))


def ratio_axis(axis: Axis, log: Callable[[str], None]) -> None:
    """Speedups on a logarithmic scale, so that 2x and 0.5x are as far from 1; `log` sets the scale of the axis."""
    log("log")
    axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}x"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def ratio_limits(values: Iterable[float]) -> tuple[float, float]:
    """Ends of an axis of speedups: all values with some room, and at least `LEAST_RATIO`.

    >>> [round(end, 2) for end in ratio_limits([1.001, 1.002])]
    [0.9, 1.11]
    """
    known = [v for v in values if v == v] or [1.0]
    low, high = min(*known, LEAST_RATIO[0]), max(*known, LEAST_RATIO[1])
    room = (high / low) ** 0.06
    return low / room, high * room


def span(axes: Axes, least: float) -> None:
    """Widens the horizontal, linear axis about its middle until it spans `least`."""
    low, high = axes.get_xlim()
    more = max(0.0, (least - (high - low)) / 2)
    axes.set_xlim(low - more, high + more)


def forest(
    axes: Axes,
    points: Iterable[tuple[float, float, float | None, float | None]],
    style: Row,
    width: float = 1.3,
) -> list[float]:
    """Marks of a style with their intervals, each a (height, value, low, high); returns what the horizontal axis must hold."""
    points = list(points)
    lines = [
        (y, low, high) for y, _, low, high in points if low is not None and high is not None and low == low
    ]
    if lines:
        axes.hlines(*zip(*lines, strict=True), color=style["color"], linewidth=width)
    axes.plot([value for _, value, *_ in points], [y for y, *_ in points], **style)
    return [*(value for _, value, *_ in points), *(end for _, *ends in lines for end in ends)]


def bands(axes: Axes, floors: Iterable[tuple[float, float | None]], height: float) -> None:
    """The noise floors behind a forest, each a (height, floor) as a bar from 1 / floor to floor; none where it is not known."""
    known = [(y, floor) for y, floor in floors if floor is not None and floor == floor]
    lows = [1 / floor for _, floor in known]
    widths = [floor - low for (_, floor), low in zip(known, lows, strict=True)]
    axes.barh([y for y, _ in known], widths, left=lows, height=height, color=BAND, linewidth=0)


# SVG


def svg(figure: Figure, key: str) -> str:
    """The figure as an <svg> element: no prolog, no metadata, ids of its own, colours by CSS variable."""
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # The page's own font draws the letters; matplotlib's serves to measure them.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        # A name so long that nothing is left for the figure: it is cut off, not lost.
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(buffer, metadata=nothing)
    drawn = text.printable(buffer.getvalue())
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    # Ids are unique within the page, and short: every mark of a figure repeats one. A hundredth of a point is enough.
    prefix = hashlib.sha256(key.encode()).hexdigest()[:6]
    drawn = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", drawn)
    drawn = re.sub(r' (?:d|x|y|points|transform)="[^"]*"', lambda m: _rounded(m[0]), drawn)
    for colour, variable in VARIABLES.items():
        drawn = drawn.replace(colour, f"var({variable})")
    # Size comes from the page: the width of its column, the height from viewBox.
    for size in ("height", "width"):
        drawn = re.sub(rf'(<svg [^>]*?){size}="[^"]*" ', r"\1", drawn, count=1)
    return drawn


def _rounded(attribute: str) -> str:
    return re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), attribute)


def standalone(chart: Chart, css: str) -> str:
    """A figure as a file of its own: the colours of the page, light or dark as its reader's system is.

    Args:
        chart: of a report.
        css: of its page, whose first two `:root` blocks are the light and the dark colours.
    """
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]
    colours = [" ".join(re.findall(r"--[\w-]+: #[0-9a-f]{6};", block)) for block in (light, dark)]
    style = (
        f"svg {{ {colours[0]} background: var(--paper); }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {colours[1]} }} }} "
        "text { font-family: system-ui, sans-serif !important; }"
    )
    end = chart.svg.index("</title>") + len("</title>")
    return f"{chart.svg[:end]}\n<style>{style}</style>{chart.svg[end:]}"


def _named(drawn: str, title: str) -> str:
    """An SVG as one image with a name, for those who hear the page."""
    if "<svg " not in drawn:
        return drawn
    head, tag, rest = drawn.partition("<svg ")
    end = rest.index(">") + 1
    return f'{head}{tag}role="img" {rest[:end]}\n<title>{escape(text.printable(title))}</title>{rest[end:]}'
