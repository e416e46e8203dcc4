"""Train published runs again and compare every loss, held-out loss and gradient norm bit for bit.

    python tests/studies/rerun_losses.py results/published/cpu/2026-11-23/losses --seeds 0 1 [--arms base tensorwise]

Takes the cases from the stored rows, so the settings are those that were published. Exit 1 where a value differs.
A CPU of another kind, or another torch, may round differently; the environment of the stored rows is printed first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from harness import store
from harness.store.case import Case
from harness.store.json_columns import parse
from harness.suites import divergence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMPARED = ("loss", "heldout_loss", "grad_norm")


def first_difference(stored: Mapping[str, Sequence[float]], again: Mapping[str, Sequence[float]]) -> str:
    """Where two runs differ first, "" if they are equal bit for bit; a curve that one of them lacks is a difference."""
    for metric in COMPARED:
        mine, theirs = list(again.get(metric, ())), list(stored.get(metric, ()))
        if mine != theirs:
            unequal = (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            place = next(unequal, min(len(mine), len(theirs)))
            return f"{metric} differs from its value {place} on ({len(theirs)} stored, {len(mine)} again)"
    return ""


def main(argv: Sequence[str]) -> int:
    """Exit 0: every value is equal; 1: some differ; 2: nothing to compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a stored run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--data-path", default="", help="file of the data, where it is not in the cache")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    frame = store.read([options.run])
    rows = frame[
        (frame["suite"] == "divergence") & (frame["status"] == "ok") & frame["metric"].isin(COMPARED)
    ]
    rows = rows[rows["part"] == ""]
    curves: dict[tuple[str, str], dict[str, Sequence[float]]] = {}
    for row in rows.to_dict("records"):
        axes = parse(row["axes"])
        if axes["seed"] in options.seeds and (not options.arms or row["arm"] in options.arms):
            curves.setdefault((row["axes"], row["arm"]), {})[row["metric"]] = list(row["samples"])
    if not curves:
        sys.stderr.write(f"error: {options.run} has no finished run of seeds {options.seeds}\n")
        return 2
    env = parse(rows.iloc[0]["env"])
    sys.stdout.write(
        f"stored by torch {env.get('torch')} on {env.get('cpu')}; here torch {torch.__version__}\n"
    )
    differ = 0
    for (axes, arm), stored in curves.items():
        given = {name: axis.default for name, axis in divergence.AXES.items() if not axis.optional}
        case = Case.of("divergence", {**given, **parse(axes), "data_path": options.data_path})
        with tempfile.TemporaryDirectory() as workspace:
            trial = divergence.trial(case, arm, "cpu", Path(workspace), lambda step, steps: None)
        again = {s.metric: list(s.samples) for s in trial.series if not s.part}
        why = first_difference(stored, again)
        differ += bool(why)
        values = sum(len(v) for v in stored.values())
        name = f"{case.text('model')} {case.integer('steps')} steps, seed {case.integer('seed')}, {arm}"
        sys.stdout.write(f"{name}: {why or f'{values} values equal bit for bit'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(curves) - differ} of {len(curves)} runs equal\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
