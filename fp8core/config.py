"""The front door that `torchao.float8` users know: the same names, resolved into a Recipe.

A configuration is what a user writes; a `Recipe` is the one truth that the rest of fp8core reads.
`Float8LinearConfig.to_recipe` translates. Compared with torchao 0.18:

- Frozen means frozen: unset casts stay None in the object and are filled in while resolving.
- Bad values raise ValueError, also under `python -O`.
- `emulate=True` keeps the recipe and changes only the backend.
- `pad_inner_dim` also pads the columns of B, so that it is enough for all three GEMMs of any layer.
- `enable_fsdp_float8_all_gather` is no error with a recipe whose weights can't be gathered in FP8: they are gathered in
  high precision, and `audit` and `verify` say so of each layer.
- `force_recompute_fp8_weight_in_bwd` is accepted without effect: a weight cast that serves both passes is kept
  between them, any other is made in the pass that needs it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Union

from fp8core.formats import Format, as_element_format, native_pair
from fp8core.recipe import RECIPES, Cast, Gemm, Granularity, Recipe, recipe_named

if TYPE_CHECKING:
    import torch


class ScalingType(enum.Enum):
    """Whether an operand is cast at all."""

    DYNAMIC = "dynamic"  # cast, with a scale from the tensor's own amax
    DISABLED = "disabled"  # left in high precision


class ScalingGranularity(enum.Enum):
    """How many elements share a scale; AXISWISE is what users call rowwise."""

    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


# torchao's alias for annotations; the classes are those of torchao.quantization, for its quantize_
FP8Granularity: Any = Union["PerTensor", "PerRow", "PerGroup"]  # noqa: F821


class Float8LinearRecipeName(enum.Enum):
    """torchao's recipes; `fp8core.RECIPES` documents these and the others, which go by their names."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True, slots=True)
class CastConfig:
    """How one operand is cast. `target_dtype` None: e4m3 for input and weight, e5m2 for grad_output."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.target_dtype is not None:
            as_element_format(self.target_dtype)


@dataclass(frozen=True, slots=True)
class Float8GemmConfig:
    """`use_fast_accum`: let the hardware accumulate with fewer bits. Faster on Hopper, less accurate."""

    use_fast_accum: bool = False


@dataclass(frozen=True, slots=True)
class Float8LinearConfig:
    """How a Linear is converted; the default is the "tensorwise" recipe.

    An override left at None takes the cast of the same operand above it. Of each GEMM, both operands are cast
    or neither.

    Attributes:
        cast_config_input, cast_config_weight, cast_config_grad_output: the three operands.
        cast_config_input_for_grad_weight: override for `input` in the grad_weight GEMM.
        cast_config_weight_for_grad_input: override for `weight` in the grad_input GEMM.
        cast_config_grad_output_for_grad_weight: override for `grad_output` in the grad_weight GEMM.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: the three GEMMs.
        enable_fsdp_float8_all_gather: FSDP2 gathers weights as FP8 codes; see `fp8core.distributed.fsdp`.
        pad_inner_dim: pad what must be a multiple of 16 with zeros. Costs copies.
        emulate: multiply dequantised operands in float32; for hardware without FP8.
        force_recompute_fp8_weight_in_bwd: no effect, see the module docstring.
        round_scales_to_power_of_2: of all casts.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        self.to_recipe()  # refuses an impossible combination where it is written, not where it is used

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The configuration of a published recipe.

        Raises:
            ValueError: unknown name, or a recipe that torchao's configuration has no words for.
        """
        name = recipe_name.value if isinstance(recipe_name, Float8LinearRecipeName) else recipe_name
        recipe = recipe_named(name)
        known = [member.value for member in Float8LinearRecipeName]
        if name not in known:
            raise ValueError(
                f"recipe {name!r} can't be written as a Float8LinearConfig, which knows {', '.join(known)}; pass the "
                f"recipe itself: config={name!r}, or fp8core.RECIPES[{name!r}]"
            )
        config = Float8LinearConfig.from_recipe(recipe)
        assert config is not None
        return config

    @staticmethod
    def from_recipe(recipe: Recipe) -> Float8LinearConfig | None:
        """The configuration that means this recipe's casts and GEMMs; None if torchao's configuration has no words for them."""
        if not all(cast.granularity in ("tensorwise", "rowwise") for cast in recipe.casts):
            return None
        config = Float8LinearConfig(
            cast_config_input=_cast_config(recipe.output.a),
            cast_config_input_for_grad_weight=_cast_config(recipe.grad_weight.b),
            cast_config_weight=_cast_config(recipe.output.b),
            cast_config_weight_for_grad_input=_cast_config(recipe.grad_input.b),
            cast_config_grad_output=_cast_config(recipe.grad_input.a),
            cast_config_grad_output_for_grad_weight=_cast_config(recipe.grad_weight.a),
            gemm_config_output=Float8GemmConfig(recipe.output.fast_accum),
            gemm_config_grad_input=Float8GemmConfig(recipe.grad_input.fast_accum),
            gemm_config_grad_weight=Float8GemmConfig(recipe.grad_weight.fast_accum),
            enable_fsdp_float8_all_gather=recipe.fp8_all_gather,
            pad_inner_dim=recipe.pad_inner_dim,
            emulate=recipe.backend.startswith("reference"),
            round_scales_to_power_of_2=any(cast.power_of_two for cast in recipe.casts),
        )
        return config if config.to_recipe().gemms == recipe.gemms else None

    def to_recipe(self) -> Recipe:
        """What this configuration means; named after a published recipe if it equals one, else "custom".

        Raises:
            ValueError: one operand of a GEMM cast and the other not.
        """
        e4m3, e5m2 = native_pair()
        in_, w, go = self.cast_config_input, self.cast_config_weight, self.cast_config_grad_output
        gemms = {
            "output": (in_, e4m3, w, e4m3, self.gemm_config_output),
            "grad_input": (
                go,
                e5m2,
                self.cast_config_weight_for_grad_input or w,
                e4m3,
                self.gemm_config_grad_input,
            ),
            "grad_weight": (
                self.cast_config_grad_output_for_grad_weight or go,
                e5m2,
                self.cast_config_input_for_grad_weight or in_,
                e4m3,
                self.gemm_config_grad_weight,
            ),
        }
        resolved: dict[str, Gemm] = {}
        for name, (a, a_default, b, b_default, gemm) in gemms.items():
            try:
                resolved[name] = Gemm(self._cast(a, a_default), self._cast(b, b_default), gemm.use_fast_accum)
            except ValueError as error:
                raise ValueError(f"GEMM {name}: {error}") from None
        published = next((r for r in RECIPES.own.values() if r.gemms == resolved), None)
        custom = Recipe(
            "custom",
            "set operand by operand",
            output=resolved["output"],
            grad_input=resolved["grad_input"],
            grad_weight=resolved["grad_weight"],
        )
        return replace(
            published or custom,
            backend="reference" if self.emulate else "torch",
            pad_inner_dim=self.pad_inner_dim,
            fp8_all_gather=self.enable_fsdp_float8_all_gather,
        )

    def _cast(self, config: CastConfig, default: Format) -> Cast | None:
        """The cast that one CastConfig means, None if disabled."""
        if config.scaling_type is ScalingType.DISABLED:
            return None
        axiswise = config.scaling_granularity is ScalingGranularity.AXISWISE
        granularity: Granularity = "rowwise" if axiswise else "tensorwise"
        fmt = default if config.target_dtype is None else as_element_format(config.target_dtype)
        return Cast(fmt, granularity, self.round_scales_to_power_of_2)


def as_recipe(config: Float8LinearConfig | Recipe | Float8LinearRecipeName | str | None) -> Recipe:
    """The recipe that a configuration, a recipe or its name means; None is the default, "tensorwise".

    Raises:
        ValueError: unknown recipe name.
        TypeError: none of these.
    """
    if config is None:
        return RECIPES["tensorwise"]
    if isinstance(config, Recipe):
        return config
    if isinstance(config, Float8LinearConfig):
        return config.to_recipe()
    if isinstance(config, Float8LinearRecipeName):
        return recipe_named(config.value)
    if isinstance(config, str):
        return recipe_named(config)
    raise TypeError(
        f"config is a {type(config).__name__}; expected Float8LinearConfig, Recipe, a recipe's name or None"
    )


def _cast_config(cast: Cast | None) -> CastConfig:
    """The CastConfig that resolves to this cast."""
    if cast is None:
        return CastConfig(ScalingType.DISABLED)
    axiswise = cast.granularity == "rowwise"
    granularity = ScalingGranularity.AXISWISE if axiswise else ScalingGranularity.TENSORWISE
    return CastConfig(ScalingType.DYNAMIC, granularity, cast.format.dtype)
