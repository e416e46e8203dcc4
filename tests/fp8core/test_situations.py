"""Recipe x situation: what a loop, a loader or a wrapper does around a model changes nothing that FP8 computes or remembers.

Oracle of the table: the same training without the situation, bitwise: losses, weights and amaxes. One step is skipped in
all of them, as a loss scaler does.
"""

from __future__ import annotations

import contextlib
import copy
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from recipes import SIXTEENS, on_cpu
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8core import (
    RECIPES,
    Float8Linear,
    GroupedMatmul,
    PrecisionSchedule,
    Recipe,
    amax_state_dict,
    audit,
    cast_input,
    convert_experts_to_float8,
    convert_to_float8_training,
    convert_to_high_precision,
    count_matmuls,
    linear,
    load_amax_state_dict,
    microbatches,
    update_scales,
    verify,
)
from fp8core.history import tensors_of
from fp8core.proof.verify import calls

STEPS, SKIPPED = 4, 1
Make = Callable[[Recipe], nn.Module]
NOT_ASKED = contextlib.nullcontext


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))


def made(recipe: Recipe) -> nn.Module:
    return convert_to_float8_training(plain(), config=recipe)


def step(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@dataclass(frozen=True)
class Situation:
    """Each part is what the loop has in its place."""

    make: Make = made
    around: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] = lambda model: NOT_ASKED()
    step: Callable[[nn.Module, torch.Tensor], torch.Tensor] = step
    before: Callable[[nn.Module], Any] = lambda model: None
    after: Callable[[nn.Module], Any] = lambda model: None


def trained(recipe: Recipe, situation: Situation) -> list[torch.Tensor]:
    model = situation.make(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(1)
    losses = []
    with situation.around(model):
        for number in range(STEPS):
            optimizer.zero_grad()
            situation.before(model)
            losses += [
                situation.step(model, torch.randn(16, 32, generator=data).requires_grad_()) for _ in range(2)
            ]
            situation.after(model)
            if number != SKIPPED:
                optimizer.step()
            update_scales(model)
    return [*losses, *(p.detach() for p in model.parameters()), *amax_state_dict(model).values()]


def made_on_meta(fill: float) -> Make:
    """torchtitan's way: `to_empty` leaves what the heap holds, and the model's own initialisation sees parameters only."""

    def make(recipe: Recipe) -> nn.Module:
        with torch.device("meta"):
            model = convert_to_float8_training(plain(), config=recipe)
        model._apply(lambda t: torch.full_like(t, fill if t.is_floating_point() else 1 << 20, device="cpu"))
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), plain().parameters(), strict=True):
                parameter.copy_(value)
        return model

    return make


@torch.inference_mode()
def made_in_inference_mode(recipe: Recipe) -> nn.Module:
    with torch.inference_mode(False):
        model = plain()
    return convert_to_float8_training(model, config=recipe)


def pickled(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again: nn.Module = torch.load(file, weights_only=False)
    return again


def validated(
    mode: Callable[[], Any], shared: bool = False
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def validate_and_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with mode():
            model(cast_input(1000 * x, model[0]) if shared else 1000 * x)
        return step(model, x)

    return validate_and_step


def recomputed(reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda model, x: step(lambda x: checkpoint(model, x, use_reentrant=reentrant), x)


def copied_and_used(copy_of: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], None]:
    """The copy trains in a block of its own, and keeps nothing of the original's."""

    def use(model: nn.Module) -> None:
        again = copy_of(model)
        with microbatches(again):
            step(again, torch.randn(16, 32, generator=torch.Generator().manual_seed(2)))
        assert all(m.weight_cache is None for m in again.modules() if isinstance(m, Float8Linear))

    return use


def reloaded(model: nn.Module) -> None:
    """Averaged weights in and out, as a checkpoint takes them."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    amaxes = {name: value.clone() for name, value in amax_state_dict(model).items()}
    model.load_state_dict({name: 2 * value for name, value in state.items()})
    model.load_state_dict(state)
    load_amax_state_dict(model, amaxes)


SITUATIONS = {
    "made on meta, heap of 1e8": Situation(make=made_on_meta(1e8)),
    "made on meta, heap of NaN": Situation(make=made_on_meta(torch.nan)),
    "converted in inference_mode": Situation(make=made_in_inference_mode),
    "FP8 all-gather, not sharded": Situation(
        make=lambda recipe: made(recipe.with_fp8_all_gather()), step=validated(torch.inference_mode)
    ),
    "deepcopy": Situation(make=lambda recipe: copy.deepcopy(made(recipe))),
    "pickle": Situation(make=lambda recipe: pickled(made(recipe))),
    "pickle, FP8 all-gather": Situation(make=lambda recipe: pickled(made(recipe.with_fp8_all_gather()))),
    "averaged weights in and out": Situation(before=reloaded),
    "wrapped": Situation(make=lambda recipe: nn.Sequential(made(recipe))),
    "validation, no_grad": Situation(step=validated(torch.no_grad)),
    "validation, inference_mode": Situation(step=validated(torch.inference_mode)),
    "validation, shared cast": Situation(step=validated(torch.no_grad, shared=True)),
    "validation, kernels": Situation(
        make=lambda recipe: made(recipe.with_kernels("always")), step=validated(torch.inference_mode)
    ),
    "checkpointing": Situation(step=recomputed(False)),
    "checkpointing, reentrant": Situation(step=recomputed(True)),
    "microbatches": Situation(around=microbatches),
    "microbatches, checkpointing": Situation(around=microbatches, step=recomputed(False)),
    "microbatches, no_grad": Situation(around=microbatches, step=validated(torch.no_grad)),
    "microbatches, inference_mode": Situation(around=microbatches, step=validated(torch.inference_mode)),
    "microbatches, deepcopy": Situation(around=microbatches, after=copied_and_used(copy.deepcopy)),
    "microbatches, copy": Situation(
        around=microbatches, after=lambda m: setattr(m, "kept", [copy.copy(c) for c in m])
    ),
    "microbatches, torch.save": Situation(around=microbatches, after=copied_and_used(pickled)),
}


@pytest.mark.filterwarnings("ignore:load_state_dict dropped")
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", SIXTEENS)
def test_a_situation_changes_nothing(name: str, situation: str) -> None:
    recipe = on_cpu(name)
    if recipe.is_four_bit and situation == "validation, kernels":
        return  # which there are none for; `test_four_bit_layers.py`
    expected, found = trained(recipe, Situation()), trained(recipe, SITUATIONS[situation])
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def test_parameters_made_in_inference_mode_have_a_way_out() -> None:
    with torch.inference_mode():
        model = made(RECIPES["tensorwise"])
        assert model(torch.randn(16, 32)).shape == (16, 32)
    with pytest.raises(RuntimeError, match=r"made in torch.inference_mode.*make the model outside of it"):
        model(torch.randn(16, 32))


def test_a_copied_schedule_sets_the_same_recipes() -> None:
    """Compiled code is guarded by the object."""
    model, schedule = made(RECIPES["tensorwise"]), PrecisionSchedule.parse("warmup_bf16:1step")
    schedule.apply(model, 0, 4)
    schedule.apply(model, 1, 4)
    recipe = model[0].recipe
    assert copy.deepcopy(schedule).apply(model, 2, 4) == 0
    assert model[0].recipe is copy.deepcopy(model)[0].recipe is recipe


def test_the_encoders_fast_path_multiplies_nothing_by_itself() -> None:
    """Oracle: the two FP8 GEMMs of each layer, by torch's profiler; `count_matmuls` has hooks, which avoid that path."""
    kept = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = convert_to_float8_training(nn.TransformerEncoder(copy.deepcopy(kept), 2), config="tensorwise")
    x = torch.randn(4, 16, 32)
    with torch.no_grad(), torch.profiler.profile() as profiler:
        model.eval()(x)
    assert sum(event.name == "aten::_scaled_mm" for event in profiler.events()) == 4
    padded = torch.arange(16) >= torch.tensor([[16], [10], [12], [7]])
    with torch.no_grad():
        inferred = model(x, src_key_padding_mask=padded)
    assert torch.equal(inferred[~padded], model(x, src_key_padding_mask=padded)[~padded])
    again = convert_to_high_precision(model)
    assert again.layers[0].activation_relu_or_gelu == kept.activation_relu_or_gelu
    assert again.use_nested_tensor


@pytest.mark.parametrize(("gradients", "strict"), [(True, False), (False, True)])
def test_export_with_an_open_batch(gradients: bool, strict: bool) -> None:
    """Oracle: eager, for another batch than that of the trace."""
    model = made(RECIPES["tensorwise"])
    sizes = ({0: torch.export.Dim("batch")},)
    with torch.set_grad_enabled(gradients):
        exported = torch.export.export(
            model, (torch.randn(4, 16, 32),), dynamic_shapes=sizes, strict=strict
        ).module()
        for batch in (2, 100):
            x = torch.randn(batch, 16, 32)
            assert torch.equal(exported(x), model(x))


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_rows_behind_the_last_offset_are_refused_compiled_too(name: str) -> None:
    multiply, weight = GroupedMatmul(config=on_cpu(name)), torch.randn(2, 128, 128)

    def product(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        rows = multiply.pad(x, offsets)
        return rows.restore(multiply(rows.x, weight, rows.offsets))

    x, offsets = torch.randn(300, 128), torch.tensor([100, 280], dtype=torch.int32)
    for run in (product, torch.compile(product, fullgraph=True, backend="aot_eager")):
        with pytest.raises((ValueError, RuntimeError), match="the last offset must be"):
            run(x, offsets)
        run(x[:280], offsets)


def test_too_few_tokens_are_refused_by_name_or_run_in_high_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain()
    x = torch.randn(34, 32).requires_grad_()
    converted = convert_to_float8_training(copy.deepcopy(model), config="tensorwise")
    with pytest.raises(
        ValueError, match=r"GEMM grad_weight of '0' .*34.*pad_inner_dim.*fqn != '0'.*ragged='bf16'"
    ):
        converted(x)
    config = RECIPES["tensorwise"].for_ragged_batches("bf16")
    converted = convert_to_float8_training(copy.deepcopy(model), config=config)
    for run in (converted, torch.compile(converted, fullgraph=True, backend="aot_eager", dynamic=False)):
        assert torch.equal(run(x), model(x))
    assert not torch.equal(converted(x[:32]), model(x[:32]))
    counted = count_matmuls(lambda: converted(x).sum().backward(), converted)
    assert counted.fp8_share == 0
    one, other = converted[0], Float8Linear(32, 32, config=config)
    proof = verify(lambda: (one(x).sum() + other(x[:32]).sum()).backward(), nn.ModuleList([one, other]))
    assert proof.ok
    assert [layer.few_tokens for layer in proof.layers] == [1, 0]
    assert proof.counted == 3
    with pytest.raises(ValueError, match=r"GEMM output of Float8Linear\(40, 32\): K=40 (?!.*ragged)"):
        Float8Linear(40, 32, config=config)(torch.randn(34, 40))
    for place in (linear, calls):  # a rule by which 32 are too few
        monkeypatch.setattr(
            place, "gemms_reason", lambda recipe, x, *_: ("", recipe.min_tokens == "bf16" and len(x) == 32)
        )
    one, other = Float8Linear(32, 32, config=config), Float8Linear(32, 32, config="tensorwise")
    proof = verify(lambda: (one(x[:32]).sum() + other(x[:32]).sum()).backward(), nn.ModuleList([one, other]))
    assert not proof.ok


@pytest.mark.parametrize(
    ("shape", "said"),
    [((1, 42, 32), "(1 x 42)"), ((2, 1500, 32), "(2 x 1500)"), ((3, 2, 34, 32), "(3 x 2 x 34)")],
    ids=["a sample of 42 tokens", "whisper's frames", "two leading sizes"],
)
def test_a_sequence_length_that_breaks_the_rule_is_named_with_the_way_out(
    shape: tuple[int, ...], said: str
) -> None:
    """By hand: the next multiple of 16 and the number of such sequences that fit, which then both run."""
    layer = Float8Linear(32, 32)
    with pytest.raises(ValueError, match="GEMM grad_weight") as refused:
        layer(torch.randn(shape))
    assert said in str(refused.value)
    longer, count = map(
        int,
        re.search(r"sequences of (\d+) for \d+, or a multiple of (\d+) of them", str(refused.value)).groups(),
    )
    assert (longer, count) == {42: (48, 8), 1500: (1504, 4), 34: (48, 8)}[shape[-2]]
    layer(torch.randn(*shape[:-2], longer, 32))
    layer(torch.randn(count, shape[-2], 32))


@pytest.mark.parametrize("how", ["refuse", "bf16", "pad"])
def test_ragged_batches_in_one_word(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Said at conversion where they would be refused; else a last batch of 8 rows trains: in high precision, or in FP8."""
    with caplog.at_level("INFO", logger="fp8core"):
        model = convert_to_float8_training(plain(), config="rowwise", ragged=how)
    assert ("no multiple of 16" in caplog.text) == (how == "refuse")
    x = torch.randn(8, 32, requires_grad=True)
    if how == "refuse":
        with pytest.raises(ValueError, match="with 8 tokens"):
            model(x)
        return
    proof = verify(lambda: model(x).square().mean().backward(), model)
    assert (proof.counted > 0) == (how == "pad")
    assert count_matmuls(lambda: model(x).sum().backward(), model).fp8_share == float(how == "pad")


def test_an_unknown_word_for_ragged_batches() -> None:
    with pytest.raises(ValueError, match="'drop' is unknown"):
        convert_to_float8_training(plain(), ragged="drop")


def test_weights_that_torchao_quantized_name_the_way_out() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = made(RECIPES["rowwise"])
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with pytest.raises(TypeError, match=r"'0' .*convert_to_high_precision\(model\) first"):
        model(torch.randn(16, 32))


def test_a_layer_compiled_in_place_is_pickled() -> None:
    model = made(RECIPES["tensorwise"])
    model[0].compile(backend="eager")
    x = torch.randn(16, 32)
    assert torch.equal(pickled(model)(x), model(x))


def test_amaxes_are_shared_with_the_layer() -> None:
    model = made(RECIPES["delayed"]).share_memory()
    assert all(tensor.is_shared() for tensor in tensors_of(model))


class Embedded(nn.Module):
    """A small vision transformer: a position is added, and a stack that no class of torch's owns is multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 16, 64))
        self.stack = nn.Parameter(torch.randn(1, 64, 64))
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x + self.position) @ self.stack
        return y


def test_a_parameter_counts_where_a_product_was_seen() -> None:
    model = convert_to_float8_training(Embedded())
    report = audit(model)
    assert [(row.fqn, row.gemms) for row in report.weights] == [("position", 0), ("stack", 0)]
    assert report.fp8_flop_share == 1
    assert "2 parameters of unknown use are not counted" in str(report)
    stepped = audit(model, step=lambda: model(torch.randn(4, 16, 64)).sum().backward())
    assert [(row.fqn, row.gemms) for row in stepped.weights] == [("stack", 3)]
    assert stepped.fp8_flop_share == pytest.approx(1 / 2)


def test_a_shared_parameter_is_listed_by_the_name_that_multiplied() -> None:
    model = nn.Sequential(nn.Module(), Embedded())
    model[0].stack = model[1].stack
    report = audit(model, step=lambda: model[1](torch.randn(4, 16, 64)).sum().backward())
    assert [(row.fqn, report.share_of(row.fqn)) for row in report.weights] == [
        ("1.stack", pytest.approx(1 / 2))
    ]


def test_a_parametrized_weight_is_its_layers() -> None:
    """One row, whose share is the step's; of a convolution too."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Conv1d(16, 16, 1)))
    for layer in model:
        nn.utils.parametrizations.weight_norm(layer)
    for step in (None, lambda: model(torch.randn(2, 16, 32)).sum().backward()):
        report = audit(model, step=step)
        assert [row.fqn for row in (*report.layers, *report.weights)] == ["0", "1.weight"]
    assert report.share_of("0.weight") == pytest.approx(2 / 3, abs=0.1)
    assert "ParametrizationList" not in str(report)


class Llama4TextExperts(nn.Module):
    """After transformers 5, `models/llama4`: as many rows for each expert, in the order of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.hidden_size, self.expert_dim = 4, 32, 64
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 128) / 8)
        self.down_proj = nn.Parameter(torch.randn(4, 64, 32) / 8)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(self.num_experts, -1, self.hidden_size)
        gate, up = torch.bmm(x, self.gate_up_proj).chunk(2, dim=-1)
        return torch.bmm(up * self.act_fn(gate), self.down_proj).view(-1, self.hidden_size)


class OwnLlama4Experts(Llama4TextExperts):
    pass


@pytest.mark.parametrize("kind", [Llama4TextExperts, OwnLlama4Experts])
def test_experts_of_llama_4(kind: type[nn.Module], sqnr_db: Callable[..., float]) -> None:
    """Oracle: their own forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(kind())
    x = torch.randn(4 * 9, 32, requires_grad=True)
    expected = model(x)
    convert_experts_to_float8(model, config="rowwise")
    found = model(x)
    assert 20 < sqnr_db(expected.detach(), found.detach()) < 40
    assert sqnr_db(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (expected, found))) > 18
    assert [(row.fqn, row.experts_per_token) for row in audit(model).experts] == [
        ("0.gate_up_proj", 4),
        ("0.down_proj", 4),
    ]
    again = convert_to_high_precision(copy.deepcopy(model))
    assert torch.equal(again(x), expected)
