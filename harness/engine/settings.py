"""Settings: a composed command line as typed values, without Hydra. The command line makes them; plan and engine read them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.timing.config import TimingConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MISSING = "???"  # as OmegaConf marks what must be given
# Keys that decide nothing about what a row says; every other one stays as it was where a run is continued. What lies at
# data_path and ceilings is known by its sha256, and `harness.engine.resume` refuses another.
FREE = {
    "workers", "devices", "isolate", "budget_s", "case_timeout_s", "case_wall_s", "case_memory_gib", "results_dir",
    "reports_dir", "report", "quiet", "log_level", "data_path", "ceilings", "config_dir", "train.judge",
}  # fmt: skip
# Keys that belong to one command and are not taken over from the one before.
OF_ONE_COMMAND = {"resume", "run_id", "shard", "dry_run", "resume_anyway", "trust", "turns"}


@dataclass
class PartConfig:
    """One part of a sweep: a suite with its axes and arms."""

    suite: str = MISSING
    axes: dict[str, Any] = field(default_factory=dict)
    shapes: Any = field(default_factory=list)  # names of shape sets, or "from_model"
    arms: list[str] = field(default_factory=list)  # empty: all arms of the suite


@dataclass
class TrainConfig:
    """Keys of the suites that train."""

    mixed_precision: str | None = None  # bf16 | fp8: which arms run
    recipe: str | None = None  # with fp8; default tensorwise
    judge: bool | None = None  # false: store the curves without a verdict, from any number of seeds and steps
    profile: bool | None = None  # a trace of the steps from profile_start to profile_end
    profile_start: int | None = None
    profile_end: int | None = None


@dataclass
class SweepConfig:
    """The whole of a command line. A sweep is one suite, or several `parts`."""

    name: str = MISSING
    question: str = ""
    suite: str | None = None
    axes: dict[str, Any] = field(default_factory=dict)
    shapes: Any = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    peers: list[str] | None = None  # of harness.peers: their arms, and all that are ours; default: every peer
    cases: list[str] = field(default_factory=list)  # ids; empty: all cases of the sweep
    parts: dict[str, PartConfig] = field(default_factory=dict)
    model: Any = None  # a name of harness.training.models, the path of a config.json, or `model._target_=my.module.build` with its arguments
    data: str | None = None  # a name of harness.training.data
    data_path: str | None = None
    ceilings: str | None = None  # id or folder of a run of sweep=ceilings, for axes.convert=advised
    schedule: str | None = None  # of the precision, see fp8core.schedule
    train: TrainConfig = field(default_factory=TrainConfig)
    ranks: int | None = None  # processes of the suites that run in several: short for axes.ranks
    workers: int | None = None  # training runs at once; default: one a core on a CPU, one on a GPU
    timing: TimingConfig = field(default_factory=TimingConfig)
    rounds: int | None = None  # exactly this many rounds; otherwise timing.min_rounds and what converges
    seed: int = 0
    device: str = "auto"
    warm_compile: bool = (
        True  # compile each training step once more, from the caches that the first time filled
    )
    control: bool = True  # time each baseline twice (A/A): the noise floor of each case
    budget_s: float | None = None  # start no case after this many seconds; the rest are rows that say so
    isolate: bool = True  # measure in worker processes, which a case may take with it; false: all in this one
    devices: str | None = (
        None  # all, or numbers of GPUs: a worker each; default: the first one that is visible
    )
    case_timeout_s: float | None = (
        None  # a worker may be silent for so long; default: see harness.engine.executor
    )
    case_wall_s: float | None = None  # and may have a case for so long; default: no limit
    case_memory_gib: float | None = None  # that a case may ask for on a CPU; default: nearly all that is free
    resume: str | None = None  # run id: run only what that run lacks; last: the newest one, if there is any
    run_id: str | None = None  # the run to start, or to go on with: common to shards that start apart
    shard: str | None = None  # i/n: this share of the cases, see harness.engine.shards
    report: bool = True  # write the HTML report at the end
    quiet: bool = False  # no progress; errors and the last lines remain
    turns: int | None = None  # of a gate: the pipe that gives them, see harness.engine.turns
    log_level: str = "INFO"  # of _run.log in the run's folder: DEBUG | INFO | WARNING | ERROR
    resume_anyway: bool = (
        False  # though code or environment have changed; the new rows say what they were made with
    )
    trust: bool = False  # take code and folders that a file from elsewhere names: of a stored run, a sweep that is tried
    dry_run: bool = False
    config_dir: str | None = None  # a folder with sweeps of your own; see harness.cli.habits
    results_dir: str = "results"
    reports_dir: str = "reports"

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SweepConfig:
        """The settings that plain values are, those that are not named by default; `plain` is the way back."""
        parts = {name: PartConfig(**part) for name, part in plain.get("parts", {}).items()}
        train, timing = TrainConfig(**plain.get("train", {})), TimingConfig(**plain.get("timing", {}))
        return cls(**{**plain, "parts": parts, "train": train, "timing": timing})

    def plain(self) -> dict[str, Any]:
        """Plain values by key, as `_run.json` stores them."""
        return dataclasses.asdict(self)

    @property
    def suites(self) -> set[str | None]:
        """Suites that it names."""
        return {self.suite, *(part.suite for part in self.parts.values())}


def deciding(plain: Mapping[str, Any]) -> dict[str, Any]:
    """What decides what a run measures, by the key of a command line that sets it (`axes.M`, `timing.min_rounds`).

    Args:
        plain: values as `SweepConfig.plain` has them; a key that is left out has its default.
    """
    every = {**dict(_by_key(SweepConfig().plain())), **dict(_by_key(plain))}
    return {k: v for k, v in every.items() if k not in FREE | OF_ONE_COMMAND | {"name", "question"}}


def _by_key(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield key, value
        return
    for name, below in value.items():
        yield from _by_key(below, f"{key}.{name}".lstrip("."))
