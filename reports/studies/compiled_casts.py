"""`python reports/studies/compiled_casts.py [--case NAME] [--recipe NAME] [-o FILE.md]`: what Inductor makes of FP8's casts."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import triton
from documented_table import fill
from inductor import absent_gpu, table
from inductor.cases import ARMS, BF16, OURS, SHAPES, TORCHAO, compiled_kernels

from harness.peers import torchao


def main(words: list[str]) -> int:
    """Prints the table, or puts it between the marks of a page. Exit code 0, or 2 for bad usage."""
    parser = argparse.ArgumentParser("python reports/studies/compiled_casts.py", description=__doc__)
    parser.add_argument("--case", choices=list(SHAPES), action="append", help="default: all")
    parser.add_argument(
        "--recipe", choices=sorted({r for _, r in ARMS if r}), action="append", help="default: all"
    )
    parser.add_argument("--library", choices=(OURS, TORCHAO), action="append", help="default: both")
    parser.add_argument(
        "-o",
        dest="page",
        type=Path,
        help="a page whose table is replaced, such as reports/published/studies/compiled-casts.md",
    )
    options = parser.parse_args(words)
    absent_gpu.pretend()
    rows = []
    for name in options.case or SHAPES:
        shape = SHAPES[name]
        bf16 = compiled_kernels(shape, BF16, "")
        for library, recipe in ARMS[1:]:
            if recipe not in (options.recipe or [recipe]) or library not in (options.library or [library]):
                continue
            found = table.counts(compiled_kernels(shape, library, recipe), bf16, shape.elements)
            rows.append(table.row(name, library, recipe, shape.has_producer, found))
            sys.stderr.write(" | ".join(rows[-1]) + "\n")
    text = f"{conditions()}\n\n{table.markdown(rows)}"
    if options.page is None:
        sys.stdout.write(text + "\n")
        return 0
    fill(options.page, {"casts": text})
    return 0


def conditions() -> str:
    """With what the table was made."""
    device = f"code generated for {absent_gpu.PROPERTIES.name} (sm_90), never run"
    peer = "torchao missing" if torchao.missing("cuda") else f"{TORCHAO} {torchao.version()}"
    return f"torch {torch.__version__}, triton {triton.__version__}, {peer}; {device}."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
