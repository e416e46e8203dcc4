"""Models as they come. Oracle: the same module called by hand, as its users call it, and the loss that it returns."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import language_models
import pytest
import torch
from language_models import VOCAB, Config, TinyForClassification, WithoutLength
from torch import nn

from harness.store.errors import UsageError
from harness.training import meta_estimate
from harness.training.models import UserModel, resolve
from harness.training.models.calls import Form, adapt, loss_of
from harness.training.models.random_tokens import token_input
from harness.training.setup import Setup, prepare

LOSS, LOGITS = torch.tensor(2.5), torch.zeros(4, 8)


def spec(target: str, batch: str = "", **more: Any) -> UserModel:
    own = {"_target_": f"language_models.{target}", **more}
    found = resolve(json.dumps(own | ({"batch": f"language_models.{batch}"} if batch else {})))
    assert isinstance(found, UserModel)
    return found


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (None, "their.model returned a NoneType for a batch of x; expected the loss"),
        (2.5, "returned a float"),
        (torch.tensor(3), r"returned a int64 tensor of shape \[\]"),
        ((LOGITS, LOGITS), r"returned \(Tensor\[4, 8\], Tensor\[4, 8\]\)"),
        ((LOSS, LOSS), "with 2 parts that could be the loss"),
        ((LOSS[None], torch.tensor(0.01)), "with 2 parts that could be the loss"),
        ((torch.zeros(1, 1), LOSS), "with 2 parts that could be the loss"),  # logits of one class, or a loss with its axes
        ((torch.zeros(32), torch.tensor(0.01)), "with 2 parts that could be the loss"),  # one loss a token
        ((None, torch.tensor(0.01)), "the None is the loss where no targets are given"),
        (torch.zeros(1, 1), r"returned a float32 tensor of shape \[1, 1\]"),  # a prediction
        ({"logits": LOGITS}, "returned a dict of logits: Tensor"),
        ({"loss": LOGITS}, r"output.loss of their.model is a float32 tensor of shape \[4, 8\]; expected one floating"),
        (language_models.ModelOutput(None, LOGITS), "output.loss of their.model is None; the batch has x: .* 'labels'"),
    ],
)  # fmt: skip
def test_no_loss_is_one_line_that_says_what_came(output: object, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        loss_of(output, Form(keys=("x",)), "their.model", (torch.zeros(8, 4),))
    assert "\n" not in str(raised.value)


class WithAccuracy(nn.Module):
    """Returns its logits and a number that no gradient flows to."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y: torch.Tensor = self.head(x)
        return y, (y.argmax(-1) == 0).float().mean()


def test_a_number_without_a_gradient_is_no_loss_in_training() -> None:
    """An accuracy beside the logits. Where no gradients are expected none is missed."""
    x = torch.zeros(8, 4)
    module = adapt(WithAccuracy(), "accuracy", "their.model")
    with pytest.raises(
        UsageError, match=r"the loss of their.model depends on no parameter .* element 1 of 2"
    ):
        module(x)
    with torch.no_grad():
        assert float(module(x)) in (0.0, 1.0)


def test_a_model_that_is_built_once_and_returned_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms would train the same weights, each where the one before stopped."""
    kept = Regressor()
    monkeypatch.setattr(language_models, "kept", lambda: kept, raising=False)
    model = spec("kept")
    model.build()
    with pytest.raises(
        UsageError, match=r"language_models.kept returned the same module twice; build a new one"
    ):
        model.build()


@pytest.mark.parametrize(("target", "batch"), [("gpt", "in_order"), ("tiny", "by_name")])
@pytest.mark.parametrize("compute", ["fp32", "bf16_autocast", "bf16"])
def test_a_step_of_a_model_as_it_comes_is_the_step_by_hand(target: str, batch: str, compute: str) -> None:
    """Oracle: the loss and gradients of the class itself, called as its users call it."""
    model = spec(target, batch)
    setup = Setup(model=model.name, batch=4, seq=16, compute=compute)
    trainee = prepare(setup, "cpu")
    plain = copy.deepcopy(getattr(language_models, target)().to(setup.weight_dtype))
    plain.load_state_dict(trainee.model.state_dict())
    given = getattr(language_models, batch)(3, 1, 4, "cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == "bf16_autocast"):
        loss = plain(**given).loss if target == "tiny" else plain(*given)[1]
    loss.backward()
    ours = trainee.gradients([model.batch(3, 1, 4, "cpu")])
    assert ours.dtype == torch.float32
    assert torch.equal(ours, loss.detach().float())
    for (name, mine), theirs in zip(trainee.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name
    assert [n for n, _ in trainee.model.named_modules()] == [n for n, _ in plain.named_modules()]
    narrow = ", bfloat16 turned to float32" if compute == "bf16" else ""
    facts = meta_estimate.facts_of_calls(setup, "cpu")
    assert facts["loss_from"] == ("output.loss" if target == "tiny" else "element 1 of 2") + narrow
    assert facts["batch_handed_over"] == (
        "by name: input_ids, labels, attention_mask" if target == "tiny" else "in order"
    )
    assert meta_estimate.tokens(setup) == 4 * 16
    products = 2 * 4 * 16 * (2 * 32 * 64 + 32 * 64)  # multiply-adds of up, down and the head
    assert sum(meta_estimate.flops(setup).values()) == 3 * products


# No batch function


@pytest.mark.parametrize(
    ("target", "batch", "words"),
    [
        ("tiny", "without_labels", "output.loss of language_models.tiny is None; the batch has input_ids: .*labels=input_ids"),
        ("gpt", "one_tensor", r"returned \(Tensor\[4, 16, 64\], NoneType\) for a batch of tensors without names .the None"),
    ],
)  # fmt: skip
def test_a_batch_without_labels_is_refused_on_paper(target: str, batch: str, words: str) -> None:
    """Before anything is measured: the plan runs the model on tensors without values."""
    setup = Setup(model=spec(target, batch).name, batch=4, seq=16, compute="fp32")
    with pytest.raises(UsageError, match=words):
        meta_estimate.unsupported(setup, "cpu", 2**40)


@pytest.mark.parametrize(("target", "keys"), [("gpt", ()), ("tiny", ("input_ids", "labels"))])
def test_without_a_batch_function_a_language_model_reads_random_tokens(
    target: str, keys: tuple[str, ...]
) -> None:
    """Oracle: an untrained model's loss on random tokens is log(vocabulary) (nanoGPT's README checks its own so)."""
    model = spec(target)
    assert (model.tokens.keys, model.tokens.vocab_size, model.tokens.seq) == (keys, VOCAB, 32)
    tokens, targets = model.batch(0, 0, 64, "cpu")
    assert tokens.shape == targets.shape == (64, 32)
    assert torch.equal(tokens, targets) if keys else torch.equal(tokens[:, 1:], targets[:, :-1])
    assert all(map(torch.equal, model.batch(0, 0, 64, "cpu"), (tokens, targets)))
    assert not torch.equal(model.batch(1, 0, 64, "cpu")[0], tokens)
    assert not torch.equal(model.batch(0, 1, 64, "cpu")[0], tokens)
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < VOCAB
    untrained = model.build()
    with torch.no_grad():
        untrained.lm_head.weight.mul_(0.01)
        assert float(untrained(tokens, targets)) == pytest.approx(math.log(VOCAB), abs=0.05)
    assert "no loss is judged" in str(
        meta_estimate.facts_of_calls(Setup(model=model.name, batch=2, seq=8), "cpu")["data"]
    )


class Regressor(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).square().mean()


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (
            Regressor(),
            r"reads no tokens that could be made up: its forward takes \(x, y\); name model.batch=",
        ),
        (TinyForClassification(Config()), "reads no tokens that could be made up"),
        (WithoutLength(), "has no longest sequence"),
    ],
    ids=["regressor", "classifier", "no_length"],
)
def test_nothing_is_made_up_for_what_is_not_known(module: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        token_input(module, "their.model")
