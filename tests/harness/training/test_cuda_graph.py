"""Recorded steps. Oracles: the eager trainee, bitwise; a tape of operators that refuses what CUDA refuses; a fake CUDA that notes each
call, against the order that torch.cuda documents.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from fakes import FakeGraphs
from operator_tape import OperatorTape
from tiny_lm import TinyLM, tokens
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8core.convert import audit, convert_to_float8_training
from fp8core.gemm import backend_named
from fp8core.history import ROLES, AmaxMemory, tensors_of
from fp8core.linear import Float8Linear
from fp8core.recipe import RECIPES, Recipe
from harness.training import cuda_graph
from harness.training.models import resolve
from harness.training.setup import Setup, Trainee, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


STEPS = cuda_graph.WARM_UP + 4


def trainee(make: Callable[[], nn.Module] = lambda: TinyLM(dropout=0.2), **changes: Any) -> Trainee:
    """Trainee with the same weights on every call."""
    torch.manual_seed(0)
    model = make()
    made = Setup(**({"model": "tiny", "batch": 4, "seq": 8, "compute": "fp32", "graph": True} | changes))
    return prepare(made, "cpu", model.to(made.weight_dtype))


def batches(accumulation: int = 1, steps: int = STEPS) -> list[list[tuple[Tensor, ...]]]:
    return [[tokens(step * accumulation + i) for i in range(accumulation)] for step in range(steps)]


def here(name: str) -> Recipe | None:
    """The recipe, emulated where a CPU has no kernel for its scales; None of "bf16"."""
    recipe = RECIPES.get(name)
    if recipe is None:
        return None
    reason = backend_named(recipe.backend).granularity_reason
    lacking = any(reason("cpu", gemm.granularity) for gemm in recipe.gemms.values())
    return recipe.emulated() if lacking else recipe


def state_of(made: Trainee) -> list[Tensor]:
    """Copies of everything that a step changes."""
    moments = [v for state in made.optimizer.state.values() for v in state.values()]
    return [t.detach().clone() for t in (*tensors_of(made.model), *moments)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def seen(made: Trainee, loss: Tensor) -> list[Tensor]:
    """Copies of what can be read after a step."""
    assert made.grad_norm is not None
    grads = [p.grad for p in made.model.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (loss, made.grad_norm, *grads)]


@pytest.mark.parametrize(
    ("recipe", "compute", "accumulation"),
    [
        *((name, "fp32", 2) for name in ("bf16", *RECIPES)),
        ("delayed", "fp32", 1),
        *((name, compute, 2) for name in ("bf16", "delayed") for compute in ("bf16_autocast", "bf16")),
    ],
)
def test_replayed_steps_are_the_eager_ones_bit_for_bit(recipe: str, compute: str, accumulation: int) -> None:
    """Losses, norms and gradients of each step; weights, moments and amaxes after all. Nothing in a step waits."""
    fed = batches(accumulation)
    eager, replayed = (
        trainee(recipe=here(recipe), compute=compute, accumulation=accumulation) for _ in range(2)
    )
    torch.manual_seed(1)
    want = [seen(eager, eager.step(step)) for step in fed][cuda_graph.WARM_UP :]
    torch.manual_seed(1)
    tape = OperatorTape()
    with cuda_graph.recorded(replayed, fed[: cuda_graph.WARM_UP], tape) as step:
        got = [seen(replayed, step(one)) for one in fed[cuda_graph.WARM_UP :]]
        assert tape.replays == len(got)
    assert all(same(*pair) for pair in zip(want, got, strict=True))
    assert same(state_of(eager), state_of(replayed))
    assert len({float(loss) for loss, *_ in got}) == len(got), "each step read its own batch"
    assert not any(group["capturable"] for group in replayed.optimizer.param_groups)


def test_recording_changes_nothing_and_yields_nothing_before_the_first_replay() -> None:
    made, fed = trainee(recipe=RECIPES["delayed"]), batches()
    random: list[Tensor] = []
    before: list[Tensor] = []

    class Watched(OperatorTape):
        @contextmanager
        def recording(self) -> Iterator[None]:
            before.extend(state_of(made))
            random.append(torch.get_rng_state())
            with super().recording():
                yield

    tape = Watched()
    with cuda_graph.recorded(made, fed[: cuda_graph.WARM_UP], tape) as step:
        assert same(before, state_of(made))
        assert torch.equal(random[0], torch.get_rng_state())
        assert made.grad_norm is not None
        assert made.grad_norm.isnan()
        first = step(fed[3])
        kept = float(first)
        assert step(fed[4]) is first, "a loss holds until the next step"
        assert float(first) != kept
        assert not tape.erased
    assert tape.erased


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:, :4], r"a batch of \[4, 4\] torch.int64; recorded was \[4, 8\] torch.int64"),
        (lambda x: x[:1], r"a batch of \[1, 8\]"),  # which copy_ would repeat
        (lambda x: x.int(), r"a batch of \[4, 8\] torch.int32"),  # and this convert
    ],
)
def test_a_batch_of_another_kind_is_refused(change: Any, message: str) -> None:
    fed = batches()
    with (
        cuda_graph.recorded(trainee(), fed[: cuda_graph.WARM_UP], OperatorTape()) as step,
        pytest.raises(ValueError, match=message),
    ):
        step([tuple(map(change, batch)) for batch in fed[3]])


class Devices(TorchDispatchMode):
    """Notes the operators that take or make a tensor of another device than "meta"."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.others = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, Tensor) and t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented
        results = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, results)) if isinstance(t, Tensor)]
        self.operators += 1
        if any(t.device.type != "meta" for t in tensors):
            self.others.add(str(func))
        return results


@pytest.mark.parametrize(
    ("recipe", "model"),
    [*((name, "") for name in ("bf16", *RECIPES)), ("delayed", "nano"), ("delayed", "llama_tiny")],
)
def test_no_tensor_of_a_step_comes_from_the_host(recipe: str, model: str) -> None:
    """Oracle: "meta" tensors, which are on no CPU and have no values: to read one raises. The optimizer knows no "meta"."""
    empty = (
        resolve(model).build(device="meta", dtype=torch.bfloat16)
        if model
        else TinyLM(dropout=0.2).to("meta", torch.bfloat16)
    )
    setup = Setup(model or "tiny", 4, 8, compute="bf16", recipe=here(recipe), accumulation=2, graph=True)
    made = Trainee(setup, empty, empty, torch.optim.AdamW(empty.parameters()), audit(empty))
    if setup.recipe is not None:
        convert_to_float8_training(empty, config=setup.recipe)
    for module in empty.modules():
        if isinstance(module, AmaxMemory):
            module.ready = frozenset(ROLES)
    batch = [tuple(part.to("meta") for part in tokens(0))] * 2
    with Devices() as devices:
        made.gradients(batch)
        nn.utils.clip_grad_norm_(empty.parameters(), 1.0)
        made.update_scales()
    assert devices.operators > 100
    assert not devices.others


# What can't be recorded


def reads(loss: Tensor) -> Tensor:
    return loss * (2 if float(loss.detach()) > 1e9 else 1)


def lists(loss: Tensor) -> Tensor:
    return loss * len([loss.tolist()])


def depends(loss: Tensor) -> Tensor:
    return loss + loss.detach().reshape(1).nonzero().sum()


def copies(loss: Tensor) -> Tensor:
    return loss * torch.tensor(2.0, device=loss.device)


class Waits(TinyLM):
    """Does something with its loss that a CUDA graph can't hold."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        changed: Tensor = self.what(super().forward(tokens, targets))
        return changed


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (reads, "RefusedError: aten._local_scalar_dense"),
        (lists, "RefusedError: tolist"),
        (depends, "RefusedError: aten.nonzero"),
        (copies, "RefusedError: aten.lift_fresh"),
    ],
)
def test_a_step_that_waits_is_refused_with_the_reason(what: Any, reason: str) -> None:
    """And everything is as it was: the same trainee goes on eagerly."""
    made, other = (trainee(lambda: Waits(what)) for _ in range(2))
    fed = batches()
    with (
        pytest.raises(
            cuda_graph.CaptureError,
            match=f"the step can't be recorded as a CUDA graph: {reason}.* not permitted",
        ),
        cuda_graph.recorded(made, fed[: cuda_graph.WARM_UP], OperatorTape()),
    ):
        pytest.fail("was recorded")
    assert not any(group["capturable"] for group in made.optimizer.param_groups)
    for one in fed[: cuda_graph.WARM_UP]:
        other.step(one)
    assert same(seen(made, made.step(fed[3])), seen(other, other.step(fed[3])))


def test_kept_casts_whose_bits_are_compared_are_refused() -> None:
    """What `Setup.graph` is for: gradient accumulation waits for the device otherwise, once a microbatch."""
    made = trainee(recipe=RECIPES["tensorwise"], accumulation=2, graph=False)
    with (
        pytest.raises(cuda_graph.CaptureError, match="RefusedError: tolist"),
        cuda_graph.recorded(made, batches(2)[: cuda_graph.WARM_UP], OperatorTape()),
    ):
        pytest.fail("was recorded")


def test_a_layer_that_is_never_called_is_no_reason_to_wait() -> None:
    """Delayed scales of such a layer never come, and an eager step looks for them each time."""

    class Idle(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.idle = nn.Linear(32, 32)

    made = trainee(Idle, recipe=RECIPES["delayed"])
    assert isinstance(made.model.get_submodule("idle"), Float8Linear)
    with cuda_graph.recorded(made, batches()[: cuda_graph.WARM_UP], OperatorTape()) as step:
        assert step(batches()[3]).isfinite()


@pytest.mark.parametrize(
    ("device", "experts", "reason"),
    [
        ("cuda", "hp", ""),
        ("cuda:1", "hp", ""),
        ("cpu", "hp", "a step is recorded as a CUDA graph; a cpu has none"),
        ("cuda", "fp8", "experts=fp8: groups"),
    ],
)
def test_what_is_not_even_tried(device: str, experts: str, reason: str) -> None:
    why = cuda_graph.refused(device, experts)
    assert why.startswith(reason)
    assert "\n" not in why
    assert bool(why) == bool(reason)


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    cuda = FakeGraphs()
    for name, fake in cuda.functions.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        cuda_graph, "_stream", functools.cache(cuda_graph._stream.__wrapped__)
    )  # no fake outlives its test
    return cuda


def noting(cuda: FakeGraphs, made: Trainee, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainee.step

    def noted(self: Trainee, batches: Any) -> Tensor:
        cuda.note(f"step, cycles {'collected' if gc.isenabled() else 'left'}")
        if cuda.refuses and cuda.log[-2].startswith("begin"):
            raise ValueError("no, for a reason")
        return step(self, batches)

    monkeypatch.setattr(Trainee, "step", noted)


def test_all_recordings_share_a_stream_which_is_waited_for_whatever_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libraries keep a workspace for each stream; and what a failed warm-up still writes must not be given back yet."""
    cuda = fake_graphs(monkeypatch)
    for _ in range(3):
        with contextlib.suppress(ValueError), cuda_graph.CudaTape().beside():
            raise ValueError
    assert cuda.streams == 1
    assert cuda.log == ["side waits for default on default", "default waits for side on default"] * 3


def test_what_is_asked_of_cuda_and_on_which_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: PyTorch's notes on CUDA graphs: a warm-up on a side stream, between two waits, then the capture."""
    cuda, made, fed = fake_graphs(monkeypatch), trainee(), batches()
    noting(cuda, made, monkeypatch)
    cycle = nn.Identity()
    cycle.itself = [cycle]
    left = weakref.ref(cycle)
    del cycle
    with cuda_graph.recorded(made, fed[: cuda_graph.WARM_UP], cuda_graph.CudaTape()) as step:
        for one in fed[cuda_graph.WARM_UP : cuda_graph.WARM_UP + 2]:
            step(one)
    assert cuda.log == [
        "side waits for default on default",
        *["step, cycles collected on side"] * cuda_graph.WARM_UP,
        "default waits for side on default",
        "begin on side",
        "step, cycles left on side",
        "end on side",
        *["replay on default"] * 2,
        "synchronize on default",
        "reset on default",
    ]
    assert gc.isenabled()
    assert left() is None, "what autograd left in cycles is gone before the warm-up"


def test_a_recording_that_cuda_refuses_gives_its_stream_back_and_the_first_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, made = fake_graphs(monkeypatch), trainee()
    cuda.refuses = True
    noting(cuda, made, monkeypatch)
    with (
        pytest.raises(cuda_graph.CaptureError, match=r"as a CUDA graph: ValueError: no, for a reason$"),
        cuda_graph.recorded(made, batches()[: cuda_graph.WARM_UP], cuda_graph.CudaTape()),
    ):
        pytest.fail("was recorded")
    assert cuda.current == "default"
    assert gc.isenabled()
