"""history: delayed and static scaling: which amax is in use when, and that it survives saving and moving."""

from __future__ import annotations

import copy
import dataclasses
import io

import pytest
import torch
from torch import nn

from fp8core import (
    RECIPES,
    AmaxesMissingWarning,
    AmaxHistory,
    Float8Linear,
    PrecisionSchedule,
    Recipe,
    amax_state_dict,
    convert_to_float8_training,
    load_amax_state_dict,
    update_scales,
)
from fp8core.cast import cast_with_amax, scale_and_cast
from fp8core.history import ROLES, AmaxMemory


def recipe(**history: object) -> Recipe:
    return dataclasses.replace(RECIPES["delayed"], history=AmaxHistory(**history))


def step(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = layer(x.clone().requires_grad_())
    output.square().mean().backward()
    return output.detach()


def memory(**history: object) -> AmaxMemory:
    return AmaxMemory(recipe(**history))


def feed(m: AmaxMemory, *steps: float) -> list[float]:
    """Amax in use after each step, of the input; the other two roles see 1."""
    used = []
    for amax in steps:
        for role in ("weight", "grad_output"):
            m.record(role, torch.tensor(1.0))
        m.record("input", torch.tensor(amax))
        m.advance()
        used.append(float(m.in_use[0]))
    return used


def test_algorithms() -> None:
    """Oracle: the definition by hand; length 3 forgets the 8 after three steps."""
    steps = (2.0, 8.0, 4.0, 1.0, 0.5)
    assert feed(memory(length=3), *steps) == [2, 8, 8, 8, 4]
    assert feed(memory(length=3, algorithm="most_recent"), *steps) == list(steps)


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")])
def test_unusable_amaxes_never_enter(bad: float) -> None:
    assert feed(memory(length=1), 4.0, bad, 2.0) == [4, 4, 2]


def test_margin_leaves_binades_free() -> None:
    """Oracle: the definition; fp8_max / amax / 2**margin."""
    x = torch.linspace(-1, 1, 64)
    codes, scale_inv, seen = cast_with_amax(x, "e4m3fn", torch.tensor(1.0), margin=3)
    assert scale_inv == torch.tensor(8 / 448)
    assert codes.float().abs().max() == 56
    assert seen == 1
    assert torch.equal(
        cast_with_amax(x, "e4m3fn", torch.tensor(1.0))[0].float(), scale_and_cast(x, "e4m3fn")[0].float()
    )


def test_first_steps_are_dynamic_and_then_use_the_history() -> None:
    """Oracle: the tensorwise recipe while there is no history; saturation at the old amax afterwards."""
    layer = Float8Linear(32, 48, bias=False, config="delayed")
    dynamic = Float8Linear.from_float(layer, "tensorwise")
    x = torch.randn(16, 32)
    assert torch.equal(step(layer, x), dynamic(x))
    assert update_scales(layer) == 1
    assert torch.equal(step(layer, x), dynamic(x))  # the same tensors: the same amaxes
    larger = step(layer, 4 * x)
    assert larger.abs().max() < 0.5 * dynamic(4 * x).abs().max()  # stale: most of it saturates
    update_scales(layer)
    assert torch.equal(step(layer, 4 * x), dynamic(4 * x))


def test_static_is_fixed_by_the_first_update() -> None:
    layer = Float8Linear(32, 48, config="static")
    step(layer, torch.ones(16, 32))
    update_scales(layer)
    fixed = layer.amaxes.in_use.clone()
    assert fixed[0] == 1
    step(layer, torch.full((16, 32), 5.0))
    update_scales(layer)
    assert torch.equal(layer.amaxes.in_use, fixed)


@pytest.mark.parametrize("held", ["keep_bf16@grad_input,keep_bf16@grad_weight", "keep_bf16@output"])
def test_roles_that_are_never_cast_hold_no_other_back(held: str) -> None:
    """Oracle: saturation at the first step's amax, which a dynamic scale would not show."""
    layer, x = Float8Linear(32, 48, bias=False, config="delayed"), torch.randn(16, 32)
    PrecisionSchedule.parse(held).apply(layer, 0, 10)
    step(layer, x)
    update_scales(layer)
    assert layer.amaxes.ready == {r for r, a in zip(ROLES, layer.amaxes.in_use, strict=True) if a > 0}
    assert layer.amaxes.of("input") == x.abs().max()
    output = layer(4 * x)
    if "@output" not in held:
        assert output.abs().max() < 0.5 * (4 * x @ layer.weight.t()).abs().max()


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_state_checkpoints_moves_and_stays_float32(name: str) -> None:
    """Oracle: nn.Module.load_state_dict(strict=True) of the plain model, and the outputs of the model that was saved."""
    plain = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    model, again = (convert_to_float8_training(copy.deepcopy(plain), config=name) for _ in range(2))
    x = torch.randn(16, 32)
    step(model, x)
    update_scales(model)
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "amaxes": amax_state_dict(model)}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    plain.load_state_dict(state["model"], strict=True)
    again.load_state_dict(plain.state_dict(), strict=True)
    assert not again[0].amaxes.ready
    load_amax_state_dict(again, state["amaxes"])
    assert again[0].amaxes.ready
    with torch.no_grad():
        assert torch.equal(again(3 * x), model(3 * x))
    assert model.bfloat16()[0].amaxes.in_use.dtype == torch.float32


@pytest.mark.parametrize("name", ["delayed", "static"])
def test_a_state_dict_without_amaxes_is_warned_of_once(name: str) -> None:
    """It comes for weights alone, at the next update; not where amaxes follow, nor where `reset` says that none are meant."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)), config=name)
    step(model, torch.randn(16, 32))
    update_scales(model)
    weights, amaxes = copy.deepcopy(model.state_dict()), copy.deepcopy(amax_state_dict(model))
    for follows in ("nothing", "amaxes", "reset"):
        again = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48)), config=name)
        again.load_state_dict(weights)
        step(again, torch.randn(16, 32))
        if follows == "amaxes":
            load_amax_state_dict(again, amaxes)
        if follows == "reset":
            again[0].amaxes.reset()
        if follows == "nothing":
            with pytest.warns(AmaxesMissingWarning, match="0.amaxes"):
                update_scales(again)
        update_scales(again)  # a warning would be an error


def test_while_a_cuda_graph_records_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers move on, as the graph's replays must; which roles have an amax is found out after it."""
    layer, never_called = (Float8Linear(32, 48, bias=False, config="delayed") for _ in range(2))
    model = nn.ModuleList((layer, never_called))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capturing, ready in ((True, frozenset()), (False, frozenset(ROLES)), (True, frozenset(ROLES))):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        x = torch.randn(16, 32)
        step(layer, x)
        update_scales(model)
        assert float(layer.amaxes.history[0, 0]) == float(x.abs().max())
        assert layer.amaxes.ready == ready
        assert never_called.amaxes.ready == frozenset()


def test_all_ranks_take_the_largest_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the maximum by hand; the collective is replaced by what a second rank would contribute. Inf and NaN of one
    rank are seen by all, and so stay out of every history; the others of the same layer do not."""
    theirs = torch.tensor([[9.0, 0.5, 0.5], [float("inf"), 0.5, float("nan")], [-float("nan"), 0.0, 2.0]])
    calls = []

    def all_reduce(tensor: torch.Tensor, op: object, group: object = None) -> None:
        if tensor.dtype == torch.int32:  # amaxes, as bits; another one compares the names of layers
            calls.append(op)
            torch.maximum(tensor, theirs.view(torch.int32) & 0x7FFF_FFFF, out=tensor)

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    layers = nn.Sequential(*(Float8Linear(32, 32, config="delayed") for _ in theirs))
    for layer in layers:
        for role in ROLES:
            layer.amaxes.record(role, torch.tensor(1.0))
    update_scales(layers)
    assert calls == [torch.distributed.ReduceOp.MAX]
    assert [layer.amaxes.in_use.tolist() for layer in layers] == [[9, 1, 1], [0, 1, 0], [0, 1, 2]]


def unrecorded(layer: Float8Linear) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in layer.amaxes.buffers()]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_an_idle_layer_keeps_its_amaxes(algorithm: str) -> None:
    """Oracle: Transformer Engine #825: the history is rolled only for modules that ran. Before, an expert that idled
    for the length of the history forgot its 8 at the first small batch, and saturated at the next one of 8."""
    busy, idle = (Float8Linear(32, 48, config=recipe(length=4, algorithm=algorithm)) for _ in range(2))
    model = nn.ModuleList((busy, idle))
    for layer in model:
        step(layer, torch.full((16, 32), 8.0))
    update_scales(model)
    before = unrecorded(idle)
    for _ in range(6):
        step(busy, torch.ones(16, 32))
        update_scales(model)
    assert busy.amaxes.in_use[0] == 1
    assert all(map(torch.equal, unrecorded(idle), before))
    step(idle, torch.ones(16, 32))
    update_scales(model)
    assert idle.amaxes.in_use[0] == (8 if algorithm == "max" else 1)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_amaxes_of_an_old_checkpoint_load_as_float32(dtype: torch.dtype, assign: bool) -> None:
    """Oracle: the checkpoint's values, converted; a bfloat16 amax in use would be rounded at each update."""
    layer = Float8Linear(32, 48, config="delayed")
    step(layer, torch.randn(16, 32))
    update_scales(layer)
    old = layer.state_dict() | amax_state_dict(layer)  # once, amaxes were a part of the model's state
    low = {key: value.to(dtype) for key, value in old.items()}
    again = Float8Linear(32, 48, config="delayed")
    again.load_state_dict(low, assign=assign)
    assert all(buffer.dtype == torch.float32 for buffer in again.amaxes.buffers())
    assert torch.equal(again.amaxes.in_use, low["amaxes.in_use"].float())
    assert again.amaxes.in_use.data_ptr() != low["amaxes.in_use"].data_ptr()
    assert again.amaxes.ready == frozenset(ROLES)


def test_loading_part_of_a_model_keeps_the_amaxes_of_the_rest() -> None:
    """Adapters are loaded so: `load_state_dict(strict=False)` without a layer's weight is not about that layer."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), config="delayed")
    step(model, torch.randn(16, 32))
    update_scales(model)
    before = amax_state_dict(model)["0.amaxes.in_use"].clone()
    with pytest.warns(UserWarning, match="dropped the amaxes"):
        model.load_state_dict({"1.weight": torch.zeros(16, 48)}, strict=False)
    assert torch.equal(model[0].amaxes.in_use, before)
    assert model[0].amaxes.ready
    assert not model[1].amaxes.ready


def test_a_meta_model_takes_a_checkpoint_by_assign() -> None:
    """Oracle: the model that was saved; torch leaves buffers that no checkpoint has on "meta"."""
    layer, x = Float8Linear(32, 48, config="delayed"), torch.randn(16, 32)
    step(layer, x)
    update_scales(layer)
    empty = Float8Linear(32, 48, config="delayed", device="meta")
    empty.load_state_dict(layer.state_dict(), assign=True)
    load_amax_state_dict(empty, amax_state_dict(layer))
    assert torch.equal(empty(3 * x), layer(3 * x))
    step(empty, x)
    assert empty.amaxes.pending.all()


def test_amaxes_that_do_not_fit_are_refused() -> None:
    model = nn.Sequential(Float8Linear(32, 48, config="delayed"))
    state = amax_state_dict(model)
    assert sorted(state) == ["0.amaxes.history", "0.amaxes.in_use"]
    with pytest.raises(RuntimeError, match=r"missing keys: 0.*unexpected keys: 1"):
        load_amax_state_dict(model, {f"1.{key[2:]}": value for key, value in state.items()})
    load_amax_state_dict(model, {}, strict=False)
    with pytest.raises(ValueError, match=r"amaxes in use are \[nan, nan, nan\]; expected finite"):
        load_amax_state_dict(model, {key: torch.full_like(value, torch.nan) for key, value in state.items()})
    other = nn.Sequential(Float8Linear(32, 48, config=recipe(length=3)))
    with pytest.raises(RuntimeError, match=r"history has shape \[3, 3\]; expected \[3, 1024\]"):
        load_amax_state_dict(model, amax_state_dict(other))
