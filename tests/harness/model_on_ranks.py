"""A user's model that does on rank 1 what the environment variable RANK_1 says."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from model_for_training import Regression, batch  # noqa: F401 - a batch function by name
from torch import Tensor, nn
from torch.nn import functional

SLEEP_S = 0.15
CHECKED = 10  # FP8 passes before the timed steps, at most: two of estimates, the first step, the proof, what is counted
_calls: list[None] = []


class OnRanks(Regression):
    """Rank 1 is killed in its FP8 steps, hangs in them, stays in high precision there, or is slow in all steps."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        how = os.environ.get("RANK_1", "") if dist.is_initialized() and dist.get_rank() == 1 else ""
        if how == "slow":
            time.sleep(SLEEP_S)
        if type(self.hidden) is not nn.Linear:
            _calls.append(None)
            if how == "killed" or (how == "killed later" and len(_calls) > CHECKED):
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(600)
            if how == "bf16":
                inner = torch.relu(functional.linear(x, self.hidden.weight, self.hidden.bias))
                return (functional.linear(inner, self.out.weight, self.out.bias) - y).square().mean()
        return super().forward(x, y)


def build() -> nn.Module:
    return OnRanks(32)
