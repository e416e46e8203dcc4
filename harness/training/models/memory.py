"""How much memory a training step will take, by part, before anything is allocated.

The model, made on "meta", runs one forward and backward pass on fake tensors: shapes, dtypes and the lifetime of every
storage are real, values and memory are not. What is alive at the end of the forward pass beyond the weights is kept for
the backward pass: by autograd, by checkpointing, by FP8 layers. The most that is alive at any time gives the workspace.

    weights       parameters
    gradients     of all parameters, in their dtype
    optimizer     AdamW's two averages, in the parameters' dtype
    fp8_weights   FP8 copies of weights that wait for the backward pass
    logits        as they are kept for the loss
    activations   everything else that is kept
    workspace     the most that lives at once beyond what is kept: gradients of activations, float32 rows of the loss

The sum is the peak of a step with gradient accumulation, where gradients lie there from the microbatch before, and
bounds that of a step without. It holds for eager mode; compiled code keeps less or the same. Not in it: what the
allocator loses to fragments, the libraries' workspaces, the CUDA context (about 0.5 GiB).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8core import Float8Linear
from fp8core.gemm.reference import ShapesAlone
from fp8core.history import AmaxMemory
from fp8core.inputs.operands import serves_both
from fp8core.proof.recorder import Recorder, alive_and_most
from harness.training.models.common import replace_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PARTS = ("weights", "gradients", "optimizer", "fp8_weights", "logits", "activations", "workspace")
ADAMW_STATES = 2
GIB = 2**30


def predict(
    model: nn.Module,
    batch: Sequence[Tensor],
    *,
    device: torch.device | str = "cpu",
    autocast: torch.dtype | None = None,
) -> dict[str, int]:
    """Bytes of each of `PARTS`; see the module docstring.

    Args:
        model: on "meta", already converted to FP8 if it will be; not changed.
        batch: its inputs; only their shapes and dtypes count, so "meta" will do.
        device: for which device. Without that device in this machine "cpu" stands in: its attention keeps what
            the GPU's keeps. Casts for "cuda" are fp8core's operators, whose temporaries never reach memory; on ROCm, and to
            formats that no kernel writes, they are plain.
        autocast: dtype of an autocast around the forward pass.

    Returns:
        part -> bytes, in the order of `PARTS`.
    """
    meant = kind = torch.device(device).type
    kind = kind if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()) else "cpu"
    model = copy.deepcopy(model)
    with ShapesAlone(kernels=meant == "cuda" and torch.version.hip is None):
        blank_weights(model, kind)
        inputs = [blank(part, kind) for part in batch]
        for parameter in model.parameters():
            if parameter.requires_grad:
                # Gradients are a part of their own, counted whole
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        logits: list[int] = []
        head = getattr(model, "head", None)
        if isinstance(head, nn.Module):
            head.register_forward_hook(lambda _, given, made: logits.append(_bytes(made)))
        with Recorder() as recorder:
            with torch.autocast(kind, autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(*inputs)
            kept, _ = alive_and_most(recorder.rows)
            loss.backward()
            _, most = alive_and_most(recorder.rows)
        fp8_weights = min(_kept_weights(model), kept)
    of_logits = logits[-1] if logits else 0
    return of_weights(model) | {
        "fp8_weights": fp8_weights,
        "logits": of_logits,
        "activations": kept - fp8_weights - of_logits,
        "workspace": most - kept,
    }


def of_weights(model: nn.Module) -> dict[str, int]:
    """The first three of `PARTS`: bytes that training takes for every batch size. Nothing runs.

    Args:
        model: on "meta" will do; what is converted to FP8 has the same parameters.
    """
    trained = sum(_bytes(p) for p in model.parameters() if p.requires_grad)
    return {
        "weights": sum(map(_bytes, model.parameters())),
        "gradients": trained,
        "optimizer": trained * ADAMW_STATES,
    }


def fits(prediction: Mapping[str, int], free_bytes: int) -> str | None:
    """Why a step will not fit into `free_bytes`, part by part, and what to change; None if it does.

    A prediction that lacks some of `PARTS` is a lower bound, and is called so.
    """
    total = sum(prediction.values())
    if total <= free_bytes:
        return None
    parts = sorted(((size, part) for part, size in prediction.items() if size), key=lambda each: -each[0])
    fixed = sum(prediction.get(part, 0) for part in PARTS[:3])
    ways = ["fewer layers", "bfloat16 weights"]
    if prediction.get("activations", 0) > total // 20:
        ways.insert(0, "checkpointing=selective or full")
    if fixed < free_bytes:
        ways.insert(0, f"a batch or length {(total - fixed) / (free_bytes - fixed):.1f} times smaller")
    least = "at least " if len(prediction) < len(PARTS) else ""
    return (
        f"a training step needs {least}{total / GIB:.2f} GiB and {free_bytes / GIB:.2f} GiB are free; GiB by part: "
        f"{', '.join(f'{part} {size / GIB:.2f}' for size, part in parts)}; try {', '.join(ways)}"
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def blank(tensor: Tensor, kind: str = "cpu") -> Tensor:
    """Tensor of the same shape and dtype; fake tensors cannot be mixed with tensors on "meta"."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=kind)


def blank_weights(model: nn.Module, kind: str = "cpu") -> None:
    """Puts such tensors in the places of parameters, buffers and amaxes; within a mode that makes fake ones."""
    replace_parameters(model, {p: nn.Parameter(blank(p, kind), p.requires_grad) for p in model.parameters()})
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else blank(buffer, kind)
        if isinstance(module, AmaxMemory):
            module.pending = blank(module.pending, kind)


def _kept_weights(model: nn.Module) -> int:
    """Bytes of FP8 weights that the forward pass keeps for grad_input, where one cast serves both GEMMs.

    Blocks under checkpointing, "selective" too, keep none: they cast again.
    """
    casts_again: set[nn.Module] = set()
    if getattr(model, "checkpointing", "none") != "none" and isinstance(model.layers, nn.Module):
        casts_again.update(model.layers.modules())
    total = 0
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer not in casts_again:
            first, second = layer.recipe.output.b, layer.recipe.grad_input.b
            total += layer.weight.numel() if serves_both(first, second) else 0
    return total
