"""One of the processes that train by accelerate: `accelerate_worker.py no|fp8` prints its losses as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import tiny_models
import torch


def train(precision: str) -> dict[str, Any]:
    """`precision`: "no" is bfloat16; "fp8"; "default" is fp8 with accelerate's own default."""
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs

    import fp8core.torchao_compat

    fp8core.torchao_compat.install(beside_torchao=True)  # transformers imports much of the real one
    from torchao.float8 import Float8LinearConfig

    model: Any = tiny_models.made("llama")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The default asks for FP8 all-gather, for which conversion makes new parameters, as torchao's does: not this optimizer's
    recipe = AORecipeKwargs() if precision == "default" else AORecipeKwargs(config=Float8LinearConfig())
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if precision == "no" else "fp8",
        kwargs_handlers=[] if precision == "no" else [recipe],
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, warned = [], 0
    for step in range(16):
        loss = model(**tiny_models.batch(2 * (step % 2) + accelerator.process_index)).loss
        accelerator.backward(loss)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        warned += sum(issubclass(warning.category, fp8core.NotTrainedWarning) for warning in caught)
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    inner = accelerator.unwrap_model(model)
    fp8 = [m for m in inner.modules() if isinstance(m, fp8core.Float8Linear)]
    kind = type(model).__name__
    return {
        "losses": losses,
        "fp8": len(fp8),
        "world": accelerator.num_processes,
        "kind": kind,
        "warned": warned,
        "not_trained": len(fp8core.audit(inner, optimizer=optimizer.optimizer).not_trained or ()),
    }


if __name__ == "__main__":
    found = train(*sys.argv[1:])
    print("RESULT" + json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
