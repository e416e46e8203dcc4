"""A trial suite of whole numbers, to drive the executor's runs, here and in processes of their own, in milliseconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.timing.workload import ArmInfo, Axis, Series, TrialOutcome, Unsupported

if TYPE_CHECKING:
    from harness.store.case import Case, Scalar

STEPS = 5


@dataclass
class ToyTrials:
    """Each run counts to five and keeps its place in a file; `acts` says what else an arm does, at step 3.

    raise    a RuntimeError
    die      the process kills itself, once: a file shows that it has been there
    die N    likewise, N times over
    stop     Ctrl-C
    wait     sleeps for a tenth of a second a step
    hang     says nothing for ten minutes
    nan      the curve ends
    nothing  there is no curve
    """

    acts: Mapping[str, str] = field(default_factory=dict)
    AXES: Mapping[str, Axis] = field(
        default_factory=lambda: {
            "seed": Axis("a seed", minimum=0, default=0),
            "model": Axis("a name", kind="str", default="m"),
            "schedule": Axis("a text", kind="str", default=""),
        }
    )
    ARMS: Mapping[str, ArmInfo] = field(
        default_factory=lambda: {
            "base": ArmInfo("the control"),
            "tensorwise": ArmInfo("a candidate", "base", "tensorwise"),
            "rowwise": ArmInfo("another", "base", "rowwise"),
            "broken": ArmInfo("must fail", "base", "any"),
        }
    )
    refuses: Mapping[str, Unsupported] = field(default_factory=dict)

    def points(
        self, shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
    ) -> list[dict[str, Scalar]]:
        return [{name: axis.default for name, axis in self.AXES.items() if name not in axes}]

    def unsupported(self, case: Case, arm: str, device: str) -> Unsupported | None:
        return self.refuses.get(arm)

    def work(self, case: Case) -> float:
        return 1.0

    def trial(
        self, case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]
    ) -> TrialOutcome:
        workspace.mkdir(parents=True, exist_ok=True)
        place = workspace / "place"
        begun = int(place.read_text()) if place.exists() else 0
        act, values = self.acts.get(arm, ""), [float(case.integer("seed")) for _ in range(begun)]
        if act == "nothing":
            return TrialOutcome((), {"threads": 1}, "nothing was trained: loss is nan at step 0")
        for step in range(begun, STEPS):
            if step == 3 and act == "raise":
                raise RuntimeError("boom")
            if step == 3 and act.startswith("die"):
                deaths = workspace / "deaths"
                died = len(deaths.read_text()) if deaths.exists() else 0
                if died < int(act.partition(" ")[2] or 1):
                    deaths.write_text("x" * (died + 1))
                    os.kill(os.getpid(), signal.SIGKILL)
            if step == 3 and act == "stop":
                raise KeyboardInterrupt
            if step == 3 and act == "nan":
                break
            if act == "wait":
                time.sleep(0.1)
            if step == 3 and act == "hang":
                time.sleep(600)
            values.append(float(case.integer("seed")))
            place.write_text(str(step + 1))
            on_step(step + 1, STEPS)
        steps = tuple(range(len(values)))
        return TrialOutcome(
            (Series("loss", tuple(values), steps), Series("amax", tuple(values), steps, "layers.0:input")),
            {"begun": begun, "stopped": "loss is nan" if act == "nan" else ""},
        )
