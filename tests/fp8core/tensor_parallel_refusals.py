"""Bad plans and inputs of tensor parallelism, each with the message that refuses it; run by ranks of `test_tensor_parallel.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from parallel_models import Config, mlp
from tensor_parallel_plans import data, mesh, plan
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fp8core import (
    RECIPES,
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    cast_input,
    check_plan,
    convert_to_float8_training,
)


def refusals() -> dict[str, str]:
    """Messages that refuse bad plans and inputs, by what is bad."""
    tp, tensorwise = mesh(), RECIPES["tensorwise"]
    colwise, rowwise = {"up": Float8ColwiseParallel()}, {"down": RowwiseParallel()}
    late, prepared = Float8ColwiseParallel(input_layouts=Shard(2)), plan("float8 sp shared")[""]
    assert isinstance(prepared, PrepareFloat8ModuleInput)
    e5m2 = PrepareFloat8ModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), float8_dtype=torch.float8_e5m2
    )

    def checked(model: nn.Module, styles: dict[str, ParallelStyle]) -> nn.Module:
        check_plan(model, tp, styles)
        return parallelize_module(model, tp, styles)

    def sharded(config: Config) -> nn.Module:
        model = mlp(config)
        fully_shard(model, mesh=tp)
        return model

    def mixed() -> nn.Module:
        model = convert_to_float8_training(
            mlp(None), config="rowwise", module_filter_fn=lambda _, fqn: fqn == "up"
        )
        return convert_to_float8_training(
            model, config="tensorwise", module_filter_fn=lambda _, fqn: fqn != "up"
        )

    def without_up() -> nn.Module:
        return convert_to_float8_training(mlp(None), module_filter_fn=lambda _, fqn: fqn != "up")

    def wrong_layout() -> object:
        x = DTensor.from_local(data(32), tp, (Shard(1),), run_check=False)
        return checked(mlp(tensorwise), {"up": ColwiseParallel()}).up(x)

    def cast_for_another() -> object:
        model = checked(mlp(tensorwise), {"down": Float8RowwiseParallel()})
        return cast_input(torch.randn(16, 128), model.down)

    attempts: dict[str, Callable[[], object]] = {
        "not converted": lambda: checked(without_up(), colwise),
        "multiple of 16": lambda: checked(mlp(tensorwise, hidden=48), colwise),
        "uneven": lambda: checked(mlp(tensorwise.emulated(), hidden=33), colwise),
        "uneven, torch": lambda: checked(mlp(tensorwise.emulated(), hidden=33), rowwise),
        "block": lambda: checked(mlp(RECIPES["blockwise"].emulated(), hidden=128), colwise),
        "no such name": lambda: checked(mlp(tensorwise), {"upp": Float8ColwiseParallel()}),
        "twice": lambda: checked(checked(mlp(tensorwise), colwise), colwise),
        "convert late": lambda: convert_to_float8_training(
            parallelize_module(mlp(None), tp, {"up": ColwiseParallel()})
        ),
        "convert after fsdp": lambda: convert_to_float8_training(sharded(None)),
        "tp after fsdp": lambda: checked(sharded(tensorwise), colwise),
        "style after fsdp": lambda: parallelize_module(sharded(tensorwise), tp, colwise),
        "wrong layout": wrong_layout,
        "features gathered": lambda: checked(mlp(tensorwise), {"up": late}).up(data(32).chunk(2, 2)[0]),
        "float8_dtype": lambda: checked(mlp(tensorwise), {"": e5m2}),
        "no reader": lambda: checked(mlp(None), {"": prepared}),
        "readers differ": lambda: checked(mixed(), {"": prepared}),
        "cast for another layer": cast_for_another,
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            told[name] = str(error)
        else:
            told[name] = "nothing"
    return told
