"""verify: a proof, read by machines, that a training step runs in FP8.

The step runs three times. The first time, in eager mode whatever was compiled, hooks note each call of each
Float8Linear: what its operands saturate and lose, whether its output is that of the recipe, and which GEMMs must
follow. The second time it runs as is, so that what is compiled compiles; the third time a profiler counts the FP8
GEMMs that ran. What must follow, of each call:

    output        once; again for each recomputation in a backward pass
    grad_input    where the input needs a gradient
    grad_weight   where the weight does

each only if the recipe casts it. The proof fails on every way of not running FP8 that looks like running it:
nothing converted (a filter that matches nothing), a layer that is never called, emulation, another recipe than the
one asked for, hardware without FP8, a count other than the prediction, an output that is not the recipe's (a stale
weight, a wrong scale), no FP8 kernel by name on CUDA, delayed scales that never move, and an all-gather in high
precision where an FP8 one is asked for.

A TorchDispatchMode would not do as a counter: it sees `aten.mm` on wrapper subclasses whether they emulate or not.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.config import as_recipe
from fp8core.convert import audit
from fp8core.gemm import backend_named, layout
from fp8core.linear import CastInput, Float8Linear
from fp8core.operands import cast_one
from fp8core.scaling import spread
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fp8core.recipe import Cast

FP8_GEMM_OPS = ("aten::_scaled_mm", "aten::_scaled_mm_v2", "fp8core::matmul")
GEMM_KERNEL = re.compile(r"gemm|nvjet|cutlass|xmma|matmul", re.IGNORECASE)
FP8_KERNEL = re.compile(r"e4m3|e5m2|fp8|float8|nvjet_qq", re.IGNORECASE)
AGREEMENT_DB = 35.0  # between a layer and its emulation; two right ones differ by bf16 rounding (55 dB) or
# accumulation (over 50 dB), two independent FP8 roundings by 25 dB
UNDERFLOW_ALARM = 0.01  # share of nonzero elements that became zero


@dataclass
class LayerProof:
    """One Linear.

    Attributes:
        fqn, recipe, reason: as `fp8core.convert.LayerAudit`.
        calls: forward passes of one step, and how many of them recomputed.
        predicted: FP8 GEMMs of one step.
        agreement_db: lowest agreement of its output with its emulated recipe; None before it is called.
        saturated, underflowed: of each operand, the largest share of elements in any call.
    """

    fqn: str
    recipe: str
    reason: str
    calls: int = 0
    recomputed: int = 0
    predicted: int = 0
    agreement_db: float | None = None
    saturated: dict[str, float] = field(default_factory=dict)
    underflowed: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Proof:
    """What `verify` found.

    Attributes:
        ok: FP8 runs as asked.
        problems: why not; empty if ok.
        warnings: what a user should look at although FP8 runs.
        layers: every Linear of the model.
        predicted, counted: FP8 GEMMs of one step.
        device: of the first converted layer, "" if there is none.
        fp8_kernel_share: of the GEMM kernels' time, in kernels of an FP8 type by their names; None off CUDA.
        all_gathers: dtype -> bytes gathered by one step; empty where nothing is sharded.
    """

    ok: bool
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    layers: tuple[LayerProof, ...]
    predicted: int
    counted: int
    device: str
    fp8_kernel_share: float | None
    all_gathers: dict[str, int]

    @property
    def exit_code(self) -> int:
        """For a process: 0 FP8 runs as asked, 1 it doesn't."""
        return 0 if self.ok else 1

    @property
    def line(self) -> str:
        """One line; it starts with "FP8 verified" only if `ok`."""
        if not self.ok:
            return "FP8 NOT verified: " + "; ".join(self.problems)
        converted = [layer for layer in self.layers if layer.recipe]
        share = "" if self.fp8_kernel_share is None else f", {100 * self.fp8_kernel_share:.0f} % of GEMM time"
        return (
            f"FP8 verified: {len(converted)} of {len(self.layers)} Linear layers, {self.counted} FP8 GEMMs a step as "
            f"predicted, recipe {', '.join(sorted({layer.recipe for layer in converted}))}, on {self.device}{share}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain types only."""
        return {"exit_code": self.exit_code, "line": self.line, **asdict(self)}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)


def verify(
    step_fn: Callable[[], object],
    model: nn.Module,
    *,
    recipe: object = None,
    fp8_all_gather: bool = False,
    announce: bool = True,
) -> Proof:
    """Runs a training step three times and proves, or disproves, that it runs in FP8.

    Args:
        step_fn: one whole training step: forward and backward passes, the optimizer if there is one. It moves the
            model on by three steps.
        model: that it trains; compiled or not.
        recipe: what every converted layer must run (as for `convert_to_float8_training`); None: whatever it runs.
        fp8_all_gather: sharded weights must be gathered in one byte an element.
        announce: write `Proof.line` to stdout.

    Returns:
        Proof. An exception of step_fn passes through.
    """
    watch = _Watch(model)
    layers = [layer for _, layer in watch.layers]
    updates = [layer.amaxes.updates if layer.amaxes is not None else 0 for layer in layers]
    gathers: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(watch)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(_Gathers(gathers))
        step_fn()
    device = layers[0].weight.device if layers else None
    step_fn()
    counted, share = _profiled(step_fn, device is not None and device.type == "cuda")
    proofs = watch.proofs()
    predicted = sum(proof.predicted for proof in proofs)

    problems = _structural(layers, proofs, recipe)
    if counted == 0:
        problems.append("no FP8 GEMM ran")
    if counted != predicted:
        problems.append(f"{counted} FP8 GEMMs ran in a step where {predicted} were predicted")
    if share is not None and share == 0:
        problems.append("no GEMM kernel on the device has an FP8 type in its name")
    for (fqn, layer), before in zip(watch.layers, updates, strict=True):
        if layer.recipe.scaling == "delayed" and layer.amaxes is not None and layer.amaxes.updates == before:
            problems.append(
                f"{fqn}: delayed scales never moved; call fp8core.update_scales(model) in each step"
            )
    high = {dtype: size for dtype, size in gathers.items() if "float8" not in dtype and "int8" not in dtype}
    if fp8_all_gather and (high or not gathers):
        problems.append(f"the all-gather is not in FP8: gathered {dict(gathers) or 'nothing'}")
    proof = Proof(
        ok=not problems,
        problems=tuple(problems),
        warnings=tuple(_warnings(proofs)),
        layers=tuple(proofs),
        predicted=predicted,
        counted=counted,
        device=str(device or ""),
        fp8_kernel_share=share,
        all_gathers=dict(gathers),
    )
    if announce:
        sys.stdout.write(proof.line + "\n")
    return proof


def _structural(layers: list[Float8Linear], proofs: list[LayerProof], recipe: object) -> list[str]:
    """What is wrong with the layers themselves, before any count."""
    if not layers:
        return ["no layer is converted to FP8 (did module_filter_fn match nothing?)"]
    problems = []
    wanted = None if recipe is None else as_recipe(recipe)  # type: ignore[arg-type]  # it checks
    if wanted is not None:
        others = sorted({str(layer.recipe) for layer in layers if layer.recipe != wanted})
        if others:
            problems.append(f"recipe {wanted} was asked for, {', '.join(others)} runs")
    emulated = sum(not backend_named(layer.recipe.backend).is_fp8 for layer in layers)
    if emulated:
        problems.append(f"{emulated} of {len(layers)} converted layers are emulated in high precision")
    for layer in layers:
        gemm = layer.recipe.output
        if gemm.a is not None and gemm.b is not None:
            reason = layout.device_reason(layer.weight.device, gemm.a.format, gemm.b.format)
            if reason is not None and reason not in problems:
                problems.append(reason)
    for proof in proofs:
        if proof.recipe and not proof.calls:
            problems.append(f"{proof.fqn}: converted, but never called")
        if proof.agreement_db is not None and not proof.agreement_db >= AGREEMENT_DB:
            problems.append(
                f"{proof.fqn}: output is not the recipe's: {proof.agreement_db:.1f} dB from its emulation, "
                f"{AGREEMENT_DB:g} expected"
            )
    return problems


def _warnings(proofs: list[LayerProof]) -> list[str]:
    found = []
    for proof in proofs:
        for role, share in proof.saturated.items():
            if share > 0:
                found.append(f"{proof.fqn}: {100 * share:.3g} % of {role} saturates")
        for role, share in proof.underflowed.items():
            if share > UNDERFLOW_ALARM:
                found.append(f"{proof.fqn}: {100 * share:.3g} % of {role} underflows to zero")
    return found


class _Watch:
    """Hooks on every Float8Linear of a model while a step runs."""

    def __init__(self, model: nn.Module) -> None:
        self.found = {
            layer.fqn: LayerProof(layer.fqn, layer.recipe, layer.reason) for layer in audit(model).layers
        }
        self.layers = [(fqn, m) for fqn, m in model.named_modules() if isinstance(m, Float8Linear)]
        self.hooks: list[Any] = []
        # Calls that a backward pass can follow: (outside of a backward pass, inside of one) -> GEMMs that will
        self.trains: dict[str, tuple[list[int], list[int]]] = {fqn: ([], []) for fqn, _ in self.layers}

    def __enter__(self) -> _Watch:
        for fqn, layer in self.layers:
            # Before the call, since a recomputation stops inside of it once it has what it needs
            self.hooks.append(layer.register_forward_pre_hook(partial(self._called, fqn)))
            self.hooks.append(layer.register_forward_hook(partial(self._returned, fqn)))
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

    def _returned(self, fqn: str, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        """Compares with the emulation, and looks at what the casts lose."""
        assert isinstance(layer, Float8Linear)
        proof, recipe, given = self.found[fqn], layer.recipe, args[0]
        if torch._C._current_graph_task_id() != -1:
            return
        with torch.no_grad():
            twin = copy.copy(layer)
            twin.recipe, twin.weight_cache = recipe.emulated(), None
            agreement = _sqnr_db(Float8Linear.forward(twin, given), output.detach())
            proof.agreement_db = min(
                agreement, proof.agreement_db if proof.agreement_db is not None else agreement
            )
            x = given.hp if isinstance(given, CastInput) else given
            if not isinstance(x, Float8Tensor):
                self._lost(proof, "input", x.reshape(-1, layer.in_features), recipe.output.a, layer)
            self._lost(proof, "weight", layer.weight, recipe.output.b, layer)
        if output.requires_grad:

            def look_at_gradient(grad: torch.Tensor) -> None:
                with torch.no_grad():
                    flat = grad.reshape(-1, layer.out_features)
                    self._lost(proof, "grad_output", flat, recipe.grad_input.a, layer)

            output.register_hook(look_at_gradient)

    @staticmethod
    def _lost(proof: LayerProof, role: str, x: torch.Tensor, cast: Cast | None, layer: Float8Linear) -> None:
        if cast is None or not x.numel():
            return
        q = cast_one(x, cast, 1, layer.amaxes, role)
        assert isinstance(q, Float8Tensor)
        magnitude = x.abs().float()
        limit = q.format.max * spread(q.scale_inv, q.shape)
        saturated = float((magnitude > limit * (1 + 2**-20)).float().mean())
        zero = (q.qdata.float() == 0) & (magnitude > 0)
        underflowed = float(zero.float().mean())
        proof.saturated[role] = max(saturated, proof.saturated.get(role, 0.0))
        proof.underflowed[role] = max(underflowed, proof.underflowed.get(role, 0.0))


class _Gathers(TorchDispatchMode):
    """Counts the bytes of all-gathers by dtype."""

    def __init__(self, into: Counter[str]) -> None:
        super().__init__()
        self.into = into

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = str(op).lower()
        if "all_gather" in name or "allgather" in name:
            source = next(
                (a for a in reversed(args[:2]) if isinstance(a, torch.Tensor)),
                None,
            )
            if source is not None:
                dtype = str(source.dtype).removeprefix("torch.")
                self.into[dtype] += source.numel() * source.element_size()
        return op(*args, **(kwargs or {}))


def _profiled(step_fn: Callable[[], object], on_gpu: bool) -> tuple[int, float | None]:
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
    """
    count = 0
    for event in events:
        if event.name in FP8_GEMM_OPS:
            caller = event.cpu_parent
            while caller is not None and caller.name not in FP8_GEMM_OPS:
                caller = caller.cpu_parent
            count += caller is None
    return count


def _sqnr_db(want: torch.Tensor, got: torch.Tensor) -> float:
    """20 log10(|want| / |want - got|); Inf where both are equal, NaN where only one is finite."""
    if torch.equal(want, got) or (want.isnan() & got.isnan() | (want == got)).all():
        return float("inf")
    want, got = want.double(), got.double()
    return float(20 * torch.log10(want.norm() / (want - got).norm()))
