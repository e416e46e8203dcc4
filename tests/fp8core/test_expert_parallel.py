"""Expert parallelism against one process that holds all experts: outputs, every gradient, bytes on the wire."""

from __future__ import annotations

import functools

import pytest
import torch
from expert_workers import CASES, EXPERTS, STEPS, WIDTH, Facts, everything, made, parallel, rounded, sizes_of
from mixtures import ends

from fp8core.distributed.expert_parallel import (
    PAYLOADS,
)
from harness.machine import ranks


@pytest.mark.parametrize(
    "world", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_equals_one_process(world: int) -> None:
    """Oracle: one process with all experts and all tokens, bit for bit: each expert sees the same rows in the same order.

    Tensorwise the process runs the experts of each rank apart, since their tokens share a scale. Tokens and gradients
    that travel in FP8 are rounded by `quantize` beforehand. Rank 3 has no token, expert 1 none on any rank.
    """
    for rank, facts in enumerate(ranks.run(parallel, world, CASES)):
        for case, equal in zip(CASES, facts, strict=True):
            wrong = [name for name, same in equal.items() if not same]
            assert not wrong, f"rank {rank} of {world}, {case}: {wrong}"


@pytest.mark.parametrize("dispatch", PAYLOADS)
@pytest.mark.parametrize("gradient", PAYLOADS)
def test_bytes_on_the_wire(dispatch: str, gradient: str) -> None:
    """Oracle: counted at the collective. FP8 is half of bfloat16 and a scale of 4 bytes a row; counts are int32."""
    for rank, facts in enumerate(of_two_ranks()):
        sent = facts["sent"][dispatch, gradient]
        mine = sum(sizes_of(rank))  # rows that this rank sends and gets back
        held = sum(sum(sizes_of(r)[4 * rank : 4 * rank + 4]) for r in range(2))  # rows of its experts
        kinds = {"high_precision": ("bfloat16", 2 * WIDTH), "fp8": ("uint8", WIDTH + 4)}
        steps = [
            (mine, dispatch),  # tokens go
            (held, "high_precision"),  # results come back
            (mine, gradient),  # the results' gradients go
            (held, gradient),  # the tokens' come back
        ]
        assert sent[0] == ("int32", 4 * EXPERTS)
        assert sent[1:] == [(kinds[kind][0], rows * kinds[kind][1]) for rows, kind in steps]


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_a_model_with_a_router(case: tuple[str, bool]) -> None:
    """Oracle: each rank's own whole model, averaged. Parallel experts add the ranks' tokens in one product, and FSDP2 (3 experts
    on 2 ranks) divides before it adds: 1e-6 for float32."""
    for facts in (both["steps"][case] for both in of_two_ranks()):
        assert len(facts) > 4
        assert {name: value for name, value in facts.items() if not value <= 1e-6} == {}


@functools.cache
def of_two_ranks() -> list[Facts]:
    return ranks.run(everything, 2)


def test_verify() -> None:
    """Oracle: the profiler, in each rank: the GEMMs of its own experts, as many as predicted."""
    for facts in of_two_ranks():
        assert facts["proven"].startswith("FP8 verified: 0 of 2 Linear layers and 1 modules of experts")


def test_fp8_tokens_are_cast_to_the_codes_that_they_came_in() -> None:
    """Oracle: tokens that never travelled. The output of "rowwise" is the same, bit for bit, over 40 binades and zeros."""
    experts = made("rowwise")
    scales = torch.logspace(-6, 6, 200)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(200, WIDTH) * scales * 2.0 ** torch.randint(-14, 1, (200, WIDTH))).to(dtype)
        x[7] = 0
        offsets = ends(*[25] * EXPERTS)
        assert torch.equal(experts(x, offsets), experts(rounded(x, torch.float8_e4m3fn), offsets))


def test_what_each_rank_keeps() -> None:
    """Oracle: by hand. Weights and biases by expert are halved, whatever else has as many elements is whole."""
    for rank, facts in enumerate(both["shares"] for both in of_two_ranks()):
        assert facts["same"]
        assert facts["apart"] == [f"experts.experts.{name}" for name in ("bias", "down", "gate", "up")]
        assert facts["bias"] == [[4.0 * rank, 4.0 * rank + 1], [4.0 * rank + 2, 4.0 * rank + 3]]
        assert facts["shapes"]["experts.experts.gate"] == (2, 32, 32)
        assert facts["shapes"]["experts.experts.gain"] == (4,)
        assert facts["shapes"]["convolution.weight"] == (4, 4, 2)


def test_mean_gradient() -> None:
    """Oracle: gradients without it, divided; of weights that are new tensors since `parallelize_experts`, too."""
    for facts in of_two_ranks():
        same = dict.fromkeys(("as it is", "copied", "assigned", "sharded"), [True] * 3)
        assert facts["divided"] == same | {"frozen": [False, True, True]}


def test_bad_input() -> None:
    """Each rank refuses, none waits for another."""
    wanted = ["3 experts", "no experts", "'fp4'", "[T, K]", "5 rows", "already", "DTensor already"]
    for messages in (facts["refusals"] for facts in of_two_ranks()):
        for message, part in zip(messages, wanted, strict=True):
            assert part in message
