"""Which GPU a question is about, and what stored runs hold of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness import store
from harness.machine import environment
from harness.machine.hardware import named, of_env
from harness.store.errors import UsageError
from harness.store.outside import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from harness.machine.hardware import Device


def gpu_and_rows(gpu: str, runs: Sequence[str]) -> tuple[Device, pd.DataFrame | None]:
    """The GPU that is named, that the runs are of, or that is here; and the rows of it, None where no run is named.

    Args:
        gpu: of the peak table; "": not named.
        runs: ids or folders of stored runs.

    Raises:
        UsageError: an unknown GPU, no such run or a damaged one, runs of other GPUs, or neither named and none here.
    """
    device = named(gpu) if gpu else None
    if not runs:
        if device is None:
            if not torch.cuda.is_available():
                raise UsageError("no GPU here; name one, gpu=h200, or a run of one, runs=RUN")
            name, device = here()
            if device is None:
                raise UsageError(
                    f"the peak of {name!r} is not known; name the nearest relative with gpu=, or add a literal to "
                    "harness/machine/hardware/devices.yaml"
                )
        return device, None
    frame = rows_of_runs(runs)
    envs = {text: parse(text) for text in frame["env"].dropna().unique()}
    found = {text: of_env(env) for text, env in envs.items()}
    names = ", ".join(sorted({str(env.get("gpu") or env.get("device")) for env in envs.values()}))
    if device is None:
        device = next((d for d in found.values() if d is not None), None)
        if device is None:
            raise UsageError(
                f"runs={','.join(runs)}: no row is of a GPU in the peak table (found: {names or 'none'}); "
                "name one with gpu=, or add an entry to harness/machine/hardware/devices.yaml"
            )
    frame = frame[frame["env"].isin([text for text, d in found.items() if d is device])]
    if frame.empty:
        raise UsageError(
            f"runs={','.join(runs)}: no row is of the {device.key} (found: {names or 'no row'}); "
            "leave runs= out, or name a run of that GPU"
        )
    return device, frame


def here() -> tuple[str, Device | None]:
    """The GPU of this process: its name, and its entry in the peak table."""
    found = environment.fingerprint("cuda")
    return str(found["gpu"]), of_env(found)


def rows_of_runs(runs: Sequence[str]) -> pd.DataFrame:
    """The rows of stored runs, of any machines."""
    frame = store.open_run([store.find_run(run) for run in runs])
    if frame.attrs["problems"]:
        raise UsageError(f"cannot read {frame.attrs['problems'][0]}; measure it again")
    return frame
