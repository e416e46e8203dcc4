"""Places: the devices that a sweep works on, and the processes that do it there.

On a CPU there is one place. Of GPUs there is one for each that `devices=` names, whose workers see that GPU alone, by its
UUID: an index means another GPU in another process, a UUID never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.machine import environment
from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.engine.executor import Place
    from harness.engine.settings import SweepConfig

MEMORY_SHARE = (
    0.9  # of what is free when a sweep starts on a CPU: all of its workers together may ask for so much
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process can see."""

    index: int
    uuid: str


def gpus(cuda: Any = None) -> list[Gpu]:
    """The visible GPUs, in the order of their indices; no context is made on any."""
    if cuda is None:
        import torch

        cuda = torch.cuda
    properties = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
    return [Gpu(i, str(getattr(p, "uuid", f"number-{i}"))) for i, p in enumerate(properties)]


def chosen(devices: str | None, device: str, visible: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of a command line: those that `devices=` names, else the first.

    Raises:
        UsageError: `devices=` on a CPU, or of a GPU that is not there.
    """
    if device == "cpu":
        if devices is not None:
            raise UsageError(
                f"devices={devices} chooses among GPUs and device=cpu has none; leave it out (runs of training are "
                "side by side with workers=N)"
            )
        return []
    if devices is None:
        return list(visible[:1])
    if devices == "all":
        return list(visible)
    words = [word.strip() for word in devices.strip("[]").split(",")]
    known = {str(gpu.index): gpu for gpu in visible}
    for word in words:
        if word not in known:
            raise UsageError(
                f"devices={devices}: expected all, or numbers of visible GPUs ({', '.join(known) or 'there are none'})"
            )
    return [known[word] for word in dict.fromkeys(words)]


def of_command(config: SweepConfig) -> list[Gpu]:
    """The GPUs of a composed command line, see `chosen`."""
    return chosen(config.devices, config.device, gpus() if config.device == "cuda" else ())


def places_for(
    config: SweepConfig, chosen_gpus: Sequence[Gpu], facts: Mapping[str, Any], lanes: int
) -> list[Place]:
    """Where the workers of a sweep compute; none with `isolate=false`.

    Args:
        config: of the command line.
        chosen_gpus: of `chosen`; empty on a CPU.
        facts: the environment of the run.
        lanes: workers at once.
    """
    if not config.isolate:
        return []
    from harness.engine.arm_process import Conditions  # torch: a plan needs none
    from harness.engine.executor import Place

    if config.device == "cpu":
        from harness.timing.device_memory import free_bytes

        limit = config.case_memory_gib
        most = MEMORY_SHARE * free_bytes("cpu") / lanes if limit is None else limit * 2**30
        return [Place(Conditions.here(int(most)))]
    if len(chosen_gpus) == 1 and config.devices is None:
        return [Place(Conditions.here())]
    found = []
    for gpu in chosen_gpus:
        own = environment.of_gpu(facts, gpu.index)
        seen = {"CUDA_VISIBLE_DEVICES": f"GPU-{gpu.uuid.removeprefix('GPU-')}"}
        found.append(Place(Conditions.here(variables=seen), environment.env_id(own), own, gpu.uuid))
    return found


def check(config: SweepConfig) -> None:
    """Refuses keys of a command line that contradict each other.

    Raises:
        UsageError: which, and the way out.
    """
    for key in ("case_timeout_s", "case_wall_s", "case_memory_gib"):
        value = getattr(config, key)
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(
                f"{key}={value:g}: expected a finite number above 0; null leaves the choice here"
            )
        if value is not None and not config.isolate:
            raise UsageError(f"{key}={value:g} limits worker processes, of which isolate=false starts none")
    if config.case_memory_gib is not None and config.device != "cpu":
        raise UsageError(
            f"case_memory_gib={config.case_memory_gib:g} limits the memory of device=cpu; a GPU ends a case that asks "
            "for more than it has by itself"
        )
    if config.workers is not None and config.workers < 1:
        raise UsageError(f"workers={config.workers}: expected an integer of at least 1")
    if not config.isolate:
        for key in ("workers", "devices"):
            if getattr(config, key) not in (None, 1):
                raise UsageError(
                    f"{key}={getattr(config, key)} needs worker processes, of which isolate=false starts none; leave one out"
                )
