"""PrecisionSchedule. Oracles: nn.Linear and the unscheduled FP8 model, bitwise; hand-written tables of states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from recipes import on_cpu
from torch import nn
from torch._dynamo.utils import counters

from fp8core import (
    RECIPES,
    CastInput,
    Float8Linear,
    PrecisionSchedule,
    cast_input,
    convert_to_float8_training,
    microbatches,
    update_scales,
)
from fp8core.recipe import GEMMS

STEPS = 6
compiles = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


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
    steps: int = STEPS,
    accumulation: int = 1,
) -> tuple[list[bytes], PrecisionSchedule]:
    """Bit patterns of loss and all gradients and weights, step by step."""
    schedule = PrecisionSchedule.parse(text)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random, seen, run = torch.Generator().manual_seed(1), [], run or model
    for step in range(steps):
        schedule.apply(model, step, steps)
        optimizer.zero_grad()
        with microbatches(model) if accumulation > 1 else nullcontext():
            for _ in range(accumulation):
                x = torch.randn(2, 8, 32, generator=random)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = run(x)
                loss.backward()
        state = [loss, *(p.grad for p in model.parameters()), *model.parameters()]
        seen.append(b"".join(t.detach().numpy().tobytes() for t in state))
        optimizer.step()
        update_scales(model)
    return seen, schedule


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_warm_up_is_the_unconverted_model_until_the_switch(name: str, autocast: bool) -> None:
    base, _ = train(model(), autocast=autocast)
    arm, schedule = train(model(name), "warmup_bf16:4", autocast=autocast)
    assert arm[:4] == base[:4]
    assert arm[4] != base[4]
    assert schedule.switches == 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_cool_down_is_all_fp8_until_the_switch(name: str) -> None:
    fp8, _ = train(model(name))
    arm, schedule = train(model(name), "cooldown_bf16:2")
    assert arm[:4] == fp8[:4]
    assert arm[4] != fp8[4]
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


def test_accumulation_with_kept_casts_is_accumulation_without() -> None:
    """Oracle: the unconverted model before the switch, the FP8 one without schedule from its state after it."""
    assert (
        train(model("rowwise"), "warmup_bf16:3", accumulation=2)[0][:3]
        == (train(model(), accumulation=2)[0][:3])
    )
    assert (
        train(model("rowwise"), "cooldown_bf16:2", accumulation=2)[0][:4]
        == (train(model("rowwise"), accumulation=2)[0][:4])
    )


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


def states(text: str, step: int, total: int = 10) -> dict[str, str]:
    """GEMMs in high precision by layer, as one letter each."""
    made, schedule = model("tensorwise"), PrecisionSchedule.parse(text)
    schedule.apply(made, 0, total)
    schedule.apply(made, step, total)
    return {
        name: "".join(letter for letter, g in zip("oiw", GEMMS, strict=True) if not m.recipe.gemms[g].is_fp8)
        for name, m in made.named_modules()
        if isinstance(m, Float8Linear)
    }


@pytest.mark.parametrize(
    ("text", "step", "want"),
    [
        ("", 0, {"q": "", "k": "", "out": ""}),
        ("warmup_bf16:3", 2, {"q": "oiw", "k": "oiw", "out": "oiw"}),
        ("warmup_bf16:3", 3, {"q": "", "k": "", "out": ""}),
        ("warmup_bf16:0.25@[qk]", 1, {"q": "oiw", "k": "oiw", "out": ""}),  # 2.5 steps are 2
        ("warmup_bf16:0.25@[qk]", 2, {"q": "", "k": "", "out": ""}),
        ("cooldown_bf16:0.2@grad_weight", 7, {"q": "", "k": "", "out": ""}),
        ("cooldown_bf16:0.2@grad_weight", 8, {"q": "w", "k": "w", "out": "w"}),
        ("keep_bf16@out:output, warmup_bf16:2@out:grad_input", 1, {"q": "", "k": "", "out": "oi"}),
        ("keep_bf16@out:output, warmup_bf16:2@out:grad_input", 5, {"q": "", "k": "", "out": "o"}),
        ("keep_bf16@o*,keep_bf16@out", 5, {"q": "", "k": "", "out": "oiw"}),
        ("warmup_bf16:10@q", 9, {"q": "oiw", "k": "", "out": ""}),  # the whole run of some layers
        ("cooldown_bf16:11@output", 0, {"q": "o", "k": "o", "out": "o"}),
    ],
)
def test_what_each_rule_holds_back(text: str, step: int, want: dict[str, str]) -> None:
    assert states(text, step) == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "warmup",
            r"'warmup' is unknown \(nearest: warmup_bf16\); expected one of warmup_bf16, cooldown_bf16",
        ),
        ("warmup_bf16", "expected warmup_bf16:STEPS or warmup_bf16:SHARE"),
        ("keep_bf16:3", "keep_bf16 has no length"),
        ("warmup_bf16:", "length ''; expected a whole number"),
        ("warmup_bf16:-1", "length '-1'"),
        (
            "warmup_bf16:1.5",
            "length '1.5'; expected a whole number of steps from 1 or a share between 0 and 1",
        ),
        ("warmup_bf16:0", "length '0'; expected a whole number of steps from 1"),
        ("cooldown_bf16:0steps@q", "length '0steps'"),
        ("warmup_bf16:0.0", "length '0.0'"),
        ("warmup_bf16:nan", "length 'nan'"),
        ("warmup_bf16:1e3", "length '1e3'"),
        ("warmup_bf16:0.5step", "length '0.5step'"),
        ("warmup_bf16:step", "length 'step'"),
        ("warmup_bf16:-1step", "length '-1step'"),
        ("warmup_bf16:10@", "'' is no target"),
        ("warmup_bf16:10@q:weight", "'q:weight' is no target.*output, grad_input, grad_weight"),
        ("warmup_bf16:10@:output", "':output' is no target"),
        ("warmup_bf16:10,", "'' is unknown"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionSchedule.parse(text)


@pytest.mark.parametrize("kind", ["warmup_bf16", "cooldown_bf16"])
@pytest.mark.parametrize("length", ["1", "+1", "01", " 1 ", "1.0", "1."])
def test_a_bare_one_is_refused_with_both_readings_and_1step_is_one_step(kind: str, length: str) -> None:
    with pytest.raises(
        ValueError, match=f"could mean one step or the whole run; write {kind}:1step, or keep_bf16"
    ):
        PrecisionSchedule.parse(f"{kind}:{length}@layers.*")
    for written in ("1step", "1 step", "1steps"):
        (rule,) = PrecisionSchedule.parse(f"{kind}:{written}@layers.*").rules
        assert (rule.amount, rule.length(10)) == (1, 1)
        assert str(rule) == f"{kind}:1step@layers.*"
    assert PrecisionSchedule.parse(f"{kind}:10steps").rules == PrecisionSchedule.parse(f"{kind}:10").rules


def test_a_checkpoint_that_wrote_one_step_as_1_is_taken_up() -> None:
    schedule = PrecisionSchedule.parse("warmup_bf16:1step@q,cooldown_bf16:1step")
    schedule.load_state_dict({"rules": "warmup_bf16:1@q,cooldown_bf16:1", "switches": 3})
    assert schedule.switches == 3
    with pytest.raises(ValueError, match="made under schedule"):
        schedule.load_state_dict({"rules": "warmup_bf16:10@q,cooldown_bf16:1", "switches": 3})


def test_misuse_is_refused() -> None:
    schedule = PrecisionSchedule.parse("warmup_bf16:2")
    with pytest.raises(ValueError, match="step=-1: steps count from 0; expected 0 to 9"):
        schedule.apply(nn.Linear(4, 4), -1, 10)
    with pytest.raises(
        TypeError, match=r"model is a int; expected Module; apply\(model, step, total_steps\)"
    ):
        schedule.apply(0, 1, 10)
    with pytest.raises(TypeError, match="a schedule is a int; expected str"):
        PrecisionSchedule.parse(1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("warmup_bf16:10", "warmup_bf16:10 holds for all of the run's 10 steps, so FP8 never runs"),
        ("cooldown_bf16:11", "holds for all of the run's 10 steps"),
        ("keep_bf16@layers.*", r"no FP8 layer is named like 'layers.\*'; there are q, k, out"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionSchedule.parse(text).apply(model("tensorwise"), 0, 10)


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
    codes = CastInput(x, x, None, (None, None), codes_only=True)
    with pytest.raises(ValueError, match="codes alone"):
        layer(codes)


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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_there_is_one_graph_a_state_and_none_a_step(backend: str) -> None:
    """Oracle: the compiled unconverted and the compiled unscheduled model, bitwise; Dynamo's own count of graphs."""
    torch._dynamo.reset()

    def compiled(recipe: str, text: str, steps: int) -> tuple[list[bytes], int]:
        made = model(recipe)
        before = counters["stats"]["unique_graphs"]
        run = torch.compile(lambda x: made(x), fullgraph=True, dynamic=False, backend=backend)
        torch._dynamo.reset()
        seen, _ = train(made, text, run=run, steps=steps)
        return seen, counters["stats"]["unique_graphs"] - before

    base, graphs = compiled("", "", 12)
    fp8, _ = compiled("tensorwise", "", 12)
    assert graphs == 1
    warm, graphs = compiled("tensorwise", "warmup_bf16:4", 12)
    assert warm[:4] == base[:4]
    assert warm[4] != base[4]
    assert graphs == 2
    both, graphs = compiled(
        "tensorwise", "warmup_bf16:4,cooldown_bf16:4", 12
    )  # back to a state already compiled
    assert both[:8] == warm[:8]
    assert graphs == 2
    cool, graphs = compiled("tensorwise", "cooldown_bf16:4", 12)
    assert cool[:8] == fp8[:8]
    assert cool[8] != fp8[8]
    assert graphs == 2
