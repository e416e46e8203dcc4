"""`python reports/studies/advice_map.py ADVICE.json`: the predicted speedups as a picture, a row a model and a column a GPU.

It draws what `advice_page` wrote beside its page, in a second: nothing is predicted here and nothing measured.
"""

from __future__ import annotations

import bisect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advice_page import GPUS, MODELS, from_json
from matplotlib.patches import Rectangle

import harness.report
from harness.report.drawing import BAND, GRID, INK, MUTED, PAPER, VARIABLES, sheet, standalone, styled
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from advice_page import Answered, Key
    from matplotlib.axes import Axes

HEAT = tuple(f"#0b000{i}" for i in range(9))
EDGES = (
    0.67,
    0.8,
    0.91,
    0.97,
    1.03,
    1.1,
    1.25,
    1.5,
)  # speedups between these nine; the middle one is "the same"
VARIABLES.update((colour, f"--heat-{i}") for i, colour in enumerate(HEAT))

MODE, SIZE = "compile", 8
TITLE = f"PREDICTED, no GPU measured: FP8 over bf16, whole training step, compiled, {SIZE} GPUs"
NOTE = (
    "Big: predicted speedup, small: its interval. Hatched: the interval contains 1, so nobody can tell without measuring. "
    "off: less than 2 % predicted, small: how much.\nDoes not fit: into the memory of a GPU. "
    "From reports/published/advice.json; how far such predictions were off: docs/advise-accuracy.md."
)
NAMES = {
    "docs/examples/Qwen3-8B": "Qwen3 8B",
    "llama_moe": "MoE, 8 small experts",
    "llama_7b": "7B, all recomputed",
}


@styled
def draw(found: Mapping[Key, Answered]) -> str:
    """The picture as an SVG file, light or dark as its reader's system is.

    Args:
        found: cells of `advice_page`, those of `MODE` and `SIZE` among them.
    """
    drawn = sheet("advice-map", 0.5 * len(MODELS) + 1.5, width=10.6, grid="")
    axes = drawn.axes
    for y, model in enumerate(MODELS):
        for x, gpu in enumerate(GPUS):
            _cell(axes, x, y, found[model, gpu, MODE, SIZE])
    axes.set_xlim(-0.5, len(GPUS) - 0.5)
    axes.set_ylim(len(MODELS) - 0.5, -0.5)
    axes.set_xticks(range(len(GPUS)), [gpu.replace("_", " ").upper() for gpu in GPUS])
    axes.set_yticks(range(len(MODELS)), [NAMES.get(m, MODELS[m][0]) for m in MODELS])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    drawn.figure.suptitle(TITLE, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    drawn.figure.supxlabel(NOTE, x=0.01, ha="left", fontsize=8, color=MUTED)
    css = Path(harness.report.__file__).with_name("page.css").read_text(encoding="utf-8")
    return standalone(drawn.chart(TITLE, NOTE), css)


def _cell(axes: Axes, x: int, y: int, cell: Answered) -> None:
    """One cell; a colour means a gain outside of the interval's doubt, and nothing else has one."""
    corner, colour, hatch = (x - 0.48, y - 0.46), PAPER, None
    if cell.word in ("on", "partial"):
        colour = HEAT[bisect.bisect(EDGES, float(cell.ratio.rstrip("x")))]
    elif cell.word == "off":
        colour = BAND
    elif cell.word == "can't tell":
        hatch = "////"
    axes.add_patch(
        Rectangle(corner, 0.96, 0.92, facecolor=colour, edgecolor=GRID, hatch=hatch, linewidth=0.6)
    )
    if cell.word == "does not fit":
        axes.text(x, y, "does not fit", ha="center", va="center", color=MUTED, fontsize=7.5)
    else:
        off, more = cell.word == "off", " (some layers)" if cell.word == "partial" else ""
        interval = (cell.ratio if off else cell.interval) or "no prediction"
        about: Any = {"ha": "center", "va": "center", "color": INK}
        bold = "normal" if hatch or off else "bold"
        axes.text(x, y - 0.12, "off" if off else cell.ratio + more, fontweight=bold, **about)
        axes.text(x, y + 0.22, interval, fontsize=7, **about)


def main(words: Sequence[str]) -> int:
    """Writes the picture beside the cells, as `advice_map.svg`.

    Raises:
        UsageError: not one file of cells that can be read.
    """
    if len(words) != 1 or not words[0].endswith(".json"):
        raise UsageError(f"expected the ADVICE.json that advice_page wrote, got {len(words)} words")
    cells = Path(words[0])
    try:
        found = from_json(cells.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {cells} ({error.strerror}); make it with `make published`") from error
    cells.with_name("advice_map.svg").write_text(draw(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
