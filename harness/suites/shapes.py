"""Named sets of linear-layer shapes, as data, and the three GEMMs that each layer makes in a training step.

For a layer with `in_features` K and `out_features` N on M tokens, `D = A @ B` with A [M, K] and B [K, N]:

    output      [M, K] @ [K, N]   input @ weight^T            M = tokens  K = in      N = out
    grad_input  [M, N] @ [N, K]   grad_output @ weight        M = tokens  K = out     N = in
    grad_weight [N, M] @ [M, K]   grad_output^T @ input       M = out     K = tokens  N = in

The last columns are the M, K, N of the GEMM itself, which is what a case of the suite `gemm` records.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.store.errors import UsageError, unknown
from harness.store.tables import beside

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from harness.store.case import Scalar

    Axes = Mapping[str, Sequence[Scalar]]  # values by name
    Point = dict[str, Scalar]

T = TypeVar("T")

ROLES = ("output", "grad_input", "grad_weight")
CUSTOM = "custom"  # shape_set and layer of sizes given by number
FROM_MODEL = "from_model"


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer of a model and how often the model has it."""

    name: str
    in_features: int
    out_features: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class ShapeSet:
    """The linear layers of one model, or a set of sizes with a purpose."""

    doc: str
    source: str
    layers: tuple[Layer, ...]
    tokens: Sequence[int] = ()  # a default; () where `axes.tokens` must say
    cubes: bool = (
        False  # M = K = N = the layer's side whatever `axes.tokens` says; plain GEMMs without a role
    )


def _shape_set(doc: str, source: str, layers: Mapping[str, Sequence[int]], **more: Any) -> ShapeSet:
    return ShapeSet(doc, source, tuple(Layer(name, *sizes) for name, sizes in layers.items()), **more)


SHAPES: dict[str, ShapeSet] = {
    name: _shape_set(**fields) for name, fields in beside(__file__, "shapes.yaml").items()
}


def merge(layers: Iterable[Layer]) -> list[Layer]:
    """One layer for each shape, in order of first appearance; the names joined by "+", the counts added.

    >>> merge([Layer("q", 8, 8), Layer("k", 8, 4), Layer("o", 8, 8, 2)])[0]
    Layer(name='q+o', in_features=8, out_features=8, count=3)
    """
    merged: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        merged.setdefault((layer.in_features, layer.out_features), []).append(layer)
    return [
        Layer("+".join(layer.name for layer in same), *shape, sum(layer.count for layer in same))
        for shape, same in merged.items()
    ]


def linear_points(shape_sets: Iterable[str], axes: Axes, model_layers: Sequence[Layer] = ()) -> list[Point]:
    """One point for each layer shape and token count: shape_set, layer, M (tokens), K (in), N (out).

    Args:
        shape_sets: names in `SHAPES`, "from_model" for `model_layers`, or FILE.json with [layer, M, K, N] of each layer of
            a job, as `fp8core.proof.recorder.layer_shapes` gives them, whose tokens are its own.
        axes: `M`, `K` and `N` replace the named sets by the product of their values (`tokens` is then not
            read); otherwise `tokens` gives M.
        model_layers: the linear layers of the model that the command line names.

    Raises:
        UsageError: an unknown set, or a file that holds no shapes.
        ValueError: only some of M, K, N; no shapes; no tokens; "from_model" without a model.
    """
    if any(axes.get(name) for name in "MKN"):
        return _by_number(axes)
    points: list[Point] = []
    for name in shape_sets:
        if name.endswith(".json"):
            points += _recorded(Path(name))
            continue
        shape_set = _named(name, model_layers)
        for layer in merge(shape_set.layers):
            tokens = (layer.in_features,) if shape_set.cubes else axes.get("tokens") or shape_set.tokens
            if not tokens:
                raise ValueError(f"shape set {name!r} needs the number of tokens: axes.tokens=[...]")
            for M in tokens:
                size = {"M": M, "K": layer.in_features, "N": layer.out_features}
                points.append({"shape_set": name, "layer": layer.name, **size})
    if not points:
        raise ValueError(f"no shapes: give axes.M, axes.K and axes.N, or shapes=[...] of {', '.join(SHAPES)}")
    return points


def gemm_sizes(M: T, K: T, N: T) -> dict[str, tuple[T, T, T]]:
    """M, K, N of each of the three GEMMs of a layer with K inputs and N outputs on M tokens, by role."""
    return {"output": (M, K, N), "grad_input": (M, N, K), "grad_weight": (N, M, K)}


def gemm_points(shape_sets: Iterable[str], axes: Axes, model_layers: Sequence[Layer] = ()) -> list[Point]:
    """One point for each GEMM: shape_set, layer, role and the M, K, N of the GEMM itself.

    Named layers have the three roles of the module's table, or those of `axes.role`. Sizes given by number and
    cubes have the role "output", unless `axes.role` says otherwise; the role then only chooses the FP8 formats.

    Args and errors as for `linear_points`.
    """
    plain_sets = {CUSTOM} | {name for name, shape_set in SHAPES.items() if shape_set.cubes}
    points: list[Point] = []
    for point in linear_points(shape_sets, axes, model_layers):
        M, K, N = (point[name] for name in "MKN")
        plain = point["shape_set"] in plain_sets
        for role in axes.get("role") or (ROLES[:1] if plain else ROLES):
            own = gemm_sizes(M, K, N)["output" if plain else str(role)]
            points.append({**point, "role": str(role), **dict(zip("MKN", own, strict=True))})
    return points


def _by_number(axes: Axes) -> list[Point]:
    missing = [f"axes.{name}" for name in "MKN" if not axes.get(name)]
    if missing:
        given = ", ".join(f"axes.{name}" for name in "MKN" if axes.get(name))
        raise ValueError(f"sizes by number need M, K and N: {given} given, {', '.join(missing)} missing")
    products = itertools.product(*(axes[name] for name in "MKN"))
    named = {"shape_set": CUSTOM, "layer": CUSTOM}
    return [{**named, **dict(zip("MKN", sizes, strict=True))} for sizes in products]


def _recorded(path: Path) -> list[Point]:
    """The layers of a file, each size once."""
    names: dict[tuple[int, ...], list[str]] = {}
    try:
        for layer, *sizes in json.loads(path.read_text(encoding="utf-8")):
            if len(sizes) != 3 or not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError(f"{layer} has the sizes {sizes}")
            names.setdefault(tuple(sizes), []).append(str(layer))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"shapes={path}: {error}; expected JSON, [[layer, M, K, N], ...] of each layer, in whole numbers"
        ) from None
    return [
        {"shape_set": path.stem, "layer": "+".join(same), **dict(zip("MKN", sizes, strict=True))}
        for sizes, same in names.items()
    ]


def _named(name: str, model_layers: Sequence[Layer]) -> ShapeSet:
    if name == FROM_MODEL:
        if not model_layers:
            raise ValueError(
                "shapes=from_model needs a model with nn.Linear layers: model._target_=my.module.build"
            )
        return ShapeSet("the model of the command line", "model._target_", tuple(model_layers))
    if name not in SHAPES:
        raise unknown("shape set", name, [*SHAPES, FROM_MODEL])
    return SHAPES[name]
