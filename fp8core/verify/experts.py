"""Hooks on products of experts while a step runs: three grouped GEMMs, each group compared by itself; see `layers`."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fp8core.experts.grouped import group_of_row
from fp8core.experts.moe import GroupedMatmul
from fp8core.gemm import backend_named
from fp8core.inputs.shared_input import after_autocast
from fp8core.verify.layers import find_node
from fp8core.verify.operands import keeps_results, plain, quietly
from fp8core.verify.oracle import Quantized, block_amax
from fp8core.verify.products import Side, Sketch, difference, sketch_difference, unit_roundoff
from fp8core.verify.received import Digest, Operand, Received, cast_fault

if TYPE_CHECKING:
    from fp8core.recipe import Cast, Gemm, Recipe
    from fp8core.verify.records import LayerProof

NODE = "_GroupedMatmulBackward"


class GroupedCall:
    """One call of a product, and the backward pass that belongs to it."""

    def __init__(
        self, product: GroupedMatmul, proof: LayerProof, args: tuple[Any, ...], in_backward: bool
    ) -> None:
        assert product.recipe is not None
        self.product, self.proof, self.in_backward = product, proof, in_backward
        self.recipe: Recipe = product.recipe
        self.backend = backend_named(self.recipe.backend)
        self.weight = plain(args[1])
        self.offsets: torch.Tensor = args[2]
        self.ends: list[int] = self.offsets.tolist()
        self.grad: torch.Tensor | None = None
        self.needs = (False, False)
        self.sketches: list[Sketch] = []
        self.digests: list[Digest] = []
        self.x: torch.Tensor | None = after_autocast(args[0].detach())
        self.expected: list[str] = []

    @property
    def groups(self) -> list[tuple[int, slice]]:
        """(expert, its rows), of those that have rows."""
        bounds = itertools.pairwise([0, *self.ends])
        return [(e, slice(first, end)) for e, (first, end) in enumerate(bounds) if first < end]

    def exact(self, gemm: Gemm) -> bool:
        """Whether single elements are held to their bounds, see `layers.Call.exact`."""
        return self.weight.device.type == "cpu" and gemm.is_fp8

    def unit(self, gemm: Gemm, out_dtype: torch.dtype) -> float:
        """`unit_roundoff` of a GEMM's result, see `layers.Call.unit`."""
        if gemm.is_fp8 and gemm.granularity in self.backend.bf16_only:
            return unit_roundoff(torch.bfloat16, out_dtype)
        return unit_roundoff(out_dtype)

    def rows(self, x: torch.Tensor, rows: slice, cast: Cast | None, dim: int) -> Quantized:
        """Rows of one expert; tensorwise scales are those of all tokens."""
        amax = block_amax(x, (0, 0)) if cast is not None and cast.granularity == "tensorwise" else None
        return Quantized.of(x[rows], cast, dim, amax)

    def received(self, got: Received) -> None:
        """A grouped FP8 GEMM is about to run: each group's operands against independent casts."""
        if not self.expected:
            self.proof.fault("an FP8 GEMM ran that the recipe does not have")
            return
        name = self.expected.pop(0)
        gemm, total = self.recipe.gemms[name], got.a.codes.shape[0 if name != "grad_weight" else 1]
        groups = group_of_row(self.offsets, total)
        for index, (e, rows) in enumerate(self.groups):
            if name == "grad_weight":
                a = self._over_tokens(got.a, e, rows, groups, turned=True)
                b = self._over_tokens(got.b, e, rows, groups, turned=False)
                assert self.grad is not None
                self._compare(name, "a", e, cast_fault(a, self.rows(self.grad, rows, gemm.a, 0)))
                self._compare(name, "b", e, self.digests[index].fault(b))
                continue
            x = self.x if name == "output" else self.grad
            assert x is not None
            dim = 1 if name == "output" else 0
            a = Operand(got.a.codes[rows], _some(got.a.scale_inv, 0, rows, total))
            scale = got.b.scale_inv[e]
            b = Operand(got.b.codes[e], scale)
            if dim == 1:
                b = Operand(b.codes.t(), scale.t() if scale.dim() == 2 else scale)
            self._compare(name, "a", e, cast_fault(a, self.rows(x, rows, gemm.a, 1)))
            self._compare(name, "b", e, cast_fault(b, Quantized.of(self.weight[e], gemm.b, dim)))

    def _over_tokens(
        self, operand: Operand, e: int, rows: slice, groups: torch.Tensor, *, turned: bool
    ) -> Operand:
        codes, scale = operand
        if turned:
            codes = codes.t()
            scale = scale.transpose(-2, -1) if scale.dim() > 1 else scale
        scale = scale[e] if scale.dim() == 3 else _some(scale, 0, rows, codes.shape[0])
        return Operand(codes[rows], scale)

    def _compare(self, name: str, letter: str, e: int, fault: str) -> None:
        self.proof.gemms[name].operands += 1
        if fault:
            self.proof.fault(f"operand {letter} of {name}, expert {e}: {fault}")


class Experts:
    """Watches every converted product of experts of a model; `stack` is shared with `layers.Linears`."""

    def __init__(
        self, products: list[tuple[str, GroupedMatmul]], proofs: dict[str, LayerProof], stack: list[Any]
    ) -> None:
        self.products, self.proofs, self.stack = products, proofs, stack
        self.handles: list[Any] = []
        self.trains: dict[str, tuple[list[int], list[int]]] = {fqn: ([], []) for fqn, _ in products}

    def __enter__(self) -> Experts:
        for fqn, product in self.products:
            self.handles.append(product.register_forward_pre_hook(partial(self._before, fqn)))
            self.handles.append(product.register_forward_hook(partial(self._after, fqn), always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, fqn: str, product: torch.nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(product, GroupedMatmul)
        x, weight, offsets = args
        proof = self.proofs[fqn]
        with quietly():
            call = GroupedCall(product, proof, args, torch._C._current_graph_task_id() != -1)
        self.stack.append(call)
        proof.calls += 1
        proof.recomputed += call.in_backward
        proof.predicted += product.fp8_calls("output", offsets)
        if torch.is_grad_enabled():
            follow = product.fp8_calls("grad_input", offsets) * x.requires_grad
            follow += product.fp8_calls("grad_weight", offsets) * weight.requires_grad
            self.trains[fqn][call.in_backward].append(follow)
        recipe = call.recipe
        if call.backend.is_fp8 and recipe.output.is_fp8:
            call.expected = ["output"]
        if torch.is_grad_enabled() and weight.requires_grad:
            with quietly():
                for _, rows in call.groups:
                    assert call.x is not None
                    q = call.rows(call.x, rows, recipe.grad_weight.b, 0)
                    call.sketches.append(Sketch.of(Side(q, 0)))
                    if q.cast is not None:
                        call.digests.append(Digest.of(q))

    def _after(self, fqn: str, product: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call: GroupedCall = self.stack.pop()
        if output is None:
            return
        gemm = call.recipe.output
        kept = bool(call.expected) and call.in_backward and keeps_results()
        with quietly():
            if call.expected and call.groups and not kept:
                call.proof.fault("the FP8 GEMM of the output did not run")
            call.expected = []
            result, x = plain(output), call.x
            assert x is not None
            for e, rows in call.groups if kept or not call.in_backward else ():
                sides = (
                    Side(call.rows(x, rows, gemm.a, 1), 1),
                    Side(Quantized.of(call.weight[e], gemm.b, 1), 1),
                )
                unit = call.unit(gemm, result.dtype)
                call.proof.compared(
                    "output",
                    difference(*sides, result[rows], unit, exact=call.exact(gemm), fast=gemm.fast_accum),
                )
        call.x = None
        if not output.requires_grad:
            return
        node = find_node(output.grad_fn, NODE)
        if node is None:
            call.proof.fault("no backward pass of a grouped product belongs to its output")
            return
        call.needs = node.needs_input_grad[0], node.needs_input_grad[1]
        node.register_prehook(partial(self._backward, call))
        node.register_hook(partial(self._backward_done, call))

    def _backward(self, call: GroupedCall, grads: tuple[torch.Tensor, ...]) -> None:
        self.stack.append(call)
        call.grad = plain(grads[0])
        call.expected = [
            name
            for name, needed in zip(("grad_input", "grad_weight"), call.needs, strict=True)
            if needed and call.backend.is_fp8 and call.recipe.gemms[name].is_fp8
        ]

    def _backward_done(
        self, call: GroupedCall, grads: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor, ...]
    ) -> None:
        self.stack.pop()
        grad, recipe = call.grad, call.recipe
        assert grad is not None
        with quietly():
            for missing in call.expected if call.groups else ():
                call.proof.fault(f"the FP8 GEMM of {missing} did not run")
            call.expected = []
            for index, (e, rows) in enumerate(call.groups):
                if call.needs[0] and grads[0] is not None:
                    gemm = recipe.grad_input
                    sides = (
                        Side(call.rows(grad, rows, gemm.a, 1), 1),
                        Side(Quantized.of(call.weight[e], gemm.b, 0), 0),
                    )
                    unit = call.unit(gemm, grad.dtype)
                    found = difference(
                        *sides, plain(grads[0])[rows], unit, exact=call.exact(gemm), fast=gemm.fast_accum
                    )
                    call.proof.compared("grad_input", found)
                if call.needs[1] and grads[1] is not None and call.sketches:
                    gemm = recipe.grad_weight
                    side = Side(call.rows(grad, rows, gemm.a, 0), 0)
                    unit = call.unit(gemm, grad.dtype)
                    found = sketch_difference(
                        side, call.sketches[index], plain(grads[1])[e], unit, exact=call.exact(gemm)
                    )
                    call.proof.compared("grad_weight", found)
            for number, name in enumerate(("grad_input", "grad_weight")):
                if call.needs[number] and grads[number] is None:
                    call.proof.fault(f"{name} is missing")
        call.grad = None


def _some(scale: torch.Tensor, dim: int, rows: slice, total: int) -> torch.Tensor:
    """Scales of some rows: one for all, one a row, or one for each block, whose bounds groups keep to."""
    if scale.dim() == 0 or scale.shape[dim] == 1:
        return scale
    if scale.shape[dim] == total:
        return scale.narrow(dim, rows.start, rows.stop - rows.start)
    block = 32 if scale.dtype == torch.float8_e8m0fnu else 128
    return scale.narrow(dim, rows.start // block, -(-(rows.stop - rows.start) // block))
