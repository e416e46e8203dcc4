"""The line of verify holds what its record holds: a positive word leaves no warning out.

Oracle: the fields of the records themselves, and steps made to have one thing each.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8core import Proof, convert_to_float8_training, update_scales, verify
from fp8core.proof.flops import MatmulCount
from fp8core.proof.flops.count import Uncounted
from fp8core.proof.verify.passes import Passes, _warnings
from fp8core.proof.verify.records import GemmProof, LayerProof
from fp8core.recipe import GEMMS

# A field that tells of something other than FP8 as asked -> a value, and what the line then says
TOLD: dict[str, tuple[Any, str]] = {
    "warnings": (("up: 99.4 % of input saturates",), "1 warnings: up: 99.4 % of input saturates"),
    "unjudged": (("up",), "cannot be judged, since the loss does not depend on them (up)"),
    "compiled": (3, "3 ran in compiled code, whose results were not compared"),
    "emulated_in": ("float32", "emulated: it multiplies FP8 codes in float32"),
    "layers": (
        (LayerProof("head", "", "left out by module_filter_fn"),),
        "head: left out by module_filter_fn",
    ),
    "matmuls": (MatmulCount((), (Uncounted("Function Own", "up", 2),)), "Function Own (2 calls)"),
}
# Of no line that is positive, or figures and names that it gives where there are any
OTHERS = {
    "problems", "not_checked", "predicted", "counted", "device", "fp8_kernel_share", "all_gathers", "experts",
    "probed", "shared_weights",
}  # fmt: skip
# Of a layer -> a value, and the warning that the record then has
OF_LAYER: dict[str, tuple[Any, str]] = {
    "few_tokens": (2, "2 of 3 calls have too few tokens and ran in high precision"),
    "saturated": ({"input": 0.994}, "99.4 % of input saturates"),
    "backward": ((4, 2), "the loss does not depend on all of its 3 calls"),
    "underflowed": ({"weight": 0.5}, "50 % of weight underflows to zero"),
}
OTHERS_OF_LAYER = {
    "fqn", "recipe", "reason", "all_gather", "calls", "recomputed", "predicted", "agreement_db", "of_experts", "gemms",
    "faults", "not_checked", "grad_bias", "gradient", "in_threads",
}  # fmt: skip


def proof_with(**fields: Any) -> Proof:
    known: dict[str, Any] = {
        "problems": (), "warnings": (), "layers": (), "predicted": 3, "counted": 3, "device": "cpu",
        "fp8_kernel_share": None, "all_gathers": {},
    }  # fmt: skip
    return Proof(**(known | fields))


def test_every_field_of_the_record_is_known_here() -> None:
    """A new field is either told in the line, or named as one that needs no word."""
    assert {field.name for field in dataclasses.fields(Proof)} == TOLD.keys() | OTHERS
    assert {field.name for field in dataclasses.fields(LayerProof)} == OF_LAYER.keys() | OTHERS_OF_LAYER
    assert {field.name for field in dataclasses.fields(GemmProof)} == {
        "fp8", "calls", "telling", "operands", "sqnr_db", "expected_db", "row_db", "agreement_db", "asked",
        "received",
    }  # fmt: skip


@pytest.mark.parametrize("name", TOLD)
def test_what_the_record_holds_stands_in_the_line(name: str) -> None:
    value, said = TOLD[name]
    proof = proof_with(**{name: value})
    assert proof.line.startswith("FP8 verified")
    assert said in proof.line
    assert said not in proof_with().line


@pytest.mark.parametrize("name", OF_LAYER)
def test_what_a_layer_s_record_holds_is_a_warning(name: str) -> None:
    value, said = OF_LAYER[name]
    gemms = {name: GemmProof(fp8=True) for name in GEMMS}
    layer = LayerProof("up", "tensorwise", "", calls=3, gemms=gemms, **{name: value})
    (warning,) = _warnings(Passes(nn.Sequential(nn.Linear(16, 16))), [layer])
    assert said in warning
    assert said in proof_with(layers=(layer,), warnings=(warning,)).line


def test_more_warnings_than_a_line_shows_are_counted() -> None:
    line = proof_with(warnings=tuple(f"layer {i}: 50 % of input saturates" for i in range(9))).line
    assert "9 warnings: layer 0:" in line
    assert line.endswith("and 6 more")


def test_an_input_that_saturates_is_said() -> None:
    """A delayed scale of a small batch, then one a hundred times larger."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 64)), config="delayed")
    x = torch.randn(16, 32)
    model(x).sum().backward()
    update_scales(model)

    def step() -> None:
        model(100 * x).square().mean().backward()
        update_scales(model)

    proof = verify(step, model, announce=False)
    assert proof.layers[0].saturated["input"] > 0.5
    assert "% of input saturates" in proof.line


class Streams(nn.Module):
    """Three layers; the loss uses the third one's output in part, or not at all."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.one, self.two, self.context = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.context(x)
        own = self.two(torch.relu(self.one(x)))
        return torch.cat((own, context), 0)[: len(x)] if self.part else own


def test_calls_that_the_loss_does_not_use_are_said() -> None:
    """A second call, whose result is only looked at: no GEMM of its backward pass is predicted, and the line says so."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)))
    x = torch.randn(16, 32, requires_grad=True)
    looked: list[torch.Tensor] = []

    def step() -> None:
        model(x).square().mean().backward()
        looked.append(model(2 * x).mean())

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.line
    assert proof.counted == proof.predicted == 4
    assert "the loss does not depend on all of its 2 calls" in proof.line


@pytest.mark.parametrize("part", [0, 1], ids=["no gradient comes", "a gradient of zeros comes"])
def test_a_layer_that_the_loss_does_not_depend_on_fails_no_proof(part: int) -> None:
    """Like SD3's last add_q_proj: its output is computed, and the loss reads other tokens."""
    model = convert_to_float8_training(Streams(part))
    x = torch.randn(16, 32, requires_grad=True)
    proof = verify(lambda: model(x).square().mean().backward(), model, announce=False)
    assert proof.ok, proof.line
    assert proof.unjudged == ("context",)
    assert "but for gradients of 1 of 3 layers, which cannot be judged" in proof.line


def test_where_most_gradients_are_zero_nothing_is_proved() -> None:
    """Before the first update of a last layer that begins at 0, wrong code agrees with every product behind it."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)))
    nn.init.zeros_(model[2].weight)
    proof = verify(lambda: model(torch.randn(16, 32)).sum().backward(), model, announce=False)
    assert not proof.ok
    assert not proof.problems
    assert {line.partition(":")[0] for line in proof.not_checked} >= {"0", "1"}


def test_a_call_in_another_thread_is_not_judged() -> None:
    """A dispatch mode belongs to its thread: that layer's products were not seen, and are no fault."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    x = torch.randn(16, 32)

    def step() -> None:
        there: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: there.append(model[1](x)))
        thread.start()
        thread.join()
        (model[0](x) + there[0]).square().mean().backward()

    proof = verify(step, model, announce=False)
    assert not proof.ok
    assert [line.partition(":")[0] for line in proof.not_checked] == ["1"]
    assert not any("did not run" in problem for problem in proof.problems), proof.line


@on_ranks(2)
def test_replicas_whose_bias_or_gradients_differ() -> None:
    """A bias of one rank is another: no proof. Gradients that no all-reduce brought together: said in the line."""
    torch.manual_seed(0)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)))
    shared = DistributedDataParallel(model)
    x = torch.randn(16, 32) + dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        shared(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    proof = verify(step, model, announce=False)
    assert proof.ok, proof.line
    assert "differ between ranks" not in proof.line

    def alone() -> None:
        with shared.no_sync():
            step()

    proof = verify(alone, model, announce=False)
    assert proof.ok
    assert "gradients differ between ranks" in proof.line
    for name in ("0.bias", "1.weight"):
        held = model.get_parameter(name)
        kept = held.detach().clone()
        with torch.no_grad():
            held.add_(dist.get_rank())
        proof = verify(step, model, announce=False)
        assert any(name in problem for problem in proof.problems), proof.line
        with torch.no_grad():
            held.copy_(kept)
