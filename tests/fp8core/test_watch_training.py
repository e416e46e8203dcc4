"""fp8core.watch in a training loop. Oracle: the same training without it, bitwise; what was asked for, by hand."""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import on_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp8core
from fp8core import CastRecord, convert_to_float8_training
from fp8core.cast_stats import CAST, NOT_SEEN, WATCHED

pytestmark = [  # both are torch's own, raised while it compiles anything at all
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
STEPS, MICROBATCHES = 6, 2


class Model(nn.Module):
    """A layer used twice, dropout, and checkpointing of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.first, self.twice, self.last = nn.Linear(32, 48), nn.Linear(48, 48), nn.Linear(48, 16)
        self.dropout = nn.Dropout(0.2)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(torch.tanh(self.twice(torch.tanh(self.twice(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.kind == "selective":
            save = [torch.ops.aten._scaled_mm.default, torch.ops.aten.tanh.default]
            x = checkpoint(
                self.block,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(save),
            )
        elif self.kind != "plain" and torch.is_grad_enabled():
            x = checkpoint(self.block, x, use_reentrant=self.kind == "reentrant")
        else:
            x = self.block(x)
        return self.last(x)


Trace = tuple[list[float], dict[str, torch.Tensor], torch.Tensor]


def train(recipe: str, kind: str, watch: Callable[[nn.Module], Any] | None) -> Trace:
    """Losses, weights with amaxes, and the state of the random numbers, after some steps with evaluations between."""
    model = convert_to_float8_training(Model(kind), config=on_cpu(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    watcher = None if watch is None else watch(model)
    data = torch.randn(STEPS, MICROBATCHES, 16, 32, generator=torch.Generator().manual_seed(3))
    losses = []
    for step in data:
        for x in step:
            loss = model(x).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            model(step[0])
        model(100 * step[0])  # an evaluation that forgot no_grad: no backward pass follows
        model.train()
        optimizer.step()
        optimizer.zero_grad()
        fp8core.update_scales(model)
        if watcher is not None:
            watcher.step()
    if watcher is not None:
        assert not watcher.problem
        watcher.close()
    return losses, dict(model.state_dict()) | fp8core.amax_state_dict(model), torch.get_rng_state()


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    assert not WATCHED


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("tensorwise", "plain"),
        ("delayed", "plain"),
        ("rowwise", "plain"),
        ("delayed", "reentrant"),
        ("delayed", "not reentrant"),
        ("tensorwise", "selective"),
    ],
)
def test_training_is_the_same_bit_by_bit_and_each_pass_counts_once(recipe: str, kind: str) -> None:
    records: list[CastRecord] = []
    plain = train(recipe, kind, None)
    watched = train(recipe, kind, lambda model: fp8core.watch(model, every=2, to=records.append))
    assert plain[0] == watched[0]
    assert plain[1].keys() == watched[1].keys()
    assert all(torch.equal(plain[1][key], watched[1][key]) for key in plain[1])
    assert torch.equal(plain[2], watched[2])
    assert sorted({r.step for r in records}) == [0, 2, 4]
    for record in records:
        assert record.status == CAST
        assert record.calls == MICROBATCHES * (2 if record.layer == "twice" else 1)
        width = {"input": {"first": 32}, "grad_output": {"last": 16}}.get(record.operand, {}).get(
            record.layer, 48
        )
        if record.operand != "weight":
            assert record.elements == record.calls * 16 * width


def test_an_unwatched_step_has_nothing_on() -> None:
    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    before = copy.deepcopy({k: v for k, v in vars(model.first).items() if "hooks" in k})
    with fp8core.watch(model, every=3) as watcher:
        for step in range(7):
            assert bool(WATCHED) == (step % 3 == 0)
            assert {k: v for k, v in vars(model.first).items() if "hooks" in k} == before
            model(torch.randn(16, 32)).sum().backward()
            watcher.step()
        assert WATCHED == {}
    watcher.close()  # twice


def test_a_resumed_run_counts_on() -> None:
    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    records: list[CastRecord] = []
    with fp8core.watch(model, every=5, to=records.append, first_step=8) as watcher:
        for _ in range(8):
            model(torch.randn(16, 32)).sum().backward()
            watcher.step()
    assert {r.step for r in records} == {10, 15}


def test_json_lines_are_appended(tmp_path: Path) -> None:
    model = convert_to_float8_training(Model("plain"), config="rowwise")
    path = tmp_path / "casts.jsonl"
    path.write_text("{}\n")
    with fp8core.watch(model, every=1, to=path) as watcher:
        x = torch.randn(16, 32)
        x[0, 0] = torch.inf
        model(x).sum().backward()
        watcher.step()
    first, *lines = path.read_text().splitlines()
    assert first == "{}"
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN and Infinity are no JSON
    names = (
        "step",
        "layer",
        "operand",
        "dtype",
        "granularity",
        "amax",
        "scale",
        "saturated_share",
        "underflow_share",
    )
    assert all({*names, "sqnr_db", "elements", "sampled", "rank"} <= row.keys() for row in rows)
    assert [(row["layer"], row["operand"], tuple(row["gemms"])) for row in rows] == [
        (r.layer, r.operand, r.gemms) for r in watcher.latest
    ]


def test_tensorboard_gets_scalars() -> None:
    class Writer:
        """Takes what SummaryWriter takes."""

        def __init__(self) -> None:
            self.scalars: dict[tuple[str, int], float] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.scalars[tag, global_step] = scalar_value

    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    writer = Writer()
    with fp8core.watch(model, every=1, to=writer) as watcher:
        model(torch.randn(16, 32)).sum().backward()
        watcher.step()
    record = next(r for r in watcher.latest if (r.layer, r.operand) == ("first", "weight"))
    assert writer.scalars["fp8/first/weight/output+grad_input/sqnr_db", 0] == record.sqnr_db
    assert writer.scalars["fp8/first/weight/output+grad_input/scale", 0] == record.scale


def broken(_: CastRecord) -> None:
    raise KeyError("no such dashboard")


@pytest.mark.parametrize(
    ("to", "said"), [(broken, "KeyError: 'no such dashboard'"), ("/dev/full", "No space left on device")]
)
def test_a_sink_that_fails_ends_watching_and_not_the_training(to: Any, said: str) -> None:
    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    watcher = fp8core.watch(model, every=1, to=to)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(16, 32)).sum().backward()
            watcher.step()
        watcher.close()
    assert [w.category for w in told] == [RuntimeWarning]
    assert said in watcher.problem
    assert "step 0" in watcher.problem
    assert "watching has stopped" in watcher.problem


def test_a_compiled_model_is_refused_or_runs_its_watched_steps_eagerly() -> None:
    """Oracle: the model itself, compiled by aot_eager, whose results are those of eager mode bit for bit."""
    torch._dynamo.reset()
    x = torch.randn(16, 32)
    results = []
    for watched in (False, True):
        model = convert_to_float8_training(Model("plain"), config="tensorwise").eval()
        compiled = torch.compile(model, backend="aot_eager")
        if watched:
            with pytest.raises(ValueError, match="compiled code shows no tensors; pass eager_steps=True"):
                fp8core.watch(compiled, every=2)
        watcher = fp8core.watch(compiled, every=2, eager_steps=True) if watched else None
        steps = []
        for _ in range(4):
            loss = compiled(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
            model.zero_grad()
            steps.append(loss.item())
            if watcher is not None:
                watcher.step()
        if watcher is not None:
            watcher.close()
            assert not watcher.problem
            assert {r.step for r in watcher.latest} == {2}
            assert {r.status for r in watcher.latest} == {CAST}
        results.append((steps, torch._dynamo.utils.counters["stats"]["unique_graphs"]))
    assert results[0][0] == results[1][0]
    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    model.compile(backend="aot_eager")
    with pytest.raises(ValueError, match="the model is compiled"):
        fp8core.watch(model)


def test_a_compiled_function_that_shows_nothing_is_told() -> None:
    torch._dynamo.reset()
    model = convert_to_float8_training(Model("plain"), config="tensorwise").eval()
    run = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")
    watcher = fp8core.watch(model, every=1)
    run(torch.randn(16, 32)).backward()
    with pytest.warns(RuntimeWarning, match="if the step is compiled, pass eager_steps=True"):
        watcher.step()
    assert {r.status for r in watcher.latest} == {NOT_SEEN}
    watcher.close()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"every": 0}, ValueError, "every=0: expected a whole number of at least 1"),
        ({"every": 2.5}, TypeError, "every is a float; expected int"),
        ({"every": True}, TypeError, "every is a bool; expected int"),
        ({"samples": 0}, ValueError, "samples=0: expected a whole number of at least 1"),
        ({"first_step": -1}, ValueError, "first_step=-1: expected a whole number of at least 0"),
        ({"to": 3}, TypeError, "to is a int; expected a callable, a path, or an object with add_scalar"),
        ({"to": "/nowhere/casts.jsonl"}, OSError, "No such file or directory: '/nowhere/casts.jsonl'"),
        ({"model": 3}, TypeError, r"model is a int; expected Module; watch(model, every=50, to=...)"),
        (
            {"model": nn.Linear(16, 16)},
            ValueError,
            "the model has no FP8 layer to watch; call convert_to_float8_training",
        ),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    with pytest.raises(error) as raised:
        fp8core.watch(**({"model": model} | arguments))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_two_watchers_of_one_layer_are_refused() -> None:
    model = convert_to_float8_training(Model("plain"), config="tensorwise")
    with fp8core.watch(model, every=1) as watcher:
        with pytest.raises(ValueError, match="the model is watched by another watcher"):
            fp8core.watch(model.first)
        model(torch.randn(16, 32)).sum().backward()
        watcher.step()


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    (example,) = (
        b for b in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "watch(" in b
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/numerics.md", "exec"), {})
    rows = [json.loads(line) for line in (tmp_path / "casts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["layer"], row["operand"]) for row in rows] == [
        (step, layer, operand)
        for step in (0, 50)
        for layer in ("0", "2")
        for operand in ("input", "weight", "grad_output")
    ]
    assert all(row["status"] == "cast" and row["sqnr_db"] > 20 for row in rows)
