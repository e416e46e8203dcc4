"""The code that does what was advised, complete: conversion, filter, FP8 all-gather, compilation, schedule, sync of scales.

It works on names that the reader has: `model`, and in `train_step` also `optimizer` and `total_steps`. `train_step` is
printed only where a step needs a call of its own; otherwise the reader's loop stays as it is. Tests run the code of every
recipe of fp8core, and let `fp8core.verify` judge the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.advise.library_names import ENGINE, FP8CORE, TORCHAO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_WIDTH = 78
_SPLIT = "# TP: parallelize_module the model here"
_SPLIT_FP8 = "# TP: parallelize_module it by Float8ColwiseParallel, Float8RowwiseParallel"
_SHARD = "# FSDP: fully_shard each block and the model here, then make the optimizer"
# Our name of a recipe -> TransformerEngine's class
_ENGINE_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """What the code must do beyond converting.

    Attributes:
        library: whose layers.
        compiled: torch.compile.
        sharded: FSDP shards the model.
        fp8_all_gather: FSDP gathers the weights in FP8.
        split: tensor parallelism splits layers.
        tp_fp8_all_gather: it gathers their inputs in FP8.
        schedule: of precisions, as `fp8core.PrecisionSchedule` reads it; "" for none. fp8core alone has one.
    """

    library: str = FP8CORE
    compiled: bool = False
    sharded: bool = False
    fp8_all_gather: bool = False
    split: bool = False
    tp_fp8_all_gather: bool = False
    schedule: str = ""


def as_code(recipe: str, left_out: Mapping[str, Sequence[str]], setup: Setup = Setup()) -> str:
    """Python for a model `model`; all names are quoted.

    Args:
        recipe: its name.
        left_out: what stays in bf16: last words of names under "words", whole ones under "names".
        setup: what else it must do.

    >>> print(as_code("delayed", {"words": ["k"], "names": []}, Setup(compiled=True)))
    import fp8core
    LEFT_OUT = {'k'}  # last words of names
    takes = lambda module, fqn: fqn.rsplit(".", 1)[-1] not in LEFT_OUT
    fp8core.convert_to_float8_training(
        model, config='delayed', module_filter_fn=takes)
    model.compile()
    def train_step(step, batch):
        model(*batch).backward()
        optimizer.step()
        fp8core.update_scales(model)
        optimizer.zero_grad()
    """
    takes = _filter(left_out)
    if setup.library == ENGINE:
        return "\n".join(_engine(recipe, takes))
    lines = _torchao(recipe, takes, setup) if setup.library == TORCHAO else _fp8core(recipe, takes, setup)
    return "\n".join(lines)


def is_executed(library: str) -> bool:
    """A test runs the printed code with that library itself, and not with a stand-in."""
    return library != ENGINE


def _fp8core(recipe: str, takes: list[str], setup: Setup) -> list[str]:
    lines, config = ["import fp8core", *takes], repr(recipe)
    if setup.fp8_all_gather:
        lines.append(f"recipe = fp8core.RECIPES[{recipe!r}].with_fp8_all_gather()")
        config = "recipe"
    lines += _convert("fp8core.convert_to_float8_training", config, takes)
    lines += _then(setup)
    before, after = [], []
    if setup.schedule:
        lines.append(f"schedule = fp8core.PrecisionSchedule.parse({setup.schedule!r})")
        before.append("schedule.apply(model, step, total_steps)")
    if recipe == "delayed":
        after.append("fp8core.update_scales(model)")
    return [*lines, *_step(before, after)]


def _torchao(recipe: str, takes: list[str], setup: Setup) -> list[str]:
    config = f"Float8LinearConfig.from_recipe_name({recipe!r})"
    lines = ["from torchao.float8 import Float8LinearConfig, convert_to_float8_training"]
    after = []
    if setup.fp8_all_gather:
        config = f"Float8LinearConfig(enable_fsdp_float8_all_gather=True)  # {recipe}"
        lines.append("from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp")
        after.append("precompute_float8_dynamic_scale_for_fsdp(model)")
    lines += [*takes, f"config = {config}"]
    lines += _convert("convert_to_float8_training", "config", takes)
    return [*lines, *_then(setup), *_step([], after)]


def _engine(recipe: str, takes: list[str]) -> list[str]:
    theirs = _ENGINE_RECIPES[recipe]
    chosen = " and takes(old, fqn)" if takes else ""
    return [
        "import torch",
        "import transformer_engine.pytorch as te",
        f"from transformer_engine.common.recipe import {theirs}",
        *takes,
        "for fqn, old in list(model.named_modules()):",
        f"    if isinstance(old, torch.nn.Linear){chosen}:",
        "        new = te.Linear(old.in_features, old.out_features,",
        "            bias=old.bias is not None, params_dtype=old.weight.dtype)",
        "        new.load_state_dict(old.state_dict(), strict=False)",
        "        model.set_submodule(fqn, new)",
        "def train_step(step, batch):",
        f"    with te.autocast(enabled=True, recipe={theirs}()):",
        "        loss = model(*batch)",
        "    loss.backward()",
        "    optimizer.step()  # make it after this conversion",
        "    optimizer.zero_grad()",
    ]


def _convert(function: str, config: str, takes: list[str]) -> list[str]:
    arguments = ["model", f"config={config}", *(["module_filter_fn=takes"] if takes else [])]
    whole = f"{function}({', '.join(arguments)})"
    return [whole] if len(whole) <= _WIDTH else [f"{function}(", f"    {', '.join(arguments)})"]


def _then(setup: Setup) -> list[str]:
    split = [_SPLIT_FP8 if setup.tp_fp8_all_gather else _SPLIT] * setup.split
    return [*split, *[_SHARD] * setup.sharded, *["model.compile()"] * setup.compiled]


def _step(before: list[str], after: list[str]) -> list[str]:
    """One optimizer step, where it must do more than a plain one."""
    if not before and not after:
        return []
    body = [*before, "model(*batch).backward()", "optimizer.step()", *after, "optimizer.zero_grad()"]
    return ["def train_step(step, batch):", *(f"    {line}" for line in body)]


def _filter(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines that define `takes(module, fqn)`; [] where every layer is converted."""
    words, names = left_out["words"], left_out["names"]
    lines, tests = [], []
    if words:
        lines += _literal("LEFT_OUT", words, "  # last words of names")
        tests.append('fqn.rsplit(".", 1)[-1] not in LEFT_OUT')
    if names:
        lines += _literal("LEFT_OUT_WHOLE", names)
        tests.append("fqn not in LEFT_OUT_WHOLE")
    if not tests:
        return []
    whole = f"takes = lambda module, fqn: {' and '.join(tests)}"
    if len(whole) <= _WIDTH:
        return [*lines, whole]
    return [*lines, "takes = lambda module, fqn: (", f"    {' and '.join(tests)})"]


def _literal(name: str, values: Sequence[str], comment: str = "") -> list[str]:
    """A set of quoted names, on as many lines as it takes."""
    quoted = [repr(value) for value in values]
    whole = f"{name} = {{{', '.join(quoted)}}}"
    if len(whole + comment) <= _WIDTH:
        return [whole + comment]
    lines = [f"{name} = {{{comment}"]
    for value in quoted:
        if len(lines) > 1 and len(lines[-1]) + len(value) + 2 <= _WIDTH:
            lines[-1] += f" {value},"
        else:
            lines.append(f"    {value},")
    return [*lines, "}"]
