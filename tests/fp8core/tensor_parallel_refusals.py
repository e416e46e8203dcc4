"""Bad plans and inputs of tensor parallelism, each with the message that refuses it; run by ranks of `test_tensor_parallel.py`."""

from __future__ import annotations

from collections.abc import Callable

from parallel_models import Config, mlp
from tensor_parallel_plans import data, mesh, plan
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fp8core import (
    RECIPES,
    Float8ColwiseParallel,
    check_plan,
    convert_to_float8_training,
)


def refusals() -> dict[str, str]:
    """Messages that refuse bad plans and inputs, by what is bad."""
    tp, tensorwise = mesh(), RECIPES["tensorwise"]
    colwise, rowwise = {"up": Float8ColwiseParallel()}, {"down": RowwiseParallel()}
    late, prepared = Float8ColwiseParallel(input_layouts=Shard(2)), plan("float8 sp shared")[""]

    def checked(model: nn.Module, styles: dict[str, ParallelStyle]) -> nn.Module:
        check_plan(model, tp, styles)
        return parallelize_module(model, tp, styles)

    def sharded(config: Config) -> nn.Module:
        model = mlp(config)
        fully_shard(model, mesh=tp)
        return model

    def but_up(model: nn.Module) -> nn.Module:
        return convert_to_float8_training(model, module_filter_fn=lambda _, fqn: fqn != "up")

    def mixed() -> nn.Module:
        return but_up(
            convert_to_float8_training(mlp(None), config="rowwise", module_filter_fn=lambda _, n: n == "up")
        )

    attempts: dict[str, Callable[[], object]] = {
        "not converted": lambda: checked(but_up(mlp(None)), colwise),
        "multiple of 16": lambda: checked(mlp(tensorwise, hidden=48), colwise),
        "uneven": lambda: checked(mlp(tensorwise.emulated(), hidden=33), colwise),
        "uneven, torch": lambda: checked(mlp(tensorwise.emulated(), hidden=33), rowwise),
        "block": lambda: checked(mlp(RECIPES["blockwise"].emulated(), hidden=128), colwise),
        "no such name": lambda: checked(mlp(tensorwise), {"upp": Float8ColwiseParallel()}),
        "convert late": lambda: convert_to_float8_training(
            parallelize_module(mlp(None), tp, {"up": ColwiseParallel()})
        ),
        "tp after fsdp": lambda: checked(sharded(tensorwise), colwise),
        "style after fsdp": lambda: parallelize_module(sharded(tensorwise), tp, colwise),
        "features gathered": lambda: checked(mlp(tensorwise), {"up": late}).up(data(32).chunk(2, 2)[0]),
        "no reader": lambda: checked(mlp(None), {"": prepared}),
        "readers differ": lambda: checked(mixed(), {"": prepared}),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            told[name] = str(error)
    return told
