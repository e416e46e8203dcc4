"""From a module to `harness.advise.model.Model`: one forward and backward pass on fake tensors, without memory.

Shapes are real, values are not: the module is made on "meta" and each operator reports what it would read and write.
Reads and writes between two matrix products are also counted as if they were one kernel, which is what a compiler can
reach at best: every tensor that comes from outside once, every tensor that is used later once.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from fp8core import audit, convert_to_float8_training
from fp8core.recipe import RECIPES
from harness.advise.model import Linear, Model, Outside, Traffic, mark_head, weighted
from harness.store.errors import UsageError
from harness.training.models import ModelSpec, UserModel
from harness.training.models.calls import common_rows
from harness.training.models.common import replace_parameters
from harness.training.models.flops import register_flop_formulas

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_BLOCKS = "layers"  # the list of blocks in the models of this project
_ATTENTION = "scaled_dot_product"
_FREE = ("empty", "_unsafe_view", "detach", "device", "lift_fresh", "alias")  # operators that move no data
_LOOKUPS = ("embedding", "index_select", "gather", "index")  # they read what they return, not the table


def trace(spec: ModelSpec | UserModel, batch: int, seq: int) -> Model:
    """One pass of a named model, or of a user's with its own batch function.

    A named model is traced with one block and with two; the difference stands for each of its blocks.

    Args:
        spec: as `harness.training.models.resolve` gives it.
        batch: sequences of a forward pass.
        seq: tokens of each; of no meaning for a user's model, whose batches have their own.

    Raises:
        UsageError: the model cannot be run on fake tensors; the layer that failed is named.
    """
    if isinstance(spec, UserModel):
        module = spec.build(device="meta", dtype=torch.bfloat16)
        inputs = tuple(part.to("meta") for part in spec.batch(0, 0, batch, "cpu"))
        return trace_module(module, inputs, spec.target)
    return _named(spec, batch, seq)


@functools.lru_cache(maxsize=16)  # many GPUs are asked about one model; neither a spec nor a Model can change
def _named(spec: ModelSpec, batch: int, seq: int) -> Model:
    """One pass of a named model."""
    tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
    parts = []
    for layers in (1, 2)[: spec.layers]:
        module = spec.build(device="meta", dtype=torch.bfloat16, layers=layers)
        module.eval()  # without dropout, whose random numbers would keep attention from its fused form
        parts.append(trace_module(module, (tokens, tokens), spec.name))
    return parts[0] if len(parts) == 1 else _repeated(parts[0], parts[1], spec.layers)


def _repeated(one: Model, two: Model, blocks: int) -> Model:
    """A model of that many blocks, of which `two` has one more than `one`."""
    prefix = f"{_BLOCKS}.0."
    stride = 1 + max((layer.input_id for layer in one.layers), default=0)
    layers = [
        replace(
            layer,
            fqn=f"{_BLOCKS}.{i}.{layer.fqn.removeprefix(prefix)}",
            input_id=layer.input_id + (i + 1) * stride,
        )
        for i in range(blocks)
        for layer in one.layers
        if layer.fqn.startswith(prefix)
    ]
    rest = (layer for layer in one.layers if not layer.fqn.startswith(prefix))
    outside = Outside(**weighted((2, one), (-1, two)))
    amounts = weighted((2 - blocks, one), (blocks - 1, two))
    return replace(one, layers=(*layers, *rest), blocks=blocks, outside=outside, **amounts)


def trace_module(module: nn.Module, inputs: Sequence[Tensor], name: str) -> Model:
    """One forward and backward pass of a module on "meta" whose `module(*inputs)` is the loss.

    Raises:
        UsageError: it cannot be run so; the layer that failed is named, with its own words.
    """
    register_flop_formulas()
    barred = barred_layers(module)
    module = copy.deepcopy(module)
    with FakeTensorMode():
        replace_parameters(module, {p: nn.Parameter(_blank(p), p.requires_grad) for p in module.parameters()})
        for part in module.modules():
            for key, buffer in part._buffers.items():
                part._buffers[key] = None if buffer is None else _blank(buffer)
            if isinstance(part, nn.RMSNorm):
                part.forward = functools.partial(_one_kernel_norm, part)  # type: ignore[method-assign]  # of this copy alone
        calls = _Calls(module, barred)
        recorder = _Recorder(calls)
        try:
            with recorder:
                loss = module(*(_blank(part) for part in inputs))
                for hook in calls.hooks:  # what checkpointing runs again is no other use of a layer
                    hook.remove()
                recorder.turn()
                if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                    raise UsageError(
                        f"{name}: model(*batch) returned no loss; expected one number, a 0-dimensional tensor that "
                        "depends on the weights"
                    )
                loss.backward()
        except UsageError:
            raise
        except Exception as error:  # the user's code may raise anything
            where = next((fqn for fqn in reversed(calls.running) if fqn), type(module).__name__)
            first = next(iter(str(error).strip().splitlines()), "")[:200]
            raise UsageError(
                f"{name} cannot be traced: {where} failed on tensors without values: {type(error).__name__}: {first}; "
                "a step that looks at values (.item(), a branch on data) has no place in a forward pass that is traced"
            ) from error
    forward, backward = recorder.finish(p.grad for p in module.parameters() if p.grad is not None)
    layers = mark_head(tuple(calls.layers.values()), _vocabularies(module))
    return Model(
        name,
        layers,
        common_rows((layer.tokens, layer.K * layer.N) for layer in layers),
        recorder.attention,
        recorder.other,
        forward,
        backward,
        sum(p.numel() for p in module.parameters()),
        _blocks(module),
        experts=recorder.grouped,
    )


def layers_alone(module: nn.Module, tokens: int, name: str) -> Model:
    """Facts of a module without `model.batch`, which cannot be called: its Linear layers, each on all tokens."""
    barred = barred_layers(module)
    linears = ((fqn, m) for fqn, m in module.named_modules() if isinstance(m, nn.Linear))
    layers = [
        Linear(fqn, m.in_features, m.out_features, tokens, i, barred.get(fqn, {}))
        for i, (fqn, m) in enumerate(linears)
    ]
    parameters = sum(p.numel() for p in module.parameters())
    marked = mark_head(layers, _vocabularies(module))
    return Model(name, marked, tokens, parameters=parameters, blocks=_blocks(module), whole=False)


def _vocabularies(module: nn.Module) -> Iterator[int | None]:
    """Rows of the embeddings: of nn.Embedding, and of those of other libraries, which call them the same."""
    return (getattr(part, "num_embeddings", None) for part in module.modules())


def barred_layers(module: nn.Module) -> dict[str, dict[str, str]]:
    """For each Linear, the recipes that it cannot run and why."""
    found: dict[str, dict[str, str]] = {}
    # What only the device at hand lacks is no property of the layer
    shapes = copy.deepcopy(module).to("meta")
    for name, recipe in RECIPES.own.items():
        converted = convert_to_float8_training(copy.deepcopy(shapes), config=recipe, allow_no_conversion=True)
        for layer in audit(converted).not_converted:
            found.setdefault(layer.fqn, {})[name] = layer.reason
    return found


class _Calls:
    """Which layers are running, and what each Linear was called with. Keeps their inputs alive, so that ids stay apart."""

    def __init__(self, module: nn.Module, barred: Mapping[str, Mapping[str, str]]) -> None:
        self.layers: dict[str, Linear] = {}
        self.running: list[str] = []
        self._barred = barred
        self._inputs: list[Tensor] = []
        self._ids: dict[object, int] = {}
        self.hooks = [
            hook
            for fqn, part in module.named_modules()
            for hook in (
                part.register_forward_pre_hook(functools.partial(self._entered, fqn)),
                part.register_forward_hook(self._left),
            )
        ]

    def _entered(self, fqn: str, part: nn.Module, args: tuple[Any, ...]) -> None:
        self.running.append(fqn)
        if not (isinstance(part, nn.Linear) and args and isinstance(args[0], Tensor)):
            return
        x, rows = args[0], args[0].numel() // part.in_features
        if (before := self.layers.get(fqn)) is not None:
            self.layers[fqn] = replace(before, tokens=before.tokens + rows)
            return
        self._inputs.append(x)
        view = (_storage(x), x.shape, x.stride(), x.storage_offset())
        read = self._ids.setdefault(view, len(self._ids))
        sizes = (part.in_features, part.out_features, rows)
        self.layers[fqn] = Linear(fqn, *sizes, read, self._barred.get(fqn, {}))

    def _left(self, *_: object) -> None:
        self.running.pop()

    @property
    def in_linear(self) -> bool:
        """Whether a Linear is running, whose products are counted by its sizes."""
        return bool(self.running) and self.running[-1] in self.layers


@dataclass(slots=True)
class _Phase:
    """Forward or backward pass: what its operators move, and what is made between each two products.

    `made`: kernel -> storage that it makes -> bytes of it, and of the storages that it is made of.
    """

    eager_bytes: float = 0.0
    eager_kernels: int = 0
    products: int = 0
    made: dict[int, dict[int, tuple[int, dict[int, int]]]] = field(default_factory=dict)

    def traffic(self, used: set[int]) -> Traffic:
        """A kernel reads what the tensors that are used were made of, and writes those; one without any need not run."""
        moved, launched = 0.0, self.products
        for kernel in self.made.values():
            written = [made for storage, made in kernel.items() if storage in used]
            read = {storage: size for _, origin in written for storage, size in origin.items()}
            moved += sum(size for size, _ in written) + sum(read.values())
            launched += bool(written)
        return Traffic(self.eager_bytes, moved, self.eager_kernels, launched)


class _Recorder(TorchDispatchMode):
    """Adds up what operators read and write; matrix products apart.

    What can run once a product is done, and before the next whose result it needs, is one fused kernel: it reads each
    storage from outside once. What it makes is written if a product or another kernel reads it, or if it is a result. A
    later kernel makes it again from what it was made of, as a compiler does, if that is less to read than writing it and
    reading it back.
    """

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self.attention = self.other = 0.0
        self.grouped = False
        self._forward, self._backward = _Phase(), _Phase()
        self._phase = self._forward
        self._calls = calls
        self._used: set[int] = set()
        self._made: dict[int, dict[int, int]] = {}  # storage -> what it is made of
        self._reads: dict[int, set[int]] = {}  # kernel -> storages
        self._ready: dict[int, int] = {}  # storage -> the kernel that makes it, or the first that can read it
        self._next = self._first = 0  # the kernel that can read the last product; the first one of the phase
        self._lookups = 0
        self._kept: list[torch.UntypedStorage] = []  # or an address could be given to another

    def turn(self) -> None:
        """The forward pass is over."""
        self._phase = self._backward
        self._next = self._first = self._next + 1

    def finish(self, results: Iterable[Tensor]) -> tuple[Traffic, Traffic]:
        """Traffic forward and backward; `results` are read by whoever comes next."""
        self._used |= {_storage(tensor) for tensor in results}
        return self._forward.traffic(self._used), self._backward.traffic(self._used)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        made = [t for t in tree_iter(result) if isinstance(t, Tensor)]
        # Storages, not tensors: autograd copies a gradient that someone else holds.
        self._kept += [tensor.untyped_storage() for tensor in made]
        if func.is_view or name.startswith(_FREE) or func.namespace == "prim":
            return result
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        self._phase.eager_kernels += 1
        if _ATTENTION in name or func.overloadpacket in flop_registry:
            self._product(func.overloadpacket, name, given, args, made)
        else:
            self._between(name, given, made)
        return result

    def _product(self, op: Any, name: str, given: list[Tensor], args: Any, made: list[Tensor]) -> None:
        self._next += 1
        self._ready |= dict.fromkeys(map(_storage, made), self._next)
        self._phase.products += 1
        self._used |= {_storage(tensor) for tensor in given}
        if self._phase is self._backward:
            return
        if _ATTENTION in name:
            q, k, v = given[:3]
            share = 0.5 if any(argument is True for argument in args) else 1.0  # the only such one: is_causal
            pairs = q.shape[:-2].numel() * q.shape[-2] * k.shape[-2]
            self.attention += 2.0 * share * pairs * (q.shape[-1] + v.shape[-1])
        elif not self._calls.in_linear:
            self.other += float(flop_registry[op](*args, out_val=made[0]))
            self.grouped = self.grouped or "grouped" in name

    def _between(self, name: str, given: list[Tensor], made: list[Tensor]) -> None:
        written = sum(map(_bytes, made))
        reads = {_storage(t): _bytes(t) for t in given}
        if name.startswith(_LOOKUPS) and not name.endswith("backward"):
            self._lookups += 1
            reads = {-self._lookups: written}
        self._phase.eager_bytes += written + sum(reads.values())
        kernel = max([self._first, *(self._ready.get(storage, 0) for storage in reads)])
        origin: dict[int, int] = {}
        for storage, size in reads.items():
            origin |= self._source(storage, size, kernel)
        self._reads.setdefault(kernel, set()).update(origin)
        for tensor in made:
            storage = _storage(tensor)
            self._made[storage], self._ready[storage] = origin, kernel
            self._phase.made.setdefault(kernel, {})[storage] = (_bytes(tensor), origin)

    def _source(self, storage: int, size: int, kernel: int) -> dict[int, int]:
        """What a kernel reads to have a tensor."""
        origin = self._made.get(storage)
        if origin is not None and self._ready[storage] == kernel:
            return origin
        if origin is not None and storage not in self._used:
            reads = self._reads.get(kernel, set())
            if sum(amount for source, amount in origin.items() if source not in reads) < 2 * size:
                return origin
        self._used.add(storage)
        return {storage: size}


def _blocks(module: nn.Module) -> int:
    return max((len(part) for part in module.modules() if isinstance(part, nn.ModuleList)), default=0)


def _one_kernel_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """A norm of the same reads and writes that is one operator on a CPU too, as RMSNorm is on a GPU."""
    return functional.layer_norm(x, norm.normalized_shape, norm.weight, None, norm.eps or 1e-5)


def _blank(tensor: Tensor) -> Tensor:
    """Fake CPU tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    """What is read or written of it: an expanded tensor lies in memory once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
