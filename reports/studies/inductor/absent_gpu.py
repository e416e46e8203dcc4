"""Lets Inductor generate Triton code for an NVIDIA GPU on a machine that has none.

Tensors are fake ones (`torch._subclasses.FakeTensorMode`), which have shapes and no values. Dynamo and autograd trace
them on the CPU, since autograd's engine refuses a device without a driver; each graph moves to "cuda:0" where AOTAutograd
gives it to Inductor, forward and backward already split. What Inductor and Triton ask of a device is answered from
`PROPERTIES`. Code is generated in full and never built: `generate` hands over each graph at the point where Inductor
would load its module.

This changes torch for the whole process and is never undone: call it in a process of its own.
"""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8core.gemm import torch_mm

if TYPE_CHECKING:
    from collections.abc import Callable

# cudaDeviceProp of an H100 SXM, as torch.cuda.get_device_properties names its fields (CUDA C programming guide, table of
# technical specifications for compute capability 9.0; NVIDIA H100 data sheet).
CAPABILITY = (9, 0)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    total_memory=80 * 2**30,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    warp_size=32,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)

_GPU = torch.device("cuda:0")


class Generated(Exception):  # noqa: N818  # no error: how the compilation of a graph ends here
    """All graphs of a function have been generated."""


def pretend() -> None:
    """Makes this process believe in one H100, as far as tracing and code generation ask.

    Raises:
        RuntimeError: the process has a GPU, whose answers would be replaced.
    """
    if torch.cuda.is_available():
        raise RuntimeError("this machine has a GPU: let Inductor compile for it and read its own counts")
    import triton
    from torch._dynamo import device_interface
    from torch._subclasses.fake_tensor import FakeTensor
    from triton.backends.compiler import GPUTarget

    answers: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: CAPABILITY,
        "is_bf16_supported": lambda *args: True,
        "get_rng_state": lambda *args: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *args: None,
        "synchronize": lambda *args: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    device_interface.init_device_reg()
    for device in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(device, _interface(device_interface))
    target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
    triton.runtime.driver.set_active(
        types.SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0)
    )
    torch_mm._HAS_AMX = False  # a matter of the CPU that traces
    fake_tensor: Any = FakeTensor
    fake_tensor.copy_ = _copy_shape
    _trace_patterns_on_cpu()


def place(module: nn.Module) -> nn.Module:
    """Replaces the parameters and buffers of a module on "meta" by fake ones, in place."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                each._parameters[name] = nn.Parameter(tensor(*parameter.shape, dtype=parameter.dtype))
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = tensor(*buffer.shape, dtype=buffer.dtype)
    return module


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A fake tensor."""
    with _mode():
        return torch.empty(shape, dtype=dtype)


@functools.cache
def _mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def generate(visit: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> None:
    """Compiles `function` with its backward pass, and calls `visit(graph)` for each of Inductor's graphs.

    Args:
        visit: takes a `torch._inductor.graph.GraphLowering` whose code has been generated. The forward graph comes first.
        function: compiled with fullgraph=True and static shapes.
        args: its arguments, fake tensors of `tensor`.

    Raises:
        RuntimeError: compilation ended before a graph was generated.
    """
    from torch._functorch import config as functorch
    from torch._inductor import compile_fx
    from torch._inductor import config as inductor
    from torch._inductor.graph import GraphLowering

    visited = 0

    def stop(*args: Any) -> Any:
        raise Generated

    def hand_over(graph: Any) -> Any:
        nonlocal visited
        graph.codegen()
        visit(graph)
        visited += 1
        return types.SimpleNamespace(call=stop, runner=None, __file__="", value="", key="")

    def lower(graph: Any, inputs: Any, **options: Any) -> Any:
        return compile_fx.compile_fx_inner(moved(graph), on_gpu(inputs), **options)

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx.compile_fx(graph, inputs, inner_compile=lower)

    lowering: Any = GraphLowering
    real = lowering.compile_to_module
    lowering.compile_to_module = hand_over
    torch._dynamo.reset()
    try:
        with (
            functorch.patch(force_non_lazy_backward_lowering=True),
            inductor.patch(force_disable_caches=True, compile_threads=1),
        ):
            torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)
    except Generated:
        pass
    finally:
        lowering.compile_to_module = real
    if not visited:
        raise RuntimeError(f"{function} was compiled to no graph of Inductor")


def moved(graph: Any) -> Any:
    """A graph of Inductor's whose tensors are all on "cuda:0", in place."""
    from torch.utils._pytree import tree_map_only

    for submodule in graph.modules():
        if not isinstance(submodule, torch.fx.GraphModule):
            continue
        for node in submodule.graph.nodes:
            node.args, node.kwargs = tree_map_only(torch.device, lambda _: _GPU, (node.args, node.kwargs))
            if "val" in node.meta:
                node.meta["val"] = on_gpu(node.meta["val"])
        submodule.recompile()
    return graph


def on_gpu(values: Any) -> Any:
    """The same tree with each fake tensor on "cuda:0"."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._pytree import tree_map_only

    def move(x: Any) -> Any:
        with x.fake_mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_GPU)

    return tree_map_only(FakeTensor, move, values)


def _interface(device_interface: Any) -> Any:
    """Dynamo's view of the device."""
    real = device_interface.CudaInterface
    shared: dict[str, Any] = {
        "current_device": staticmethod(lambda: 0),
        "get_device_properties": staticmethod(lambda device=None: PROPERTIES),
    }
    worker = type("Worker", (real.Worker,), dict(shared))
    answers: dict[str, Any] = {
        **shared,
        "Worker": worker,
        "is_available": staticmethod(lambda: True),
        "device_count": staticmethod(lambda: 1),
        "get_compute_capability": staticmethod(lambda device=None: 10 * CAPABILITY[0] + CAPABILITY[1]),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        "is_bf16_supported": staticmethod(lambda including_emulation=False: True),
    }
    return type("AbsentGpu", (real,), answers)


def _copy_shape(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The binding asks for the CUDA driver before it dispatches; Inductor calls it to see whether shapes agree."""
    if torch.broadcast_shapes(self.shape, source.shape) != self.shape:
        raise RuntimeError(f"{list(source.shape)} can't be broadcast to {list(self.shape)}")
    return self


def _trace_patterns_on_cpu() -> None:
    """Inductor traces its own rewrite patterns with real tensors of the device; on the CPU the patterns are the same."""
    from torch._inductor.fx_passes import joint_graph, post_grad

    def on_cpu(real: Callable[..., Any], device: object = None) -> Any:
        return real(torch.device("cpu"))

    modules: tuple[Any, ...] = (joint_graph, post_grad)
    for module in modules:
        module.lazy_init = functools.partial(on_cpu, module.lazy_init)
