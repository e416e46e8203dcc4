"""`python tests/studies/kernel_table.py --triton DIR`: meters every specialisation with two Tritons and writes docs/kernels*.

The figures are kept in docs/kernels.json: "before" stays as it is, "now" is measured again. `--before` makes the present
ones the "before".
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.advise.meter.facts import Facts
from harness.advise.meter.launches import Launch
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "docs" / "kernels.json", ROOT / "docs" / "kernels.md"
ALL, NEWEST = ROOT / "docs" / "kernels-all.csv", ROOT / "docs" / "kernels-newest.md"
BEGIN, END = "<!-- made by make aot: begin -->", "<!-- made by make aot: end -->"
Row = dict[str, Any]  # "launch", and "facts" or "error"


def main(argv: Sequence[str]) -> int:
    """Measures, keeps, writes; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make aot", description=__doc__)
    parser.add_argument("--triton", type=Path, required=True, help="folder of Triton 3.6.0")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "aot")
    parser.add_argument("--before", action="store_true", help="keep the figures as those before a change")
    parser.add_argument(
        "--defaults", action="store_true", help="no other candidates, no products of matrices: quicker"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page again")
    options = parser.parse_args(argv)
    data: dict[str, list[Row]] = json.loads(DATA.read_text()) if DATA.is_file() else {}
    try:
        if not options.page:
            data["before" if options.before else "now"] = measured(
                options.triton, options.cache, options.defaults
            )
    except UsageError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sides = (f'"{side}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for side, rows in data.items())
    DATA.write_text("{\n" + ",\n".join(sides) + "\n}\n")  # a line a launch, so that a change can be read
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{page(data)}{END}{after}")
    ALL.write_text(all_rows(data))
    NEWEST.write_text(newest_page(data))
    failed = [row for row in data.get("now", []) if "error" in row]
    for row in failed:
        sys.stderr.write(f"error: {row['launch']['operator']}: {row['error']}\n")
    return 2 if failed else 0


def measured(triton: Path, cache: Path, defaults: bool) -> list[Row]:
    """Rows of every specialisation, with Triton 3.6.0 and then with the installed one."""
    from metered.farm import meter_all
    from metered.specialisations import launches

    wanted = [one for one in launches() if not defaults or (one.default and one.operator != "matmul")]
    rows: list[Row] = []
    for folder in (triton, None):
        for launch, answer in zip(wanted, meter_all(wanted, folder, cache), strict=True):
            result = {"error": answer} if isinstance(answer, str) else {"facts": answer.to_json()}
            rows.append({"launch": launch.to_json(), **result})
    return rows


def page(data: dict[str, list[Row]]) -> str:
    """The table of docs/kernels.md: the largest launch of each default tile, with the older Triton."""
    return "\n".join(["", *_before_and_after(data)[0], ""]) + "\n"


def _before_and_after(data: dict[str, list[Row]]) -> list[list[str]]:
    """A table for each Triton, the older one first; a cell is "before→after", or one figure where they agree."""
    before, now = (_largest(_facts(data.get(side, []))) for side in ("before", "now"))
    tables = []
    for version in sorted({version for _, _, version in (now or before)}):
        lines = [
            f"### Default tile, bfloat16 to e4m3, Triton {version}: before→after",
            "",
            "| operator, kernel | tile, warps | registers | CTA/SM | instr./element | conv./element | KB in flight/SM | H100 | H200 |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        keys = sorted(key for key in now if key[2] == version)
        lines += [_row(before.get(key), now[key]) for key in keys]
        tables.append([*lines, ""])
    return tables


def _largest(rows: Iterable[tuple[Launch, Facts]]) -> dict[tuple[str, str, str], tuple[Launch, Facts]]:
    """The headline launch with most elements of each (operator, kernel, Triton)."""
    largest: dict[tuple[str, str, str], tuple[Launch, Facts]] = {}
    for launch, facts in rows:
        key = (launch.operator, launch.kernel, facts.triton)
        if _is_headline(launch) and (key not in largest or launch.elements > largest[key][0].elements):
            largest[key] = launch, facts
    return largest


def all_rows(data: dict[str, list[Row]]) -> str:
    """docs/kernels-all.csv: every specialisation as it is now."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            *("operator", "kernel", "triton", "source", "tile, warps", "registers", "spill_bytes", "CTA/SM"),
            *(
                "instr/element",
                "conv/element",
                "load_bits",
                "store_bits",
                "matrix_instruction",
                "H100",
                "H200",
            ),
        )
    )
    writer.writerows(_full_row(launch, facts) for launch, facts in _facts(data.get("now", [])))
    return text.getvalue()


def newest_page(data: dict[str, list[Row]]) -> str:
    """docs/kernels-newest.md: the table of docs/kernels.md with each newer Triton."""
    lines = [
        "# Kernels in machine code, newest Triton",
        "",
        "Made by `make aot`; [kernels](kernels.md) says how to read it. No GPU has run any of it.",
    ]
    for table in _before_and_after(data)[1:]:
        lines += ["", *(line.replace("### ", "## ") for line in table)]
    return "\n".join(lines).rstrip() + "\n"


def _facts(rows: Iterable[Row]) -> list[tuple[Launch, Facts]]:
    return [
        (Launch.from_json(row["launch"]), Facts.from_json(row["facts"])) for row in rows if "facts" in row
    ]


def _is_headline(launch: Launch) -> bool:
    first = next(iter(launch.signature.values()))
    return (
        launch.default
        and first == "*bf16"
        and not launch.constants.get("E5M2")
        and launch.operator != "matmul"
    )


def _tile(launch: Launch) -> str:
    sizes = [
        str(launch.constants[name])
        for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK")
        if name in launch.constants
    ]
    return f"{' x '.join(sizes)}, {launch.options['num_warps']}"


def _share(facts: Facts) -> list[str]:
    return [f"{facts.share[gpu]:.0%}" if gpu in facts.share else "-" for gpu in ("H100", "H200")]


def _row(before: tuple[Launch, Facts] | None, now: tuple[Launch, Facts]) -> str:
    launch, _ = now
    new = _cells(*now)
    old = _cells(*before) if before else new
    cells = [was if was == now else f"{was}→{now}" for was, now in zip(old, new, strict=True)]
    return f"| `{launch.operator}`, `{launch.kernel}` | {' | '.join(cells)} |"


def _cells(launch: Launch, facts: Facts) -> list[str]:
    return [
        _tile(launch).replace(" x ", "x").replace(", ", ","),
        f"{facts.registers}{' (spills)' if facts.stack else ''}",
        str(facts.ctas_per_sm),
        f"{facts.per_element:.1f}",
        f"{facts.conversions:.2f}",
        f"{facts.in_flight / 1024:.0f}",
        *_share(facts),
    ]


def _full_row(launch: Launch, facts: Facts) -> tuple[str, ...]:
    widths = [" + ".join(str(8 * size) for size in moved) or "-" for moved in (facts.loads, facts.stores)]
    walked = not facts.matrix
    return (
        launch.operator,
        launch.kernel,
        facts.triton,
        next(iter(launch.signature.values())).replace("tensordesc", "").strip("*<>"),
        _tile(launch),
        str(facts.registers),
        str(facts.stack),
        str(facts.ctas_per_sm),
        f"{facts.per_element:.1f}" if walked else "-",
        f"{facts.conversions:.2f}" if walked else "-",
        *(widths if walked else ("-", "-")),
        facts.matrix or "-",
        *_share(facts),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
