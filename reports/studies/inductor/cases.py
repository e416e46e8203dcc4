"""What is compiled: a Linear alone and behind the modules that feed it, by recipe and by library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from fp8core import RECIPES, Float8Linear
from fp8core.history import ROLES, AmaxMemory
from fp8core.kernels.reference import rms_norm
from harness.peers import torchao
from inductor import absent_gpu
from inductor.schedule import kernels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from inductor.schedule import Kernel

TOKENS, WIDTH, FFN = 16384, 4096, 14336  # Llama-3-8B: sizes with K, N and M all different
_EPS = 1e-5
BF16, OURS, TORCHAO = "bf16", "fp8core", "torchao"


@dataclass(frozen=True, slots=True)
class Shape:
    """A case.

    Attributes:
        name: of the case.
        K, N: of its Linear.
        has_producer: something before the Linear writes its input.
    """

    name: str
    K: int
    N: int
    has_producer: bool

    @property
    def elements(self) -> Mapping[str, int]:
        """Elements of each tensor of the Linear."""
        return {"input": TOKENS * self.K, "weight": self.K * self.N, "grad_output": TOKENS * self.N}


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("Linear", WIDTH, FFN, has_producer=False),
        Shape("RMSNorm -> Linear", WIDTH, FFN, has_producer=True),
        Shape("SwiGLU -> Linear", FFN, WIDTH, has_producer=True),
    )
}
# mxfp8 has no FP8 product on this device; a static scale is a delayed one that is never renewed
ARMS: tuple[tuple[str, str], ...] = (
    (BF16, ""),
    *((OURS, name) for name in RECIPES if name not in ("mxfp8", "static")),
    *((TORCHAO, name) for name in torchao.PEER.recipes),
)


def compiled_kernels(shape: Shape, library: str, recipe: str) -> list[Kernel]:
    """Kernels of one forward and backward pass, after `absent_gpu.pretend`.

    Args:
        shape: one of `SHAPES`.
        library: "bf16", "fp8core" or "torchao".
        recipe: its name; "" for bf16.

    Raises:
        ValueError: unknown library.
        RuntimeError: torchao can't be imported, or Inductor's schedule can't be counted.
    """
    layer = absent_gpu.place(_layer(shape, library, recipe))
    for module in layer.modules():
        if isinstance(module, AmaxMemory):
            module.ready = frozenset(ROLES)  # as from the second step on
    kernels: list[Kernel] = []
    x, other = (absent_gpu.tensor(TOKENS, shape.K).requires_grad_() for _ in range(2))
    weight = absent_gpu.tensor(WIDTH).requires_grad_()
    functions: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
        "Linear": (lambda x: layer(x), (x,)),
        "RMSNorm -> Linear": (lambda x, w: layer(rms_norm(x, w, _EPS)[0]), (x, weight)),
        "SwiGLU -> Linear": (lambda gate, up: layer(functional.silu(gate) * up), (x, other)),
    }
    function, args = functions[shape.name]
    absent_gpu.generate(lambda graph: kernels.extend(kernels_of(graph)), function, *args)
    return kernels


def _layer(shape: Shape, library: str, recipe: str) -> nn.Module:
    plain = nn.Linear(shape.K, shape.N, bias=False, device="meta", dtype=torch.bfloat16)
    if library == BF16:
        return plain
    if library == OURS:
        return Float8Linear.from_float(plain, config=recipe)
    if library == TORCHAO:
        missing = torchao.missing("cuda")
        if missing is not None:
            raise RuntimeError(missing)
        return torchao.linear(plain, recipe)
    raise ValueError(f"library {library!r} is unknown; expected {BF16}, {OURS} or {TORCHAO}")
