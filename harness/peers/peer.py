"""Peer: what an adapter says about one other implementation of FP8, and which of its parts it offers."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType

from harness.machine.kernels_by_name import FP8_GEMM, kernel_class
from harness.store.errors import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from harness.store.published import Published

MODES = ("eager", "compile")
GEMM_RECIPES = ("tensorwise", "rowwise", "blockwise")  # whose scales suite `gemm` hands to a product


@dataclass(frozen=True, slots=True)
class Peer:
    """One other implementation; a part that it lacks is None.

    Attributes:
        arm: first word of its arms ("torchao" of `torchao_rowwise_eager`).
        doc: what it is, in a few words.
        missing: device -> why it can't run here, with the way to get it; None where it can. It imports nothing of the peer:
            that is for `linear`, `cast` and `gemm`, by `imported`, which `doctor` tries before it calls a peer usable.
        version: of what is installed; called only where nothing is missing.
        recipes: of `fp8core.recipe.RECIPES`, those that `linear` or `gemm` offers under the same name.
        modes: how `linear` is meant to be run.
        linear: (layer, recipe name) -> a module that shares the layer's parameters.
        around: (recipe name, first) -> a context for a whole forward pass of a model with such layers; `first` says whether
            it is the first microbatch of a step, whose casts of weights are kept for the others; None where it is the
            only one, or of no step.
        fails_under_autocast: recipe name -> why such a layer can't train on a float32 input under autocast; None where it
            can. Asked only where nothing is missing.
        unfit: (recipe name, device) -> why this recipe of it can't run here; asked only where nothing is missing.
        operators: whether its FP8 GEMMs are operators of PyTorch's that a profiler counts; else kernels are, by name.
        cast: (x, FP8 dtype, granularity) -> (codes, scale_inv); amax, scale and rounding, the contracted dimension
            last.
        granularities: of A and B that `gemm` takes; empty: those of all GEMMs of its recipes.
        fast_accum: whether `gemm` always keeps its sums in the FP8 units; its arms are then checked as such.
        own_process: it changes PyTorch for its whole process; accepted and not read, since each arm has its own.
        published: what its authors measured of it; tables that show the peer say whether that was reproduced.
        gemm: (codes of A and B, scale_inv of A and B, use_fast_accum) -> D in bfloat16; layouts as the suite `gemm`.
    """

    arm: str
    doc: str
    missing: Callable[[str], str | None]
    version: Callable[[], str]
    recipes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()
    linear: Callable[[nn.Linear, str], nn.Module] | None = None
    around: Callable[[str, bool | None], AbstractContextManager[None]] | None = None
    fails_under_autocast: Callable[[str], str | None] = lambda recipe: None
    unfit: Callable[[str, str], str | None] = lambda recipe, device: None
    operators: bool = True
    cast: Callable[[Tensor, torch.dtype, str], tuple[Tensor, Tensor]] | None = None
    granularities: tuple[tuple[str, str], ...] = ()
    fast_accum: bool = False
    own_process: bool = False
    gemm: Callable[[Tensor, Tensor, Tensor, Tensor, bool], Tensor] | None = None
    published: tuple[Published, ...] = ()

    @property
    def facts(self) -> dict[str, object]:
        """What a row holds of the peer that ran."""
        figures = {"peer_published": [each.stored for each in self.published]} if self.published else {}
        return {"peer": self.arm, "peer_version": self.version(), **figures}


class PeerImportError(ImportError):
    """A peer is installed and cannot be imported: its arms are skipped rows, as those of one that is not installed."""

    cause = Cause.MISSING


def not_installed(package: str, pip: str) -> str | None:
    """Say that a top-level package is not there, and the line that brings it; None where it is. Nothing is imported.

    Args:
        package: its name.
        pip: what to hand to `pip install`.
    """
    return None if importlib.util.find_spec(package) else f"{package} is not installed: pip install '{pip}'"


def imported(module: str, pip: str) -> Any:
    """A module of a peer: in the process that needs it, since a plan would wait for it in vain.

    Raises:
        PeerImportError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, AttributeError, RuntimeError) as error:
        # A release made for another torch fails in one of these ways, and in the middle of its own imports.
        raise PeerImportError(
            f"{module} cannot be imported with torch {torch.__version__} ({type(error).__name__}: "
            f"{' '.join(str(error).split())}); another release may fit: pip install '{pip}'"
        ) from error


def fp8_kernels(events: Sequence[Any]) -> int:
    """Launches on a GPU of kernels that multiply FP8, by their names: of libraries that call no operator of PyTorch's."""
    return sum(
        getattr(event, "count", 1)
        for event in events
        if event.device_type == DeviceType.CUDA and kernel_class(event.name) == FP8_GEMM
    )


def nvidia_capability(device: str) -> tuple[int, int]:
    """Compute capability of an NVIDIA GPU; (0, 0) where the device is none that can be seen."""
    seen = torch.device(device).type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return torch.cuda.get_device_capability(device) if seen else (0, 0)


def torch_version() -> str:
    """Version of peers that consist of torch alone."""
    return str(torch.__version__)
