"""Observers of a training step, for `fp8core.verify`: hooks on layers, and a profiler.

A TorchDispatchMode would not do as a counter of FP8 GEMMs: it sees `aten.mm` on wrapper subclasses whether they
emulate or not. The profiler counts the operators that really ran.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile
from torch.distributed.tensor import DTensor

from fp8core.convert import audit
from fp8core.gemm import backend_named
from fp8core.gemm.fastest import MEASURING
from fp8core.grouped import aligned_grouped_mm
from fp8core.linear import Float8Linear
from fp8core.moe import GroupedMatmul
from fp8core.operands import cast_one
from fp8core.scaling import spread
from fp8core.shared_input import CastInput
from fp8core.tensor import Float8Tensor
from fp8core.two_casts import TwoCasts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fp8core.recipe import Cast

FP8_GEMM_OPS = (
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_grouped_mm",
    "fp8core::matmul",
)
# Attention kernels are built of CUTLASS too, and call themselves so
GEMM_KERNEL = re.compile(r"^(?!.*(flash|fmha|attention)).*(gemm|nvjet|cutlass|xmma|matmul)", re.IGNORECASE)
# cuBLAS writes e4m3 as q and e5m2 as r into the names of its nvjet kernels
FP8_KERNEL = re.compile(r"e4m3|e5m2|fp8|float8|nvjet_(sm\d+_)?[qr]{2}", re.IGNORECASE)


@dataclass
class LayerProof:
    """One Linear, or the product of one module of experts.

    Attributes:
        fqn, recipe, reason, all_gather: as `fp8core.convert.LayerAudit`; of experts, the name of their `GroupedMatmul`.
        calls: forward passes of one step, and how many of them recomputed.
        predicted: FP8 GEMMs of one step.
        agreement_db: lowest agreement of its output with its emulated recipe; None before it is called.
        saturated, underflowed: of each operand, the largest share of elements in any call; not of a weight that FSDP2
            gathered in FP8, as it arrives in codes; not of experts.
        of_experts: it is such a product, not a Linear.
    """

    fqn: str
    recipe: str
    reason: str
    all_gather: str = ""
    calls: int = 0
    recomputed: int = 0
    predicted: int = 0
    agreement_db: float | None = None
    saturated: dict[str, float] = field(default_factory=dict)
    underflowed: dict[str, float] = field(default_factory=dict)
    of_experts: bool = False


class Watch:
    """Hooks on every Float8Linear of a model while a step runs."""

    def __init__(self, model: nn.Module) -> None:
        self.found = {
            layer.fqn: LayerProof(layer.fqn, layer.recipe, layer.reason, layer.all_gather)
            for layer in audit(model).layers
        }
        self.layers = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, Float8Linear)]
        self.products = [
            (fqn, m)
            for fqn, m in model.named_modules()
            if isinstance(m, GroupedMatmul) and m.recipe is not None
        ]
        self.found |= {
            fqn: LayerProof(fqn, str(product.recipe), "", of_experts=True) for fqn, product in self.products
        }
        self.hooks: list[Any] = []
        # Calls that a backward pass can follow: (outside of a backward pass, inside of one) -> GEMMs that will
        self.trains: dict[str, tuple[list[int], list[int]]] = {
            fqn: ([], []) for fqn, _ in (*self.layers, *self.products)
        }
        self.expected: dict[str, torch.Tensor] = {}  # output of the call under way, by emulation

    def __enter__(self) -> Watch:
        for fqn, layer in self.layers:
            # Before the call, since a recomputation stops inside of it once it has what it needs
            self.hooks.append(layer.register_forward_pre_hook(partial(self._called, fqn)))
            # Before hooks of tensor parallelism, which lay the output out anew
            self.hooks.append(layer.register_forward_hook(partial(self._returned, fqn), prepend=True))
        for fqn, product in self.products:
            self.hooks.append(product.register_forward_pre_hook(partial(self._multiplied, fqn)))
            self.hooks.append(product.register_forward_hook(partial(self._compared, fqn)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def proofs(self) -> list[LayerProof]:
        """With the prediction. A checkpointed call trains either outside of the backward pass, and is then
        recomputed inside (non-reentrant), or inside only (reentrant); it leads to gradients once."""
        for fqn, (outside, inside) in self.trains.items():
            self.found[fqn].predicted += max(sum(outside), sum(inside))
        self.trains.clear()
        return list(self.found.values())

    def _called(self, fqn: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(layer, Float8Linear)
        proof, recipe = self.found[fqn], layer.recipe
        x: torch.Tensor = args[0].hp if isinstance(args[0], CastInput) else args[0]
        in_backward = torch._C._current_graph_task_id() != -1
        proof.calls += 1
        proof.recomputed += in_backward
        if backend_named(recipe.backend).is_fp8:
            proof.predicted += recipe.output.is_fp8
            if torch.is_grad_enabled():
                follow = recipe.grad_input.is_fp8 * x.requires_grad
                follow += recipe.grad_weight.is_fp8 * layer.weight.requires_grad
                self.trains[fqn][in_backward].append(follow)
        if not in_backward:
            with torch.no_grad():
                self._emulate(fqn, layer, args[0])

    def _emulate(self, fqn: str, layer: Float8Linear, given: Any) -> None:
        """Before the call, as FSDP2 has given the weight away after it: what its output must be, and what casts lose."""
        proof, recipe = self.found[fqn], layer.recipe
        twin = object.__new__(Float8Linear)  # not copy.copy, which the classes that FSDP2 makes don't take
        twin.__dict__.update(layer.__dict__)
        twin.recipe, twin.weight_cache = recipe.emulated().with_kernels("never"), None
        self.expected[fqn] = Float8Linear.forward(twin, given)
        x = given.hp if isinstance(given, CastInput) else given
        known = isinstance(x, Float8Tensor) or (isinstance(given, CastInput) and given.codes_only)
        if not known:
            self._lost(proof, "input", x, recipe.output.a, layer)
        self._lost(proof, "weight", layer.linear_weight, recipe.output.b, layer)

    def _multiplied(self, fqn: str, product: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """As `_called`, of the product of experts; it may take a GEMM for each of them."""
        assert isinstance(product, GroupedMatmul)
        assert product.recipe is not None
        x, weight, offsets = args
        proof = self.found[fqn]
        in_backward = torch._C._current_graph_task_id() != -1
        proof.calls += 1
        proof.recomputed += in_backward
        proof.predicted += product.fp8_calls("output", offsets)
        if torch.is_grad_enabled():
            follow = product.fp8_calls("grad_input", offsets) * x.requires_grad
            follow += product.fp8_calls("grad_weight", offsets) * weight.requires_grad
            self.trains[fqn][in_backward].append(follow)
        if not in_backward:
            emulated = product.recipe.emulated().with_kernels("never")
            with torch.no_grad():
                self.expected[fqn] = aligned_grouped_mm(x, weight, offsets, emulated)

    def _compared(self, fqn: str, product: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Compares with the emulation."""
        expected = self.expected.pop(fqn, None)
        if expected is not None:
            self._agrees(self.found[fqn], expected, output)

    @staticmethod
    def _agrees(proof: LayerProof, expected: torch.Tensor, output: torch.Tensor) -> None:
        with torch.no_grad():
            agreement = _sqnr_db(expected, output.detach())
        proof.agreement_db = min(
            agreement, proof.agreement_db if proof.agreement_db is not None else agreement
        )

    def _returned(self, fqn: str, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Compares with the emulation, and looks at what the cast of the gradient loses."""
        assert isinstance(layer, Float8Linear)
        expected = self.expected.pop(fqn, None)
        if expected is None:
            return
        proof, recipe = self.found[fqn], layer.recipe
        self._agrees(proof, expected, output)
        if output.requires_grad:

            def look_at_gradient(grad: torch.Tensor) -> None:
                with torch.no_grad():
                    self._lost(proof, "grad_output", grad, recipe.grad_input.a, layer)

            output.register_hook(look_at_gradient)

    @staticmethod
    def _lost(proof: LayerProof, role: str, x: torch.Tensor, cast: Cast | None, layer: Float8Linear) -> None:
        x = _part(x)
        if cast is None or not x.numel() or isinstance(x, Float8Tensor | TwoCasts):
            return
        x = x.reshape(-1, x.shape[-1])
        q = cast_one(x, cast, 1, layer.amaxes, role, kernels=layer.recipe.kernels)
        assert isinstance(q, Float8Tensor)
        magnitude = x.abs().float()
        limit = q.format.max * spread(q.scale_inv, q.shape)
        saturated = float((magnitude > limit * (1 + 2**-20)).float().mean())
        zero = (q.qdata.float() == 0) & (magnitude > 0)
        underflowed = float(zero.float().mean())
        proof.saturated[role] = max(saturated, proof.saturated.get(role, 0.0))
        proof.underflowed[role] = max(underflowed, proof.underflowed.get(role, 0.0))


def profiled(step_fn: Callable[[], object], on_gpu: bool) -> tuple[int, float | None]:
    """(FP8 GEMMs that ran in one step, share of the GEMM kernels' time in FP8 ones; None off CUDA)."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes each start to stderr otherwise
    with profile(use_kineto=on_gpu, use_device="cuda" if on_gpu else None) as profiler:
        step_fn()
        if on_gpu:
            torch.cuda.synchronize()
    events = profiler.function_events or []
    counted = count_fp8_gemms(events)
    if not on_gpu:
        return counted, None
    times: Counter[bool] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and GEMM_KERNEL.search(event.name):
            times[FP8_KERNEL.search(event.name) is not None] += event.self_device_time_total
    return counted, times[True] / times.total() if times.total() else 0.0


def count_fp8_gemms(events: Iterable[Any]) -> int:
    """Calls of `FP8_GEMM_OPS` among a profiler's `function_events`; a call within such a call is the same one.

    A dispatch mode, such as that of selective activation checkpointing, shows an operator above it and again below.
    Calls that `fp8core.gemm.fastest` times are none of the step's.
    """
    count = 0
    for event in events:
        if event.name in FP8_GEMM_OPS:
            caller = event.cpu_parent
            while caller is not None and caller.name not in (*FP8_GEMM_OPS, MEASURING):
                caller = caller.cpu_parent
            count += caller is None
    return count


def _part(x: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it, where it is a DTensor of tensor parallelism."""
    return x.to_local() if isinstance(x, DTensor) else x


def _sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    """20 log10(|want| / |want - got|), of this rank's parts; Inf where both are equal, NaN where only one is finite."""
    want, got = _part(want), _part(got)
    if torch.equal(want, got) or (want.isnan() & got.isnan() | (want == got)).all():
        return float("inf")
    want, got = want.double(), got.double()
    return float(20 * torch.log10(want.norm() / (want - got).norm()))
