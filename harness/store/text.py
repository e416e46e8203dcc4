"""Text: how numbers, shapes and arms are written in a report."""

from __future__ import annotations

import hashlib
import math
import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from harness.store.outside import from_json, parse

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

SIZES = ("M", "K", "N")
NONE = "N/A"  # not known; never a stand-in value
LONGEST_S = 1e12  # a note of a run may say any number
# Values of training axes that say nothing about a case: the defaults of the suites (a test holds them together).
USUAL: Mapping[str, object] = {
    "accumulation": 1,
    "checkpointing": "none",
    "experts": "hp",
    "layers": 0,
    "profile": False,
    "profile_end": 3,
    "profile_start": 2,
    "schedule": "",
}


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, thousands apart, never in exponent form from 1e-4 to 1e9.

    >>> number(1234567), number(0.012345), number(99.96), number(None)
    ('1,230,000', '0.0123', '100', 'N/A')
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent >= 9:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - exponent
    rounded = round(value, decimals)
    # Rounding may carry into the next power of ten: 99.96 has three digits as 100, not 100.0.
    if rounded and math.floor(math.log10(abs(rounded))) > exponent:
        decimals -= 1
    return f"{rounded:,.{max(decimals, 0)}f}"


def count(value: float | None) -> str:
    """A whole number: "1,234"."""
    return NONE if value is None or math.isnan(value) else f"{value:,.0f}"


def ratio(value: float | None) -> str:
    """A speedup: "1.32x"."""
    return NONE if value is None or math.isnan(value) else f"{number(value)}x"


def interval(low: float, high: float) -> str:
    """A 95 % interval: "1.30 to 1.34"; N/A where there are too few rounds for one."""
    return NONE if math.isnan(low) or math.isnan(high) else f"{number(low)} to {number(high)}"


def spread(low: float, high: float, count: int, what: str) -> str:
    """A range over cases, which is no interval: "1.10 to 1.50, range over 3 models"."""
    return f"{number(low)} to {number(high)}, range over {plural(count, what)}"


def percent(value: float | None, digits: int = 2) -> str:
    """A share: "83 %"."""
    return NONE if value is None or math.isnan(value) else f"{number(100 * value, digits)} %"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(3725), duration(65.4)
    ('1:02:05', '0:01:05')
    """
    return str(timedelta(seconds=round(max(-LONGEST_S, min(seconds, LONGEST_S)))))


def done(share: float) -> str:
    """A share of work, rounded down, so that "100 %" is said where nothing is left.

    >>> done(0.996), done(0.29), done(1.0)
    ('99 %', '29 %', '100 %')
    """
    return f"{math.floor(100 * share + 1e-9)} %"


def bytes_(size: float) -> str:
    """A size in binary units: "64 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError("unreachable: GiB takes the rest")


def axes_of(text: str) -> Mapping[str, object]:
    """The axes of a case from their JSON."""
    return parse(text)


def axis_value(value: object) -> str:
    """One axis value as a word: a model of the user's own by the name of its function and what it is given."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str) and value.startswith("{"):
        return _own_model(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def case_label(axes: Mapping[str, object], without: Collection[str] = ()) -> str:
    """A case in a few words: names first, a number or a yes with the name of its axis, then the sizes as M x K x N.

    What goes without saying is left out: empty values, and those of `USUAL`.

    Args:
        axes: axis values of the case.
        without: axes to leave out, such as those that all cases at hand share.

    >>> case_label({"K": 4096, "M": 8192, "N": 14336, "layer": "mlp.up", "role": "output"})
    'mlp.up output 8192x4096x14336'
    >>> case_label({"accumulation": 1, "batch": 8, "compute": "fp32", "layers": 0, "model": "nano", "profile": True})
    'nano fp32 batch=8 profile=true'
    """
    shown = {n: v for n, v in axes.items() if n not in without and not _unsaid(n, v)}
    if without and not shown:
        return case_label(axes)
    sizes = [axis_value(shown[name]) for name in SIZES if name in shown]
    rest = {n: v for n, v in shown.items() if n not in SIZES}
    names = [n for n in sorted(rest, key=lambda n: n != "model") if _is_name(n, rest[n])]
    words = [axis_value(rest[n]) for n in names]
    words += [f"{n}={axis_value(v)}" for n, v in rest.items() if n not in names]
    return " ".join([*words, *(["x".join(sizes)] if sizes else [])])


def axes_said(axes: Mapping[str, object], names: Iterable[str]) -> str:
    """What all rows of a table share, for its caption: "model nano, batch 8"; "" where nothing needs saying."""
    return ", ".join(f"{n} {axis_value(axes[n])}" for n in names if n in axes and not _unsaid(n, axes[n]))


def _unsaid(name: str, value: object) -> bool:
    # "custom" is the name of what has no name: sizes given by number.
    return value in (None, "", "custom") or (name in USUAL and value == USUAL[name])


def _is_name(name: str, value: object) -> bool:
    """Whether a value says by itself what it is: "nano" and "e4m3" do, 8 and a checkpointing "full" do not."""
    return isinstance(value, str) and name not in USUAL


def own_model(name: str) -> dict[str, Any]:
    """What a row says of a model of the user's own, as it is named: function and arguments; {} for any other model."""
    try:
        given = from_json(name)
    except ValueError:
        given = None
    return given if isinstance(given, dict) else {}


def _own_model(value: str) -> str:
    if not (given := own_model(value)):
        return value
    rest = (f"{k}={v}" for k, v in given.items() if k not in ("_target_", "batch"))
    return " ".join([str(given.get("_target_", "")), *rest])


def constant_axes(axes: Iterable[str]) -> set[str]:
    """Names of the axes (each given as JSON) that have one value in all of several cases."""
    every = [axes_of(a) for a in dict.fromkeys(axes)]
    if len(every) < 2:
        return set()
    names = set(every[0]).union(*every)
    # As text too: True equals 1, and one axis may hold both.
    first = {n: (every[0].get(n), str(every[0].get(n))) for n in names}
    return {n for n in names if all((a.get(n), str(a.get(n))) == first[n] for a in every)}


def plural(number_of: int, one: str) -> str:
    """A count with its noun: "1 pair", "3 pairs"."""
    return f"{number_of:,} {one}" + ("" if number_of == 1 else "s")


def some(items: Sequence[str], most: int = 4, between: str = "; ") -> str:
    """The first few items and how many more there are."""
    more = len(items) - most
    return between.join(items[:most]) + (f" and {more} more" if more > 0 else "")


def short(words: str, most: int) -> str:
    """A text in one line of at most so many characters, its middle left out."""
    words = " ".join(printable(words).split())
    if len(words) <= most:
        return words
    tail = most // 3
    return f"{words[: most - tail - 1]}\u2026{words[-tail:]}"


def reason(message: str) -> str:
    """Why a row failed or was skipped, without the traceback that may follow: it names places of the machine.

    >>> reason('rank 1 of 2: ValueError: bad Traceback (most recent call last): File "x.py"')
    'rank 1 of 2: ValueError: bad'
    """
    return message.partition(" Traceback (most recent call last)")[0]


def printable(text: str) -> str:
    """Without control characters and those that turn the direction of text or cannot be seen (Unicode TR 36)."""
    lines = text.split("\n")
    return "\n".join(
        line if line.isprintable() else "".join(c if c.isprintable() else " " for c in line) for line in lines
    )


def slug(words: str) -> str:
    """A text as an id within the page and as the name of a file: letters, digits, "_" and "-" alone.

    >>> slug("speedup-gemm-isolated"), slug("../odd suite")
    ('speedup-gemm-isolated', '_odd_suite-da77fe')
    """
    clean = re.sub(r"[^A-Za-z0-9_-]+", "_", words)
    return clean if clean == words else f"{clean}-{hashlib.sha256(words.encode()).hexdigest()[:6]}"


def markdown(value: object) -> str:
    """Text as markdown shows it, in one line: no markup and no cell border."""
    line = " ".join(printable(str(value)).split())
    line = re.sub(r"([\\`*\[\]|~])", r"\\\1", line)
    line = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", line)  # between letters it is no emphasis
    # What starts a heading, a list or an underline of one where it stands first in a paragraph.
    line = re.sub(r"^(#+|[-+]|=+|-+)(?=\s|$)", r"\\\1", line)
    line = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", line)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def code(value: object) -> str:
    """Text between backticks: as many as it takes; what looks like HTML escaped, for readers that know no backticks."""
    line = " ".join(printable(str(value)).split())
    if "<" in line:
        return f"<code>{markdown(line)}</code>"
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", line)), default=0))
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}"
