"""Each call of a converted layer, watched once: what its GEMMs receive and what it hands out, forward and backward.

    before a call     input and weight in high precision -> the operands that the output GEMM must receive
    a GEMM            what it received, at the operator, below autograd and below every tensor subclass
    after the call    the output; the node of autograd that will run the backward pass is found and hooked
    its backward      grad_output in high precision -> the operands of grad_input and grad_weight; their results

A Float8Linear has one group of tokens, a product of experts one for each expert that has tokens; all else is the same.
The input is not kept until its grad_weight is there: a digest of its codes and a sketch of its values are
(`oracle.Digest`, `products.Sketch`), a few MiB of a layer.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode

from fp8core.arguments import PLAIN_TENSORS, is_dtensor
from fp8core.gemm import backend_named
from fp8core.inputs.sharded import tp_layout_of
from fp8core.inputs.shared_input import CastInput, after_autocast
from fp8core.layer_rules import gemms_reason
from fp8core.linear import Float8Linear
from fp8core.proof.adders import registers_of
from fp8core.proof.audit import audit, fp8_modules
from fp8core.proof.cast_stats import READS
from fp8core.proof.flops import MatmulCounter
from fp8core.proof.recorder import tensors_in
from fp8core.proof.verify.gathered_codes import GatheredCodes
from fp8core.proof.verify.operands import cast_as, input_of, matrix, plain, quietly
from fp8core.proof.verify.oracle import TiledOperand
from fp8core.proof.verify.products import Sketch, difference
from fp8core.proof.verify.records import GemmProof, LayerProof
from fp8core.proof.verify.shared_weights import SharedWeights
from fp8core.proof.verify.sums import BiasSum, Sums
from fp8core.recipe import GEMMS
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fp8core.inputs.sharded import TPLayout
    from fp8core.proof.adders import Register
    from fp8core.recipe import Recipe

NODES = ("_ScaledLinearBackward", "_GroupedMatmulBackward")
# Written by native_batch_norm and cuDNN's, whose schemas don't say so; nor do those of c10d, which write their first argument
RUNNING = ("running_mean", "running_var")
FOUR_BITS = "fp8core::four_bit_mm"
OPERATORS = ("aten::_scaled_mm", "fp8core::matmul", "fp8core::scaled_grouped_mm", FOUR_BITS)


class Call:
    """One forward pass of one layer, and the backward pass that belongs to it.

    Attributes:
        x: the input as a matrix, `again` that of grad_weight; both for as long as the forward pass.
        grad: the gradient of the output.
        needs: gradients of the input, of the weight.
        groups: (expert, its tokens); of a Linear one, with all of them.
        operands: (GEMM, place, expert) -> what it must receive.
    """

    def __init__(self, watch: Watch, proof: LayerProof, module: Any, args: tuple[Any, ...]) -> None:
        self.watch, self.proof, self.module = watch, proof, module
        self.in_backward = torch._C._current_graph_task_id() != -1
        self.recipe: Recipe = module.recipe
        self.backend = backend_named(self.recipe.backend)
        self.weight, self.offsets = args[1:] if proof.of_experts else (module.weight, None)
        self.needs = [torch.is_grad_enabled() and t.requires_grad for t in (values_of(args[0]), self.weight)]
        if not proof.of_experts and self.recipe.min_tokens == "bf16" and self._has_few_tokens(args[0]):
            self.recipe = self.recipe.in_high_precision(*GEMMS)
            proof.few_tokens += 1
        self.groups = [(0, slice(None))]
        self.tp: TPLayout | None = None
        self.x: torch.Tensor | None = None
        self.again: torch.Tensor | None = None
        self.grad: torch.Tensor | None = None
        self.aliased = False
        self.bias: BiasSum | None = None
        self.expected: list[str] = []
        self.operands: dict[tuple[str, int, int], TiledOperand] = {}
        self.sketches: dict[tuple[str, int, int], Sketch] = {}

    def _has_few_tokens(self, given: Any) -> bool:
        """Whether the layer's rule runs this call in high precision; never of tokens that every FP8 GEMM contracts."""
        x, _ = input_of(self.module, given)
        weight = plain(self.module.linear_weight).detach().requires_grad_(self.needs[1])
        return bool(x.shape[0] % 16) and gemms_reason(self.recipe, x, weight)[1]

    def gemms_of(self, name: str) -> int:
        """FP8 GEMMs that one of `GEMMS` takes."""
        if self.offsets is not None:
            return int(self.module.fp8_calls(name, self.offsets))
        gemm = self.recipe.gemms[name]
        return int(self.backend.is_fp8 and gemm.is_fp8 and not gemm.is_four_bit)

    def open(self, given: Any) -> None:
        """Looks at input and weight."""
        if self.offsets is not None:
            bounds = enumerate(itertools.pairwise([0, *self.offsets.tolist()]))
            self.groups = [(expert, slice(*ends)) for expert, ends in bounds if ends[0] < ends[1]]
            self.x = self.again = after_autocast(given.detach())
        else:
            self.tp = tp_layout_of(self.weight)
            self.x, again = input_of(self.module, given)
            self.again = self.x if again is None else again
            if any(
                isinstance(x, Float8Tensor) and x not in self.watch.gathered for x in (self.x, self.again)
            ):
                self.proof.unchecked("cast of the input: it came in codes")
            weight = plain(self.module.linear_weight)
            if isinstance(weight, Float8Tensor):
                self.watch.gathered.check_weight(self.module, weight, self.proof)
            if not self.in_backward:
                self.watch.shared.look(self.proof.fqn, self.module, weight, self.proof)
        self.expect("output")
        if not self.in_backward:
            self._losses("output", 0)
            self._losses("output", 1)
        if self.needs[1] and self._is_judged("grad_weight"):
            for expert, rows in self.groups:
                sketch = Sketch.of_input(self.operand("grad_weight", 1, expert, rows))
                self.sketches["grad_weight", 1, expert] = sketch

    def _is_judged(self, name: str) -> bool:
        """Whether there is an independent cast and product of a GEMM; there is none of four bits."""
        return not self.recipe.gemms[name].is_four_bit

    def expect(self, *names: str) -> None:
        """These GEMMs follow; what they must receive is made now, on all ranks alike."""
        self.expected = [
            name
            for name in names
            if self.recipe.gemms[name].is_fp8 and (self.backend.is_fp8 or not self._is_judged(name))
        ]
        for name, place, group in itertools.product(names, (0, 1), self.groups):
            if self._is_judged(name):
                self.operand(name, place, *group)

    def operand(self, name: str, place: int, expert: int, rows: slice) -> TiledOperand:
        """What a GEMM must receive: a or b, [lines, along]."""
        key = name, place, expert
        if key not in self.operands:
            role, turned = READS[name][place]
            whole: Any = self.grad
            if role == "weight":
                whole = plain(self.module.linear_weight if self.offsets is None else self.weight)
            elif role == "input":
                whole = self.again if turned else self.x
            if isinstance(whole, Float8Tensor):
                found = TiledOperand.given(whole.qdata, whole.scale_inv)
                self.operands[key] = found.t() if turned else found
            else:
                x = whole[rows] if whole.dim() == 2 else whole[expert]
                self.operands[key] = cast_as(
                    x.t() if turned else x,
                    getattr(self.recipe.gemms[name], "ab"[place]),
                    getattr(self.module, "amaxes", None),
                    role,
                    self.tp,
                    whole if whole.dim() == 2 else x,
                )
        return self.operands[key]

    def check_gemm(self, operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *how: str) -> None:
        """An FP8 GEMM is about to run: codes and scales of a and of b, each [lines, along]; how it adds up, and by what."""
        if not self.expected:
            self.proof.fault("an FP8 GEMM ran that the recipe does not have")
            return
        name = self.expected.pop(0)
        for (role, _), (codes, scale) in zip(READS[name], operands, strict=True):
            dtype = (
                "float4_e2m1fn_x2" if codes.dtype == torch.uint8 else str(codes.dtype).removeprefix("torch.")
            )
            self.proof.gemms[name].receive(role, dtype, granularity_seen(codes, scale), *how)
        if not self._is_judged(name):
            return
        for (expert, rows), (place, (codes, scale)) in itertools.product(self.groups, enumerate(operands)):
            wanted = self.operand(name, place, expert, rows).digest
            if wanted is None:
                continue
            stacked = codes.dim() == 3
            got = TiledOperand.given(
                codes[expert] if stacked else codes, scale[expert] if stacked or scale.dim() == 3 else scale
            )
            if name == "grad_weight":
                got = got.t().part(rows).t()
            elif not stacked and place == 0:
                got = got.part(rows)
            self.proof.gemms[name].operands += 1
            fault = wanted.fault(got)
            if fault:
                whose = f", expert {expert}" if self.proof.of_experts else ""
                self.proof.fault(f"operand {'ab'[place]} of {name}{whose}: {fault}")

    def end_of_gemms(self, result: torch.Tensor) -> None:
        """Checks that every GEMM that is due by now has run."""
        for name in self.expected if result.numel() and self.groups else ():
            self.proof.fault(f"the FP8 GEMM of {name} did not run")
        self.expected = []

    def compare(self, name: str, result: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """A result against the product of its operands."""
        if not self._is_judged(name):
            self.proof.unchecked(f"{name}: no independent cast to four bits is there to compare with")
            return
        gemm, result = self.recipe.gemms[name], plain(result)
        # In the order in which they round it, last where the layer hands it out
        dtypes = [torch.bfloat16] * (gemm.is_fp8 and gemm.granularity in self.backend.bf16_only)
        dtypes += [result.dtype if self.grad is None else self.grad.dtype]
        dtypes += [result.dtype] * (name == "grad_input" and result.dtype != dtypes[-1])
        registers: tuple[Register, ...] | None = None
        if gemm.is_fp8 and (self.backend.is_fp8 or result.device.type == "cpu"):
            registers = registers_of(result.device, gemm.fast_accum)
        if name != "grad_weight":
            result = matrix(result)
        for expert, rows in self.groups:
            found = difference(
                self.operand(name, 0, expert, rows),
                self.operand(name, 1, expert, rows),
                result[rows] if result.dim() == 2 else result[expert],
                dtypes,
                bias,
                registers=registers,
            )
            self.proof.compared(name, found)

    def close(self, output: Any) -> None:
        """After the forward pass."""
        # Selective activation checkpointing hands out results of the first pass, and runs no operator
        modes = _get_current_dispatch_mode_stack() if self.in_backward and self.expected else ()
        kept = any(isinstance(mode, _CachedTorchDispatchMode) for mode in modes)
        with quietly():
            result = plain(output)
            self.end_of_gemms(result[:0] if kept else result)
            if kept or not self.in_backward:
                bias: Any = (
                    None if self.offsets is not None or self.module.bias_deferred else self.module.bias
                )
                if bias is not None:
                    bias = self.tp.local_bias(bias) if self.tp is not None and is_dtensor(bias) else bias
                    bias = plain(bias).to(result.dtype)
                self.compare("output", result, bias)
        self._rest()

    def follow(self, output: Any) -> None:
        """Finds the backward pass that belongs to an output."""
        level, node = [output.grad_fn], None
        for _ in range(8):
            node = node or next((each for each in level if each is not None and each.name() in NODES), None)
            level = [after for each in level if each is not None for after, _ in each.next_functions]
        if node is None:
            self.proof.fault(f"no backward pass of a {type(self.module).__name__} belongs to its output")
            return
        self.needs = node.needs_input_grad[:2]
        if type(output) is torch.Tensor:  # its gradient before anything of the layer has read it
            output.register_hook(lambda grad: setattr(self, "grad", grad.detach()))
        node.register_prehook(self._before_backward)
        node.register_hook(self._after_backward)

    def _before_backward(self, grads: tuple[torch.Tensor, ...]) -> None:
        self.watch.stack.append(self)
        with quietly():
            self.grad = matrix(plain(grads[0]) if self.grad is None else self.grad)
            values = self.grad.qdata.float() if isinstance(self.grad, Float8Tensor) else self.grad
            self.proof.gradient |= bool(values.any())
            led_to, reached = self.proof.backward
            follow = sum(map(self.gemms_of, itertools.compress(GEMMS[1:], self.needs)))
            self.proof.backward = led_to, reached + follow
            if isinstance(self.grad, Float8Tensor) and self.grad not in self.watch.gathered:
                self.proof.unchecked("cast of grad_output: it came in codes")
            if self.bias is not None:
                self.bias.expect(self.grad.dequantize() if isinstance(self.grad, Float8Tensor) else self.grad)
            self.expect(*itertools.compress(GEMMS[1:], self.needs))

    def _after_backward(self, grads: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor, ...]) -> None:
        self.watch.stack.pop()
        with quietly():
            assert self.grad is not None
            self.end_of_gemms(self.grad)
            self._losses("grad_input", 0)
            for name, result in itertools.compress(zip(GEMMS[1:], grads, strict=False), self.needs):
                if result is None:
                    self.proof.fault(f"{name} is missing")
                elif name == "grad_weight" or not self.aliased:
                    self.compare(name, result)
        if not (self.aliased and self.needs[0]):  # else the gradient that is handed out will come
            self._rest()

    def input_gradient(self, grad: torch.Tensor) -> None:
        """The gradient that reaches the layer's input."""
        if self.grad is None:
            self.proof.fault("grad_input came from elsewhere than the layer's backward pass")
            return
        with quietly():
            self.compare("grad_input", grad)
        self._rest()

    def _rest(self) -> None:
        """Lets go of all but sketches."""
        self.x = self.again = self.grad = None
        self.operands = {**self.sketches}

    def _losses(self, name: str, place: int) -> None:
        """What the cast of an operand saturates and loses."""
        if self.proof.of_experts or not self._is_judged(name):
            return
        operand, role = self.operand(name, place, *self.groups[0]), READS[name][place][0]
        if operand.cast is not None and operand.x.numel():
            shares = self.proof.saturated, self.proof.underflowed
            for known, share in zip(shares, operand.losses(), strict=True):
                known[role] = max(share, known.get(role, 0.0))


def granularity_seen(codes: torch.Tensor, scale: torch.Tensor) -> str:
    """What a scale [lines, blocks] of codes [lines, along] covers, by its shape; of stacked matrices each."""
    if scale.numel() == 1 or scale.dim() < 2:
        return "tensorwise"
    if scale.dtype == torch.float8_e8m0fnu:
        return "1x32"
    lines, along = scale.shape[-2:]
    if scale.dtype == torch.float8_e4m3fn:
        squares = scale.view(torch.uint8).unflatten(0, (-1, 16)) if lines % 16 == 0 else None
        return "16x16" if squares is not None and bool((squares == squares[:, :1]).all()) else "1x16"
    if along == 1 and lines == codes.shape[-2]:
        return "rowwise"
    return "1x128" if lines == codes.shape[-2] else "128x128"


def values_of(given: Any) -> torch.Tensor:
    """An input in high precision, or what stands for it."""
    return given.hp if isinstance(given, CastInput) else given


class Watch:
    """Watches a model while the block runs; `proofs` then says what was seen.

    It looks at each FP8 GEMM, on every backend but "reference", and at each write to a tensor.

    Args:
        model: to watch.
        on_write: called with each tensor that an operator is about to write.

    Attributes:
        counter: of the matrix products, whose recorder sees the operators.
        modules: what is watched, by name.
        stray: FP8 GEMMs that ran outside of all layers.
        gathered: codes of inputs, weights and gradients that a collective brought.
        sums: of gradients, by weight.
    """

    def __init__(self, model: nn.Module, on_write: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        self.counter = MatmulCounter(model)
        self.counter.recorder.before.append(self._look)
        self.found = {
            layer.fqn: LayerProof(layer.fqn, layer.recipe, layer.reason, layer.all_gather)
            for layer in audit(model).layers
        }
        self.modules = list(fp8_modules(model).items())
        for fqn, module in self.modules:
            proof = self.found.setdefault(fqn, LayerProof(fqn, str(module.recipe), "", of_experts=True))
            for name, gemm in module.recipe.gemms.items():
                proof.gemms[name] = GemmProof(gemm.is_fp8)
                if gemm.is_fp8:
                    proof.gemms[name].asked = str(gemm.a), str(gemm.b)
        self.on_write = on_write
        self.stray = 0
        self.stack: list[Call] = []
        self.gathered = GatheredCodes(module for _, module in self.modules)
        self.sums: dict[int, Sums] = {}
        self.biases: dict[int, BiasSum] = {}
        self.shared = SharedWeights(model)
        # Calls that a backward pass can follow -> GEMMs that will: outside of a backward pass, inside of one
        self.trains = {fqn: [0, 0] for fqn, _ in self.modules}
        self._end = ExitStack()

    def _look(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""
        if not isinstance(op, OpOverload):
            return
        arguments = op._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        for place, argument in enumerate(arguments):
            unsaid = argument.name in RUNNING or (place == 0 and op.namespace == "c10d")
            if unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
                for tensor in tensors_in(given.get(argument.name)):
                    self.on_write(tensor)
        name = op.name().partition(".")[0]
        if name in OPERATORS:
            a, b, scale_a, scale_b = args[:4]
            if name == FOUR_BITS:
                if self.stack:
                    self._gemm(((a, scale_a), (b, scale_b)), "float32", "reference")
                return
            fast = given.get("use_fast_accum", not given.get("promote_every", 128))
            sums = ("fast" if fast else "promoted") if registers_of(a.device, bool(fast)) else "float32"
            if name == "fp8core::matmul":  # b lies as [N, K]
                self._gemm(((a, scale_a), (b, scale_b)), sums, "triton")
            else:
                b, scale_b = b.mT, scale_b.mT if scale_b.dim() > 1 else scale_b
                self._gemm(((a, scale_a), (b, scale_b)), sums, given.get("backend", "torch"))

    def __enter__(self) -> Watch:
        self._end.enter_context(self.gathered.watched())
        self._end.enter_context(self.shared.watched())
        for fqn, module in self.modules:
            # Before the call, since a recomputation stops inside of it once it has what it needs; after a Linear before
            # hooks of tensor parallelism, which lay the output out anew
            first = isinstance(module, Float8Linear)
            for handle in (
                module.register_forward_pre_hook(partial(self._before, fqn)),
                module.register_forward_hook(self._after, prepend=first, always_call=True),
            ):
                self._end.callback(handle.remove)
        self._end.enter_context(self.counter)
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.close()
        sums: list[Sums | BiasSum] = [*self.sums.values(), *self.biases.values()]
        for each in sums:
            each.finish()

    def _gemm(self, operands: Sequence[tuple[torch.Tensor, torch.Tensor]], *how: str) -> None:
        if self.stack:
            with quietly():
                self.stack[-1].check_gemm(operands, *how)
        else:
            self.stray += 1

    def _before(self, fqn: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        proof = self.found[fqn]
        call = Call(self, proof, module, args)
        if self._is_seen():
            self.stack.append(call)
        elif call.recipe.fp8_gemms:
            proof.in_threads += 1
            proof.unchecked("it was called in a thread whose operators cannot be seen")
        proof.calls += 1
        proof.recomputed += call.in_backward
        proof.predicted += call.gemms_of("output")
        for name in itertools.compress(GEMMS[1:], call.needs):
            self.trains[fqn][call.in_backward] += call.gemms_of(name)
        if not (call.recipe.fp8_gemms and self._is_seen()):
            return None
        self.shared.look_at_rest()
        given, weight = args[0], call.weight
        hp = values_of(given)
        with quietly():
            call.open(given)
            if call.needs[1] and weight.is_leaf and id(weight) not in self.sums:
                self.sums[id(weight)] = Sums(weight, proof)
        bias: Any = None if proof.of_experts or module.bias_deferred else module.bias
        if bias is not None and bias.is_leaf and bias.requires_grad and torch.is_grad_enabled():
            call.bias = self.biases.get(id(bias)) or BiasSum(bias, proof)
            self.biases[id(bias)] = call.bias
        if not call.needs[0] or type(hp) not in PLAIN_TENSORS:
            return None
        alias = hp.view_as(hp)  # whose gradient is this call's alone, where several layers read the tensor
        call.aliased = True
        alias.register_hook(call.input_gradient)
        return (given._replace(hp=alias) if isinstance(given, CastInput) else alias, *args[1:])

    def _is_seen(self) -> bool:
        """Whether this thread hands its operators to this mode."""
        return any(mode is self.counter.recorder for mode in _get_current_dispatch_mode_stack())

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_seen():
            return
        call = self.stack.pop()
        if output is None or call.x is None:
            return  # it raised, runs nothing in FP8, or is a recomputation that had what it needs
        call.close(output)
        if any(call.needs):
            call.follow(output)
        elif call.bias is not None and output.requires_grad:
            output.register_hook(lambda grad, bias=call.bias: bias.expect(matrix(plain(grad))))

    def proofs(self) -> list[LayerProof]:
        """With the prediction. A checkpointed call trains either outside of the backward pass, and is then
        recomputed inside (non-reentrant), or inside only (reentrant); it leads to gradients once."""
        for fqn, follow in self.trains.items():
            proof = self.found[fqn]
            proof.backward = max(follow), proof.backward[1]
            proof.predicted += proof.backward[
                1
            ]  # a call that the loss does not depend on is followed by none
            follow[:] = 0, 0
        return list(self.found.values())
