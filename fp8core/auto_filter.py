"""torchao's filter by size: which layers are worth FP8, by its measurements on an H100.

`python -m harness advise` predicts the same for other GPUs and recipes, and prints a filter.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from fp8core.config import Float8LinearRecipeName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _auto_filter_for_recipe(
    recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]
) -> Callable[[nn.Module, str], bool]:
    """A `module_filter_fn` that leaves out layers whose sizes did not pay in torchao's tables.

    Left out are modules that are no nn.Linear, names that contain one of `filter_fqns`, sizes that are not multiples of
    16, and, with weight [N, K]:

        tensorwise   K <= 4096 and N <= 1024
        rowwise      N <= 2048, or K <= 1024, or N <= 4096 and K <= 2048

    Source: torchao 0.18, `float8_linear_utils.py`; the same answers for every size.

    Raises:
        ValueError: no recipe of torchao's.
        NotImplementedError: "rowwise_with_gw_hp", for which torchao has no table either.
    """
    name = Float8LinearRecipeName(recipe)
    if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
        raise NotImplementedError(
            f"recipe {name.value!r} has no table of sizes; expected tensorwise or rowwise, or pass a filter of your own"
        )
    takes = (
        _auto_filter_for_tensorwise if name is Float8LinearRecipeName.TENSORWISE else _auto_filter_for_rowwise
    )
    return partial(takes, filter_fqns=filter_fqns)


def _auto_filter_for_tensorwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """`_auto_filter_for_recipe("tensorwise", filter_fqns)` of one layer."""
    N, K = _sizes(mod, fqn, filter_fqns)
    return N > 0 and not (K <= 4096 and N <= 1024)


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    """`_auto_filter_for_recipe("rowwise", filter_fqns)` of one layer."""
    N, K = _sizes(mod, fqn, filter_fqns)
    return not (N <= 2048 or K <= 1024 or (N <= 4096 and K <= 2048))


def _sizes(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> tuple[int, int]:
    """[N, K] of a layer that FP8 can multiply; (0, 0) of what is left out whatever its size."""
    if not isinstance(mod, nn.Linear) or any(part in fqn for part in filter_fqns):
        return 0, 0
    N, K = mod.weight.shape
    return (0, 0) if K % 16 or N % 16 else (N, K)
