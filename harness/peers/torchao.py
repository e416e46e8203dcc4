"""torchao: `torchao.float8`, the training library whose names and recipes the field uses.

Its float8 training is plain Python over torch; eager it moves far more bytes than it must, since it is meant to be
compiled, so that both modes are arms.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
from typing import TYPE_CHECKING

import torch

from harness.peers.peer import Peer, imported, not_installed

if TYPE_CHECKING:
    from torch import Tensor, nn

PIP = "torchao>=0.18"


@functools.cache
def load(module: str) -> None:
    """Imports one of torchao's modules; see `harness.peers.peer.imported`."""
    # The wheel's C++ libraries serve other parts of torchao; with another torch they fail to load, loudly, and to
    # leave them out is logged as a warning.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
    imported(module, PIP)


def missing(device: str) -> str | None:
    """Any device will do."""
    return not_installed("torchao", PIP)


def version() -> str:
    """Version of the installed wheel."""
    return importlib.metadata.version("torchao")


def linear(layer: nn.Linear, recipe: str) -> nn.Module:
    """`torchao.float8.float8_linear.Float8Linear` of the recipe.

    Made by `from_float`, since `convert_to_float8_training` also changes how Inductor writes `minimum` and `maximum`
    for the whole process, and with it every other compiled arm.
    """
    load("torchao.float8")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    return Float8Linear.from_float(layer, config=Float8LinearConfig.from_recipe_name(recipe))


@functools.cache
def fails_under_autocast(recipe: str) -> str | None:
    """Tried on one small layer, so that a release which mends it is measured.

    0.18 keeps the input of a GEMM in high precision as it came: with recipe rowwise_with_gw_hp a float32 input, such as
    torch's norms give under autocast, meets a bfloat16 gradient in the backward pass.
    """
    layer = linear(torch.nn.Linear(16, 16, bias=False), recipe)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            loss = layer(torch.ones(16, 16)).float().sum()
        loss.backward()
    except RuntimeError as error:
        return (
            f"torchao {version()} can't train {recipe} on a float32 input under autocast ({error}); take axes.compute=bf16 or "
            f"fp32, or fp8core's arms of {recipe}"
        )
    return None


def cast(x: Tensor, dtype: torch.dtype, granularity: str) -> tuple[Tensor, Tensor]:
    """The dynamic cast of its Float8Linear. It keeps the scale and inverts it at the GEMM; both are timed here."""
    load("torchao.float8")
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    rowwise = granularity == "rowwise"
    result = hp_tensor_to_float8_dynamic(
        x,
        dtype,
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE,
        axiswise_dim=-1 if rowwise else None,
    )
    return result._data, result._scale.reciprocal()


PEER = Peer(
    arm="torchao",
    doc="torchao.float8",
    missing=missing,
    version=version,
    recipes=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    modes=("eager", "compile"),
    linear=linear,
    fails_under_autocast=fails_under_autocast,
    cast=cast,
)
