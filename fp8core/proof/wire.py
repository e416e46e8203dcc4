"""What goes over the wire: every collective that this process takes part in, with dtype and size.

    with count_collectives() as counts:
        step()
    counts.bytes["all_gather", "uint8"]       # FP8 codes travel as uint8, see `fp8core.distributed.fsdp`
    counts.calls["reduce_scatter", "float32"]
    counts.scale_reductions

Counted at the operators `c10d::*`, through which PyTorch hands each tensor to NCCL, gloo or a fake process group: the
calls of FSDP2, DDP's buckets, pipeline sends, functional collectives and those that a DTensor makes inside of one of
its own operators. What compiled code sends is seen only where the compiler leaves the call to eager PyTorch, so a count
belongs around an eager step.
"""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp8core.observers import SCALE_REDUCTIONS
from fp8core.proof.recorder import OperatorRow, Recorder, Sent

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Collectives:
    """What one rank gave to collectives.

    Attributes:
        rows: of a step.
        scale_reductions: how many of the all-reduces found scales of sharded weights (`fp8core.distributed.weight_scales`).
    """

    rows: list[OperatorRow] = field(default_factory=list)
    scale_reductions: int = 0

    def scales_reduced(self) -> None:
        """The all-reduce just made was for scales."""
        self.scale_reductions += 1

    @property
    def sent(self) -> list[Sent]:
        """In the order of the calls."""
        return [row.sent for row in self.rows if row.sent is not None]

    @property
    def calls(self) -> Counter[tuple[str, str]]:
        """(collective, dtype) -> calls."""
        return Counter((each.collective, each.dtype) for each in self.sent)

    @property
    def bytes(self) -> Counter[tuple[str, str]]:
        """(collective, dtype) -> bytes."""
        total: Counter[tuple[str, str]] = Counter()
        for each in self.sent:
            total[each.collective, each.dtype] += each.size_bytes
        return total

    def of(self, collective: str) -> dict[str, int]:
        """dtype -> bytes of one collective."""
        return {dtype: size for (name, dtype), size in self.bytes.items() if name == collective}


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Counts this process's collectives while the block runs, backward passes included; blocks may be nested."""
    with Recorder(compiled=True, collectives=True) as recorder:
        counts = Collectives(recorder.rows)
        SCALE_REDUCTIONS.append(counts.scales_reduced)
        try:
            yield counts
        finally:
            SCALE_REDUCTIONS.remove(counts.scales_reduced)
