"""Settings of the reference job: the recipe of `sweeps/reference_7b.yaml`, and how long and on what it trains."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.cli.config import sweeps
from harness.store.errors import UsageError, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.store.case import Scalar

SWEEP = "reference_7b"
_OF_THE_SWEEP = ("model", "batch", "seq", "accumulation", "checkpointing", "weights")
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
            run in bf16 and one in FP8. Held-out batches are rounded up to a multiple of the ranks.
        ab_steps: of the block that pairs bf16 with FP8; 0: none.
        compile: the blocks, by torch.compile; default: on a GPU.
        checkpoint_s: seconds between two checkpoints.
        run_id: the same one continues a run.
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
    results_dir: str = "results"
    reports_dir: str = "reports"

    @property
    def same(self) -> dict[str, Any]:
        """What must not change when a run is continued."""
        others = ("results_dir", "reports_dir", "checkpoint_s", "data_path")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in others}


def read(words: Sequence[str]) -> Settings:
    """The settings of a command line.

    Args:
        words: `key=value`.

    Raises:
        UsageError: an unknown key or a value that is none, in one line.
    """
    known = {f.name: f for f in dataclasses.fields(Settings)}
    given = dict(_recipe())
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"{word!r} is not key=value")
        if key not in known:
            raise unknown("key", key, known)
        given[key] = value if known[key].type == "str" else yaml.safe_load(value)
    settings = Settings()
    for key, value in given.items():
        try:
            settings = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(settings), {key: value}))  # type: ignore[assignment]
        except OmegaConfBaseException as error:
            raise UsageError(f"{key}={value}: expected {known[key].type}") from error
    _check(settings)
    return settings


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
    ):
        if getattr(settings, name) < least:
            raise UsageError(f"{name}={getattr(settings, name)}: expected an integer of at least {least}")
    if settings.weights not in COMPUTE:
        raise unknown("weights", settings.weights, COMPUTE)
    if not settings.run_id:
        raise UsageError("run_id is not given: name the run, since the same name continues it (run_id=NAME)")
    if not settings.seeds:
        raise UsageError("seeds=[]: expected one or more, as in seeds=[0,1,2]")
