"""The table of what Inductor's kernels move, and the page that holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from inductor.schedule import generated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inductor.schedule import Kernel

HEADER = (
    "case", "library", "recipe", "kernels", "input B", "weight B", "grad_output B", "mean B", "amax fused", "cast fused",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Counts:
    """One arm of a case, beside the same case in bf16.

    Attributes:
        kernels: that Inductor generated.
        more_kernels: than in bf16.
        bytes_per_element: of each tensor of the Linear, beyond what bf16 moves.
        mean: bytes beyond bf16 over the elements of the three tensors.
        amaxes, amaxes_read_back: kernels that take a maximum over a whole tensor; those that read it from memory although
            another generated kernel had it on chip.
        casts, casts_read_back: kernels that write codes, likewise.
    """

    kernels: int
    more_kernels: int
    bytes_per_element: Mapping[str, float]
    mean: float
    amaxes: int
    amaxes_read_back: int
    casts: int
    casts_read_back: int


def counts(kernels: Sequence[Kernel], bf16: Sequence[Kernel], elements: Mapping[str, int]) -> Counts:
    """What an arm does beyond bf16.

    Args:
        kernels: of the arm, forward and backward.
        bf16: of the same case without FP8.
        elements: of each tensor of the Linear.
    """
    ours, theirs = generated(kernels), generated(bf16)
    least = min(elements.values())
    whole = [k for k in ours if any(a.elements >= least for a in k.reads)]
    amaxes, casts = [k for k in whole if k.takes_maximum], [k for k in whole if k.casts]
    total = sum(k.moved for k in ours) - sum(k.moved for k in theirs)
    return Counts(
        kernels=len(ours),
        more_kernels=len(ours) - len(theirs),
        bytes_per_element={
            name: (sum(k.moved_of(n) for k in ours) - sum(k.moved_of(n) for k in theirs)) / n
            for name, n in elements.items()
        },
        mean=total / sum(elements.values()),
        amaxes=len(amaxes),
        amaxes_read_back=sum(k.reads_back(least) for k in amaxes),
        casts=len(casts),
        casts_read_back=sum(k.reads_back(least) for k in casts),
    )


def row(case: str, library: str, recipe: str, has_producer: bool, found: Counts) -> tuple[str, ...]:
    """One line of the table."""
    by_tensor = (f"{found.bytes_per_element[t]:.2f}" for t in ("input", "weight", "grad_output"))
    return (
        case,
        library,
        recipe,
        f"{found.kernels} (+{found.more_kernels})",
        *by_tensor,
        f"{found.mean:.2f}",
        _fused(found.amaxes, found.amaxes_read_back, has_producer),
        _fused(found.casts, found.casts_read_back, has_producer),
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = [HEADER, ["---"] * 3 + ["---:"] * (len(HEADER) - 5) + ["---"] * 2, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fused(kernels: int, read_back: int, has_producer: bool) -> str:
    if not kernels:
        return "none needed"
    if not has_producer:
        return f"no neighbour ({kernels})"
    return f"yes ({kernels})" if not read_back else f"no: {read_back} of {kernels} read back"
