"""One launch of a Triton kernel as data: what is compiled, and what it is called with."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """A specialisation of a kernel with the arguments of one call.

    Attributes:
        module: import path of the kernel's module, or a file ending in ".py".
        kernel: name of the `triton.jit` function in it.
        signature: type of each parameter in Triton's words ("*bf16", "i32", "constexpr", "tensordesc<...>").
        constants: values of the "constexpr" parameters.
        aligned: indices of the parameters that are multiples of 16.
        arguments: of the others in order: a number, "pointer", or the sizes of a descriptor.
        options: `num_warps`, `num_stages`, `enable_fp_fusion`.
        grid: programs in three dimensions.
        walks: the grid is work for as many programs as run at once.
        elements: that the whole launch handles; those of its first tensor, of a product its result's.
        bytes_moved: read and written in global memory by the whole launch; 0: count what the code moves.
        operator: of fp8core, whose launcher made it; "" for a kernel from elsewhere.
        shape: for people: what it is called on.
        default: what runs where nothing was tuned, not another candidate.
    """

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    grid: tuple[int, int, int]
    elements: int
    bytes_moved: float = 0.0
    operator: str = ""
    shape: str = ""
    default: bool = True
    walks: bool = False

    def load(self) -> Any:
        """The `triton.jit` function."""
        return getattr(importlib.import_module(self.module), self.kernel)

    def to_json(self) -> dict[str, Any]:
        """Plain data, from which `from_json` makes the same launch."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Launch:
        """The launch that `to_json` wrote."""
        tuples = {name: tuple(data[name]) for name in ("aligned", "arguments", "grid")}
        return Launch(**{**data, **tuples})
