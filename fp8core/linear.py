"""Float8Linear: nn.Linear whose three GEMMs run in FP8.

    output      [M, N] = input         [M, K] @ weight.T [K, N] (+ bias)
    grad_input  [M, K] = grad_output   [M, N] @ weight   [N, K]
    grad_weight [N, K] = grad_output.T [N, M] @ input    [M, K]

M counts tokens: all leading dimensions of the input, flattened. Each tensor is cast as the recipe says, once where
the codes don't depend on the axis (tensorwise, 128x128), else once for each axis; parameters and gradients stay in
high precision. `fp8core.plain_linear` is the layer itself, on one page; this module holds parameters, checks and remembers
calls, and attaches what a call has beside its tensors. `scaled_linear` is the layer as a function.

Layers that read the same tensor (q, k, v; gate, up) can share its casts, see `cast_input`. Casts of weights can
be kept across microbatches, see `fp8core.microbatches`. A weight that is a DTensor is a part of a layer that tensor
parallelism has cut, see `fp8core.inputs.sharded`.

The result has the dtype of the (autocast) input, whatever the weight's. Rowwise GEMMs of backend "torch" yield
bfloat16, so a float32 or float16 layer is rounded to bfloat16 once for each of them.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from fp8core.arguments import PLAIN_TENSORS, any_autocast, check_type, is_dtensor
from fp8core.config import Float8LinearConfig, as_recipe
from fp8core.history import AmaxMemory, Draws, LayerMemory, PassCount, amaxes_of_pass
from fp8core.inputs.attached import AttachedPlan, CastingPlan, plan_for
from fp8core.inputs.sharded import check_layer, tp_layout_of
from fp8core.inputs.shared_input import CastInput, after_autocast, input_casts
from fp8core.inputs.two_casts import TwoCasts
from fp8core.layer_rules import check_codes, check_weight, gemms_reason
from fp8core.observers import WATCHED
from fp8core.plain_linear import Plan, as_matrix, multiply
from fp8core.replace import take_over
from fp8core.scaling import check_hp
from fp8core.tensor import Float8Tensor

if TYPE_CHECKING:
    from fp8core.config import Float8LinearRecipeName
    from fp8core.inputs.microbatch import WeightCache
    from fp8core.inputs.sharded import TPLayout
    from fp8core.recipe import Recipe

_SHAPES_REMEMBERED = 256  # of one layer, whose number of tokens may differ in each call


class Float8Linear(nn.Linear):
    """Drop-in nn.Linear in FP8.

    Attributes:
        recipe: what is cast and how.
        amaxes: what delayed or static scaling remembers; None for dynamic recipes.
        passes: what stochastic rounding remembers; None for other recipes.
        weight_cache: casts of the weight while a `fp8core.microbatches` block runs, else None.
        suspended_recipe: while a `fp8core.PrecisionSchedule` holds GEMMs back, the recipe that it returns to.
        converted_from: class of the layer whose place it took; nn.Linear if it took none.
        fqn: its name in the model that was converted, for errors; "" for a layer that is no one's.
        bias_deferred: a style of `fp8core.distributed.tensor_parallel` adds the bias, once the output is summed.
    """

    is_transposed = (
        False  # the parameter lies as [in_features, out_features]: `fp8core.transposed.Float8Conv1D`
    )
    recipe: Recipe
    amaxes: AmaxMemory | None
    passes: PassCount | None
    weight_cache: WeightCache | None
    suspended_recipe: Recipe | None = None
    bias_deferred: bool
    converted_from: type[nn.Linear]
    fqn = ""
    _plans: tuple[Recipe | None, dict[object, Plan]] = (None, {})  # of this recipe, by `_plan_key`
    STATE: ClassVar = frozenset(
        (
            "recipe",
            "amaxes",
            "passes",
            "weight_cache",
            "suspended_recipe",
            "bias_deferred",
            "converted_from",
            "is_transposed",
            "fqn",
            "_plans",
        )
    )

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        config: Float8LinearConfig | Recipe | str | None = None,
    ) -> None:
        """The arguments of nn.Linear; `config` is a configuration, a recipe or its name (default "tensorwise")."""
        super().__init__(in_features, out_features, bias, device, dtype)
        self.recipe = as_recipe(config)
        self.amaxes = None if self.recipe.scaling == "dynamic" else AmaxMemory(self.recipe, device)
        self.passes = PassCount(device) if self.recipe.is_stochastic else None
        self.weight_cache = None
        self.suspended_recipe = None
        self.bias_deferred = False
        self.converted_from = nn.Linear

    def reset_parameters(self) -> None:
        """Initialise as nn.Linear does, a layer that was made on "meta" too; amaxes start afresh."""
        super().reset_parameters()
        for memory in self.children():
            if isinstance(memory, LayerMemory):
                memory.reset()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """With the weight, amaxes and counts come too or start afresh: they are those of the weight that was."""
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for memory in self.children() if f"{prefix}weight" in state_dict else ():
            if isinstance(memory, AmaxMemory) and memory.ready and f"{prefix}amaxes.in_use" not in state_dict:
                warnings.warn(
                    "load_state_dict dropped the amaxes of delayed or static scaling, which are those of the weights that "
                    "were; to keep them, take amax_state_dict(model) before, and load_amax_state_dict(model, it) after",
                    stacklevel=2,
                )
            if isinstance(memory, LayerMemory):
                memory.reset(self.weight.device)

    @classmethod
    def from_float(
        cls, mod: nn.Linear, config: Float8LinearConfig | Recipe | str | None = None
    ) -> Float8Linear:
        """A Float8Linear that shares mod's parameters and takes its hooks; nothing is copied or initialised.

        The forward of a subclass is replaced: `convert_to_float8_training` says where that would lose something.

        Raises:
            TypeError: mod is no nn.Linear.
        """
        if not isinstance(mod, nn.Linear):
            raise TypeError(f"from_float takes an nn.Linear, got {type(mod).__name__}")
        return cls(mod.in_features, mod.out_features, bias=False, device="meta", config=config)._taking(mod)

    def _taking(self, mod: Any) -> Self:
        """This layer, made on "meta", in the place of one of its sizes."""
        take_over(self, mod)
        self.converted_from = mod.converted_from if isinstance(mod, Float8Linear) else type(mod)
        if self.amaxes is not None:
            self.amaxes = AmaxMemory(self.recipe, mod.weight.device)
        if self.passes is not None:
            self.passes = PassCount(mod.weight.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: no open `microbatches` block knows them."""
        return {**super().__getstate__(), "weight_cache": None, "_plans": (None, {})}

    @property
    def config(self) -> Float8LinearConfig | None:
        """The recipe in torchao's words, as `layer.config` there; None where its configuration has none for it."""
        return Float8LinearConfig.from_recipe(self.recipe)

    @property
    def linear_weight(self) -> torch.Tensor:
        """The weight as [out_features, in_features], however the parameter lies."""
        return self.weight.t() if self.is_transposed else self.weight

    def forward(self, input: torch.Tensor | CastInput) -> torch.Tensor:
        """`input @ weight.T + bias`.

        Args:
            input: float32, bfloat16 or float16, [..., in_features]; any number of leading dimensions, none
                and sizes of 0 included. Under autocast it is first converted to the autocast dtype. Or its
                casts by `cast_input`; or a Float8Tensor that was cast as the recipe casts it.

        Returns:
            [..., out_features] of the (converted) input's dtype; a DTensor where the weight is one.

        Raises:
            ValueError: last dimension is not in_features; a cast that is not the recipe's; or a GEMM that this
                call leads to would break a rule of the hardware (see `fp8core.gemm.layout`): tokens must be a
                multiple of 16 to train with an FP8 grad_weight.
            TypeError: dtype.
        """
        weight: torch.Tensor = self.weight
        if (
            self.suspended_recipe is not None  # most cheaply asked: this is here for layers that are held
            and not self.recipe.fp8_gemms
            and not (self.is_transposed or self.bias_deferred)
            and type(input) is torch.Tensor
            and type(weight) in PLAIN_TENSORS
            and input.dtype == weight.dtype
        ):
            return nn.functional.linear(input, weight, self.bias)
        if self.is_transposed:
            weight = weight.t()
        tp = None if type(weight) in PLAIN_TENSORS else tp_layout_of(weight)
        bias: torch.Tensor | None = None if self.bias_deferred else self.bias
        if tp is None:
            return self._run(input, weight, bias, None)
        check_layer(self, tp, input.hp if isinstance(input, CastInput) else input)
        if isinstance(input, CastInput):
            input = input._replace(hp=tp.local_input(input.hp, str(self)))
        else:
            input = tp.local_input(input, str(self))
        assert is_dtensor(weight)
        weight = weight.to_local()
        bias = tp.local_bias(bias) if is_dtensor(bias) else bias
        return tp.whole_output(self._run(input, weight, bias, tp))

    def _run(
        self,
        input: torch.Tensor | CastInput,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: TPLayout | None,
    ) -> torch.Tensor:
        """The layer, or this rank's part of it: all three are plain tensors."""
        compiling, gradients = torch.compiler.is_compiling(), torch.is_grad_enabled()
        given: tuple[torch.Tensor | None, ...] = ()
        plan: Plan | None = None
        codes_only = False
        # A plain tensor for which there is a plan has passed all that follows
        if not compiling and type(input) is torch.Tensor and not any_autocast():
            plan = self._known_plan(input, weight, gradients)
        if plan is None:
            if not self.recipe.fp8_gemms:
                return self._forward_hp(input, weight, bias)
            if isinstance(input, TwoCasts):
                input = input.as_cast_input()
            if isinstance(input, CastInput) and self.recipe.is_four_bit:
                input = input.hp  # of which no casts are shared
            whole = input
            if isinstance(input, CastInput):
                given, codes_only, input = self._given(input, weight), input.codes_only, input.hp
            else:
                input = after_autocast(input)
            plan = None if compiling else self._known_plan(input, weight, gradients)
            plan = self._new_plan(input, weight, gradients) if plan is None else plan
            if plan is None:
                return self._forward_hp(whole, weight, bias)
        assert not isinstance(input, CastInput)
        if isinstance(input, Float8Tensor):
            check_codes(self.recipe, input, "input", gradients and weight.requires_grad)
        cache, memory, passes = self.weight_cache, self.amaxes, self.passes
        stats = (
            WATCHED[self](weight, self.recipe) if not compiling and gradients and self in WATCHED else None
        )
        if given or not (
            cache is None and memory is None and tp is None and stats is None and passes is None
        ):
            # No casts are kept where parts share a scale: a part can't know that the others' weights have changed
            # A transposed parameter is another tensor in each call, which the cache doesn't know again
            # What is kept in a pass without gradients would not be recorded by the next pass with gradients, and autograd
            # saves nothing that was made in inference mode
            if (
                compiling
                or tp is not None
                or self.is_transposed
                or not (gradients or (memory is None and not torch.is_inference_mode_enabled()))
            ):
                cache = None
            kernels = plan.kernels if isinstance(plan, CastingPlan) else {}
            amaxes = amaxes_of_pass(memory, gradients)
            draws = None if passes is None else passes.draws(self.recipe.seed, gradients)
            if given or not (cache is None and tp is None and stats is None):
                plan = AttachedPlan(
                    self.recipe, gradients, kernels, amaxes, None, draws, cache, tp, stats, codes_only
                )
            else:
                plan = CastingPlan(self.recipe, gradients, kernels, amaxes, None, draws)
        output = multiply(input, weight, plan, *given)
        return output if bias is None else output + bias.to(output.dtype)

    def _given(self, input: CastInput, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the casts of a shared input, for the output and for grad_weight, if they are this layer's."""
        if input.casts != input_casts(self.recipe):
            raise ValueError(f"input was cast for another recipe than {self.recipe}; cast it for this layer")
        trains = torch.is_grad_enabled() and weight.requires_grad
        if input.codes_only and trains and input.for_grad_weight is None:
            raise ValueError(
                "input consists of codes that were made without gradients, for inference; make it anew where "
                "gradients are enabled"
            )
        shared = input.for_grad_weight is input.for_output  # given once: Dynamo takes no tensor twice
        return input.for_output, None if shared else input.for_grad_weight

    def _forward_hp(
        self, input: torch.Tensor | CastInput, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """With all GEMMs in high precision, see `fp8core.schedule`."""
        if isinstance(input, CastInput):
            if input.codes_only:
                raise ValueError(
                    f"input consists of codes alone, and recipe {self.recipe} multiplies none; make it anew"
                )
            input = input.hp
        return _in_high_precision(input, weight, bias)

    def _known_plan(self, input: torch.Tensor, weight: torch.Tensor, gradients: bool) -> Plan | None:
        """Return the plan of an earlier call with tensors like these; None where there was none. In eager mode only."""
        recipe, plans = self._plans
        if recipe is not self.recipe or not isinstance(input, torch.Tensor):
            return None
        return plans.get(_plan_key(input, weight, gradients))

    def _new_plan(self, input: torch.Tensor, weight: torch.Tensor, gradients: bool) -> Plan | None:
        """Check a call's tensors and resolve what its GEMMs need; in eager mode remembered for tensors like these.

        None: the tokens are too few for FP8, and the recipe wants high precision then.

        Raises:
            TypeError, ValueError: see `forward`.
        """
        plan = _checked_plan(
            input, weight, self.recipe, gradients, f"{type(self).__name__} {self.fqn!r}", self.fqn
        )
        if plan is None or torch.compiler.is_compiling():
            return plan
        recipe, plans = self._plans
        if recipe is not self.recipe or len(plans) >= _SHAPES_REMEMBERED:
            plans = {}
            self._plans = self.recipe, plans
        plans[_plan_key(input, weight, gradients)] = plan
        return plan

    def extra_repr(self) -> str:
        """nn.Linear's, and the recipe; a custom one operand by operand."""
        recipe = self.recipe
        detail = ""
        if recipe.name == "custom":
            detail = " (" + "; ".join(f"{name}: {gemm}" for name, gemm in recipe.gemms.items()) + ")"
        return f"{super().extra_repr()}, recipe={recipe}{detail}"


def _plan_key(input: torch.Tensor, weight: torch.Tensor, gradients: bool) -> tuple[object, ...]:
    """All that a plan depends on, beside the recipe."""
    return (
        input.shape,
        weight.shape,
        input.dtype,
        weight.device,
        gradients,
        input.requires_grad,
        weight.requires_grad,
        type(input),
        type(weight),
    )


def _in_high_precision(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """nn.Linear, bit for bit where that takes the input."""
    if input.dtype == weight.dtype or torch.is_autocast_enabled(input.device.type):
        return nn.functional.linear(input, weight, bias)
    bias = None if bias is None else bias.to(input.dtype)
    return nn.functional.linear(input, weight.to(input.dtype), bias)


def _checked_plan(
    x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, gradients: bool, what: str, fqn: str = ""
) -> Plan | None:
    """Check a call's tensors and resolve what its products need.

    None: the tokens are too few for FP8, and the recipe wants high precision then.

    Raises:
        TypeError, ValueError, RuntimeError: see `Float8Linear.forward` and `check_weight`.
    """
    check_hp(x, "input")
    if not torch.compiler.is_compiling():
        check_weight(weight, gradients, what)
    K = weight.shape[1]
    if x.dim() == 0 or x.shape[-1] != K:
        raise ValueError(f"input has shape {list(x.shape)}; expected [..., {K}]")
    flat = as_matrix(x, K)
    reason, is_for_tokens = gemms_reason(recipe, flat, weight, fqn, x.shape)
    if is_for_tokens and recipe.min_tokens == "bf16":
        return None
    if reason:
        raise ValueError(reason)
    return plan_for(recipe, flat, weight, gradients)


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    recipe: Float8LinearConfig | Recipe | Float8LinearRecipeName | str = "tensorwise",
) -> torch.Tensor:
    """`x @ weight.T` as a Float8Linear computes it, bit for bit, without a module: the three products of a recipe in FP8.

    >>> import torch
    >>> x, weight = torch.ones(16, 32, requires_grad=True), torch.ones(48, 32, requires_grad=True)
    >>> y = scaled_linear(x, weight, "rowwise")
    >>> y.sum().backward()
    >>> y.shape, x.grad[0, 0].item(), weight.grad[0, 0].item()
    (torch.Size([16, 48]), 48.0, 16.0)

    Stochastic rounding takes the address of its random numbers from torch's generator, as dropout does. It keeps nothing between
    calls, so each call checks its arguments anew: a Float8Linear, which remembers that, takes less
    host time. For products of your own, in an autograd function or over gathered codes, see `quantize` and `scaled_mm`.
    `torch.compile` keeps it whole in one graph, as it keeps a Float8Linear; the recipe is a constant of the graph.

    Args:
        x: float32, bfloat16 or float16, [..., K], any layout; converted first under autocast. K, N and, to train the weight,
            the number of tokens are multiples of 16.
        weight: float32, bfloat16 or float16, [N, K], any layout, not converted by autocast. Or a Float8Tensor whose cast is
            the recipe's: codes that were gathered, whose gradient arrives in the dtype that they advertise.
        recipe: a recipe that scales dynamically, its name, or torchao's configuration. What it does is `Recipe.doc`.

    Returns:
        [..., N] in x's dtype, after autocast. Differentiable once, in x and weight. A group of elements that share a scale and
        hold Inf or NaN is NaN throughout. Without tokens: an empty tensor, and zeros as the weight's gradient.

    Raises:
        TypeError: dtype of x; a DTensor, of which `to_local()` is what one rank multiplies; or what is no recipe.
        ValueError: shapes that don't fit, or that the hardware refuses; an unknown recipe; or one that remembers amaxes
            ("delayed", "static"), which a function has no place for.

    Source: the products and formats of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433); the recipes
    are torchao.float8's.
    """
    recipe = as_recipe(recipe)
    for name, tensor in (("x", x), ("weight", weight)):
        check_type(name, tensor, torch.Tensor, "scaled_linear(x, weight, recipe)")
        if is_dtensor(tensor):
            raise TypeError(
                f"{name} is a DTensor; pass {name}.to_local(), or convert the layer, which knows its layout"
            )
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}; expected [N, K]")
    if recipe.scaling != "dynamic":
        raise ValueError(
            f"recipe {recipe} remembers amaxes, which a function has no place for; take a Float8Linear, or recipe "
            f"{recipe.nearest or 'tensorwise'!r}"
        )
    if not recipe.fp8_gemms:
        return _in_high_precision(x, weight, None)
    x, gradients = after_autocast(x), torch.is_grad_enabled()
    for role, tensor, other in (("input", x, weight), ("weight", weight, x)):
        if isinstance(tensor, Float8Tensor):
            check_codes(recipe, tensor, role, gradients and other.requires_grad)
    plan = _checked_plan(x, weight, recipe, gradients, "scaled_linear")
    if plan is None:
        return _in_high_precision(x, weight, None)
    if recipe.is_stochastic:
        number = torch.randint(2**32, (), device=x.device)
        plan = CastingPlan(recipe, gradients, {}, draws=Draws(number, recipe.seed))
    return multiply(x, weight, plan)
