"""A toy sweep whose arms write a line a call, importable by workers: python logged_calls.py LOG FOLDER runs it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toy import ToySuite, as_module, planned

from harness import store
from harness.engine.arm_process import Conditions
from harness.engine.bench import Setting
from harness.engine.executor import Place, RunOutcome, run
from harness.timing.rounds import TimingConfig
from harness.timing.workload import Numerics, Workload

if TYPE_CHECKING:
    from harness.engine.plan import SweepPlan
    from harness.store.case import Case

# A block is one call. Two calls of each arm come before the first round: both of the warm-up.
EACH = TimingConfig(
    min_rounds=6, max_rounds=6, min_samples=1, min_seconds=0.0, block_ms=0.1, checkpoint_s=0.0,
    warmup_min_iterations=1, warmup_min_seconds=0.0, warmup_max_seconds=0.1,
)  # fmt: skip
WARM_CALLS = 2


@dataclass(frozen=True)
class Called:
    """Builds an arm that logs its calls before it works."""

    log: Path
    name: str
    seconds: float = 0.02

    def __call__(self, case: Case) -> Workload:
        return Workload(run=self.run, check=lambda: Numerics({"sqnr_db": 28.5}))

    def run(self) -> None:
        with self.log.open("a") as file:
            file.write(self.name + "\n")
        time.sleep(self.seconds)


def plan(suite: ToySuite) -> SweepPlan:
    return planned(as_module(suite), {"n": [1]})


def sweep(suite: ToySuite, folder: Path, **changes: Any) -> RunOutcome:
    """Runs the toy's one case by a worker, with a snapshot after every round."""
    given = {"places": [Place(Conditions.here())]} | changes
    writer = store.RunWriter(folder, run_id="r", sweep="toy", env_id="e", env={}, about={})
    outcome = run(plan(suite), writer, Setting("cpu", EACH, control=False), **given)
    writer.close(outcome.state)
    return outcome


def logging_suite(log: Path, seconds: float = 0.02, other: type[Called] = Called) -> ToySuite:
    """Both arms log to one file."""
    return ToySuite(behaviour={"base": Called(log, "base", seconds), "other": other(log, "other", seconds)})


if __name__ == "__main__":
    import logged_calls  # under the name that workers import it by

    logged_calls.sweep(logged_calls.logging_suite(Path(sys.argv[1])), Path(sys.argv[2]))
