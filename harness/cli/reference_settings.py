"""Settings of the reference job: the recipe of `sweeps/reference_7b.yaml`, and how long and on what it trains."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli.config import sweeps
from harness.engine.run_folder import checked_run_id
from harness.store.errors import UsageError, unknown
from harness.training.ab.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.store.case import Scalar

SWEEP = "reference_7b"
_OF_THE_SWEEP = ("model", "batch", "seq", "accumulation", "checkpointing", "weights")
_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "bool | None": "true or false",
    "list[int]": "integers in brackets, [0,1,2]",
}
COMPUTE = {"bf16": "bf16", "fp32": "bf16_autocast"}  # of the suites that train, by masters


@dataclass
class Settings:
    """Keys of the command line.

    Attributes:
        model, batch, seq, accumulation, checkpointing, weights: as axes of suite `scale`; where left out those of
            `sweeps/reference_7b.yaml`, its first value each.
        recipe: of the FP8 arm.
        data, data_path: as in sweep=train.
        steps, lr, lr_warmup, eval_every, eval_batches, seeds: of the training runs, as in sweep=divergence; each seed is a
            run in bf16 and one in FP8. lr_warmup is 100, or a tenth of fewer than 1000 steps, unless given. Held-out batches are rounded up to a multiple of the ranks.
        ab_steps: of the block that pairs bf16 with FP8; 0: none.
        compile: the blocks, by torch.compile; default: on a GPU.
        checkpoint_s: seconds between two checkpoints.
        run_id: the same one continues a run.
        resume_anyway: continue with another torch, code, device or GPU; the report then says so.
    """

    run_id: str = ""
    model: str = ""
    batch: int = 0
    seq: int = 0
    accumulation: int = 0
    checkpointing: str = ""
    weights: str = ""
    recipe: str = "tensorwise"
    data: str = "stdlib"
    data_path: str = ""
    steps: int = 1000
    lr: float = 3e-4
    lr_warmup: int = 100
    eval_every: int = 100
    eval_batches: int = 16
    seeds: list[int] = field(default_factory=lambda: [0])
    ab_steps: int = 200
    compile: bool | None = None
    checkpoint_s: float = 600.0
    resume_anyway: bool = False
    results_dir: str = "results"
    reports_dir: str = "reports"

    @property
    def same(self) -> dict[str, Any]:
        """What must not change when a run is continued."""
        others = ("results_dir", "reports_dir", "checkpoint_s", "data_path", "resume_anyway")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in others}

    def axes(self, ranks: int, seed: int) -> dict[str, Any]:
        """A case of suite `divergence`: a training run of so many ranks in bf16 and in FP8."""
        chosen = (
            *("model", "data", "batch", "seq", "accumulation", "steps", "lr", "lr_warmup", "checkpointing"),
            *("weights", "eval_every"),
        )
        return {name: getattr(self, name) for name in chosen} | {"ranks": ranks, "seed": seed}

    def refuse_other_run(self, about: Mapping[str, Any], ranks: int) -> None:
        """Refuses to continue a run under other settings.

        Args:
            about: what its `_run.json` says; empty for a new run.
            ranks: of this job.

        Raises:
            UsageError: the first setting that differs.
        """
        mine = {**self.same, "ranks": ranks}
        before = {**about.get("settings", {}), "ranks": about.get("ranks")}
        changed = [name for name, value in mine.items() if about and before.get(name) != value]
        if changed:
            raise UsageError(
                f"run {self.run_id} has {changed[0]}={before.get(changed[0])}, asked for is {mine[changed[0]]}: continue it as "
                "it was, or take another run_id"
            )

    def check_ab_steps(self, arms: tuple[str, ...]) -> None:
        """Refuses an A/B block of these arms that is too short for an interval.

        Raises:
            UsageError: with the least number of steps.
        """
        try:
            if self.ab_steps:
                Plan(self.ab_steps, arms=arms)
        except UsageError as error:
            raise UsageError(str(error).replace("steps=", "ab_steps=")) from error


def read(words: Sequence[str]) -> Settings:
    """The settings of a command line.

    Args:
        words: `key=value`.

    Raises:
        UsageError: an unknown key or a value that is none, in one line.
    """
    known = {f.name: f for f in dataclasses.fields(Settings)}
    given: dict[str, Any] = dict(_recipe())
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is not key=value")
        if key not in known:
            raise unknown("key", key, known)
        try:
            given[key] = value if known[key].type == "str" else yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise _not_so(known[key], value) from error
    settings = Settings()
    for key, value in given.items():
        try:
            settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings), {key: value}))  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise _not_so(known[key], value) from error
    if "lr_warmup" not in given:
        settings.lr_warmup = min(settings.lr_warmup, settings.steps // 10)
    _check(settings)
    return settings


def _not_so(known: dataclasses.Field[Any], value: object) -> UsageError:
    return UsageError(f"{known.name}={value}: expected {_EXPECTED[str(known.type)]}")


def described() -> str:
    """The keys with their defaults, and where they are explained."""
    given = Settings(**_recipe())  # type: ignore[arg-type]
    lines = [f"  {name}={value}" for name, value in dataclasses.asdict(given).items()]
    head = "usage: torchrun ... -m harness.cli.reference_job run_id=NAME [key=value ...]; keys are those of sweep=divergence and sweep=scale"
    return "\n".join([head, *lines])


def _recipe() -> dict[str, Scalar]:
    axes = yaml.safe_load(sweeps()[SWEEP].read_text())["axes"]
    return {name: axes[name][0] for name in _OF_THE_SWEEP}


def _check(settings: Settings) -> None:
    for name, least in (
        ("batch", 1),
        ("seq", 1),
        ("accumulation", 1),
        ("steps", 1),
        ("ab_steps", 0),
        ("eval_every", 0),
        ("eval_batches", 0),
        ("lr_warmup", 0),
    ):
        if getattr(settings, name) < least:
            raise UsageError(f"{name}={getattr(settings, name)}: expected an integer of at least {least}")
    for name in ("lr", "checkpoint_s"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}={value}: expected a finite number above 0")
    if settings.lr_warmup >= settings.steps:
        raise UsageError(
            f"lr_warmup={settings.lr_warmup}: expected an integer from 0 to steps - 1 = {settings.steps - 1}"
        )
    if settings.weights not in COMPUTE:
        raise unknown("weights", settings.weights, COMPUTE)
    if not settings.run_id:
        raise UsageError("run_id is not given: name the run, since the same name continues it (run_id=NAME)")
    checked_run_id(settings.run_id)
    seeds = settings.seeds
    if not seeds or min(seeds) < 0 or len({*seeds}) < len(seeds):
        raise UsageError(
            f"seeds={seeds}: expected one or more different integers of at least 0, as in seeds=[0,1,2]"
        )
