"""Drawing: matplotlib into inline SVG that follows the page's colours, light or dark.

Figures are drawn in placeholder colours, which are replaced by CSS variables of the page (`page.css`), so one SVG
serves both colour schemes. Series differ in marker or dash as well as colour. The bytes depend on the data alone.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_svg import FigureCanvasSVG

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, BAND = "#010101", "#020202", "#030303", "#040404"
SERIES = tuple(f"#0a000{i}" for i in range(8))
VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", BAND: "--band"} | {
    c: f"--series-{i}" for i, c in enumerate(SERIES)
}
MARKERS = "osD^vPX*"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fp8-harness",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 9.0,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.6,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 4.5,
}


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: a title, the SVG and a caption with the conditions that the numbers depend on."""

    key: str
    title: str
    svg: str
    caption: str


def legend(figure: Figure, axes: Axes) -> None:
    """Above the figure, in rows of at most five."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=len(labels) if len(labels) < 6 else 4,
        borderpad=0,
        labelcolor=INK,
    )


def svg(figure: Figure, key: str) -> str:
    """The figure as an <svg> element: no prolog, no metadata, ids of its own, colours by CSS variable."""
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(
        buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{key}-", text)
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Size comes from the page: the width of its column, the height from viewBox.
    return re.sub(
        r'(<svg [^>]*?)width="[^"]*" ',
        r"\1",
        re.sub(r'(<svg [^>]*?)height="[^"]*" ', r"\1", text, count=1),
        count=1,
    )
