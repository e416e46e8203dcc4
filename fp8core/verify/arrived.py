"""Codes that a layer gets from elsewhere: checked where they are made, and recognised where they are read.

producers   RMSNorm, with an addition or without, and SwiGLU that write codes and no high precision: `.produced`
gathers     sequence parallelism in FP8: each rank checks the codes of its own tokens, and that those of all ranks arrive as
            they were sent: `.exchanged`
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.distributed import gathered
from fp8core.inputs.sharded import cut_of
from fp8core.inputs.shared_input import CastInput
from fp8core.linear import Float8Linear
from fp8core.producers import RMSNorm, SwiGLU
from fp8core.tensor import Float8Tensor
from fp8core.verify.exchanged import exchange_faults
from fp8core.verify.operands import max_over, quantized, quietly
from fp8core.verify.oracle import Quantized, block_amax, block_of
from fp8core.verify.produced import produced_fault, result_bounds
from fp8core.verify.received import Operand, cast_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.verify.records import LayerProof


class Arrived:
    """Codes that were found right, by their memory, for as long as that lives."""

    def __init__(self, proofs: dict[Float8Linear, LayerProof]) -> None:
        self.proofs = proofs
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.handles: list[Any] = []
        self.added: list[RMSNorm] = []
        self.faults: list[str] = []

    def __contains__(self, codes: object) -> bool:
        return isinstance(codes, Float8Tensor) and codes.qdata.untyped_storage() in self.known

    def watch(self, model: nn.Module) -> None:
        """Hooks on the producers of a model."""
        for module in model.modules():
            if isinstance(module, RMSNorm | SwiGLU):
                self.handles.append(module.register_forward_hook(self._produced))
            if isinstance(module, RMSNorm):  # a method that is no call of the module has no hooks
                vars(module)["add"] = partial(self._add, module, module.add)
                self.added.append(module)

    def open(self) -> None:
        """From here on gathers are seen."""
        gathered.observers.append(self._gathered)

    def close(self) -> None:
        """To here."""
        gathered.observers.remove(self._gathered)
        for handle in self.handles:
            handle.remove()
        for module in self.added:
            vars(module).pop("add", None)
        self.added.clear()

    def _produced(
        self, module: RMSNorm | SwiGLU, args: tuple[Any, ...], output: torch.Tensor | CastInput
    ) -> None:
        if not (isinstance(output, CastInput) and output.codes_only):
            return
        layers = [arg for arg in args if isinstance(arg, Float8Linear)]
        with quietly():
            near, far = result_bounds(module, *(arg for arg in args if not isinstance(arg, Float8Linear)))
            for codes, cast, dim in zip(output[1:3], output.casts, (1, 0), strict=True):
                if isinstance(codes, Float8Tensor) and cast is not None:
                    ends = (
                        quantized(layers[0], end, cast, dim, "input", cut_of(layers[0].weight))
                        for end in (near, far)
                    )
                    fault = produced_fault(Operand(codes.qdata, codes.scale_inv), *ends)
                    self._note(f"codes of {type(module).__name__}", fault, self.proofs.get(layers[0]))
                    self.known.add(codes.qdata.untyped_storage())

    def _add(
        self,
        module: RMSNorm,
        add: Callable[..., tuple[torch.Tensor, Any]],
        x: torch.Tensor,
        delta: torch.Tensor,
        *layers: Float8Linear,
    ) -> tuple[torch.Tensor, Any]:
        total, output = add(x, delta, *layers)
        if isinstance(output, CastInput) and output.codes_only:
            with quietly():  # float64 holds the sum of two such numbers to below a float32 rounding
                wanted = (x.detach().double() + delta.detach().double()).float().to(x.dtype)
                same = torch.equal(total.detach().nan_to_num(nan=0), wanted.nan_to_num(nan=0))
                if not same or not torch.equal(total.detach().isnan(), wanted.isnan()):
                    self._note("sum of RMSNorm.add", "it is not x + delta", self.proofs.get(layers[0]))
            self._produced(module, (wanted, *layers), output)
        return total, output

    def _compare(self, what: str, codes: Float8Tensor, wanted: Quantized) -> None:
        self._note(what, cast_fault(Operand(codes.qdata, codes.scale_inv), wanted), None)

    def _note(self, what: str, fault: str, proof: LayerProof | None) -> None:
        if fault and proof is not None:
            proof.fault(f"{what}: {fault}")
        elif fault:
            self.faults.append(f"{what}: {fault}")

    def _gathered(self, gather: gathered.Gathered) -> None:
        with quietly():
            group = gather.like.device_mesh.get_group()
            cast, memory = gather.cast, gather.memory
            in_use = memory.of(gather.role) if cast.scaling != "dynamic" and memory is not None else None
            amax = None
            if in_use is not None and memory is not None:
                amax = (in_use.double() * 2.0**memory.settings.margin).reshape(1, 1)
            elif cast.granularity == "tensorwise" or gather.dim == 0:
                amax = max_over(block_amax(gather.part, block_of(cast, gather.dim)), group)
            if in_use is None:
                cast = replace(cast, scaling="dynamic")
            wanted = Quantized.of(gather.part, cast, gather.dim, amax)
            self._compare(f"gathered {gather.role}", gather.local, wanted)
            self.faults += [f"gathered {gather.role}: {fault}" for fault in exchange_faults(gather, group)]
            self.known.add(gather.whole.qdata.untyped_storage())
