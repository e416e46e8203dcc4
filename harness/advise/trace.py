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

from fp8core import audit, convert_to_float8_training
from fp8core.proof.formulas import SCORES, VALUES
from fp8core.proof.recorder import Recorder
from fp8core.recipe import RECIPES
from harness.advise.model import Linear, Model, Outside, VectorTraffic, mark_head, weighted
from harness.store.errors import UsageError
from harness.training.models import ModelSpec, UserModel
from harness.training.models.calls import common_rows
from harness.training.models.flops import register_flop_formulas
from harness.training.models.memory import blank, blank_weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from fp8core.proof.recorder import OperatorRow

_BLOCKS = "layers"  # the list of blocks in the models of this project
_ATTENTION = (SCORES, VALUES)
_FREE = ("empty", "_unsafe_view", "detach", "lift_fresh", "alias")  # operators that move no data
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
        blank_weights(module)
        for part in module.modules():
            if isinstance(part, nn.RMSNorm):
                part.forward = functools.partial(_one_kernel_norm, part)  # type: ignore[method-assign]  # of this copy alone
        recorder = Recorder(module)
        calls = _Calls(module, barred, recorder)
        try:
            with recorder:
                loss = module(*(blank(part) for part in inputs))
                for hook in calls.hooks:  # what checkpointing runs again is no other use of a layer
                    hook.remove()
                turn = len(recorder.rows)
                if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
                    raise UsageError(
                        f"{name}: model(*batch) returned no loss; expected one number, a 0-dimensional tensor that "
                        "depends on the weights"
                    )
                loss.backward()
                results = {recorder.number_of(p.grad) for p in module.parameters() if p.grad is not None}
        except UsageError:
            raise
        except Exception as error:  # the user's code may raise anything
            where = recorder.raised or type(module).__name__
            first = next(iter(str(error).strip().splitlines()), "")[:200]
            raise UsageError(
                f"{name} cannot be traced: {where} failed on tensors without values: {type(error).__name__}: {first}; "
                "a step that looks at values (.item(), a branch on data) has no place in a forward pass that is traced"
            ) from error
    forward, backward = traffic(recorder.rows[:turn], recorder.rows[turn:], results)
    products = [
        (row, product)
        for row in recorder.rows[:turn]
        for product in row.products or ()
        if row.owner not in calls.layers or product.role in _ATTENTION
    ]
    attention = sum(p.flops * (0.5 if p.is_causal else 1.0) for _, p in products if p.role in _ATTENTION)
    layers = mark_head(tuple(calls.layers.values()), _vocabularies(module))
    return Model(
        name,
        layers,
        common_rows((layer.tokens, layer.K * layer.N) for layer in layers),
        attention,
        sum(product.flops for _, product in products if product.role not in _ATTENTION),
        forward,
        backward,
        sum(p.numel() for p in module.parameters()),
        _blocks(module),
        experts=any("grouped" in row.operator.overloadpacket.__name__ for row, _ in products),
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
    """What each Linear was called with."""

    def __init__(
        self, module: nn.Module, barred: Mapping[str, Mapping[str, str]], recorder: Recorder
    ) -> None:
        self.layers: dict[str, Linear] = {}
        self._barred, self._recorder = barred, recorder
        self._ids: dict[object, int] = {}
        self.hooks = [
            part.register_forward_pre_hook(functools.partial(self._entered, fqn))
            for fqn, part in module.named_modules()
            if isinstance(part, nn.Linear)
        ]

    def _entered(self, fqn: str, part: nn.Linear, args: tuple[Any, ...]) -> None:
        if not (args and isinstance(args[0], Tensor)):
            return
        x, rows = args[0], args[0].numel() // part.in_features
        if (before := self.layers.get(fqn)) is not None:
            self.layers[fqn] = replace(before, tokens=before.tokens + rows)
            return
        view = (self._recorder.number_of(x), x.shape, x.stride(), x.storage_offset())
        read = self._ids.setdefault(view, len(self._ids))
        sizes = (part.in_features, part.out_features, rows)
        self.layers[fqn] = Linear(fqn, *sizes, read, self._barred.get(fqn, {}))


def traffic(
    forward: Sequence[OperatorRow], backward: Sequence[OperatorRow], results: Iterable[int]
) -> tuple[VectorTraffic, VectorTraffic]:
    """What the operators of both passes read and write, matrix products apart.

    What can run once a product is done, and before the next whose result it needs, is one fused kernel: it reads each
    storage from outside once. What it makes is written if a product or another kernel reads it, or if it is a result. A
    later kernel makes it again from what it was made of, as a compiler does, if that is less to read than writing it and
    reading it back.

    Args:
        forward: rows of the forward pass.
        backward: and of the backward pass.
        results: storages that whoever comes next reads.
    """
    kernels = _Kernels()
    phases = [kernels.of(rows) for rows in (forward, backward)]
    kernels.used.update(results)
    first, second = (phase.traffic(kernels.used) for phase in phases)
    return first, second


@dataclass(slots=True)
class _Phase:
    """Forward or backward pass: what its operators move, and what is made between each two products.

    `made`: kernel -> storage that it makes -> bytes of it, and of the storages that it is made of.
    """

    eager_bytes: float = 0.0
    eager_kernels: int = 0
    products: int = 0
    made: dict[int, dict[int, tuple[int, dict[int, int]]]] = field(default_factory=dict)

    def traffic(self, used: set[int]) -> VectorTraffic:
        """A kernel reads what the tensors that are used were made of, and writes those; one without any need not run."""
        moved, launched = 0.0, self.products
        for kernel in self.made.values():
            written = [made for storage, made in kernel.items() if storage in used]
            read = {storage: size for _, origin in written for storage, size in origin.items()}
            moved += sum(size for size, _ in written) + sum(read.values())
            launched += bool(written)
        return VectorTraffic(self.eager_bytes, moved, self.eager_kernels, launched)


class _Kernels:
    """Which fused kernel makes and reads what; see `traffic`. `used`: storages that must be written."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self._made: dict[int, dict[int, int]] = {}  # storage -> what it is made of
        self._reads: dict[int, set[int]] = {}  # kernel -> storages
        self._ready: dict[int, int] = {}  # storage -> the kernel that makes it, or the first that can read it
        self._next = 0  # the kernel that can read the last product
        self._lookups = 0

    def of(self, rows: Iterable[OperatorRow]) -> _Phase:
        """One pass."""
        self._next += 1
        first, phase = self._next, _Phase()
        for row in rows:
            name = row.operator.overloadpacket.__name__
            if row.operator.is_view or name.startswith(_FREE):
                continue
            phase.eager_kernels += 1
            if row.products:
                phase.products += 1
                self._next += 1
                self._ready |= dict.fromkeys(row.written, self._next)
                self.used.update(row.read)
            else:
                self._between(row, name, first, phase)
        return phase

    def _between(self, row: OperatorRow, name: str, first: int, phase: _Phase) -> None:
        reads, written = row.read, sum(row.written.values())
        if name.startswith(_LOOKUPS) and not name.endswith("backward"):
            self._lookups += 1
            reads = {-self._lookups: written}
        phase.eager_bytes += written + sum(reads.values())
        kernel = max([first, *(self._ready.get(storage, 0) for storage in reads)])
        origin: dict[int, int] = {}
        for storage, size in reads.items():
            origin |= self._source(storage, size, kernel)
        self._reads.setdefault(kernel, set()).update(origin)
        for storage, size in row.written.items():
            self._made[storage], self._ready[storage] = origin, kernel
            phase.made.setdefault(kernel, {})[storage] = (size, origin)

    def _source(self, storage: int, size: int, kernel: int) -> dict[int, int]:
        """What a kernel reads to have a tensor."""
        origin = self._made.get(storage)
        if origin is not None and self._ready[storage] == kernel:
            return origin
        if origin is not None and storage not in self.used:
            reads = self._reads.get(kernel, set())
            if sum(amount for source, amount in origin.items() if source not in reads) < 2 * size:
                return origin
        self.used.add(storage)
        return {storage: size}


def _blocks(module: nn.Module) -> int:
    return max((len(part) for part in module.modules() if isinstance(part, nn.ModuleList)), default=0)


def _one_kernel_norm(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """A norm of the same reads and writes that is one operator on a CPU too, as RMSNorm is on a GPU."""
    return functional.layer_norm(x, norm.normalized_shape, norm.weight, None, norm.eps or 1e-5)
