"""A clock that says what a test made up, and products that note who multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from recipes import changed

from fp8core import BACKENDS, E4M3FN, quantize
from fp8core.gemm.backend import Backend
from fp8core.gemm.fastest import Fastest, Product
from fp8core.kernels import tuning

NAMES = ("torch", "triton")
TYPES = E4M3FN.dtype, E4M3FN.dtype
SMALL = Product(32, 64, 48, *TYPES, "rowwise", torch.bfloat16, False, torch.device("cpu"))  # of `operands()`

Run = Callable[[], object]


class Clock:
    """Answers the time made up for whoever multiplied in the closure; notes who ran, timed or not."""

    def __init__(self, **times: float) -> None:
        self.times, self.ran = times, list[str]()
        self.timed = 0

    def __call__(self, run: Run) -> float:
        run()
        self.timed += 1
        return self.times[self.ran[-1]]

    def watched(self, name: str, **attributes: Any) -> Backend:
        """The backend of that name, whose products are noted."""
        real = changed(BACKENDS[name], **attributes)

        def matmul(*operands: Any) -> torch.Tensor:
            self.ran.append(name)
            return real.matmul(*operands)

        return changed(real, matmul=matmul)

    def choosing(self, *, measures: bool = True, **attributes: dict[str, Any]) -> Fastest:
        """A new choice, as a new process has it."""
        tuning.forget()
        candidates = [self.watched(name, **attributes.get(name, {})) for name in NAMES]
        return Fastest(candidates, self if measures else None)


def operands(
    M: int = 32, K: int = 64, N: int = 48, granularity: Any = "rowwise", out: torch.dtype = torch.bfloat16
) -> tuple[Any, ...]:
    a = quantize(torch.randn(M, K), E4M3FN, granularity, dim=1)
    b = quantize(torch.randn(N, K), E4M3FN, granularity, dim=1).t()
    return a.qdata, b.qdata, a.scale_inv, b.scale_inv, out, False
