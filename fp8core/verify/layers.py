"""Hooks on every Float8Linear while a step runs in eager mode: its three GEMMs, call by call.

    before a call     input and weight in high precision -> the operands that the output GEMM must receive
    the GEMM itself   what it received, see `received`
    after the call    the output; the node of autograd that will run the backward pass is found and hooked
    its backward      grad_output in high precision -> the operands of grad_input and grad_weight; their results

The input is not kept until its grad_weight is there: a digest of its codes and a sketch of its values are
(`received.Digest`, `products.Sketch`), a few MiB of a layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fp8core.gemm import backend_named
from fp8core.inputs.sharded import cut_of
from fp8core.inputs.shared_input import CastInput
from fp8core.linear import Float8Linear
from fp8core.tensor import Float8Tensor
from fp8core.verify.accumulation import Accumulation
from fp8core.verify.arrived import Arrived
from fp8core.verify.operands import input_of, keeps_results, plain, quantized, quietly, weight_of
from fp8core.verify.products import Side, Sketch, difference, sketch_difference, unit_roundoff
from fp8core.verify.received import Digest, Operand, Received, cast_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.inputs.sharded import TPLayout
    from fp8core.recipe import Gemm
    from fp8core.verify.oracle import Quantized
    from fp8core.verify.records import LayerProof

NODE = "_ScaledLinearBackward"


class Expected(NamedTuple):
    """One FP8 GEMM that is about to run.

    Attributes:
        name: one of `fp8core.recipe.GEMMS`.
        a, b: operands as `Quantized`, or the `Digest` of one; None where codes came from elsewhere.
        turn_a, turn_b: the GEMM reads the transpose of the tensor.
    """

    name: str
    a: Quantized | None
    b: Quantized | Digest | None
    turn_a: bool
    turn_b: bool


class Call:
    """One forward pass of one layer, and the backward pass that belongs to it."""

    def __init__(self, layer: Float8Linear, proof: LayerProof, in_backward: bool) -> None:
        self.layer, self.proof, self.in_backward = layer, proof, in_backward
        self.recipe = layer.recipe
        self.backend = backend_named(self.recipe.backend)
        self.cut: TPLayout | None = None
        self.sides: tuple[Side, Side] | None = None
        self.sketch: Sketch | None = None
        self.digest: Digest | None = None
        self.grad: torch.Tensor | None = None
        self.aliased = self.follows = False  # a backward pass can
        self.needs = (False, False)  # gradients: of the input, of the weight
        self.expected: list[Expected] = []

    def exact(self, gemm: Gemm) -> bool:
        """Whether single elements are held to their bounds: additions in float32, operands in FP8."""
        return self.layer.weight.device.type == "cpu" and gemm.is_fp8

    def unit(self, gemm: Gemm, out_dtype: torch.dtype) -> float:
        """`unit_roundoff` of a GEMM's result."""
        if gemm.is_fp8 and gemm.granularity in self.backend.bf16_only:
            return unit_roundoff(torch.bfloat16, out_dtype)
        return unit_roundoff(out_dtype)

    def side(self, x: torch.Tensor, name: str, operand: str, dim: int, role: str) -> Side:
        """A tensor as an operand of a GEMM that contracts `dim`."""
        cast = getattr(self.recipe.gemms[name], operand)
        return Side(quantized(self.layer, x, cast, dim, role, self.cut), dim)

    def received(self, got: Received) -> None:
        """An FP8 GEMM is about to run."""
        if not self.expected:
            self.proof.fault("an FP8 GEMM ran that the recipe does not have")
            return
        want = self.expected.pop(0)
        for operand, wanted, turned, letter in (
            (got.a, want.a, want.turn_a, "a"),
            (got.b, want.b, want.turn_b, "b"),
        ):
            if wanted is None:
                continue
            if turned:
                scale = operand.scale_inv
                operand = Operand(operand.codes.t(), scale.t() if scale.dim() == 2 else scale)
            if isinstance(wanted, Digest):
                fault = wanted.fault(operand)
            elif wanted.cast is None:
                continue
            else:
                fault = cast_fault(operand, wanted)
            self.proof.gemms[want.name].operands += 1
            if fault:
                self.proof.fault(f"operand {letter} of {want.name}: {fault}")


class Linears:
    """Watches every Float8Linear of a model.

    Attributes:
        stack: calls under way, the innermost last; whoever sees an FP8 GEMM hands it to that one.
        arrived: codes of inputs and gradients that were made outside of the layers.
        shards: layer -> check of this rank's part of a weight that FSDP2 gathers in codes.
    """

    def __init__(self, layers: list[tuple[str, Float8Linear]], proofs: dict[str, LayerProof]) -> None:
        self.layers, self.proofs = layers, proofs
        self.stack: list[Any] = []
        self.handles: list[Any] = []
        self.accumulations: dict[int, Accumulation] = {}
        # Calls that a backward pass can follow: (outside of a backward pass, inside of one) -> GEMMs that will
        self.trains: dict[str, tuple[list[int], list[int]]] = {fqn: ([], []) for fqn, _ in layers}
        self.arrived = Arrived({layer: proofs[fqn] for fqn, layer in layers})
        self.shards: dict[Float8Linear, Callable[[Float8Tensor, LayerProof], None]] = {}

    def __enter__(self) -> Linears:
        self.arrived.open()
        for fqn, layer in self.layers:
            # Before the call, since a recomputation stops inside of it once it has what it needs
            self.handles.append(layer.register_forward_pre_hook(partial(self._before, fqn)))
            # Before hooks of tensor parallelism, which lay the output out anew
            self.handles.append(
                layer.register_forward_hook(partial(self._after, fqn), prepend=True, always_call=True)
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.arrived.close()
        for handle in self.handles:
            handle.remove()
        for each in self.accumulations.values():
            each.finish()

    def _before(self, fqn: str, layer: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        assert isinstance(layer, Float8Linear)
        proof, recipe = self.proofs[fqn], layer.recipe
        given = args[0]
        hp: torch.Tensor = given.hp if isinstance(given, CastInput) else given
        call = Call(layer, proof, torch._C._current_graph_task_id() != -1)
        self.stack.append(call)
        self._count(fqn, call, hp)
        if not recipe.fp8_gemms:
            return None
        trains = torch.is_grad_enabled() and layer.weight.requires_grad
        with quietly():
            self._operands(call, given, trains)
            if trains and layer.weight.is_leaf and id(layer.weight) not in self.accumulations:
                self.accumulations[id(layer.weight)] = Accumulation(layer.weight, proof)
        call.follows = trains or (torch.is_grad_enabled() and hp.requires_grad)
        if not (torch.is_grad_enabled() and hp.requires_grad):
            return None
        if type(hp) not in (torch.Tensor, torch.nn.Parameter):
            return None
        alias = hp.view_as(hp)  # whose gradient is this call's alone, where several layers read the tensor
        call.aliased = True
        alias.register_hook(partial(self._input_gradient, call))
        return (given._replace(hp=alias) if isinstance(given, CastInput) else alias, *args[1:])

    def _count(self, fqn: str, call: Call, x: torch.Tensor) -> None:
        """GEMMs that will follow."""
        recipe, proof = call.recipe, call.proof
        proof.calls += 1
        proof.recomputed += call.in_backward
        if call.backend.is_fp8:
            proof.predicted += recipe.output.is_fp8
            if torch.is_grad_enabled():
                follow = recipe.grad_input.is_fp8 * x.requires_grad
                follow += recipe.grad_weight.is_fp8 * call.layer.weight.requires_grad
                self.trains[fqn][call.in_backward].append(follow)

    def _operands(self, call: Call, given: Any, trains: bool) -> None:
        """What the output GEMM must receive, and what is kept of the input."""
        layer, proof, recipe = call.layer, call.proof, call.recipe
        call.cut = cut_of(layer.weight)
        weight = weight_of(layer)
        x, for_grad_weight, unknown = input_of(layer, given)
        if unknown and not (
            x in self.arrived and (for_grad_weight is None or for_grad_weight in self.arrived)
        ):
            proof.unchecked(f"cast of the input: {unknown}")
        if isinstance(weight, Float8Tensor):
            if layer in self.shards:
                self.shards[layer](weight, proof)
            else:
                proof.unchecked("cast of the weight: it came in codes")
        a = call.side(x, "output", "a", 1, "input")
        b = call.side(weight, "output", "b", 1, "weight")
        call.sides = a, b
        if call.backend.is_fp8 and recipe.output.is_fp8:
            call.expected = [Expected("output", a.q, b.q, False, True)]
        if not call.in_backward:
            for role, side in (("input", a), ("weight", b)):
                _losses(proof, role, side.q)
        if trains:
            kept = for_grad_weight if for_grad_weight is not None else x
            again = call.side(kept, "grad_weight", "b", 0, "input")
            call.sketch = Sketch.of(again)
            if again.q.cast is not None:
                call.digest = Digest.of(again.q)

    def _after(self, fqn: str, layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self.stack.pop()
        if output is None or not call.recipe.fp8_gemms or call.sides is None:
            return  # it raised, or a recomputation had what it needs
        kept = bool(call.expected) and call.in_backward and keeps_results()
        with quietly():
            if call.expected and plain(output).numel() and not kept:
                call.proof.fault("the FP8 GEMM of the output did not run")
            call.expected = []
            if kept or not call.in_backward:
                self._output(call, output)
        call.sides = None
        if not call.follows:
            return
        node = find_node(output.grad_fn)
        if node is None:
            call.proof.fault("no backward pass of a Float8Linear belongs to its output")
            return
        call.needs = node.needs_input_grad[0], node.needs_input_grad[1]
        if type(output) is torch.Tensor:
            output.register_hook(partial(_note_gradient, call))
        node.register_prehook(partial(self._backward, call))
        node.register_hook(partial(self._backward_done, call))

    def _output(self, call: Call, output: torch.Tensor) -> None:
        layer, gemm = call.layer, call.recipe.output
        result = plain(output)
        result = result.reshape(-1, result.shape[-1])
        bias: Any = None if layer.bias_deferred else layer.bias
        if bias is not None and call.cut is not None and hasattr(bias, "placements"):
            bias = call.cut.local_bias(bias)
        bias = None if bias is None else plain(bias).to(result.dtype)
        assert call.sides is not None
        unit = call.unit(gemm, result.dtype)
        call.proof.compared(
            "output",
            difference(*call.sides, result, unit, bias, exact=call.exact(gemm), fast=gemm.fast_accum),
        )

    def _backward(self, call: Call, grads: tuple[torch.Tensor, ...]) -> None:
        """Before the node of autograd runs: which GEMMs must follow, with which operands."""
        self.stack.append(call)
        layer, recipe = call.layer, call.recipe
        with quietly():
            if call.grad is None:
                call.grad = plain(grads[0])
            grad = call.grad = call.grad.reshape(-1, call.grad.shape[-1])
            call.expected = []
            if isinstance(grad, Float8Tensor) and grad not in self.arrived:
                call.proof.unchecked("cast of grad_output: it came in codes")
            if not call.backend.is_fp8:
                return
            needs_input, needs_weight = call.needs
            if recipe.grad_input.is_fp8 and needs_input:
                a = call.side(grad, "grad_input", "a", 1, "grad_output").q
                b = call.side(weight_of(layer), "grad_input", "b", 0, "weight").q
                call.expected.append(Expected("grad_input", a, b, False, False))
            if recipe.grad_weight.is_fp8 and needs_weight:
                a = call.side(grad, "grad_weight", "a", 0, "grad_output").q
                call.expected.append(Expected("grad_weight", a, call.digest, True, False))

    def _backward_done(
        self, call: Call, grads: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor, ...]
    ) -> None:
        """After it: grad_weight, and grad_input where no alias of the input will show it."""
        self.stack.pop()
        with quietly():
            assert call.grad is not None
            for missing in call.expected if call.grad.numel() else ():
                call.proof.fault(f"the FP8 GEMM of {missing.name} did not run")
            call.expected = []
            if call.recipe.grad_input.a is not None:
                _losses(
                    call.proof, "grad_output", call.side(call.grad, "grad_input", "a", 1, "grad_output").q
                )
            if call.needs[0] and grads[0] is None:
                call.proof.fault("grad_input is missing")
            if call.needs[1]:
                self._weight_gradient(call, grads[1])
            if call.needs[0] and grads[0] is not None and not call.aliased:
                self._compare_input(call, grads[0])
        if not call.aliased:
            call.grad = None

    def _weight_gradient(self, call: Call, result: torch.Tensor | None) -> None:
        gemm = call.recipe.grad_weight
        if result is None or call.sketch is None or call.grad is None:
            call.proof.fault("grad_weight is missing")
            return
        unit = call.unit(gemm, call.grad.dtype)
        side = call.side(call.grad, "grad_weight", "a", 0, "grad_output")
        found = sketch_difference(side, call.sketch, plain(result), unit, exact=call.exact(gemm))
        call.proof.compared("grad_weight", found)

    def _input_gradient(self, call: Call, grad: torch.Tensor) -> None:
        """The gradient that reaches the layer's input."""
        if call.grad is None:
            call.proof.fault("grad_input came from elsewhere than the layer's backward pass")
            return
        with quietly():
            self._compare_input(call, grad)
        call.grad = None

    def _compare_input(self, call: Call, result: torch.Tensor) -> None:
        gemm = call.recipe.grad_input
        assert call.grad is not None
        unit = call.unit(gemm, call.grad.dtype) + unit_roundoff(result.dtype)
        a = call.side(call.grad, "grad_input", "a", 1, "grad_output")
        b = call.side(weight_of(call.layer), "grad_input", "b", 0, "weight")
        matrix = plain(result).reshape(-1, result.shape[-1])
        call.proof.compared(
            "grad_input", difference(a, b, matrix, unit, exact=call.exact(gemm), fast=gemm.fast_accum)
        )


def _note_gradient(call: Call, grad: torch.Tensor) -> None:
    """The gradient of the output, before anything of the layer has read it."""
    call.grad = grad.detach()


def find_node(node: Any, name: str = NODE) -> Any:
    """The node of autograd of that name nearest to an output; None if there is none within a few steps."""
    level = [node]
    for _ in range(8):
        for found in level:
            if found is not None and found.name() == name:
                return found
        level = [after for found in level if found is not None for after, _ in found.next_functions]
    return None


def _losses(proof: LayerProof, role: str, q: Quantized) -> None:
    """What the cast of an operand saturates and loses."""
    if q.cast is None or not q.x.numel():
        return
    saturated, underflowed = q.losses()
    proof.saturated[role] = max(saturated, proof.saturated.get(role, 0.0))
    proof.underflowed[role] = max(underflowed, proof.underflowed.get(role, 0.0))
