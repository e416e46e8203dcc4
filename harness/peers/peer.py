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
from harness.store.published import Published, of_peer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

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
            Left out: torch is all it needs.
        version: of what is installed; called only where nothing is missing. Left out: torch's.
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
        published: what its authors measured of it, for a peer of this tree in `published.yaml`; tables that show the peer say
            whether that was reproduced.
        gemm: (codes of A and B, scale_inv of A and B, use_fast_accum) -> D in bfloat16; layouts as the suite `gemm`.
    """

    arm: str
    doc: str
    missing: Callable[[str], str | None] = lambda device: None
    version: Callable[[], str] = lambda: str(torch.__version__)
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
        figures = [each.stored for each in self.published or of_peer(self.arm)]
        stored = {"peer_published": figures} if figures else {}
        return {"peer": self.arm, "peer_version": self.version(), **stored}


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


def needs(package: str, pip: str, maker: str, *majors: int) -> Callable[[str], str | None]:
    """`Peer.missing` of a package for the GPUs of one maker.

    Args:
        package: its name.
        pip: what to hand to `pip install`.
        maker: "NVIDIA", or "AMD" (under ROCm).
        majors: the first numbers of the compute capabilities that it runs on; all if none is given.
    """

    def missing(device: str) -> str | None:
        own = "AMD" if torch.version.hip else "NVIDIA"
        named = f" of compute capability {' and '.join(map(str, majors))}" if majors else ""
        if torch.device(device).type != "cuda" or own != maker:
            return f"{package} runs on {maker} GPUs{named}, not on this {device}; there: pip install '{pip}'"
        if majors and nvidia_capability(device)[0] not in majors:
            return f"{package} runs on {maker} GPUs{named}, not on this {device}"
        return not_installed(package, pip)

    return missing


def triton_missing(device: str) -> str | None:
    """`Peer.missing` of Triton kernels."""
    if torch.device(device).type != "cuda":
        return f"it consists of Triton kernels, which {device} can't run"
    return not_installed("triton", "triton")


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
