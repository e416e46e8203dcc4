"""The counter: who owns the matrix products that a recorder sees, and in which dtype they run.

Who owns a product:

    forward     the parameter that one of its operands is made of (`provenance`), else the module that runs
    backward    whoever owned the product of the autograd node that runs, found by the node's sequence number
    softmax     a product of activations whose result goes into a softmax is "attention scores"; one that takes a
                softmax's result is "attention values"

"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from fp8core.arguments import check_known, check_type
from fp8core.gemm import backend_named
from fp8core.proof.flops.count import (
    EMULATED,
    FOUR_BITS,
    WEIGHT,
    Matmul,
    MatmulCount,
    Uncounted,
    name_in_layer,
)
from fp8core.proof.flops.provenance import Origin, Provenance
from fp8core.proof.formulas import CAUSAL_SHARE, PRODUCT, SCORES, VALUES, Causal, Product, grouped_rows
from fp8core.proof.recorder import IN_FORWARD, OperatorRow, Recorder, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8core.proof.recorder import Phase

aten = torch.ops.aten
_SOFTMAXES = (aten._softmax, aten._safe_softmax, aten._masked_softmax)
_APPLIED: Any = torch.autograd.Function


def count_matmuls(step_fn: Callable[[], object], model: nn.Module, *, causal: Causal = "full") -> MatmulCount:
    """Runs a step once, in eager mode, and counts its matrix products.

    Args:
        step_fn: runs one forward and backward pass of the model; what it does to weights and gradients stays.
        model: whose parameters and modules own the products.
        causal: how fused attention with a causal mask counts: "full", all pairs, or "half" of them.

    Returns:
        MatmulCount: rows, shares, and a line of text. Under FSDP, tensor or data parallelism: of this rank.

    Raises:
        TypeError: step_fn is no function, or model no module.
        ValueError: another convention.
    """
    check_step(step_fn)
    with MatmulCounter(model, causal=causal) as counter:
        step_fn()
    return counter.result()


def check_step(step_fn: object) -> None:
    """Refuses what is no function of a step.

    Raises:
        TypeError: names its type.
    """
    if not callable(step_fn):
        raise TypeError(
            f"step_fn is a {type(step_fn).__name__}; expected a function that runs one training step"
        )


@dataclass(slots=True)
class _Record:
    """One product of one call; the role of a product of activations may become known later."""

    owner: str
    role: str
    operator: str
    dtype: str
    phase: Phase
    flops: float
    shape: tuple[int, ...] = ()
    source: _Record | None = None  # the forward product whose gradient this is

    @property
    def final_role(self) -> str:
        return self.source.final_role if self.source is not None and self.role == PRODUCT else self.role


class MatmulCounter:
    """Counts while its block runs, in eager mode; see `count_matmuls`.

    Args:
        model: whose parameters and modules own the products.
        causal: as in `count_matmuls`.

    Attributes:
        recorder: sees the operators.
    """

    def __init__(self, model: nn.Module, *, causal: Causal = "full") -> None:
        check_type("model", model, nn.Module)
        check_known("causal convention", causal, CAUSAL_SHARE)
        self._model, self._causal = model, causal
        self._names: defaultdict[int, list[str]] = defaultdict(list)
        self._records: list[_Record] = []
        self._uncounted: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._causal_flops = 0.0
        self._made_by: dict[tuple[int, int], list[_Record]] = {}  # (graph task, sequence number of a node)
        self._end = ExitStack()
        # Of each `autograd.Function` that runs: the storages that operators wrote
        self._written: list[set[int]] = []
        self.recorder = Recorder(model, collectives=True)
        self._provenance = Provenance(self.recorder.number_of)
        self.recorder.after.append(self._ran)
        self.recorder.entered.append(self._entered)

    def __enter__(self) -> MatmulCounter:
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            self._names[id(parameter)].append(name_in_layer(name))
            self._provenance.add_parameter(parameter)
        self._apply = vars(_APPLIED)["apply"]
        setattr(_APPLIED, "apply", classmethod(self._applied))  # noqa: B010
        self._end.callback(setattr, _APPLIED, "apply", self._apply)
        self._end.enter_context(torch.compiler.set_stance("force_eager"))
        self._end.enter_context(self.recorder)
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.close()

    def result(self) -> MatmulCount:
        """What was counted so far."""
        sums: dict[tuple[str, str, str, str, Phase], list[float]] = {}
        for record in self._records:
            key = (record.owner, record.final_role, record.operator, record.dtype, record.phase)
            total = sums.setdefault(key, [0, 0.0])
            total[0] += 1
            total[1] += record.flops
        return MatmulCount(
            tuple(Matmul(*key, calls=int(calls), flops=flops) for key, (calls, flops) in sums.items()),
            tuple(Uncounted(operator, owner, calls) for (operator, owner), calls in self._uncounted.items()),
            self._causal,
            self._causal_flops,
        )

    def _ran(self, row: OperatorRow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """One operator has run."""
        func = row.operator
        if self._written and isinstance(func, OpOverload) and not func.is_view and "empty" not in func.name():
            self._written[-1].update(row.written)
        if row.products is None:
            self._uncounted[str(getattr(func, "overloadpacket", func)), row.owner] += 1
        elif row.products:
            self._multiplied(row, args, kwargs, out)
        elif isinstance(func, OpOverload):
            if func.overloadpacket in _SOFTMAXES:
                record = self._provenance.of(args[0]).product
                if isinstance(record, _Record) and record.role == PRODUCT:
                    record.role = SCORES
            self._provenance.follow(func, args, out)

    def _applied(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """An `autograd.Function` runs: a result that comes from no operator (NumPy's, a kernel's) may be a product."""
        self._written.append(set(map(self.recorder.number_of, tensors_in(args))))
        try:
            out = self._apply.__get__(None, function)(*args, **kwargs)
        finally:
            written = self._written.pop()
        own = function.__module__.partition(".")[0] in ("torch", "fp8core")
        if (
            not own
            and not {self.recorder.number_of(x) for x in tensors_in(out) if x.is_floating_point()} <= written
        ):
            self._uncounted[f"Function {function.__name__}", self.recorder.owner()] += 1
        if self._written:
            self._written[-1] |= written
        return out

    def _multiplied(self, row: OperatorRow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        func, phase = row.operator, row.phase
        operands = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() and arg.is_floating_point()]
        origins = [self._provenance.of(operand) for operand in operands]
        task = torch._C._current_graph_task_id()
        if task == IN_FORWARD and any(made != IN_FORWARD for made, _ in self._made_by):
            self._made_by = {key: value for key, value in self._made_by.items() if key[0] == IN_FORWARD}
        first = next(tensors_in(out), None)
        shape = () if first is None else tuple(first.shape)
        dtype = _dtype(operands, origins)
        if func is torch.ops.fp8core.scaled_grouped_mm.default and not backend_named(args[-1]).is_fp8:
            dtype = EMULATED
        if func is torch.ops.fp8core.four_bit_mm.default:
            dtype = FOUR_BITS
        multiplied = grouped_rows(func, args, kwargs)
        rows = next((origin.rows for origin in origins if origin.rows), None) if multiplied else None
        true_share = min(1.0, rows / multiplied) if rows and multiplied else 1.0
        if rows and first is not None:
            self._provenance.set(first, Origin(rows=rows))
        for product in row.products or ():
            owner, role, source = self._owner(product, origins, task, phase, shape)
            if not owner and role == PRODUCT and source is None and not self.recorder.running:
                phase = "outside"
            flops = product.flops * (CAUSAL_SHARE[self._causal] if product.is_causal else 1.0)
            record = _Record(
                owner, role, str(func.overloadpacket), dtype, phase, flops * true_share, shape, source
            )
            self._records.append(record)
            self._causal_flops += flops if product.is_causal and phase != "recompute" else 0
            if phase in ("forward", "recompute"):
                number = torch._C._autograd._get_sequence_nr() - 1
                self._made_by.setdefault((task, number), []).append(record)
                if role == PRODUCT and first is not None and not rows:
                    self._provenance.set(first, Origin(product=record))

    def _owner(
        self, product: Product, origins: list[Origin], task: int, phase: Phase, shape: tuple[int, ...]
    ) -> tuple[str, str, _Record | None]:
        """(name, role, the forward product whose gradient this is) of one product."""
        if phase == "backward":
            sources = self._sources(task)
            if len({(record.owner, record.role) for record in sources}) > 1:
                # One node made several products: those of fused attention by role, others by shape
                by_role = [record for record in sources if record.role == product.role != PRODUCT]
                by_shape = [
                    r for r in sources if r.owner in self._named(origins) or self._has_shape(r.owner, shape)
                ]
                sources = by_role or by_shape or sources
            if sources:
                source = sources[0]
                role = product.role if product.role != PRODUCT else source.role
                return source.owner, role, source
        named = self._named(origins)
        if named:
            return named[-1], WEIGHT if product.role == PRODUCT else product.role, None
        running = self.recorder.running
        if running and isinstance(running[-1][1], nn.Linear) and product.role == PRODUCT:
            # Casts that were made before the step (`fp8core.microbatches`), or a weight made of several parameters
            return f"{running[-1][0]}.weight".lstrip("."), WEIGHT, None
        role = product.role
        if role == PRODUCT and any(origin.of_softmax for origin in origins):
            role = VALUES
        return self.recorder.owner(), role, None

    def _named(self, origins: list[Origin]) -> list[str]:
        """Names of the parameters among the operands; one of the running module last, and no bias where there is a weight."""
        names = []
        for origin in origins:
            if origin.parameter is not None:
                known = self._names[id(origin.parameter)]
                prefix = f"{self.recorder.owner()}."
                mine = [name for name in known if name.startswith(prefix) or (prefix == "." and name)]
                names.append(((bool(mine), origin.parameter.dim() > 1), (mine or known)[0]))
        return [name for _, name in sorted(names, key=lambda item: item[0])]

    def _has_shape(self, owner: str, shape: tuple[int, ...]) -> bool:
        """Whether the owner is a parameter of a gradient's shape."""
        wanted = {shape, (*shape[:-2], *shape[:-3:-1])}
        return any(
            owner in names and tuple(p.shape) in wanted
            for p in self._model.parameters()
            if (names := self._names[id(p)])
        )

    def _sources(self, task: int) -> list[_Record]:
        """The forward products of the autograd node that runs."""
        node = torch._C._current_autograd_node()
        if node is None:
            return []
        number = node._sequence_nr()
        inner = [made for made, key in self._made_by if key == number and IN_FORWARD < made < task]
        return self._made_by.get((max(inner, default=IN_FORWARD), number), [])

    def _entered(self, fqn: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in self._names:  # FSDP2 puts the gathered parameter in its place for a while
                self._names[id(parameter)].append(f"{fqn}.{name}".lstrip("."))
            self._provenance.add_parameter(parameter)


def _dtype(operands: list[Tensor], origins: list[Origin]) -> str:
    """`Matmul.dtype` of a product's two operands: a bias and scales have fewer dimensions or come later."""
    pairs = [(x, origin) for x, origin in zip(operands, origins, strict=True) if x.dim() >= 2][:3]
    codes = [x.dtype for x, _ in pairs if x.dtype.itemsize == 1]
    if len(codes) >= 2:
        return "e5m2" if any("e5m2" in str(dtype) for dtype in codes) else "e4m3"
    if sum(origin.of_codes for _, origin in pairs) >= 2:
        return EMULATED
    kinds = [str(x.dtype).removeprefix("torch.") for x in operands]
    return kinds[-1] if kinds else ""
