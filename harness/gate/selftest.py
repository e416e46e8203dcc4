"""`python -m harness gate-selftest`: how often the gate is wrong, by simulation, on real cases and on stored history.

- simulation: the grid of `simulate`, held to the gate's bars. Exit 1 where one is missed.
- `--real N`: N sittings of this work tree against itself (A/A), and N for each slowdown of `--pads`, put into one side.
- `--sessions DIR`: counts what stored sessions concluded, whoever measured them, and shuffles their labels: a round's
  two sides are equal in an A/A session, so swapping them at random must not raise alarms either. A/A sessions are set
  against one another too, as two stored runs would be.

Every count comes with its Clopper-Pearson interval.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.gate import SWEEP
from harness.gate.decide import Verdict
from harness.gate.error_rates import quiet_power, rate_bars, rate_lines, rates
from harness.gate.policy import as_given, load_policy
from harness.gate.simulate import (
    EFFECTS,
    NOISES,
    ROUNDS,
    TOLERANCE,
    bars,
    grid,
)
from harness.gate.stored_sessions import StoredSession, about_sittings, read_sittings
from harness.store.errors import UsageError
from harness.store.words import Parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from harness.gate.error_rates import Rate
    from harness.gate.policy import Policy
    from harness.gate.simulate import Bar, Cell

FEWEST = 100  # trials or judgements that can show a rate of 1 %


def main(argv: Sequence[str]) -> int:
    """Returns 0 where every bar of the simulation holds, else 1."""
    parser = Parser("gate-selftest", "The gate's own error rates.")
    parser.add_argument("--trials", type=int, default=2000, help="of each cell of the grid (default 2000)")
    parser.add_argument(
        "--judgements",
        type=int,
        default=100,
        help="whole judgements a noise, beside other gates (default 100)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", type=Path, metavar="FILE")
    parser.add_argument(
        "--real", type=int, default=0, metavar="N", help="sittings on this machine, of each kind"
    )
    parser.add_argument(
        "--pads", default="0.02,0.05,0.10", help="slowdowns that are put in (default %(default)s)"
    )
    parser.add_argument("--pairs", type=int, help="rounds of a real sitting (policy: pairs)")
    parser.add_argument("--confirm-pairs", type=int, help="rounds of its confirmation")
    parser.add_argument(
        "--sessions", type=Path, nargs="+", metavar="DIR", help="stored sessions to be counted"
    )
    parser.add_argument("--results-dir", type=Path, default=Path("results"))
    parser.add_argument(
        "words", nargs="*", metavar="KEY=VALUE", help=f"what --real measures (default {SWEEP})"
    )
    options = parser.parse_intermixed_args(list(argv))
    for name in ("trials", "judgements"):
        if getattr(options, name) < FEWEST:
            parser.error(
                f"--{name} {getattr(options, name)}: fewer than {FEWEST} {name} cannot measure rates of 1 %"
            )
    policy = load_policy(options.policy)
    folders = list(options.sessions or [])
    if options.real:
        folders.append(_measure(options, policy))
    cells = grid(policy, options.trials, options.seed)
    beside = rates(policy, options.judgements, options.seed)
    promises = [*bars(cells), *rate_bars(beside, quiet_power(policy, options.judgements, options.seed))]
    sittings = [s for folder in folders for s in read_sittings(folder, policy)]
    text = "\n".join(
        [
            *simulation_lines(cells, promises, options.trials, policy),
            *rate_lines(beside, options.judgements),
            *(about_sittings(sittings, policy) if sittings else []),
        ]
    )
    target = options.results_dir / "gate-selftest" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    _store(target, text, cells, beside, promises, sittings)
    sys.stdout.write(f"{text}\nstored   {target}\n")
    return 0 if all(bar.holds for bar in promises) else 1


def simulation_lines(
    cells: Sequence[Cell], promises: Sequence[Bar], trials: int, policy: Policy
) -> list[str]:
    """The bars, and a table of REGRESSED / OK in percent for every noise, number of rounds and effect."""
    lines = [
        f"Simulated: {trials} trials a cell, tolerance {TOLERANCE:.0%}, alpha {policy.alpha:g}, confirmation by "
        f"{policy.confirm_pairs} fresh rounds at {policy.alpha_confirm:g}.",
        "",
        "| promise | worst cell | bar | holds |",
        "|---|---|---|---|",
    ]
    for bar in promises:
        sign = "at least" if bar.at_least else "at most"
        lines.append(
            f"| {bar.text} | {bar.worst:.1%} ({bar.where}) | {sign} {bar.bound:.0%} | {'yes' if bar.holds else 'NO'} |"
        )
    lines += [
        "",
        "REGRESSED / OK in % of trials at a true slowdown of so many tolerances; the rest is INCONCLUSIVE.",
        "",
        "| noise | rounds | " + " | ".join(f"{e:g}" for e in EFFECTS) + " | coverage |",
        "|---|---|" + "---|" * (len(EFFECTS) + 1),
    ]
    table = {(c.noise, c.rounds, c.effect): c for c in cells}
    for noise, rounds in dict.fromkeys((c.noise, c.rounds) for c in cells):
        row = [table[noise, rounds, effect] for effect in EFFECTS]
        shares = [f"{100 * c.share(Verdict.REGRESSED):.1f} / {100 * c.share(Verdict.OK):.1f}" for c in row]
        lines.append(f"| {noise} | {rounds} | {' | '.join(shares)} | {row[0].covered / row[0].trials:.1%} |")
    return lines


def _measure(options: argparse.Namespace, policy: Policy) -> Path:
    """Real sittings of this work tree against itself; returns the folder that holds them."""
    from harness.gate.drive import Request, measure_and_judge

    policy = as_given(policy, options)
    root = Path(__file__).resolve().parent.parent.parent
    try:
        pads = [0.0, *(float(p) for p in options.pads.split(",") if p)]
    except ValueError as error:
        raise UsageError(f"--pads {options.pads!r}: expected shares such as 0.02,0.10") from error
    folder: Path = (
        options.results_dir / "gate-selftest" / "sittings" / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    )
    for pad in pads:
        for index in range(options.real):
            load, started = os.getloadavg()[0], time.monotonic()
            request = Request(
                {"baseline": root, "candidate": root},
                options.words or [SWEEP],
                policy,
                folder,
                pads={"candidate": pad},
                seed=options.seed + index,
            )
            judgement = measure_and_judge(request, lambda line: None)
            sys.stderr.write(
                f"slowdown {pad:.0%}, sitting {index + 1} of {options.real}: {dict(judgement.counted)}, exit "
                f"{int(judgement.code)}, {time.monotonic() - started:.0f} s, load {load:.1f} to {os.getloadavg()[0]:.1f}\n"
            )
    return folder


def _store(
    target: Path,
    text: str,
    cells: Sequence[Cell],
    beside: Sequence[Rate],
    promises: Sequence[Bar],
    sittings: Sequence[StoredSession],
) -> None:
    document: dict[str, Any] = {
        "grid": {"noises": [dataclasses.asdict(n) for n in NOISES], "rounds": ROUNDS, "effects": EFFECTS},
        "cells": [dataclasses.asdict(c) for c in cells],
        "rates": [dataclasses.asdict(r) for r in beside],
        "bars": [dataclasses.asdict(b) | {"holds": b.holds} for b in promises],
        "sittings": [
            {
                "name": s.name,
                "pad": s.pad,
                "seconds": s.seconds,
                "rounds": s.rounds,
                "load_average": s.load,
                "exit": int(s.judgement.code),
                "verdicts": dict(s.judgement.counted),
            }
            for s in sittings
        ],
    }
    try:
        target.mkdir(parents=True, exist_ok=True)
        (target / "selftest.md").write_text(text + "\n", encoding="utf-8")
        (target / "selftest.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot write to {target} ({error.strerror}); choose another with --results-dir"
        ) from error
