"""torchao_mx: MXFP8 training of torchao's prototype, products of 1x32 blocks with power-of-two scales.

Where it runs: compute capability 10.0 (its casts and products are kernels of Blackwell). Elsewhere it has an emulation,
which multiplies in bfloat16 and is no FP8 to be timed.
"""

from __future__ import annotations

import importlib.util

from torch import Tensor, nn

from harness.peers import torchao
from harness.peers.peer import Peer, nvidia_capability

MODULE = "torchao.prototype.moe_training.mxfp8_linear"
CAPABILITY = (10, 0)


class MXLinear(nn.Linear):
    """nn.Linear whose three products are torchao's MXFP8, with RCEIL scales as its training recipe has them."""

    emulated = False  # multiply in bfloat16 after the same casts, on any device: for the tests of this file

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`."""
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        kernels = KernelPreference.EMULATED if self.emulated else KernelPreference.AUTO
        output: Tensor = _to_mxfp8_then_scaled_mm(input, self.weight, kernels, ScaleCalculationMode.RCEIL)
        return output if self.bias is None else output + self.bias


def linear(layer: nn.Linear, recipe: str) -> nn.Module:
    """The layer with its three products in MXFP8.

    Raises:
        ValueError: another recipe.
    """
    if recipe != "mxfp8":
        raise ValueError(f"torchao_mx offers mxfp8, not {recipe!r}")
    torchao.load(MODULE)
    new = MXLinear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    new.weight, new.bias = layer.weight, layer.bias
    return new


def missing(device: str) -> str | None:
    """A GPU with products of MX blocks, and a torchao that has the prototype."""
    if importlib.util.find_spec("torchao") is not None and nvidia_capability(device) < CAPABILITY:
        return f"torchao's MXFP8 takes compute capability {'.'.join(map(str, CAPABILITY))}, not this {device}"
    return torchao.missing(device)


PEER = Peer(
    arm="torchaomx",
    doc="torchao.prototype.moe_training, MXFP8",
    missing=missing,
    version=torchao.version,
    recipes=("mxfp8",),
    modes=("eager", "compile"),
    linear=linear,
)
