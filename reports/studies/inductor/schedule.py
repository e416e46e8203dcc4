"""The kernels of Inductor's schedules as plain data: what each reads, writes and reduces.

Bytes are Inductor's own account (`BaseSchedulerNode.get_read_write_buffer_accesses`): each buffer that a kernel touches
counts once a kernel, however often its code loads it, and what is written and read within one kernel only does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_PRODUCTS = (
    "aten.mm.out",
    "aten.mm.default",
    "aten._scaled_mm.default",
    "aten._scaled_mm.out",
    "fp8core.matmul.default",
)
GRAPH_INPUT, LIBRARY, GENERATED = "graph input", "library", "generated"  # who wrote a buffer


@dataclass(frozen=True, slots=True)
class Access:
    """One buffer as a kernel reads or writes it.

    Attributes:
        name: of the buffer.
        elements: of the whole buffer.
        moved: bytes.
        dtype: as PyTorch prints it, without "torch.".
        source: who wrote it, one of the constants above.
    """

    name: str
    elements: int
    moved: int
    dtype: str
    source: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel.

    Attributes:
        backward: in the backward graph.
        library: a matrix product, which Inductor calls and generates no code for.
        reads, writes: its buffers.
        takes_maximum: it reduces by a maximum.
    """

    backward: bool
    library: bool
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    takes_maximum: bool

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return sum(access.moved for access in (*self.reads, *self.writes))

    def moved_of(self, elements: int) -> int:
        """Bytes of the buffers that have so many elements."""
        return sum(a.moved for a in (*self.reads, *self.writes) if a.elements == elements)

    @property
    def casts(self) -> bool:
        """It writes FP8 codes."""
        return any(access.dtype.startswith("float8") for access in self.writes)

    def reads_back(self, least: int) -> bool:
        """It reads a high-precision tensor of at least `least` elements that another generated kernel wrote."""
        return any(
            a.source == GENERATED and a.elements >= least and not a.dtype.startswith("float8")
            for a in self.reads
        )


def kernels_of(graph: Any) -> list[Kernel]:
    """The kernels of a `torch._inductor.graph.GraphLowering` whose code has been generated, in order.

    Raises:
        RuntimeError: a node of the schedule is no kernel of its own, so that nodes could not be counted as kernels; or
            it calls an operator that is no matrix product.
    """
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import (
        ExternKernelSchedulerNode,
        FusedMixOrderReductions,
        FusedSchedulerNode,
        NopKernelSchedulerNode,
        SchedulerNode,
    )

    # Rows and columns reduced in one pass count as one kernel; its partial sums are added by a small one more.
    one_kernel = (SchedulerNode, FusedSchedulerNode, FusedMixOrderReductions)
    written: dict[str, str] = {}
    kernels = []
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        library = isinstance(node, ExternKernelSchedulerNode)
        if library and not isinstance(node.node, MultiOutput) and _operator(node.node) not in _PRODUCTS:
            raise RuntimeError(
                f"{_operator(node.node)} is no matrix product, and what it moves would not be counted"
            )
        if not library and type(node) not in one_kernel:
            raise RuntimeError(f"Inductor schedules a {type(node).__name__}, which need not be one kernel")
        reads = node.get_read_write_buffer_accesses(include_reads=True, include_writes=False)
        writes = node.get_read_write_buffer_accesses(include_reads=False, include_writes=True)
        kernels.append(
            Kernel(
                bool(graph.is_backward),
                library,
                _accesses(graph, reads, written),
                _accesses(graph, writes, written),
                not library and any(_is_maximum(n) for n in node.get_nodes()),
            )
        )
        for name in node.get_buffer_names():
            written[name] = LIBRARY if library else GENERATED
    return kernels


def _accesses(graph: Any, moved: dict[str, int], written: dict[str, str]) -> tuple[Access, ...]:
    from torch._inductor.ir import MultiOutputLayout

    return tuple(
        Access(
            name,
            int(graph.get_numel(name)),
            int(size),
            str(graph.get_dtype(name)).removeprefix("torch."),
            written.get(name, GRAPH_INPUT),
        )
        for name, size in sorted(moved.items())
        if not isinstance(
            graph.get_buffer(name).get_output_spec(), MultiOutputLayout
        )  # its parts are buffers too
    )


def _operator(node: Any) -> str:
    return str(getattr(node, "op_overload", None))


def _is_maximum(node: Any) -> bool:
    return node.is_reduction() and getattr(node.node.data, "reduction_type", "") == "max"


def generated(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Those that Inductor wrote."""
    return [kernel for kernel in kernels if not kernel.library]
