"""Small training loops that a trial is tried in, and a clock whose times are planted."""

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

    def __init__(self, *, dropout: float = 0.0, rows: int = 16, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net(dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10, 0.9)
        self.rows, self.turn = rows, 0
        self.random = torch.get_rng_state()

    def batch(self) -> Tensor:
        return torch.randn(self.rows, 32, generator=torch.Generator().manual_seed(self.turn))

    def step(self, batch: Tensor | None = None) -> None:
        _, loss = self.model(self.batch() if batch is None else batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_scales(self.model)
        self.scheduler.step()
        self.turn += 1

    def run(
        self, trial: Any, most: int = 10**6, *, before: Any = lambda: None, inside: Any = lambda: None
    ) -> Any:
        """Steps until the trial is done, with what comes before each step and within it; the trial's result."""
        while not trial.done and self.turn < most:
            before()
            with trial.step():
                inside()
                self.step()
        return trial.result()

    def state(self) -> list[Any]:
        """All that a later step depends on."""
        moments = [v for s in self.optimizer.state.values() for v in s.values()]
        return [*self.model.parameters(), *moments, self.scheduler.state_dict(), torch.get_rng_state()]


def equal(mine: list[Any], theirs: list[Any]) -> bool:
    """Bit for bit."""
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(mine, theirs, strict=True)
    )


def planted(trial: Any, fp8_ms: float = 80.0, base_ms: float = 100.0, gap_ms: float = 1.0) -> Any:
    """A trial that was just made, by whose clock FP8's steps take another time than bf16's."""
    trial._clock = PlantedClock(lambda count: fp8_ms if trial._turn.is_fp8 else base_ms, gap_ms)
    return trial


class PlantedClock:
    """Times that the test decides: each step takes what `step_ms(trial)` says, with `gap_ms` between steps."""

    method = "planted"

    def __init__(self, step_ms: Any, gap_ms: float = 1.0) -> None:
        self.now, self.inside, self.step_ms, self.gap_ms = 0.0, False, step_ms, gap_ms
        self.count = 0

    def mark(self) -> float:
        self.now += self.step_ms(self.count) if self.inside else self.gap_ms
        self.count += self.inside
        self.inside = not self.inside
        return self.now

    def settle(self) -> None:
        pass

    def ms(self, start: float, end: float) -> float:
        return end - start
