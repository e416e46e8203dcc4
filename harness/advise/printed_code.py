"""The code that does what was advised, for a model `model` of the reader's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.advise.casts import ENGINE, FP8CORE, TORCHAO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_WIDTH = 78
_WORD = 'n.rsplit(".", 1)[-1]'
_ENGINE_RECIPES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
}
_STEP = "def train_step(step, batch):"


def as_code(
    recipe: str,
    left_out: Mapping[str, Sequence[str]],
    *,
    library: str = FP8CORE,
    compiled: bool = False,
    sharded: bool = False,
    fp8_all_gather: bool = False,
    split: bool = False,
    tp_fp8_all_gather: bool = False,
    schedule: str = "",
    update_scales: bool = False,
    heads: Sequence[str] = (),
) -> str:
    """Python for a model `model`, and where a step needs calls of its own a `train_step`; all names are quoted.

    Tests run the code of every recipe of fp8core, and let `fp8core.verify` judge the step.

    Args:
        recipe: its name.
        left_out: what stays in bf16: last words of names under "words", whole ones under "names".
        library: whose layers.
        compiled: by torch.compile.
        sharded: by FSDP.
        fp8_all_gather: FSDP gathers weights in FP8.
        split: by tensor parallelism.
        tp_fp8_all_gather: which gathers inputs in FP8.
        schedule: of precisions.
        update_scales: in each step.
        heads: what an output head may be called, if the names are not those of the reader's model.

    >>> print(as_code("delayed", {"words": ["k"], "names": []}, compiled=True, update_scales=True))
    import fp8core
    LEFT_OUT = {'k'}  # last words of names
    assert LEFT_OUT <= {n.rsplit(".", 1)[-1] for n, _ in model.named_modules()}
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
    code, before, after, config = [], "", "", repr(recipe)
    gathers = "precompute_float8_dynamic_scale_for_fsdp"
    if library == ENGINE:
        theirs = _ENGINE_RECIPES[recipe]
        code += ["import torch", "import transformer_engine.pytorch as te"]
        code += [f"from transformer_engine.common.recipe import {theirs}"]
    elif library == TORCHAO:
        code += ["from torchao.float8 import Float8LinearConfig, convert_to_float8_training"]
        code += [f"from torchao.float8 import {gathers}"] * fp8_all_gather
    else:
        code += ["import fp8core"]
    code += (chosen := list(_filter(left_out, heads)))
    if library == ENGINE:
        takes = " and takes(old, fqn)" if chosen else ""
        return "\n".join([*code, _ENGINE_CODE.replace("TAKES", takes).replace("RECIPE", theirs)])
    convert = "convert_to_float8_training"
    if library == TORCHAO:
        made = f"Float8LinearConfig.from_recipe_name({config})"
        if fp8_all_gather:
            made, after = (
                f"Float8LinearConfig(enable_fsdp_float8_all_gather=True)  # {recipe}",
                f"{gathers}(model)",
            )
        code, config = [*code, f"config = {made}"], "config"
    else:
        convert = f"fp8core.{convert}"
        after = "fp8core.update_scales(model)" * update_scales
        if fp8_all_gather:
            code, config = [*code, f"recipe = fp8core.RECIPES[{config}].with_fp8_all_gather()"], "recipe"
    code += [_fit(convert, f"model, config={config}{', module_filter_fn=takes' if chosen else ''}", "()")]
    if split:
        styles = "it by Float8ColwiseParallel, Float8RowwiseParallel"
        code += [f"# TP: parallelize_module {styles if tp_fp8_all_gather else 'the model here'}"]
    code += ["# FSDP: fully_shard each block and the model here, then make the optimizer"] * sharded
    code += ["model.compile()"] * compiled
    if schedule:
        before = "schedule.apply(model, step, total_steps)"
        code += [f"schedule = fp8core.PrecisionSchedule.parse({schedule!r})"]
    if before or after:
        calls = [before, "model(*batch).backward()", "optimizer.step()", after, "optimizer.zero_grad()"]
        code += [_STEP, *(f"    {call}" for call in calls if call)]
    return "\n".join(code)


_ENGINE_CODE = f"""\
for fqn, old in list(model.named_modules()):
    if isinstance(old, torch.nn.Linear)TAKES:
        new = te.Linear(old.in_features, old.out_features,
            bias=old.bias is not None, params_dtype=old.weight.dtype)
        new.load_state_dict(old.state_dict(), strict=False)
        model.set_submodule(fqn, new)
{_STEP}
    with te.autocast(enabled=True, recipe=RECIPE()):
        loss = model(*batch)
    loss.backward()
    optimizer.step()  # make it after this conversion
    optimizer.zero_grad()"""


def _filter(left_out: Mapping[str, Sequence[str]], heads: Sequence[str]) -> Iterator[str]:
    """What the module filter leaves out, each name checked against the model's; nothing where all layers are converted."""
    words = [word for word in left_out["words"] if word not in heads]
    sets = (
        ("LEFT_OUT", words, "  # last words of names", f"LEFT_OUT <= {{{_WORD} for n, _ in MODULES}}"),
        (
            "HEAD",
            heads if len(words) < len(left_out["words"]) else (),
            "",
            f"any({_WORD} in HEAD for n, _ in MODULES)",
        ),
        ("LEFT_OUT_WHOLE", left_out["names"], "", "LEFT_OUT_WHOLE <= {fqn for fqn, _ in MODULES}"),
    )
    tests = []
    for name, values, comment, known in sets:
        if values:
            yield _names(values, name, comment)
            yield f"assert {known.replace('MODULES', 'model.named_modules()')}"
            tests.append(
                f"{'fqn' if name == 'LEFT_OUT_WHOLE' else _WORD.replace('n.', 'fqn.')} not in {name}"
            )
    if tests:
        yield _fit("takes = lambda module, fqn: ", " and ".join(tests))


def _names(values: Sequence[str], start: str, comment: str) -> str:
    """A set of quoted names, on as many lines as it takes."""
    whole = f"{start} = {{{', '.join(map(repr, values))}}}{comment}"
    if len(whole) <= _WIDTH:
        return whole
    lines = [f"{start} = {{{comment}"]
    for value in map(repr, values):
        if len(lines) > 1 and len(lines[-1]) + len(value) + 2 <= _WIDTH:
            lines[-1] += f" {value},"
        else:
            lines.append(f"    {value},")
    return "\n".join([*lines, "}"])


def _fit(head: str, inner: str, around: str = "") -> str:
    """A call in one line, or in two where it is too long; `around`: its parentheses, which one line may leave out."""
    whole = f"{head}{around[:1]}{inner}{around[1:]}"
    return whole if len(whole) <= _WIDTH else f"{head}(\n    {inner})"
