"""fp8core.watch: ownership of layers, eager mode, switches, copies and warnings. Oracle: the expected records, by hand."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from recipes import on_cpu
from torch import nn

import fp8core
from fp8core import PrecisionSchedule, convert_to_float8_training
from fp8core.cast_stats import CAST, HIGH_PRECISION, WATCHED


def model(recipe: str = "tensorwise") -> nn.Sequential:
    torch.manual_seed(0)
    return convert_to_float8_training(
        nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), config=on_cpu(recipe)
    )


def run(net: nn.Module) -> None:
    net(torch.randn(16, 32)).square().mean().backward()


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


@pytest.fixture(autouse=True)
def nothing_is_left_on() -> Iterator[None]:
    yield
    gc.collect()
    assert not WATCHED
    assert stance() == "default"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_eager_mode_lasts_as_long_as_one_watcher_needs_it(order: tuple[int, int]) -> None:
    nets = model(), model()
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


def test_eager_mode_gives_back_the_stance_that_was() -> None:
    with torch.compiler.set_stance("eager_on_recompile"):
        first, second = (fp8core.watch(model(), eager_steps=True) for _ in range(2))
        run(first._model)
        run(second._model)
        first.step()
        second.step()
        assert stance() == "eager_on_recompile"
        first.close()
        second.close()


@pytest.mark.parametrize("step", [0, 1, 2])
def test_layers_are_held_from_the_first_to_the_last_step(step: int) -> None:
    net = model()
    watcher = fp8core.watch(net, every=2)
    for _ in range(step):
        run(net)
        watcher.step()
    for other in (net, net[1]):
        with pytest.raises(ValueError, match=r"is watched by another watcher; close\(\) that one first"):
            fp8core.watch(other)
    watcher._was_told = True
    watcher.close()
    fp8core.watch(net, first_step=1)


def test_a_watcher_that_is_dropped_frees_its_layers() -> None:
    net = model()
    watcher = fp8core.watch(net, every=2, first_step=1)
    del watcher
    gc.collect()
    fp8core.watch(net)


def test_layers_that_were_converted_later_are_another_watchers() -> None:
    """The first watcher meets them at its next watched step, and ends."""
    net = nn.Sequential(model(), nn.Sequential(nn.Linear(16, 16)))
    watcher = fp8core.watch(net, every=1, first_step=0)
    convert_to_float8_training(net[1], config=on_cpu("tensorwise"))
    other = fp8core.watch(net[1], first_step=1)
    net(torch.randn(16, 32)).sum().backward()
    with pytest.warns(RuntimeWarning, match="1.0 is watched by another watcher"):
        watcher.step()
    other._was_told = True
    other.close()


def test_a_switch_after_the_backward_pass_changes_no_record() -> None:
    net = model("rowwise")
    layers = [m for m in net if isinstance(m, fp8core.Float8Linear)]
    schedule = PrecisionSchedule.parse("keep_bf16@0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fp8core.watch(net, every=1) as watcher:
            run(net)
            schedule.apply(net, 0, 10)
            layers[1].recipe = layers[0].recipe
            watcher.step()
    assert {r.status for r in watcher.latest if r.layer == "1"} == {CAST}
    assert {r.status for r in watcher.latest} <= {CAST, HIGH_PRECISION}
    assert {r.layer for r in watcher.latest} == {"0", "1"}


def test_a_forward_pass_counts_once_however_often_it_is_differentiated() -> None:
    for recipe in ("tensorwise", "rowwise"):
        net = model(recipe)
        with fp8core.watch(net, every=2) as watcher:
            loss = net(torch.randn(16, 32)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            watcher.step()
        assert {r.calls for r in watcher.latest} == {1}
        size = {"0": (16 * 32, 48 * 32, 16 * 48), "1": (16 * 48, 16 * 48, 16 * 16)}
        for record in watcher.latest:
            at = ("input", "weight", "grad_output").index(record.operand)
            assert record.elements == size[record.layer][at]


def test_a_scale_that_moves_on_before_the_step_ends_is_the_one_that_was_used() -> None:
    """What a sample needs is copied when it is taken: update_scales and the optimizer change their tensors in place."""
    results = []
    for late in (False, True):
        net = model("delayed")
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
        net = model("rowwise")
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
