"""What the gate finds: two sides of rows -> its exit code and a code of each unit. Oracle: what was put into the rows.

A code is the metric and the verdict, then what holds of it: the change of what moved, `x20` rounds where they are not ten, what
stands in the way (`UnitState`), the cause, `flagged` of what is open, `suspect`, `held`; a number before it counts the units that have it.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from curves_for_tests import control, rows_of_runs, shifted
from gate_fixtures import (
    ENV,
    POLICY,
    TODAY,
    Rows,
    Times,
    control_row,
    failed_row,
    run,
    time_row,
    value_row,
)

from harness.gate import render
from harness.gate.decide import UnitVerdict
from harness.gate.options import Loud
from harness.gate.policy import Allowance, Match, MetricRule
from harness.store.errors import Cause

if TYPE_CHECKING:
    from harness.gate.unit import Judgement, Unit

INF = float("inf")
MOVED = (UnitVerdict.REGRESSED, UnitVerdict.IMPROVED)


class Row(NamedTuple):
    """Two sides, what is found, words that are said of it, and how many notes are loud."""

    before: Rows
    after: Rows
    code: int
    found: str
    said: str
    loud: int
    options: Mapping[str, Any]


TABLE: dict[str, Row] = {}


def add(
    name: str, sides: Sequence[Rows], code: int, found: str, said: str = "", *, loud: int = 0, **options: Any
) -> None:
    """Puts a row into the table; `policy` are keys of it."""
    assert name not in TABLE
    options["policy"] = replace(POLICY, **options.pop("policy", {}))
    TABLE[name] = Row(sides[0], sides[1], code, found, said, loud, options)


def code_of(unit: Unit, judgement: Judgement) -> str:
    words = [unit.key.metric, unit.verdict, unit.state]
    if unit.rounds:
        words += [f"{unit.change - 1:+.0%}"] * (unit.verdict in MOVED)
        words += [f"x{unit.rounds}"] * (unit.rounds != 10)
    words += [unit.cause.name] if unit.cause else []
    words += ["flagged"] * (unit.flagged and unit.verdict is UnitVerdict.INCONCLUSIVE)
    words += ["suspect"] * (unit in judgement.suspects) + ["held"] * unit.held
    return " ".join(filter(None, words))


def counted(found: str) -> Counter[str]:
    parts = (part.partition(" ") for part in found.split(", "))
    return Counter(
        {rest if n.isdigit() else f"{n} {rest}".strip(): int(n) if n.isdigit() else 1 for n, _, rest in parts}
    )


def units(slow: float = 1.0, count: int = 1, *, faster: float = 1.0, **times: Any) -> tuple[Rows, Rows]:
    """So many units, of which the candidate's first is slower, or the baseline's."""
    draw = Times(**times)
    return tuple([time_row(n, draw(1.0 if n else f)) for n in range(count)] for f in (faster, slow))


def beside(sides: Sequence[Rows], before: Rows, after: Rows | None = None) -> tuple[Rows, Rows]:
    """Two sides with more rows."""
    return [*sides[0], *before], [*sides[1], *(before if after is None else after)]


def values(metric: str, before: float, after: float) -> tuple[Rows, Rows]:
    return [value_row(0, metric, before)], [value_row(0, metric, after)]


# Times

add(
    "slower",
    units(1.1),
    1,
    "time_ms REGRESSED +10% x20",
    "confirmed on fresh data",
    confirm=units(1.1, seed=1),
)
add("faster", units(faster=1.1), 0, "time_ms IMPROVED -9% x20", confirm=units(faster=1.1, seed=1))
add(
    "slower, and in fresh data not",
    units(1.06),
    6,
    "time_ms INCONCLUSIVE x20 flagged suspect",
    "did not confirm",
    confirm=units(seed=1),
)
add(
    "flagged, and not measured again",
    units(1.1, 10, rounds=6),
    6,
    "time_ms INCONCLUSIVE x6 flagged suspect, 9 time_ms OK x6",
)
add(
    "flagged, and four fresh rounds",
    units(1.1, 10, rounds=6),
    6,
    "time_ms INCONCLUSIVE flagged suspect, 9 time_ms OK x6",
    confirm=units(1.1, seed=1, rounds=4),
)
add("equal, six rounds", units(1.0, 10, rounds=6), 0, "10 time_ms OK x6")
for few in (3, 5, 7):
    add(f"ten times slower in {few} rounds", units(10.0, 10, spread=0.001, rounds=few), 6,
        f"time_ms INCONCLUSIVE x{few} {'flagged ' * (few > 4)}suspect, 9 time_ms OK x{few}", "COULD NOT JUDGE 1 of 10, 1 of them looks slower: gemm ")  # fmt: skip
SEVEN = units(10.0, 10, spread=0.001, rounds=7)
LABEL = "0x64x64"
OPEN, HELD = (
    "time_ms INCONCLUSIVE x7 flagged suspect, 9 time_ms OK x7",
    "time_ms INCONCLUSIVE x7 flagged held, 9 time_ms OK x7",
)
add(
    "on_inconclusive: warn puts up with what is open, not with this",
    SEVEN,
    6,
    OPEN,
    policy={"on_inconclusive": "warn"},
)
add("nor does a share", SEVEN, 6, OPEN, policy={"undecided_share": 0.9})
add(
    "on_slower: warn",
    SEVEN,
    0,
    "time_ms INCONCLUSIVE x7 flagged held, 9 time_ms OK x7 held",
    policy={"on_slower": "warn"},
)
add(
    "an allowance for one that looks slower",
    SEVEN,
    0,
    HELD,
    policy={"allow": (Allowance(Match(case=LABEL), TODAY, "known"),)},
)
add("ten times faster in seven rounds", SEVEN[::-1], 0, "10 time_ms OK x7")
for days, code, found, said in (
    (0, 0, "held", "allowed"),
    (-1, 1, "", "ended on 2027-01-14: known, ticket 12"),
):
    allowance = Allowance(
        Match(suite="gemm", arm="fp8"), TODAY + datetime.timedelta(days), "known, ticket 12"
    )
    add(f"an allowance that ends in {days} days", units(1.2), code, f"time_ms REGRESSED +20% {found}".strip(),
        "" if not days else said, policy={"allow": (allowance,)})  # fmt: skip

# Stored runs: 4.2 % is more than the tolerance of 3 %, and less than the tolerance and what sessions differ by

STEADY = Times(0.001)
TEN = tuple([time_row(n, STEADY(factor)) for n in range(10)] for factor in (1.0, 1.042))
add("4.2 % slower, paired", TEN, 1, "10 time_ms REGRESSED +4%")
add("4.2 % slower, stored", TEN, 0, "10 time_ms OK", "no control case in both runs", session="")
add(
    "one unit, stored: no scatter is known",
    units(1.045, spread=0.001),
    6,
    "time_ms INCONCLUSIVE",
    "measure both together (--against)",
    session="",
)

# The control case

NOISY = Times(0.2, seed=3)
add("a noisy control", beside(units(), [control_row(NOISY())], [control_row(NOISY(1.03))]), 0, "time_ms OK")
add(
    "a control without times",
    beside(units(), [control_row([1.0] * 10)], [control_row([INF] * 10)]),
    3,
    "time_ms INCONCLUSIVE",
)
LOST = replace(control_row([1.0]), status="failed", reason="lost", samples=(), rounds=())
for at, sides in enumerate((([LOST], [control_row([1.0] * 10)]), ([control_row([1.0] * 10)], [LOST]))):
    add(f"a control that failed on side {at}", beside(units(), *sides), 3, "time_ms INCONCLUSIVE")
MACHINE = Times()
add("a control that moved, and a lost bit", beside(beside(([time_row(0, MACHINE())], [time_row(0, MACHINE(1.2))]), [control_row(MACHINE())],
    [control_row(MACHINE(1.2))]), *values("sqnr_db", 28.5, 22.5)), 4, "time_ms INCONCLUSIVE control flagged, sqnr_db REGRESSED", "28.5 -> 22.5 dB")  # fmt: skip

# In stored runs without that case, the bf16 product of PyTorch alone stands in for it
draw = Times(0.001)
TWENTY = tuple([time_row(n, draw(factor)) for n in range(10)] for factor in (1.0, 1.2))
for moved, code, found in (
    (1.0, 1, "10 time_ms REGRESSED +20%, time_ms OK"),
    (1.2, 3, "11 time_ms INCONCLUSIVE control flagged"),
):
    add(f"a stand-in for the control that moved by {moved}",
        beside(TWENTY, [time_row(0, draw(), "bf16_eager")], [time_row(0, draw(moved), "bf16_eager")]), code, found, session="")  # fmt: skip

# Exact rules

for metric, before, after, verdict, code in (
    ("sqnr_db", 28.5, 28.46, "OK", 0),  # within 0.05 dB
    ("sqnr_db", 28.5, 28.4, "REGRESSED", 4),
    ("sqnr_db", 28.5, 30.0, "IMPROVED", 0),
    ("sqnr_db", INF, 60.0, "REGRESSED", 4),
    ("sqnr_db", INF, INF, "OK", 0),
    ("sqnr_db", 60.0, INF, "IMPROVED", 0),
    ("mismatches", 0.0, 1.0, "REGRESSED", 4),
    ("underflow_frac", 0.0, 0.0, "OK", 0),
    ("rel_err_max", 0.1, INF, "REGRESSED", 4),
    ("saved_bytes_per_elem", 4.0, 4.0001, "REGRESSED", 1),  # memory: 0 %
    ("saved_bytes_per_elem", 4.0, 3.0, "IMPROVED", 0),
):
    add(
        f"{metric} {before} -> {after}",
        beside(units(), *values(metric, before, after)),
        code,
        f"time_ms OK, {metric} {verdict}",
    )
ARMS = [time_row(0, Times(seed=5)(), arm) for arm in ("bf16", "fp8")]
TWO = [time_row(0, Times(rounds=2)(), arm) for arm in ("bf16", "fp8")]
EXACT = [value_row(0, "sqnr_db", 28.5)]
for name, rows, code, found, said in (
    ("ten rounds", ARMS + EXACT, 0, "time_ms OK, sqnr_db OK", "OK, no time judged"),
    ("two rounds", TWO + EXACT, 0, "time_ms INCONCLUSIVE x2, sqnr_db OK", "OK, no time judged"),
    ("two rounds and no exact rule", TWO, 6, "time_ms INCONCLUSIVE x2", "COULD NOT JUDGE 1 of 1"),
):
    add(f"machine-free, {name}", (rows, rows), code, found, said, machine_free=True)

STATED = {"compile_graph_breaks": 0, "operator_calls": 10, "fp8_layers": 9}
FOUR = ("bytes_moved", *STATED)
for name, moved, stated, verdicts, code in (
    (
        "more",
        2e6,
        {**STATED, "compile_graph_breaks": 2, "operator_calls": 9},
        ("REGRESSED", "REGRESSED", "IMPROVED", "OK"),
        1,
    ),
    ("fewer layers", 1e6, {**STATED, "fp8_layers": 8}, ("OK", "OK", "OK", "REGRESSED"), 1),
    ("the same", 1e6, STATED, ("OK",) * 4, 0),
    ("nothing", None, {}, ("INCONCLUSIVE open",) * 4, 0),
):
    one, other = (
        time_row(0, Times()(), bytes_moved=b, resolved=r) for b, r in ((1e6, STATED), (moved, stated))
    )
    add(
        f"a row states {name}",
        ([one], [other]),
        code,
        ", ".join(["time_ms OK", *map(" ".join, zip(FOUR, verdicts, strict=True))]),
    )
CALLS = [
    [time_row(0, Times()(), resolved={"operator_calls": n}), value_row(0, "rel_err_max", 0.1)]
    for n in (10, 11)
]
for now, verdict, code, loud in (
    ("2.13.0+cpu", "REGRESSED", 1, 0),
    ("2.14", "INCONCLUSIVE open", 0, 1),
    ("2.13.1", "INCONCLUSIVE open", 0, 1),
):
    add(f"one more operator under torch {now}", CALLS, code, f"rel_err_max OK, operator_calls {verdict}",
        "operator_calls of 1 units" * loud, loud=loud, envs=(ENV, {**ENV, "torch": now}), machine_free=True)  # fmt: skip
add(
    "an improved count is to be adopted",
    CALLS[::-1],
    0,
    "rel_err_max OK, operator_calls IMPROVED",
    "1 exact counts improved",
    machine_free=True,
)

add(
    "two times of an arm state an improved count once",
    [
        [
            row
            for m in ("time_ms", "forward_backward_ms")
            for row in [time_row(0, Times()(), metric=m, resolved=r)]
        ]
        for r in (STATED, {**STATED, "operator_calls": 9})
    ],
    0,
    "time_ms OK, forward_backward_ms OK, compile_graph_breaks OK, operator_calls IMPROVED, fp8_layers OK",
)

# Why it is slower

AT = [1980.0] * 10
for name, before, after, cause, evidence in (
    ("fewer cycles a second", {"clocks": AT}, {"clocks": [1650.0] * 10}, "clock", "time +20."),
    ("more cycles", {"clocks": AT}, {"clocks": AT}, "kernel", "cycles +"),
    ("a clock was not read throughout", {"clocks": AT}, {"clocks": [*AT[:9], 0.0]}, "", ""),
    ("nothing was counted", {}, {}, "", ""),
    ("more graphs", {"compile_graphs": 1}, {"compile_graphs": 2}, "compile", "compile_graphs 1 -> 2"),
    ("more breaks", {"compile_graph_breaks": 1}, {"compile_graph_breaks": 2}, "compile", "compile_graph_breaks 1 -> 2"),
    ("recompiled", {"recompiles": 1}, {"recompiles": 2}, "compile", "recompiles 1 -> 2"),
    ("more operators", {"operator_calls": 12}, {"operator_calls": 15}, "host", "operators called 12 -> 15"),
    ("as many operators", {"operator_calls": 12, "kernels": ["old"]}, {"operator_calls": 12, "kernels": ["new"]}, "kernel", "the same operators were called; other kernels ran"),
    ("compile time", {"metric": "compile_s"}, {"metric": "compile_s"}, "compile", "compile time +20."),
    ("launching", {"metric": "launch_us"}, {"metric": "launch_us"}, "host", "launching kernels takes longer"),
):  # fmt: skip
    draw, facts = Times(), before.keys() - {"clocks", "metric"}
    row, other = (
        {k: v for k, v in side.items() if k not in facts} | {"resolved": {k: side[k] for k in facts}}
        for side in (before, after)
    )
    add(f"20 % slower: {name}", ([time_row(0, draw(), **row)], [time_row(0, draw(1.2), **other)]), 1, ", ".join([
        f"{before.get('metric', 'time_ms')} REGRESSED +20% {cause}".strip(),
        *(f"{fact} {'OK' if before[fact] == after[fact] else 'REGRESSED'}" for fact in facts - {"kernels"}),
    ]), evidence)  # fmt: skip
# Of a ratio the clock is no cause: both arms run at it
HALF = {"clocks": [990.0] * 10}
for name, other, found in (
    ("both arms twice as long", 2.0, "time_ms OK"),
    ("one of them 20 % longer than that", 2.4, "time_ms REGRESSED +20%"),
):
    draw = Times()
    ratio = [
        [time_row(0, draw(factor), "bf16", clocks=clocks), time_row(0, draw(of_fp8), "fp8", clocks=clocks)]
        for factor, of_fp8, clocks in ((1.0, 1.0, AT), (2.0, other, HALF["clocks"]))
    ]
    add(f"a ratio at half the clock, {name}", ratio, int(other > 2), found, machine_free=True)
for moved, cause in (
    (1.09, "control"),
    (1.04, "compile"),
):  # the machine goes before all, where it explains half
    draw = Times()
    sides = [
        [time_row(0, draw(f), resolved={"recompiles": n}), control_row(draw(c))]
        for f, n, c in ((1.0, 0, 1.0), (1.1, 9, moved))
    ]
    add(
        f"10 % slower, the control by {moved}",
        sides,
        1,
        f"time_ms INCONCLUSIVE {cause} flagged, recompiles REGRESSED",
    )

# The conditions of a measurement


def struck(sides: Sequence[Rows], condition: str, where: str) -> tuple[Rows, Rows]:
    about = [{"method": "cuda_events", condition: side in where} for side in "ab"]
    return tuple([replace(row, timing=a) for row in rows] for rows, a in zip(sides, about, strict=True))


for where, condition, decides in (
    ("b", "throttled", False),
    ("a", "throttled", False),
    ("ab", "throttled", True),  # limited by power, the one as the other
    ("b", "contended", False),
    ("ab", "contended", False),
):
    regressed, name = "time_ms REGRESSED +20%", f"{condition} on {where}"
    slow, again = (struck(units(f, seed=seed), condition, where) for f, seed in ((1.2, 0), (1.1, 1)))
    add(
        name,
        slow,
        1 if decides else 6,
        regressed if decides else "time_ms INCONCLUSIVE excluded suspect",
        "1 times were measured ",
    )
    add(f"{name}, which the policy lets decide", slow, 1, regressed, policy={"exclude": ()})
    add(f"{name} in the confirmation", units(1.1, 10, rounds=6), 1 if decides else 6,
        "time_ms REGRESSED +10% x16, 9 time_ms OK x6" if decides else "time_ms INCONCLUSIVE x6 flagged suspect, 9 time_ms OK x6",
        "" if decides else "1 confirmations decide nothing", confirm=again)  # fmt: skip

# A sample that is no time counts against its own side

SOUND = [time_row(0, Times(seed=s)(), arm) for s, arm in enumerate(("bf16", "fp8", "other"))]
for bad, at in ((0.0, 3), (-1.0, 0), (INF, 9)):
    spoilt = Times(seed=2)()
    spoilt[at] = bad
    odd = [*SOUND[:2], time_row(0, spoilt, "other")]
    for where, found in (("ab", "INCONCLUSIVE open"), ("a", "INCONCLUSIVE open"), ("b", "REGRESSED no time")):
        stage = tuple(odd if side in where else SOUND for side in "ab")
        for name, sides, more, x in (
            ("first stage", stage, {}, ""),
            ("confirmation", (SOUND, SOUND), {"confirm": stage}, " x20"),
        ):
            for machine_free in (False, True):
                others = f"time_ms OK{x}" if machine_free else f"2 time_ms OK{x}"
                code = 1 if where == "b" else 0 if machine_free else 6
                add(f"{bad} ms on {where} in the {name}, machine-free {machine_free}", sides, code, f"{others}, time_ms {found}",
                    f"sample of round {at} is {bad:g} ms", machine_free=machine_free, **more)  # fmt: skip

# What one side lacks

NEWER = (ENV, {**ENV, "driver": "575.1"})
NINE = [time_row(n, Times()()) for n in range(9)]
NINTH = [time_row(9, Times()())]
LACKS = [failed_row(0, "needs a compiler", status="skipped")]
for name, lost, state, code in (
    ("failed", failed_row(0, "RuntimeError: out of memory"), "lost", 1),
    ("skipped", failed_row(0, "needs sm_89", status="skipped"), "lost", 1),
    ("refuted", failed_row(0, "sqnr_db 3 below 20", cause=Cause.NUMERICS), "wrong", 4),
):
    add(
        f"an arm {name}",
        (beside(units(), EXACT)[0], [lost]),
        code,
        f"time_ms REGRESSED {state} missing, sqnr_db REGRESSED {state} missing",
        lost.reason,
    )
    add(f"an arm {name} in the confirmation", units(1.1, 10), code, f"time_ms REGRESSED {state} missing, 9 time_ms OK",
        f"{lost.status} in the confirmation: {lost.reason}", confirm=(units(seed=1)[0], [lost]))  # fmt: skip
for cause, state, code in ((Cause.RUN, "lost", 1), (Cause.NUMERICS, "wrong", 4)):
    # A worker writes what it skipped, then the figures of a check, then the failed time; elsewhere a skipped arm is open
    skipped = replace(failed_row(0, "no oracle", status="skipped"), metric="mismatches")
    figure, failed = (
        replace(failed_row(0, "3; below 20", cause=cause), metric="sqnr_db"),
        failed_row(0, "below 20", cause=cause),
    )
    before, gone = [*units()[0], value_row(0, "rel_err_max", 0.1)], [skipped, figure, failed]
    found = f"time_ms REGRESSED {state} missing, rel_err_max REGRESSED {state} missing"
    more: dict[str, Any] = {"envs": NEWER, "machine_free": True}
    add(f"failed and not skipped: {cause}", (before, gone), code, found, "failed: below 20", **more)
    add(f"failed in the confirmation and not skipped: {cause}", (before, before), code, found, "failed in the confirmation: below 20",
        confirm=(before, gone), **more)  # fmt: skip
add("a figure that is worse in the confirmation alone", beside(units(1.1), EXACT), 4, "time_ms REGRESSED +10% x20, sqnr_db REGRESSED", "28.5 -> 20 dB",
    confirm=beside(units(1.1, seed=1), EXACT, [value_row(0, "sqnr_db", 20.0)]))  # fmt: skip
UNDECIDED = "9 time_ms OK, time_ms INCONCLUSIVE"
for name, sides, code, found, said, loud, more in (
    ("new", (NINE[:1], NINE), 0, "time_ms OK", "8 cases are new", 0, {}),
    ("mended", ([*NINE, failed_row(9, "code 7")], NINE + NINTH), 0, "9 time_ms OK", "1 arms failed in the baseline", 0, {}),
    ("killed", ([*NINE, failed_row(9, "code -9", cause=Cause.DIED)], NINE + NINTH), 0, f"{UNDECIDED} open", "need not be its code's doing", 1, {}),
    ("gone", ([*NINE, failed_row(9, "full")], NINE), 0, f"{UNDECIDED} failed twice", "not in the candidate", 1, {}),
    ("skipped now", ([*NINE, failed_row(9, "full")], [*NINE, failed_row(9, "too large", status="skipped")]), 0, f"{UNDECIDED} failed twice",
     "skipped: too large", 1, {}),
    ("never", ([*NINE[1:2], *LACKS], [*NINE[1:2], *LACKS]), 0, "time_ms OK", "at most", 0, {}),
    ("lost", (NINE[:1], LACKS), 1, "time_ms REGRESSED lost missing", "needs a compiler", 0, {"machine_free": True}),
    ("lost elsewhere", (NINE[:1], LACKS), 6, "time_ms INCONCLUSIVE open", "machine is another", 0, {"machine_free": True, "envs": NEWER}),
):  # fmt: skip
    add(f"an arm is {name}", sides, code, found, said, loud=loud, **more)
for broken, machine_free in (
    (2, False),
    (2, True),
    (9, False),
    (9, True),
):  # more than a fifth of ten may not stay open
    good = [
        row
        for n in range(broken, 10)
        for row in (time_row(n, Times(seed=n)()), value_row(n, "sqnr_db", 30.0))
    ]
    bad = [failed_row(n, f"AttributeError: no prime, {n}") for n in range(broken)]
    times = [f"{10 - broken} time_ms OK"] * (not machine_free)
    add(f"{broken} of ten arms fail on both sides, machine-free {machine_free}", ([*good, *bad],) * 2, 0 if broken <= 2 else 6,
        ", ".join([*times, f"{10 - broken} sqnr_db OK, {broken} time_ms INCONCLUSIVE failed twice"]), f"{broken} arms failed on both sides",
        loud=1, machine_free=machine_free)  # fmt: skip

# Training

BASE = control()
GOOD = shifted(BASE)
trained = partial(
    lambda *more, runs=GOOD: [*rows_of_runs("base", BASE), *rows_of_runs("tensorwise", runs), *more]
)
BROKEN = rows_of_runs("negative_control", shifted(BASE, lambda t: 0.6 * t / (t + 30), ratio=0.6))
FAILS = [replace(row, status="failed", samples=(), rounds=(), reason="RuntimeError: out of memory")
         for row in rows_of_runs("tensorwise", GOOD) if row.metric == "loss"]  # fmt: skip
BAD = shifted(BASE, lambda t: 0.6 * t / (t + 30), ratio=0.6)
ALONE = rows_of_runs("base", BASE)
for name, before, after, code, found, said in (
    ("breaks", trained(), trained(runs=BAD), 4, "REGRESSED", "baseline: PASS"),
    ("was broken and is", trained(runs=BAD), trained(runs=BAD), 4, "REGRESSED", "FAIL against base"),
    ("is mended", trained(runs=BAD), trained(), 0, "IMPROVED", "baseline: FAIL"),
    ("is new", ALONE, trained(), 0, "OK", "baseline: not trained"),
    ("is new and broken", ALONE, trained(runs=BAD), 4, "REGRESSED", "baseline: not trained"),
):
    add(f"training that {name}", (before, after), code, f"loss {found}", said)
add("training that breaks, where the policy ignores the loss", beside(units(), trained(), trained(runs=BAD)), 0, "time_ms OK",
    policy={"metrics": {**POLICY.metrics, "loss": MetricRule("ignore")}})  # fmt: skip
add("a negative control that fails", (trained(*BROKEN),) * 2, 0, "2 loss OK")
add("a negative control that does not", (trained(*BROKEN), trained(*rows_of_runs("negative_control", GOOD))), 6, "2 loss INCONCLUSIVE",
    policy={"on_inconclusive": "fail"})  # fmt: skip
add(
    "one training run is gone",
    (trained(), trained(runs={s: r for s, r in GOOD.items() if s < 4})),
    1,
    "loss REGRESSED lost missing, loss INCONCLUSIVE",
    "not in the candidate",
)
add(
    "all training runs crashed",
    (trained(), trained(*FAILS, runs={})),
    1,
    "5 loss REGRESSED lost missing, loss INCONCLUSIVE",
    "RuntimeError: out of memory",
)


@pytest.mark.parametrize("name", TABLE)
def test_what_two_sides_of_rows_come_to(name: str, tmp_path: Path) -> None:
    row = TABLE[name]
    found = run(tmp_path, row.before, row.after, **row.options)
    assert (int(found.code), Counter(code_of(u, found) for u in found.findings)) == (
        row.code, counted(row.found),
    )  # fmt: skip
    texts = [render.headline(found), *found.notes, *(unit.reason for unit in found.findings)]
    texts += [unit.cause.evidence for unit in found.findings if unit.cause]
    assert any(row.said in text for text in texts), texts
    assert sum(isinstance(note, Loud) for note in found.notes) == row.loud
