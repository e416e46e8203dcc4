"""`harness.agree`. Oracles: the definition of the KL divergence in float64, a planted layer, and the order of recipes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import harness
from fp8core import convert_to_float8_training
from harness import store
from harness.__main__ import main
from harness.store.errors import UsageError
from harness.training.models import build

VOCAB = 96


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A Llama of two blocks, sharper than at its start: its logits differ by some units."""
    made = build("llama_tiny", vocab_size=VOCAB)
    with torch.no_grad():
        for each in made.parameters():
            each.mul_(1.5)
    return made


def batches(count: int = 2) -> list[torch.Tensor]:
    return list(torch.randint(VOCAB, (count, 4, 32), generator=torch.Generator().manual_seed(1)))


def in_fp8(model: nn.Module, recipe: Any) -> nn.Module:
    return convert_to_float8_training(copy.deepcopy(model), config=recipe)


def test_the_same_model_is_at_zero_and_no_layer_is_blamed(model: nn.Module) -> None:
    found = harness.agree(model, copy.deepcopy(model), batches())
    assert found.gap.kl_max == found.gap.logprob_max == found.gap.flips == 0
    assert found.gap.tokens == 2 * 4 * 31
    assert not found.above_floor
    assert found.causes == ()
    assert "equal: one model twice" in str(found)
    assert "not further apart" not in str(found)


def test_the_figures_are_those_of_their_definition(model: nn.Module) -> None:
    other, (ids,) = in_fp8(model, "tensorwise"), batches(1)
    found = harness.agree(model, other, [{"tokens": ids}], passes=0)
    with torch.no_grad():
        p, q = (m.eval()(ids).double().log_softmax(-1) for m in (model, other))
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).flatten()
    assert found.gap.kl_mean == pytest.approx(kl.mean().item(), rel=1e-9)
    assert found.gap.kl_p99 == pytest.approx(kl.quantile(0.99, interpolation="higher").item(), rel=1e-9)
    assert found.gap.flips == (p.argmax(-1) != q.argmax(-1)).double().mean()
    top = (p - q).gather(-1, p.argmax(-1, keepdim=True)).abs()  # no input_ids are named
    assert (found.judged, found.gap.logprob_max) == ("top token of a", pytest.approx(top.max().item()))


def test_models_are_left_as_they_were(model: nn.Module) -> None:
    other = in_fp8(model, "delayed")
    other.train()
    before = copy.deepcopy(other.state_dict())
    harness.agree(model, other, batches())
    assert other.training
    assert all(torch.equal(x, before[k]) for k, x in other.state_dict().items())
    assert not any(layer._forward_hooks for layer in other.modules())


def test_where_the_first_batch_shows_no_gap_no_layer_is_blamed(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("embedding.weight")[0].mul_(2.0)
    found = harness.agree(model, other, [batches(1)[0].clamp(min=1), batches(1)[0].zero_()])
    assert found.above_floor
    assert found.causes == ()
    assert "first batch" in str(found)


def test_the_floor_is_what_another_split_of_the_batch_does(model: nn.Module) -> None:
    """A scale a tensor is that of the whole batch; equal calls are equal on a CPU."""
    other, (ids,) = in_fp8(model, "tensorwise"), batches(1)
    assert harness.agree(model, other, [ids], passes=0).floor.kl_mean > 1e-6
    assert harness.agree(model, other, [ids[:1]], passes=0).floor.kl_max == 0


def test_padding_and_last_tokens_do_not_count(model: nn.Module) -> None:
    class Hf(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return type("Out", (), {"logits": model(input_ids)})

    (ids,) = batches(1)
    mask = torch.ones_like(ids)
    mask[0, 10:] = 0
    found = harness.agree(Hf(), Hf(), [{"input_ids": ids, "attention_mask": mask}])
    assert (found.gap.tokens, found.judged) == (3 * 31 + 9, "next token")


@pytest.mark.parametrize("both", [False, True])
def test_nan_is_never_below_the_floor(both: bool, model: nn.Module, tmp_path: Path) -> None:
    broken = copy.deepcopy(model)
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    found = harness.agree(copy.deepcopy(broken) if both else model, broken, batches(1), passes=2)
    assert found.above_floor
    assert "not finite" in str(found)
    assert "not further apart" not in str(found)
    frame = store.read(found.save("nano", tmp_path))
    assert (frame[(frame.arm == "b") & (frame.metric == "kl_nats")].status == "failed").all()


def test_it_is_stored_and_has_a_page(model: nn.Module, tmp_path: Path) -> None:
    found = harness.agree(model, in_fp8(model, "tensorwise"), batches(1), passes=4)
    folder = found.save("nano", tmp_path / "results")
    row = store.read(folder, where={"metric": "kl_nats", "arm": "b"}).set_index("part")
    assert row.value["mean"] == found.gap.kl_mean
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert "kl_nats" in (tmp_path / "page.html").read_text()
    assert "<table" in found._repr_html_()
    assert "of the gap is gone" in str(found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([], "batches is empty"),
        ([torch.zeros(2, 1, dtype=torch.long)], "no token is left"),
        ([(torch.zeros(2, 3, dtype=torch.long),)], "a batch is a tuple"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: nn.Module, given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        harness.agree(model, model, given)
    with pytest.raises(UsageError, match="expected logits"):
        harness.agree(nn.Flatten(), nn.Flatten(), [torch.zeros(2, 3)])
    with pytest.raises(UsageError, match="passes=-1"):
        harness.agree(model, model, batches(1), passes=-1)
