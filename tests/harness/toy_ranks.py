"""A trial suite whose arms do, in several ranks, what goes wrong in several ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from harness.machine import ranks
from harness.store.case import Case, Scalar
from harness.suites.parallel import not_finite
from harness.timing.workload import ArmInfo, Axis, Series, Trial, Unsupported

WORLD, TIMEOUT_S = 3, 3.0
FAULTS = ("killed", "hangs", "nan", "shapes")


def train(how: str, notes: str) -> list[float]:
    """Steps of a sharded layer with fewer rows than there are ranks; rank 1 does in the second one what `how` says."""
    rank = dist.get_rank()
    (Path(notes) / f"{how}-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 2, bias=False)  # rank 2 holds none of it
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.ones(4, 8)
        if rank == 1 and step == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(600)
            if how == "nan":
                x = x * float("nan")
            if how == "shapes":
                dist.all_reduce(torch.ones(5))
        elif how == "shapes" and step == 1:
            dist.all_reduce(torch.ones(4))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass
class ToyRanks:
    """Arm "fine" trains; the others fail as their name says."""

    notes: str
    AXES: Mapping[str, Axis] = field(
        default_factory=lambda: {"number": Axis("of the case", minimum=0, default=0)}
    )
    ARMS: Mapping[str, ArmInfo] = field(
        default_factory=lambda: {name: ArmInfo(name) for name in ("fine", *FAULTS, "fine_again")}
    )

    def points(
        self, shapes: Sequence[str], axes: Mapping[str, Sequence[Scalar]], model: Any
    ) -> list[dict[str, Scalar]]:
        return [{} if "number" in axes else {"number": 0}]

    def unsupported(self, case: Case, arm: str, device: str) -> Unsupported | None:
        return None

    def work(self, case: Case) -> float:
        return 1.0

    def trial(
        self, case: Case, arm: str, device: str, workspace: Path, on_step: Callable[[int, int], None]
    ) -> Trial:
        every = ranks.run(train, WORLD, arm, self.notes, timeout_s=TIMEOUT_S)
        if fault := not_finite(every):
            return Trial((), {}, fault)
        return Trial((Series("loss", tuple(every[0]), (0, 1, 2)),))
