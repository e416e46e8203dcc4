"""How a user's model is called: from a batch as its code makes it to a loss as training takes it.

The one place that knows either. A batch is a tensor, a tuple or list of tensors (`model(*batch)`), or a mapping of them
(`model(**batch)`). The loss is what the model returns, its `loss`, or the one number in a tuple: (logits, loss),
(loss, logits); where more than one part could be it, none is taken. Everything else calls `model(*parts)` and gets that
loss in float32: two hooks of the module see to it, so that its class, the names of its layers and its own `forward` stay
as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from harness.store.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def common_rows(layers: Iterable[tuple[int, int]]) -> int:
    """Rows of the layers that do most of the work; 0 without layers.

    Args:
        layers: of each Linear the rows of its input in one forward pass, over all its calls, and the elements of its
            weight. Layers of equal rows speak together; a pooled head, with its few rows, is outvoted by the body.
    """
    work: defaultdict[int, int] = defaultdict(int)
    for rows, elements in layers:
        work[rows] += rows * elements
    return max(work, key=lambda rows: (work[rows], rows), default=0)


def tokens_of(model: nn.Module, batch: tuple[Tensor, ...]) -> int:
    """`common_rows` of one forward pass of `model(*batch)`, which may be on "meta"; 0 if it calls no Linear."""
    rows: defaultdict[nn.Linear, int] = defaultdict(int)

    def seen(layer: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(layer, nn.Linear) and args and isinstance(args[0], Tensor):
            rows[layer] += args[0].numel() // layer.in_features

    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(seen) for layer in layers]
    try:
        with torch.no_grad():
            model(*batch)
    finally:
        for hook in hooks:
            hook.remove()
    return common_rows((count, layer.weight.numel()) for layer, count in rows.items())


LOSS = "loss"  # attribute or key of an output that has one


@dataclass(slots=True)
class Form:
    """What was seen of a model's calls.

    Attributes:
        keys: of a batch that is a mapping; () for one that is handed over in order; None before the first batch.
        loss: where the loss was found, and in which dtype where it is not float32; "" before the first pass.
    """

    keys: tuple[str, ...] | None = None
    loss: str = ""


# By canonical name of the model: a module is built apart from its batches, often several times, in any order.
_FORMS: dict[str, Form] = {}
_ADAPTED: WeakSet[nn.Module] = WeakSet()


def form_of(name: str) -> Form:
    """What is known of the calls of a model, by its canonical name."""
    return _FORMS.setdefault(name, Form())


def parts_of(made: object, name: str, called: str) -> tuple[Tensor, ...]:
    """The tensors of a batch, in the order in which the model's calls take them; its keys are remembered.

    Args:
        made: what a batch function returned.
        name: canonical name of the model.
        called: of the batch function, for the error.

    Raises:
        UsageError: no tensor, tuple, list or mapping of tensors, or other keys than those of the batch before.
    """
    named = made if isinstance(made, Mapping) else {}
    keys = tuple(map(str, named))
    whole = (made,) if isinstance(made, Tensor) else made if isinstance(made, tuple | list) else ()
    parts = tuple(named.values()) or tuple(whole)
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise UsageError(
            f"{called} returned {kind(made)}; expected a tensor, a tuple of tensors, or a mapping of them by the names "
            "that the model's forward has"
        )
    form = form_of(name)
    if form.keys not in (None, keys):
        raise UsageError(
            f"{called} returned {_named(keys)}, before that {_named(form.keys)}; expected the same for every step"
        )
    form.keys = keys
    return parts


def loss_of(
    output: object, form: Form, called: str, given: Sequence[object] = (), *, trains: bool = False
) -> Tensor:
    """The loss in what a model returned, float32 and 0-dimensional.

    Args:
        output: of the model's forward.
        form: notes where the loss was found; its keys say in an error what the model was given.
        called: of the model, for the error.
        given: the parts of the batch, which tell the length of a loss that is not reduced.
        trains: a gradient is expected of it.

    Raises:
        UsageError: none there, more than one part that could be it, or one without a gradient.
    """
    numbers = numbers_in(output, given)
    if len(numbers) != 1:
        raise UsageError(_no_loss(output, numbers, form, called))
    ((where, found),) = numbers.items()
    loss = found.reshape(())
    if trains and not loss.requires_grad:
        raise UsageError(
            f"the loss of {called} depends on no parameter that requires a gradient; it was taken from {where}"
        )
    if not torch.compiler.is_compiling():  # what is compiled has run before, on paper or for its proof
        narrow = "" if loss.dtype == torch.float32 else f", {_dtype(loss)} turned to float32"
        form.loss = where + narrow
    return loss.float()


def numbers_in(output: object, given: Sequence[object] = ()) -> dict[str, Tensor]:
    """What could be the loss in what a model returned, by the place where it stands.

    The output itself, or else its `loss` alone, or else the parts of a tuple without None. A part could be the loss if it
    is floating and has one element, or one for each sample or token of the batch: a loss that nobody reduced, which must
    not let an auxiliary one pass for the loss. Alone, it is one only if it is 0-dimensional or of shape [1].

    Args:
        output: of the model's forward.
        given: the parts of the batch.
    """
    parts: dict[str, object] = {}
    if isinstance(output, Tensor):
        parts = {"the output": output}
    elif _has_loss(output):
        parts = {f"output.{LOSS}": _loss_field(output)}
    elif isinstance(output, tuple | list) and not any(part is None for part in output):
        parts = {f"element {i} of {len(output)}": part for i, part in enumerate(output)}
    lengths = [
        n for part in given if isinstance(part, Tensor) and part.dim() for n in (len(part), part.numel())
    ]
    could = {
        where: part
        for where, part in parts.items()
        if isinstance(part, Tensor)
        and part.is_floating_point()
        and (part.numel() == 1 or (part.dim() == 1 and len(part) in lengths))
    }
    is_none = len(could) == 1 and any(part.dim() > 1 or part.numel() != 1 for part in could.values())
    return {} if is_none else could


def _no_loss(output: object, numbers: Mapping[str, Tensor], form: Form, called: str) -> str:
    given = _named(form.keys)
    if numbers:
        return (
            f"{called} returned {kind(output)} with {len(numbers)} parts that could be the loss ({', '.join(numbers)}); "
            f"return it alone, or as output.{LOSS}"
        )
    if not isinstance(output, Tensor) and _has_loss(output):
        if (field := _loss_field(output)) is not None:
            return f"output.{LOSS} of {called} is {kind(field)}; expected one floating number"
        return (
            f"output.{LOSS} of {called} is None; the batch has {given}: a Hugging Face model computes its loss from "
            "'labels', so make the batch a mapping with labels (labels=input_ids for a causal LM)"
        )
    why = ""
    if isinstance(output, tuple | list) and any(part is None for part in output):
        why = " (the None is the loss where no targets are given: give them in the batch, or return the loss alone)"
    return (
        f"{called} returned {kind(output)} for a batch of {given}{why}; expected the loss, one floating number, or an "
        "output with it: output.loss, (logits, loss)"
    )


def _has_loss(output: object) -> bool:
    return (isinstance(output, Mapping) and LOSS in output) or hasattr(output, LOSS)


def _loss_field(output: Any) -> object:
    return output[LOSS] if isinstance(output, Mapping) and LOSS in output else getattr(output, LOSS)


def adapt(module: nn.Module, name: str, called: str) -> nn.Module:
    """Returns the module, whose call on the parts of a batch now gives the loss.

    Args:
        module: changed in place: a hook before its forward and one after it.
        name: canonical name of the model.
        called: of the model, for errors.

    Raises:
        UsageError: it has been adapted before: its weights would be those of another arm.
    """
    if module in _ADAPTED:
        raise UsageError(f"{called} returned the same module twice; build a new one each call")
    _ADAPTED.add(module)
    form = form_of(name)

    def hand_over(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        keys = form.keys
        return ((), dict(zip(keys, args, strict=True))) if keys and not kwargs else None

    def take_loss(whole: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> Tensor:
        trains = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        trains = trains and any(weight.requires_grad for weight in whole.parameters())
        return loss_of(output, form, called, (*args, *kwargs.values()), trains=trains)

    module.register_forward_pre_hook(hand_over, with_kwargs=True)
    module.register_forward_hook(take_loss, with_kwargs=True)
    return module


def kind(value: object) -> str:
    """What a value is, for an error."""
    if isinstance(value, Tensor):
        return f"a {_dtype(value)} tensor of shape {list(value.shape)}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key!s}: {type(part).__name__}" for key, part in value.items())
        return f"a {type(value).__name__} of {inside or 'nothing'}"
    if isinstance(value, tuple | list):
        inside = ", ".join(
            f"Tensor{list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__ for part in value
        )
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return f"a {type(value).__name__}"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _named(keys: tuple[str, ...] | None) -> str:
    return ", ".join(keys or ()) or "tensors without names"
