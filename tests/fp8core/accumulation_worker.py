"""What the ranks of `test_fsdp.py` run to accumulate gradients over a window of microbatches."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fp8core import Float8LinearConfig, convert_to_float8_training
from fp8core.distributed.wire import count_collectives

MICROBATCHES = 3


def gathered_codes(kept: bool) -> tuple[list[float], float, dict[str, int]]:
    """Losses, the sum of the gradients, and bytes of all-gathers by dtype; `kept`: weights stay until the last backward."""
    torch.manual_seed(0)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))), config=config
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    if kept:
        model.set_reshard_after_forward(False)
    losses = []
    with count_collectives() as counts:
        for index in range(MICROBATCHES):
            last = index == MICROBATCHES - 1
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or not kept)
            loss = model(torch.full((16, 64), index + 1.0)).square().mean()
            loss.backward()
            losses.append(loss.item())
    total = sum(float(p.grad.to_local().double().sum()) for p in model.parameters())
    return losses, total, counts.of("all_gather")
