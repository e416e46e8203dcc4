"""PrecisionSchedule. Oracles: nn.Linear and the unscheduled FP8 model, bitwise; hand-written tables of states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recipes import SIXTEENS, on_cpu
from torch import nn
from torch._dynamo.utils import counters

from fp8core import (
    RECIPES,
    Float8Linear,
    PrecisionSchedule,
    cast_input,
    convert_to_float8_training,
    microbatches,
    update_scales,
)
from fp8core.recipe import GEMMS

STEPS = 6


class Mlp(nn.Module):
    """Two layers that share a cast, as q and k do, and one behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = nn.Linear(32, 48), nn.Linear(32, 48, bias=False), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = [self.q, self.k]
        fp8 = [m for m in both if isinstance(m, Float8Linear)]
        shared = cast_input(x, *fp8) if len(fp8) == 2 and fp8[0].recipe == fp8[1].recipe else x
        return self.out(torch.tanh(self.q(shared)) * self.k(shared)).float().square().mean()


def model(recipe: str = "") -> nn.Module:
    return convert_to_float8_training(Mlp(), config=on_cpu(recipe)) if recipe else Mlp()


def train(
    model: nn.Module,
    text: str = "",
    *,
    autocast: bool = False,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[list[bytes], PrecisionSchedule]:
    """Bit patterns of loss and all gradients and weights, step by step."""
    schedule = PrecisionSchedule.parse(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random, seen, run = torch.Generator().manual_seed(1), [], run or model
    for step in range(STEPS):
        schedule.apply(model, step, STEPS)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(torch.randn(2, 8, 32, generator=random))
        loss.backward()
        state = [loss, *(p.grad for p in model.parameters()), *model.parameters()]
        seen.append(b"".join(t.detach().numpy().tobytes() for t in state))
        optimizer.step()
        update_scales(model)
    return seen, schedule


@pytest.mark.parametrize(
    ("before", "text", "autocast"),
    [("", "warmup_bf16:4", False), ("", "warmup_bf16:4", True), ("the recipe", "cooldown_bf16:2", False)],
)
@pytest.mark.parametrize("name", SIXTEENS)
def test_until_the_switch_it_is_the_model_without_a_schedule(
    name: str, before: str, text: str, autocast: bool
) -> None:
    """Oracle: the unconverted model before the end of a warm-up, the one that is all FP8 before a cool-down."""
    want, _ = train(model(before and name), autocast=autocast)
    arm, schedule = train(model(name), text, autocast=autocast)
    assert arm[:4] == want[:4]
    assert arm[4] != want[4]
    assert schedule.switches == 1


def test_after_a_warm_up_delayed_scaling_starts_as_any_run_does() -> None:
    """Oracle: the delayed recipe from the state of the switch, with fresh memory."""
    arm = model("delayed")
    after, _ = train(arm, "warmup_bf16:4")
    memories = [m.amaxes for m in arm.modules() if isinstance(m, Float8Linear)]
    assert all(m is not None and m.ready for m in memories)
    dynamic, _ = train(model("tensorwise"), "warmup_bf16:4")
    assert after[4] == dynamic[4]  # the first step scales by the tensors themselves
    assert after[5] != dynamic[5]  # the second by the first one's amaxes


def test_kept_casts_do_not_survive_a_switch() -> None:
    """The recipe changes while a `microbatches` block is open and the weight does not."""
    layer = convert_to_float8_training(nn.Linear(32, 48), config=on_cpu("tensorwise"))
    schedule, x = PrecisionSchedule.parse("warmup_bf16:1step@output,cooldown_bf16:1step"), torch.randn(16, 32)
    want = {}
    for step in range(3):
        schedule.apply(layer, step, 3)
        want[step] = layer(x)
    with microbatches(layer):
        for step in (0, 1, 2, 0, 1):
            schedule.apply(layer, step, 3)
            for _ in range(2):
                assert torch.equal(layer(x), want[step])
    assert not torch.equal(want[0], want[1])


@pytest.mark.parametrize(
    ("text", "step", "want"),
    [
        ("", 0, "- - -"),
        ("warmup_bf16:3", 2, "oiw oiw oiw"),
        ("warmup_bf16:3", 3, "- - -"),
        ("warmup_bf16:0.25@[qk]", 1, "oiw oiw -"),  # 2.5 steps are 2
        ("warmup_bf16:0.25@[qk]", 2, "- - -"),
        ("cooldown_bf16:0.2@grad_weight", 7, "- - -"),
        ("cooldown_bf16:0.2@grad_weight", 8, "w w w"),
        ("keep_bf16@out:output, warmup_bf16:2@out:grad_input", 1, "- - oi"),
        ("keep_bf16@out:output, warmup_bf16:2@out:grad_input", 5, "- - o"),
        ("keep_bf16@o*,keep_bf16@out", 5, "- - oiw"),
        ("warmup_bf16:10@q", 9, "oiw - -"),  # the whole run of some layers
        ("cooldown_bf16:11@output", 0, "o o o"),
    ],
)
def test_what_each_rule_holds_back(text: str, step: int, want: str) -> None:
    """GEMMs in high precision of q, k and out, as one letter each."""
    made, schedule = model("tensorwise"), PrecisionSchedule.parse(text)
    schedule.apply(made, 0, 10)
    schedule.apply(made, step, 10)
    held = [
        "".join(letter for letter, g in zip("oiw", GEMMS, strict=True) if not m.recipe.gemms[g].is_fp8) or "-"
        for m in (made.q, made.k, made.out)
    ]
    assert " ".join(held) == want


@pytest.mark.parametrize(
    "text",
    ["warmup", "warmup_bf16", "keep_bf16:3", "warmup_bf16:10@", "warmup_bf16:10@q:weight", "warmup_bf16:10@:output",
     "warmup_bf16:10,", *(f"cooldown_bf16:{length}@q" for length in (
         "", "-1", "1.5", "0", "0steps", "0.0", "nan", "1e3", "0.5step", "step", "-1step", "1", "+1", "01", " 1 ", "1.0", "1."))],
)  # fmt: skip
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    """A bare 1 too: it could mean one step or the whole run."""
    with pytest.raises(ValueError, match=r"expected|is unknown|no target|no length|could mean"):
        PrecisionSchedule.parse(text)


@pytest.mark.parametrize("written", ["1step", "1 step", "1steps"])
def test_one_step_is_written_with_its_unit(written: str) -> None:
    (rule,) = PrecisionSchedule.parse(f"warmup_bf16:{written}@layers.*").rules
    assert (rule.amount, rule.length(10)) == (1, 1)
    assert str(rule) == "warmup_bf16:1step@layers.*"


def test_what_does_not_fit_the_run_is_refused() -> None:
    for text, at, of, error, message in (
        ("warmup_bf16:2", -1, None, ValueError, "step=-1"),
        ("warmup_bf16:2", 1, 0, TypeError, "expected Module"),
        ("warmup_bf16:10", 0, None, ValueError, "own recipe never runs"),
        ("cooldown_bf16:11", 0, None, ValueError, "10 steps"),
        ("keep_bf16@layers.*", 0, None, ValueError, "q, k, out"),
    ):
        given: Any = model("tensorwise") if of is None else of
        with pytest.raises(error, match=message):
            PrecisionSchedule.parse(text).apply(given, at, 10)


def test_a_schedule_made_anew_for_each_step_returns_to_the_recipe() -> None:
    """Oracle: the same schedule kept as one object."""
    kept, anew = (convert_to_float8_training(nn.Linear(32, 48), config="tensorwise") for _ in range(2))
    schedule = PrecisionSchedule.parse("warmup_bf16:5,cooldown_bf16:0.1")
    for step in range(20):
        schedule.apply(kept, step, 20)
        PrecisionSchedule.parse(str(schedule)).apply(anew, step, 20)
        assert kept.recipe == anew.recipe
        assert kept.recipe.fp8_gemms == (3 if 5 <= step < 18 else 0)


def test_a_layer_held_back_takes_what_it_takes_in_fp8() -> None:
    """An input of another dtype than the weights, as in FP8: a run must not end at its cool-down."""
    layer = Float8Linear(32, 48, config="tensorwise")
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    PrecisionSchedule.parse("keep_bf16").apply(layer, 0, 1)
    want = torch.nn.functional.linear(x, layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(layer(x), want)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)), "rounded once"


def test_texts_and_switch_steps() -> None:
    schedule = PrecisionSchedule.parse("warmup_bf16:0.1@q:output, cooldown_bf16:20 ,keep_bf16@grad_input")
    assert PrecisionSchedule.parse(str(schedule)).rules == schedule.rules
    assert schedule.switch_steps(200) == (20, 180)
    assert PrecisionSchedule().switch_steps(5) == ()
    assert PrecisionSchedule.parse("warmup_bf16:5@q,cooldown_bf16:9@k,warmup_bf16:2").switch_steps(5) == (2,)


def test_a_switch_right_after_a_resumption_is_counted_and_the_state_resumed_into_is_not() -> None:
    made, schedule = model("tensorwise"), PrecisionSchedule.parse("warmup_bf16:2")
    assert schedule.apply(made, 2, 5) == 6  # three layers: held back as they were at step 1, then let go
    assert schedule.switches == 1
    made, schedule = model("tensorwise"), PrecisionSchedule.parse("warmup_bf16:2")
    assert schedule.apply(made, 1, 5) == 3
    assert schedule.switches == 0


def test_a_checkpoint_goes_on_and_one_of_other_rules_is_refused() -> None:
    arm = model("tensorwise")
    _, schedule = train(arm, "warmup_bf16:2")
    again = PrecisionSchedule.parse("warmup_bf16:2")
    again.load_state_dict(copy.deepcopy(schedule.state_dict()))
    assert again.switches == 1
    with pytest.raises(
        ValueError, match=r"made under schedule 'warmup_bf16:2', this run has 'warmup_bf16:3'"
    ):
        PrecisionSchedule.parse("warmup_bf16:3").load_state_dict(schedule.state_dict())


def test_compiled_there_is_one_graph_a_state_and_none_a_step() -> None:
    """Oracle: eager mode, whose bits aot_eager keeps; Dynamo's own count of graphs. The last state was compiled already."""
    torch._dynamo.reset()
    counters.clear()
    made, text = model("tensorwise"), "warmup_bf16:2,cooldown_bf16:2"
    run = torch.compile(lambda x: made(x), fullgraph=True, dynamic=False, backend="aot_eager")
    assert train(made, text, run=run)[0] == train(model("tensorwise"), text)[0]
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_layer_held_back_is_nn_linear(dtype: torch.dtype, bias: bool, shared: bool, autocast: bool) -> None:
    """Forward and all gradients, bit for bit; under autocast a float32 input's gradients add up in float32."""
    layers = [nn.Linear(32, 48, bias=bias, dtype=dtype) for _ in range(2)]
    held = [Float8Linear.from_float(m, RECIPES["tensorwise"]) for m in layers]
    for m in held:
        PrecisionSchedule.parse("keep_bf16").apply(m, 0, 1)
    x = torch.randn(3, 5, 32, dtype=dtype)
    results = []
    for group in (layers, held):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.float32):
            given = cast_input(inputs, *held) if shared and group is held else inputs
            outputs = [m(given) for m in group]
        parameters = [p for m in group for p in m.parameters()]
        results.append(
            [*outputs, *torch.autograd.grad(sum(y.float().sum() for y in outputs), [inputs, *parameters])]
        )
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
