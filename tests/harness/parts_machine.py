"""A GPU and a clock made up for the tests of a sweep of sweeps."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import store
from harness.cli import parts as whole_module
from harness.cli.config import load
from harness.cli.parts import Whole
from harness.engine.parts import CUT, Part, Progress, parts_of
from harness.judge.smoke import KERNELS, LAYERS
from harness.store.compare import against, rows_of
from harness.store.measurement import Measurement

SLOT_S = 510


BUILT = 0.5  # of a part's time, before the first round


STEP_MS = {"bf16_eager": 155.0, "tensorwise_eager": 120.0, "bf16_compile": 140.0, "tensorwise_compile": 100.0}


PARTS = parts_of(load(["sweep=gpu"], lambda device: device).config, whole_module.NEEDS)


PART = {part.name: part for part in PARTS}


class Machine:
    """A GPU on which every part takes `factor` times its estimate, and its rounds come one by one.

    Args:
        factor: of every part's time.
        broken: kernels and recipes that fail when they are checked.
        dies: what the sweep of the part `eager` raises after its first round.
        raises: parts whose sweep raises before it has stored anything.
    """

    def __init__(
        self,
        factor: float = 1.0,
        broken: Sequence[str] = (),
        dies: type[BaseException] | None = None,
        raises: Sequence[str] = (),
    ) -> None:
        self.factor, self.broken, self.dies, self.raises = factor, broken, dies, raises
        self.now = 0.0
        self.begun: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.timeouts: dict[str, float] = {}

    def clock(self) -> float:
        return self.now

    def measure(self, words: Sequence[str], timeout_s: float) -> int:
        part = PART[said(words, "run_id").removeprefix("r-")]
        self.begun.append(part.name)
        self.words[part.name], self.timeouts[part.name] = list(words), timeout_s
        if part.name in self.raises:
            raise RuntimeError("a fault of the harness")
        ends, total = self.now + timeout_s, self.factor * (part.estimate_s or 0)
        folder = Path(said(words, "results_dir")) / part.sweep / said(words, "run_id")
        made = store.RunWriter(folder, run_id=folder.name, sweep=part.sweep, env_id="e", env={}, about={})
        wanted = int(said(words, "rounds") or 1)
        whole = part.overrides.get("rounds", 1)  # a part that is tried again has fewer rounds, and takes less
        arms = said(words, "arms").strip("[]").split(",") if said(words, "arms") else ["a"]
        if left_out := said(words, "without"):
            arms = [arm for arm in arms if arm not in left_out.strip("[]").split(",")]
        done = self.now + total * (BUILT + (1 - BUILT) * wanted / whole)
        begins = self.now + total * BUILT
        round_s = (done - begins) / wanted
        finished = max(0, min(wanted, int((ends - begins) / round_s + 1e-9)))
        if self.dies is not None and part.name == "eager":
            finished = 1
        whole_case = finished == wanted
        if finished:
            (made.append if whole_case else made.checkpoint)(self.rows(part, arms, finished, whole_case))
        if self.dies is not None and part.name == "eager":
            raised, self.dies = self.dies, None
            raise raised
        self.now = done if whole_case else ends
        made.close("finished" if whole_case else "interrupted")
        return 0 if whole_case else CUT

    def rows(self, part: Part, arms: Sequence[str], count: int, whole: bool) -> list[Measurement]:
        if part.name == "smoke":
            return self.smoke()
        suite = {"train": "train", "cast": "cast"}.get(part.sweep, "codes")
        found = []
        for arm in arms:
            ms = STEP_MS.get(arm, {"copy": 0.09, "fused": 0.08}.get(arm, 1.0))
            samples = tuple(ms * (1 + 0.001 * math.sin(i + len(arm))) for i in range(count))
            moved = {"copy": 4.0, "read": 2.0}.get(arm, 3.0) * 16384 * 4096
            axes = {"model": "llama3_8b", "layers": 4} if suite == "train" else {"M": 16384, "K": 4096}
            found.append(Measurement(
                suite, "c1", arm, json.dumps(axes), "time_ms", "ok" if whole else "partial",
                reason="" if whole else f"partial: {count} of at least {part.overrides.get('rounds')} rounds, cut", regime="isolated",
                samples=samples, rounds=tuple(range(count)), bytes_moved=moved, flops={"bf16": 1e15},
            ))  # fmt: skip
        return found

    def smoke(self) -> list[Measurement]:
        found = []
        for name in ("amax", "cast", "cast_both"):
            bad = name in self.broken
            found.append(Measurement(
                KERNELS, name, "bf16", json.dumps({"kernel": name}), "mismatches", "failed" if bad else "ok",
                reason="7 of 8 elements differ" if bad else "", samples=() if bad else (0.0,),
            ))  # fmt: skip
        for name, operators in (("tensorwise", ("amax", "cast_both")), ("rowwise", ("cast_rowwise_both",))):
            bad = name in self.broken
            found.append(Measurement(
                LAYERS, "l", name, "{}", "sqnr_db", "failed" if bad else "ok",
                reason="FP8 NOT verified" if bad else "", samples=() if bad else (28.0,),
                resolved={"operators": operators},
            ))  # fmt: skip
        return found


def said(words: Sequence[str], key: str) -> str:
    return next((word.partition("=")[2] for word in reversed(words) if word.startswith(f"{key}=")), "")


def session(
    tmp_path: Path, machine: Machine, device: str = "cuda", text: str = "input.txt", budget: float = SLOT_S
) -> Whole:
    """What a command that is given again finds: all that it knows of the slots before stands in `_run.json`."""
    folder = tmp_path / "results" / "gpu" / "r"
    words = ["sweep=gpu", f"device={device}", f"reports_dir={tmp_path / 'out'}", f"budget_s={budget}"]
    if text:
        words.append(f"data_path={tmp_path / text}")
    about = {"parts": store.read_about(folder).get("parts", {})}
    writer = store.RunWriter(folder, run_id="r", sweep="gpu", env_id="e", env={}, about=about)

    def measure(words: Sequence[str], seconds: float) -> int:
        return whole_module._isolated(lambda words: machine.measure(words, seconds), words)

    return Whole(load(words, lambda asked: asked), folder, writer, measure, machine.clock)


def ratio(tmp_path: Path, suite: str, arm: str, other: str) -> dict[str, Any]:
    """Ratio of two arms in the gathered rows, finished rounds of cut cases included."""
    rows = store.read(tmp_path / "out" / "r.parquet")
    found = rows_of(against(rows[rows["suite"] == suite], arm, other, partial=True))
    return next(r for r in found if not math.isnan(r["speedup"]))


def done_but(whole: Whole, *names: str) -> None:
    """A sweep that has all but these parts behind it."""
    whole.state |= {p.name: Progress(done=True, ok=True, tries=1) for p in PARTS if p.name not in names}
