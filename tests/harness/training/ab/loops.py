"""A small training loop that a trial is tried in, and a clock whose times are planted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8core import update_scales


class Net(nn.Module):
    """Two Linear layers of Llama's shape in small; returns (output, loss)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.down(self.dropout(torch.relu(self.up(x))))
        return y, (y - x).square().mean()


class Loop:
    """A loop of one's own: model, optimizer, schedule and batches that depend on the turn alone."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model: Any = Net(dropout)
        self.rows, self.turn = 16, 0
        self.make_optimizer()

    def make_optimizer(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [10, 90], 0.9)

    def batch(self) -> Tensor:
        return torch.randn(self.rows, 32, generator=torch.Generator().manual_seed(self.turn))

    def step(self) -> None:
        _, loss = self.model(self.batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_scales(self.model)
        self.scheduler.step()
        self.turn += 1

    def run(self, trial: Any, most: int = 10**6, *, before: Any = None, inside: Any = None) -> Any:
        """Steps until the trial is done, with what comes before each step and within it; the trial's result."""
        while not trial.done and self.turn < most:
            if before:
                before()
            with trial.step():
                if inside:
                    inside()
                self.step()
        return trial.result()

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def state(self) -> list[Any]:
        """All that a later step depends on."""
        moments = [v.clone() for s in self.optimizer.state.values() for v in s.values()]
        return [*self.weights(), *moments, str(self.scheduler.state_dict()), torch.get_rng_state()]


def equal(mine: list[Any], theirs: list[Any]) -> bool:
    """Bit for bit."""
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(mine, theirs, strict=True)
    )


def planted(trial: Any, factor: float = 1.0, **ms: float) -> Any:
    """A trial that was just made, by whose clock FP8's steps take 80 ms and bf16's 100, or what is given by arm."""
    times = {"base": 100.0, "base:again": 100.0, "fp8": 80.0} | ms
    trial._clock = PlantedClock(lambda: times[trial._turn.arm] * factor)
    return trial


class PlantedClock:
    """Times that the test decides: each step takes what `step_ms()` says, and 1 ms lies between steps."""

    method = "planted"

    def __init__(self, step_ms: Any) -> None:
        self.now, self.inside, self.step_ms = 0.0, False, step_ms

    def mark(self) -> float:
        self.now += self.step_ms() if self.inside else 1.0
        self.inside = not self.inside
        return self.now

    def settle(self) -> None:
        pass

    def ms(self, start: float, end: float) -> float:
        return end - start
