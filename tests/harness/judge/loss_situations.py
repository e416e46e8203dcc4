"""Planted situations of loss curves, as data: none may PASS, each honest twin must. Every one is drawn anew by a seed.

Written from the rule's description alone (issue and reference), beside the judge and before it was there. A course falls from 4 to
2.25 nats; runs of an arm lie 0.07 % apart, mostly along the whole course. A change makes runs of a side's runs, the base's, and draws.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

Frames = list[pd.DataFrame]
Draws = np.random.Generator
Change = Callable[[Frames, Frames, Draws], Frames]
PASS, WITHHELD = frozenset({"PASS"}), frozenset({"INCONCLUSIVE"})
FAIL = frozenset({"FAIL"})
NO_PASS, REFUSED = WITHHELD | FAIL, WITHHELD | {"REFUSED"}
SPACING = 100  # steps between two evaluations


@dataclass(frozen=True, slots=True)
class Situation:
    """One situation.

    Attributes:
        words: outcomes that are right; "REFUSED": a usage error is right too.
        make: the base's and the candidate's runs, of draws.
        options: of `verdict`.
        code: of the finding, where it is obvious.
        is_refused: whether the curves are no evidence: no gap, interval or p may be printed.
    """

    name: str
    words: frozenset[str]
    make: Callable[[Draws], tuple[Frames, Frames]]
    options: Mapping[str, Any]
    code: str
    is_refused: bool

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    def arms(self, seed: int = 0) -> tuple[Frames, Frames]:
        """The base's and the candidate's runs; other rows of the table don't change them."""
        return self.make(np.random.default_rng([seed, zlib.crc32(self.name.encode())]))


# ---- honest arms


def course(u: Any) -> Any:
    return 2 + 2 * (1 + 30 * u) ** -0.6


def wander(g: Draws, n: int, size: int, rho: float, heavy: bool = False) -> Any:
    """Noise of unit spread that remembers itself along the course."""
    from scipy.signal import lfilter  # half a second, which the collection does without

    drawn = g.standard_t(3, (n, size)) / np.sqrt(3) if heavy else g.normal(size=(n, size))
    drawn[:, 1:] *= np.sqrt(1 - rho**2)
    return lfilter([1], [1, -rho], drawn, axis=1)


def arm(
    g: Draws, n: int = 5, K: int = 40, sd: float = 6e-4, jitter: float = 4e-4, rho: float = 0, fall: Any = course, heavy: bool = False
) -> Frames:  # fmt: skip
    """`sd`: of what sets runs apart for a third of the course; `jitter`: of each value, as shares of the loss."""
    u = np.linspace(0, 1, K + 1)
    noise = sd * wander(g, n, K + 1, np.exp(-3 / K)) + jitter * wander(g, n, K + 1, rho, heavy)
    return [pd.DataFrame({"step": (u * K * SPACING).round(), "val_loss": y}) for y in fall(u) * (1 + noise)]


def by_seed(g: Draws, n: int = 5, K: int = 200) -> tuple[Frames, Frames]:
    """Runs of one seed share batches, so training losses; the candidate leaves its twin within a tenth of the course."""
    base, mine = arm(g, n, K), arm(g, n, K, 2e-4, 1.5e-4)
    for i, frames in enumerate(zip(base, mine, strict=True)):
        u = frames[0]["step"] / frames[0]["step"].max()
        own = (frames[1]["val_loss"] / course(u) - 1) * np.minimum(10 * u, 1)
        frames[1]["val_loss"] = frames[0]["val_loss"] * (1 + own)
        batches, norms = wander(g, 2, K + 1, 0.2)
        for f in frames:
            f["train_loss"] = f["val_loss"] * (1 + 0.01 * batches + 2e-3 * u * g.normal(size=K + 1))
            f["grad_norm"] = np.exp(0.05 * norms + 0.01 * g.normal(size=K + 1)) / (1 + u)
            f["seed"] = i
    return base, mine


# ---- changes


def same(mine: Frames, base: Frames, g: Draws) -> Frames:
    return mine


def chain(*changes: Change) -> Change:
    def change(mine: Frames, base: Frames, g: Draws) -> Frames:
        for one in changes:
            mine = one(mine, base, g)
        return mine

    return change


def each(new: Callable[[pd.DataFrame, Any, int, Draws], pd.DataFrame], of: int = 99) -> Change:
    """The first `of` runs anew, of a run, the share of its course, its place and draws."""
    return lambda mine, base, g: [
        new(f, (f["step"] / f["step"].max()).to_numpy(), i, g) if i < of else f for i, f in enumerate(mine)
    ]


def put(new: Any, low: float = 0, high: float = 1, *, of: int = 99, column: str = "val_loss") -> Change:
    """A value, or what a function gives of values, the share of the course and draws, in a part of the course."""

    def change(f: pd.DataFrame, u: Any, i: int, g: Draws) -> pd.DataFrame:
        value = new(f[column].to_numpy(), u, g) if callable(new) else new
        return f.assign(**{column: np.where((low < u) & (u <= high), value, f[column])})

    return each(change, of)


def gap(height: Any, *part: float, **options: Any) -> Change:
    """A share of the loss, or a function of the share of the course."""
    return put(lambda y, u, g: y * (1 + (height(u) if callable(height) else height)), *part, **options)


def cut(low: float, high: float = 1, of: int = 99) -> Change:
    return each(lambda f, u, i, g: f[(u <= low) | (u > high)].reset_index(drop=True), of)


def until(target: float) -> Change:
    return each(lambda f, u, i, g: f[: int(np.argmax(f["val_loss"] <= target)) + 1])


def spikes(share: float, height: float = 0.1) -> Change:
    """At other steps in each run, never at the last."""
    return put(lambda y, u, g: y * (1 + height * np.isin(u, g.choice(u[1:-1], round(share * u.size), False))))


def columns(**made: Any) -> Change:
    """Constants, or what functions give of the share of the course, a run's place, and draws."""
    return each(lambda f, u, i, g: f.assign(**{k: v(u, i, g) if callable(v) else v for k, v in made.items()}))


def renamed(name: str, old: str = "val_loss") -> Change:
    return each(lambda f, u, i, g: f.rename(columns={old: name}))


def copied(new: Any = lambda y, i, g: y, of: int = 5, one: bool = False, own: bool = False) -> Change:
    """The first `of` runs are the base's, or its first alone, or the side's own first, changed by `new`."""
    return lambda mine, base, g: [
        f.assign(val_loss=new((mine if own else base)[0 if one or own else i]["val_loss"], i, g)) if i < of else f
        for i, f in enumerate(mine)
    ]  # fmt: skip


def half(mine: Frames, base: Frames, g: Draws, last: bool) -> Frames:
    """Half of each run is the base's, to the last bit."""
    sides = (mine, base) if last else (base, mine)
    return [pd.concat([a[: len(a) // 2], b[len(a) // 2 :]]) for a, b in zip(*sides, strict=True)]


def seeds(*names: int) -> Change:
    return chain(lambda mine, base, g: mine[: len(names)], columns(seed=lambda u, i, g: names[i]))


def machines(count: int, first: int, sd: float = 5e-3) -> Change:
    """Runs in turn on so many machines, each with an effect of its own."""

    def change(mine: Frames, base: Frames, g: Draws) -> Frames:
        effects = 1 + np.resize(g.normal(0, sd, count), len(mine))
        return [
            f.assign(machine=f"m{first + i % count}", val_loss=f["val_loss"] * effects[i]) for i, f in enumerate(mine)
        ]  # fmt: skip

    return change


def rounded(digits: int) -> Change:
    return put(lambda y, u, g: y.round(digits), -1)


def norms(times: float) -> Change:
    return columns(grad_norm=lambda u, i, g: times * np.exp(0.05 * g.normal(size=u.size)) / (1 + u))


def beside(change: Change = same) -> Change:
    """A training loss beside the other."""
    noise = partial(np.random.Generator.normal, scale=1e-3)
    return chain(
        columns(train_loss=lambda u, i, g: course(u) * (1 + noise(g) + noise(g, size=u.size))), change
    )


held = put(lambda y, u, g: y[np.arange(y.size) // 4 * 4])
alternating = gap(lambda u: 0.012 * (-1) ** np.arange(u.size))
last_spike = gap(lambda u: 0.1 * (u == 1), of=1)
lr = columns(lr=lambda u, i, g: 3e-4 * (1 - 0.9 * u))

# ---- the table

TABLE: dict[str, Situation] = {}


def add(
    name: str, candidate: Change = same, base: Change = same, both: Change = same, *, words: frozenset[str] = WITHHELD,
    code: str = "", refused: bool = False, **options: Any,
) -> None:  # fmt: skip
    """One row: what happens to each side, then to both of them; how arms are drawn (`n`: also a side each), the judge's options."""
    draw = {key: options.pop(key) for key in inspect.signature(arm).parameters if key in options}

    def make(g: Draws) -> tuple[Frames, Frames]:
        if "paired" in options:
            first, second = by_seed(g, **draw)
        else:
            first, second = (arm(g, **draw | {"n": n}) for n in np.broadcast_to(draw.get("n", 5), 2))
        first = base(first, [], g)
        return both(first, [], g), both(candidate(second, first, g), first, g)

    TABLE[name] = Situation(name, words, make, options, code, refused)


fails = partial(add, words=NO_PASS)
refuse = partial(add, refused=True)
copy = partial(refuse, code="copies")
pair = partial(add, paired="seed")
honest = partial(add, words=PASS)
NOISY: dict[str, Any] = {"K": 2000, "n": 10, "jitter": 0.01, "rho": 0.2}  # training loss at every step
SHAPES = {
    "slow swing": gap(lambda u: 0.012 * np.sin(6 * np.pi * u)),
    "early gap": gap(0.02, 0, 0.31),
    "early gap that heals": gap(lambda u: 0.04 * np.exp(-8 * u)),
    "mid gap": gap(0.015, 0.35, 0.71),
    "better in the middle": gap(-0.015, 0.35, 0.71),
    "dip before the end": gap(0.02, 0.75, 0.92),
    "from better to zero": gap(lambda u: 0.02 * (u - 1)),
    "from worse to zero": gap(lambda u: 0.02 * (1 - u)),
}
for name, change in SHAPES.items():
    for K in (10, 40, 200):
        add(f"course: {name}, K = {K}", change, K=K)
    pair(f"paired: {name}", change)
for K in (10, 40, 200):
    fails(f"course: alternating, K = {K}", alternating, K=K)
    fails(f"course: late climb, K = {K}", gap(lambda u: 0.06 * (u - 0.8), 0.8), K=K)
add("course: fast swing", gap(lambda u: 0.015 * np.sin(80 * np.pi * u)), K=200)
add("course: the base's early gap", base=SHAPES["early gap"], code="course")
add(
    "course: grows, within the margin",
    gap(lambda u: 0.0038 * (u - 0.5), 0.5),
    K=100,
    n=10,
    sd=2e-4,
    code="trend",
)
add("course: mid gap of the training loss", gap(0.02, 0.3, 0.6), code="course", **NOISY)
add("course: training loss, 7 margins", gap(0.0175), words=FAIL, code="worse", **NOISY)
add("course: loss alone, 7 margins", gap(0.0175), both=renamed("loss"), words=FAIL, code="worse", **NOISY)
fails("course: a run strays", gap(lambda u: 0.04 * u, of=1), n=12)

add("spikes: more, K = 40", spikes(0.1), code="spikes")
add("spikes: more, K = 200", spikes(0.05, 0.05), K=200, code="spikes")
fails("spikes: more, K = 10", spikes(0.25), K=10)
for value in (np.nan, np.inf, 1e30):
    fails(f"spikes: {value} at the end", put(value, 0.97))
    fails(f"spikes: {value} in the middle", put(value, 0.5, 0.53))
    refuse(f"spikes: {value} ends the base", base=put(value, 0.97, of=1))
    refuse(f"spikes: {value} ends both", both=put(value, 0.97))
fails("spikes: NaN at the end of one run", put(np.nan, 0.97, of=1))

refuse("values: 0 at the end", put(0, 0.9))
refuse("values: 0 at the end of one run", put(0, 0.99, of=1))
refuse("values: 0 in the middle", put(0, 0.5, 0.56))
refuse("values: 0 ends the base", base=put(0, 0.9))
refuse("values: negative here and there", put(lambda y, u, g: np.where(g.random(u.size) < 0.1, -y, y)))
refuse("values: negative, both sides", both=put(lambda y, u, g: y - 3, -1))
refuse("values: constant", put(course(1)))
refuse("values: constant last third", put(lambda y, u, g: y[-1], 0.66))
refuse("values: forward-filled, K = 200", held, K=200)
refuse("values: forward-filled", held)
refuse("values: forward-filled base", base=held)
refuse("values: forward-filled, both sides", both=held)
SMOOTH = {
    "best so far": put(lambda y, u, g: np.minimum.accumulate(y)),
    "smoothed": put(lambda y, u, g: pd.Series(y).ewm(alpha=0.1).mean()),
    "averaged": put(lambda y, u, g: pd.Series(y).rolling(10, min_periods=1).mean()),
}
for name, change in SMOOTH.items():
    fails(f"values: {name}", change, K=200, jitter=2e-3)
    fails(f"values: {name}, of the base", base=change, K=200, jitter=2e-3)
fails("values: averaged training loss", SMOOTH["averaged"], code="smooth", **NOISY)
add(
    "values: both end worse than their best",
    both=gap(lambda u: 0.2 * (u - 0.6), 0.6),
    code="worse_than_its_best",
)
add("values: idle", fall=lambda u: 2.3 - 1e-3 * u)
add("values: stands still", fall=lambda u: 2.3 + 1.7 * np.exp(-40 * u), code="still")
refuse("values: rises", fall=lambda u: 2 + 0.5 * u)

copy("copies: the base's runs", copied())
copy("copies: one run of the base", copied(of=1))
copy("copies: one run twice", copied(of=2, own=True))
copy("copies: one run twice, of the base", base=copied(of=2, own=True))
for name, new in {
    "noise": lambda y, i, g: y + 1e-4 * g.normal(size=y.size),
    "scaled": lambda y, i, g: y * (1 + 2e-4 * i),
    "shifted": lambda y, i, g: y + 3e-4 * i,
}.items():
    copy(f"copies: own file, {name}", copied(new, own=True), K=200)
    copy(f"copies: the base's file, {name}", copied(new, one=True))
    refuse(f"copies: each side one file, {name}", copied(new, own=True), copied(new, own=True), K=200)
    copy(f"copies: the base's runs, {name}", copied(new), K=200)
copy("copies: rounded", copied(lambda y, i, g: y.round(3)))
copy("copies: first half", partial(half, last=False))
copy("copies: last half", partial(half, last=True))
copy("copies: one step off", copied(lambda y, i, g: np.append(y[1:], y.iloc[-1] * (1 + 1e-4 * g.normal()))))

early = partial(add, code="stopped_early")
early("ends: candidate", cut(0.8))
early("ends: base", base=cut(0.8))
early("ends: one run", cut(0.7, of=1))
early("ends: slow runs are left", cut(0.6, of=3))
early("ends: one side stops at the target", until(2.35), K=200)
fails(
    "ends: both stop at the target, one worse",
    chain(gap(0.012), until(2.35)),
    until(2.35),
    K=200,
    target=2.35,
)
add("ends: other start, step 0 alone", gap(0.02, -1, 0))
add("ends: starts from a checkpoint", gap(lambda u: -0.2 * np.exp(-20 * u), -1))
add("ends: first third is not there", cut(-1, 0.3))
refuse("ends: hole", cut(0.4, 0.6), code="hole")
refuse("ends: hole in the base", base=cut(0.4, 0.6), code="hole")
add("ends: tokens for steps", put(lambda y, u, g: y * 4096, column="step"), words=REFUSED)
add("ends: other names of the axis", renamed("global_step", "step"), words=REFUSED)

differ = partial(add, code="differs")
NAMES = {"batch_size": int, "seq_length": int, "warmup_steps": int, "torch": str, "dataset": str, "unit": str}
for name, made in NAMES.items():
    differ(f"conditions: {name}", columns(**{name: made(2)}), columns(**{name: made(1)}))
add("conditions: nan_iterations", columns(nan_iterations=3), columns(nan_iterations=0), code="skipped")
differ("conditions: lr", chain(lr, gap(1, -1, column="lr")), lr)
differ("conditions: lr ends otherwise", chain(lr, gap(1, 0.7, column="lr")), lr)
differ("conditions: a column of one side", columns(rht="off"))
differ(
    "conditions: another one is waived",
    columns(torch="2", cuda="12"),
    columns(torch="1", cuda="13"),
    differs=("torch",),
)
bf16, fp8 = (columns(precision=name) for name in ("bf16", "fp8"))
mixed = columns(precision=lambda u, i, g: ("bf16", "fp8")[i > 0])
refuse("conditions: one precision", fp8, fp8, code="same_treatment")
refuse("conditions: precisions swapped", bf16, fp8, code="swapped")
refuse("conditions: precision mixed", mixed, bf16, code="mixed_treatment")
refuse("conditions: precision mixed in the base", fp8, mixed, code="mixed_treatment")
fails("conditions: bits", gap(0.4427, -1))
add("conditions: bits in the base", base=gap(0.4427, -1))
add("conditions: sides hold other losses", renamed("eval_loss"))
for name in ("lr", "tokens_per_s", "grad_norm", "ppl"):
    refuse(f"conditions: {name} as the loss", both=renamed(name), words=REFUSED, value=name)
GAIN: dict[str, Any] = {"fall": lambda u: 5 - course(u)}
for name in ("accuracy", "reward"):
    refuse(f"conditions: {name} as the loss", both=renamed(name), words=REFUSED, value=name, **GAIN)

five = seeds(*range(5))
add("seeds: one was dropped", seeds(0, 1, 2, 4), five, code="seeds_chosen")
add("seeds: chosen", seeds(3, 7, 11, 19, 23), five, code="seeds_chosen")
add("seeds: chosen, both sides", both=seeds(3, 7, 11, 19, 23), code="seeds_chosen")
add("seeds: one twice", seeds(0, 1, 2, 3, 3), five, code="seeds_repeat")

add("columns: norms a third larger", norms(1.3), norms(1), code="grad_norm")
add("columns: norms a third smaller", norms(0.7), norms(1), code="grad_norm")
add("columns: norms clipped", columns(grad_norm=1.0), norms(1))
fails("columns: training loss worse", beside(gap(0.02, column="train_loss")), beside())
swing = gap(lambda u: 0.012 * np.sin(6 * np.pi * u), column="train_loss")
fails("columns: training loss swings", beside(swing), beside())
fails("columns: train good, eval bad", beside(gap(0.02)), beside(), value="train_loss")

fails("absence: no loss at the end", put(np.nan, 0.6), both=lr)
fails("absence: no loss at the end of one run", put(np.nan, 0.6, of=1), both=lr)
refuse("absence: no loss at the end, both sides", both=chain(lr, put(np.nan, 0.6)))
refuse("absence: Trainer's 0.0", chain(norms(1), put(0, 0.7), put(np.nan, 0.7, column="grad_norm")), norms(1))
fails("absence: none before the last", put(np.nan, 0.5, 0.95), both=lr)

clustered = partial(add, n=10, K=10, cluster="machine")
m0, m1 = columns(machine="m0"), columns(machine="m1")
clustered("clusters: two machines, +1.4 %", chain(m1, gap(0.014)), m0, words=NO_PASS, between=5e-4)
clustered("clusters: two machines, wide spread", m1, m0, between=2e-3)
clustered("clusters: 2 and 2", machines(2, 2), machines(2, 0))
clustered("clusters: 3 and 3", machines(3, 3), machines(3, 0))

refuse("few: two digits", both=rounded(2), code="coarse_log")
refuse("few: two digits in the candidate", rounded(2), code="coarse_log")
LORA: dict[str, Any] = {"K": 18, "fall": lambda u: 0.925 * (1.017 - 0.017 * u)}
add("few: falls by 1.7 %", sd=1e-3, **LORA)
add("few: noise wider than the margin", sd=0.02)
for n in ((1, 1), (2, 2), (5, 2), (2, 5), (5, 1)):
    add(f"few: {n[0]} and {n[1]} runs", n=n, code="few_runs")
add("few: two values", K=2, code="few_values")
add("few: step 0 alone", both=cut(0), code="few_values")

fails_paired = partial(pair, words=NO_PASS)
fails_paired("paired: late climb", gap(lambda u: 0.06 * (u - 0.8), 0.8))
fails_paired("paired: alternating", alternating)
fails_paired("paired: training loss swings", swing)
fails_paired("paired: averaged", SMOOTH["averaged"])
fails_paired("paired: more spikes", spikes(0.05))
fails_paired("paired: train good, eval bad", gap(0.02), value="train_loss")
pair("paired: the base + 1e-5", copied(lambda y, i, g: y + 1e-5), refused=True)
pair("paired: the base times 1 + 1e-5", copied(lambda y, i, g: y * (1 + 1e-5)), refused=True)
pair("paired: the base's runs", copied(), refused=True)
pair("paired: one run twice", copied(of=2, own=True), refused=True)
pair("paired: a seed dropped", seeds(0, 1, 2, 4), words=REFUSED)
pair("paired: a seed twice", seeds(0, 1, 2, 3, 3), words=REFUSED)
pair("paired: seeds exchanged", seeds(1, 2, 3, 4, 0))
pair("paired: norms clipped", columns(grad_norm=1.0))
pair("paired: a broken seed of the base", base=put(np.nan, 0.9, of=1))
pair("paired: other torch", columns(torch="2"), columns(torch="1"), code="differs")
pair("paired: other sequence length", columns(seq_length=8192), columns(seq_length=4096), code="differs")
pair("paired: forward-filled", held)
pair("paired: one run ends early", cut(0.7, of=1))
pair("paired: two seeds", n=2, code="few_runs")

for K in (10, 40, 200):
    honest(f"honest: K = {K}", K=K)
honest("honest: 10 runs", n=10, K=10)
honest("honest: 3 and 10 runs", sd=3e-4, jitter=2e-4, n=(3, 10))
honest("honest: a gap of a tenth of the margin", gap(2.5e-4))
honest("honest: training loss", both=renamed("train_loss"), value="train_loss", **NOISY)
honest("honest: training loss, loss alone", both=renamed("loss"), **NOISY)
honest("honest: training loss, 3 %", margin=0.01, **NOISY | {"jitter": 0.03})
honest("honest: heavy tails", K=200, jitter=1e-3, heavy=True)
honest("honest: a spike at the last sample, K = 10", last_spike, K=10)
honest("honest: a spike at the last sample, K = 40", last_spike)
honest("honest: a spike at the base's last sample", base=last_spike, K=10)
honest("honest: spikes at other steps, K = 40", both=spikes(0.05))
honest("honest: spikes at other steps, K = 200", both=spikes(0.03, 0.05), K=200)
honest("honest: another window", window=3)
honest("honest: both smoothed", both=SMOOTH["smoothed"], K=200, jitter=2e-3)
honest("honest: four digits", both=rounded(4))
honest("honest: falls by 1.7 %, five digits", both=rounded(5), n=20, sd=2e-4, jitter=1e-4, **LORA)
honest("honest: both stop at the target", both=until(2.35), K=200, target=2.35)
honest("honest: a shorter schedule, declared", both=chain(cut(0.6), columns(max_steps=2400)))
honest("honest: evaluated a little before", put(lambda y, u, g: y - 5, column="step"), K=10)
honest("honest: precision", fp8, bf16)
honest(
    "honest: treatment",
    columns(fp8=1, recipe="row"),
    columns(fp8=0, recipe="none"),
    treatment=("fp8", "recipe"),
)
honest("honest: torch waived", columns(torch="2"), columns(torch="1"), differs=("torch",))
honest("honest: equal conditions", both=chain(lr, columns(torch="2", batch_size=512)))
named = columns(host=lambda u, i, g: f"h{g.random()}", time_s=lambda u, i, g: u * g.normal(99))
honest("honest: hosts and clocks", both=named)
speed = columns(tokens_per_s=lambda u, i, g: 90 + g.random(u.size))
honest("honest: another speed", chain(speed, gap(0.3, column="tokens_per_s")), speed)
honest("honest: seeds in a row", seeds(5, 6, 7, 8, 9), five)
honest("honest: the same seeds, other curves", both=five)
honest("honest: seeds by chance", both=columns(seed=lambda u, i, g: int(g.integers(10**5, 10**9))))
honest("honest: norms", both=norms(1))
honest("honest: a training loss beside", both=beside())
sparse = put(lambda y, u, g: np.where(np.arange(u.size) % 10, np.nan, y))
honest("honest: validations between steps", both=chain(lr, sparse), K=400)
honest("honest: 3 and 3 machines", machines(3, 3, 2e-4), machines(3, 0, 2e-4), n=9, cluster="machine")
honest("honest: machines of both sides", both=machines(3, 0, 2e-4), n=9, cluster="machine")
honest("honest: one machine a side", m1, m0, n=10, cluster="machine", between=5e-4)
honest("honest: paired", paired="seed")
honest("honest: paired, 10 seeds", paired="seed", n=10)
