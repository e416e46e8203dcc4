"""fp8core.watch in a training loop. Oracle: the same training without it, bitwise; what was asked for, by hand."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from recipes import on_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp8core
from fp8core import CastRecord, convert_to_float8_training
from fp8core.observers import WATCHED
from fp8core.proof.cast_stats import CAST, NOT_SEEN
from fp8core.proof.sampled_places import SampledPlaces

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
    gc.collect()
    assert not WATCHED
    assert stance() == "default"


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


def small(recipe: str = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    return convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), config=on_cpu(recipe)
    )


def run(net: nn.Module) -> None:
    net(torch.randn(16, 32)).square().mean().backward()


def watched(net: nn.Module, steps: int = 1, x: torch.Tensor | None = None, **options: Any) -> fp8core.Watcher:
    """After so many steps under its eyes."""
    with fp8core.watch(net, **options) as watcher:
        for _ in range(steps):
            net(torch.randn(16, 32) if x is None else x).square().mean().backward()
            watcher.step()
    return watcher


def test_a_resumed_run_counts_on() -> None:
    records: list[CastRecord] = []
    watched(small(), 8, every=5, to=records.append, first_step=8)
    assert {r.step for r in records} == {10, 15}


def test_json_lines_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "casts.jsonl"
    path.write_text("{}\n")
    x = torch.randn(16, 32)
    x[0, 0] = torch.inf
    watcher = watched(small("rowwise"), x=x, every=1, to=path)
    first, *lines = path.read_text().splitlines()
    assert first == "{}"
    rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]  # NaN and Infinity are no JSON
    assert [row | {"gemms": tuple(row["gemms"])} for row in rows] == [asdict(r) for r in watcher.latest]


def test_tensorboard_gets_scalars() -> None:
    writer = mock.Mock(spec=["add_scalar"])
    watcher = watched(small(), every=1, to=writer)
    record = next(r for r in watcher.latest if (r.layer, r.operand) == ("0", "weight"))
    for figure in ("sqnr_db", "scale"):
        writer.add_scalar.assert_any_call(
            f"fp8/0/weight/output+grad_input/{figure}", getattr(record, figure), 0
        )


def broken(_: CastRecord) -> None:
    raise KeyError("no such dashboard")


@pytest.mark.parametrize("to", [broken, "/dev/full"])
def test_a_sink_that_fails_ends_watching_and_not_the_training(to: Any) -> None:
    with pytest.warns(RuntimeWarning, match="stopped") as said:
        watcher = watched(small(), 3, every=1, to=to)
    assert len(said) == 1
    assert "step 0" in watcher.problem


def test_a_look_for_which_memory_is_missing_ends_watching_and_not_the_training() -> None:
    with mock.patch.object(SampledPlaces, "of", side_effect=MemoryError), pytest.warns(RuntimeWarning):
        watcher = watched(small(), 3, every=1, to=lambda _: None)
    assert "MemoryError" in watcher.problem


def test_a_compiled_model_is_refused_or_runs_its_watched_steps_eagerly() -> None:
    """Oracle: the model itself, compiled by aot_eager, whose results are those of eager mode bit for bit."""
    torch._dynamo.reset()
    results = []
    for watched in (False, True):
        model = convert_to_float8_training(Model("plain"), config="tensorwise").eval()
        compiled = torch.compile(model, backend="aot_eager")
        watcher = None
        if watched:
            with pytest.raises(ValueError, match="eager_steps=True"):
                fp8core.watch(compiled, every=2)
            watcher = fp8core.watch(compiled, every=2, eager_steps=True)
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
        for x in torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(1)):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(loss.item())
            if watcher is not None:
                watcher.step()
        if watcher is not None:
            watcher.close()
            assert not watcher.problem
            assert {(r.step, r.status) for r in watcher.latest} == {(2, CAST)}
        results.append(steps)
    assert results[0] == results[1]
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


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "numerics.md").read_text()
    (example,) = (
        b for b in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "watch(" in b
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "docs/numerics.md", "exec"), {})
    rows = [json.loads(line) for line in (tmp_path / "casts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0, 50}
    assert all(row["status"] == "cast" and row["sqnr_db"] > 20 for row in rows)


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_eager_mode_lasts_as_long_as_one_watcher_needs_it(order: tuple[int, int]) -> None:
    nets = small(), small()
    watchers = [fp8core.watch(net, every=2, eager_steps=True) for net in nets]
    assert stance() == "force_eager"
    for net in nets:
        run(net)
    watchers[order[0]].step()
    assert stance() == "force_eager"
    watchers[order[1]].step()
    assert stance() == "default"
    for watcher in watchers:
        watcher.close()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_layers_are_held_from_the_first_to_the_last_step(step: int) -> None:
    net = small()
    watcher = fp8core.watch(net, every=2)
    for _ in range(step):
        run(net)
        watcher.step()
    for other in (net, net[1]):
        with pytest.raises(ValueError, match=r"is watched by another watcher; close\(\) that one first"):
            fp8core.watch(other)
    watcher._on.was_stepped = True
    watcher.close()
    again = fp8core.watch(net, first_step=1)
    again.step()


def test_a_watcher_that_is_dropped_frees_its_layers_and_says_that_it_recorded_nothing() -> None:
    net = small()
    watchers = [fp8core.watch(net, every=2, first_step=1)]
    with pytest.warns(RuntimeWarning, match=r"watcher\.step\(\) was never called"):
        watchers.clear()
    fp8core.watch(net, first_step=1).step()


def test_a_scale_that_moves_on_before_the_step_ends_is_the_one_that_was_used() -> None:
    """What a sample needs is copied when it is taken: update_scales and the optimizer change their tensors in place."""
    results = []
    for late in (False, True):
        net = small("delayed")
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            net(torch.randn(16, 32, generator=generator)).square().mean().backward()
            fp8core.update_scales(net)
        with fp8core.watch(net, every=2) as watcher:
            net(torch.randn(16, 32, generator=generator)).square().mean().backward()
            if late:
                optimizer.step()
                fp8core.update_scales(net)
            watcher.step()
        results.append(watcher.latest)
    assert results[0] == results[1]


def test_many_calls_are_those_calls_together() -> None:
    """More than are kept one by one. Oracle: the same batch once: every mean over equal calls is that of one."""
    results = []
    for times in (1, 70):
        net = small("rowwise")
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        with fp8core.watch(net, every=2, samples=100) as watcher:
            for _ in range(times):
                net(x).square().mean().backward()
            watcher.step()
            assert not watcher.problem
        results.append(watcher.latest)
    for one, many in zip(*results, strict=True):
        assert (many.calls, many.elements, many.sampled) == (70, 70 * one.elements, 70 * one.sampled)
        for figure in ("amax", "scale", "largest_scale", "saturated_share", "underflow_share", "sqnr_db"):
            assert getattr(many, figure) == pytest.approx(getattr(one, figure), rel=1e-9), figure
