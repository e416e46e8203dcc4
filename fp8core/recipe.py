"""Recipe: which operand of which GEMM is cast to FP8 or to four bits, and how. Data only.

A Linear layer is three GEMMs (`input` [M, K], `weight` [N, K], `grad_output` [M, N]; M counts tokens):

    output      [M, N] = input         [M, K] @ weight.T [K, N]     contracts over K, the input features
    grad_input  [M, K] = grad_output   [M, N] @ weight   [N, K]     contracts over N, the output features
    grad_weight [N, K] = grad_output.T [N, M] @ input    [M, K]     contracts over M, the tokens

Each has a left operand `a` and a right operand `b`. `None` in place of a `Cast` leaves the operand in high
precision. How many elements share a scale:

    tensorwise   the whole operand
    rowwise      each row of `a`, each column of `b`: the contracted axis, so scales can leave the sum
    1x128        128 neighbours along the contracted axis
    128x128      a square of 128 by 128
    1x32         32 neighbours along the contracted axis, the scale an E8M0 code (MX)
    1x16         16 neighbours along it, an E4M3 code and one float32 scale a tensor (NVFP4: e2m1 alone)
    16x16        a square of 16 by 16 with such a scale

and where the scale comes from: *dynamic* = the tensor's own amax; *delayed* = the amax of earlier steps
(`AmaxHistory`); *static* = an amax that was measured once and then stays (`fp8core.update_scales`).

The first three recipes equal those of `torchao.float8` 0.18 (`config.py`, `from_recipe_name`). To add a
recipe, add a literal to `RECIPES`; from outside the tree, an entry point of the group `fp8_harness.recipes`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from fp8core.arguments import check_known
from fp8core.extensions import ExtensionTable, of_type
from fp8core.formats import E2M1FN, Format, native_pair
from fp8core.four_bits import SIGNS
from fp8core.gemm import backend_named
from fp8core.scaling import GRANULARITIES as GRANULARITIES
from fp8core.scaling import MX_MODES as MX_MODES
from fp8core.scaling import Granularity as Granularity
from fp8core.scaling import MxMode as MxMode

if TYPE_CHECKING:
    from collections.abc import Sequence

Scaling = Literal["dynamic", "delayed", "static"]
SCALINGS: tuple[str, ...] = get_args(Scaling)
Rounding = Literal["nearest", "stochastic"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
Kernels = Literal["auto", "always", "never"]
KERNELS: tuple[str, ...] = get_args(Kernels)
Ragged = Literal["refuse", "bf16", "pad"]
RAGGED: tuple[str, ...] = get_args(Ragged)
GEMMS: tuple[str, ...] = ("output", "grad_input", "grad_weight")

# The granularities that one multiplication may mix: one scale can be repeated, a block can't
_FAMILIES: tuple[frozenset[str], ...] = (
    frozenset({"tensorwise", "rowwise"}),
    frozenset({"1x128", "128x128"}),
    frozenset({"1x32"}),
    frozenset({"1x16", "16x16"}),
)
_OF_FOUR_BITS: tuple[Granularity, ...] = ("1x16", "16x16", "1x32")


def _set_fields(self: Any, state: Sequence[object]) -> None:
    """Take the fields of a pickle, which are stored by place: those of another version would land in others."""
    every = fields(self)
    if len(state) != len(every):
        raise ValueError(
            f"a pickled {type(self).__name__} has {len(state)} fields; expected {len(every)}: another version of fp8core made it. "
            "Load the model there, save its state_dict(), and load that into a model that was converted here"
        )
    for each, value in zip(every, state, strict=True):
        object.__setattr__(self, each.name, value)


@dataclass(frozen=True, slots=True)
class AmaxHistory:
    """How delayed scaling turns the amax of earlier steps into a scale.

        amax  = max(history)  or  history[0], the last step's
        scale = fp8_max / amax / 2**margin

    Attributes:
        length: steps remembered.
        algorithm: "max" over the history, or "most_recent".
        margin: binades left free above amax, against a tensor that grows.
    """

    __setstate__ = _set_fields

    length: int = 1024
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"an amax history of length {self.length} remembers nothing; expected >= 1")
        check_known("amax algorithm", self.algorithm, ("max", "most_recent"))


@dataclass(frozen=True, slots=True)
class Cast:
    """How one operand of one GEMM is brought to FP8, or to four bits.

    Attributes:
        format: the element format.
        granularity: how many elements share a scale; see the module docstring.
        power_of_two: round each scale down to a power of two, which makes scaling itself exact. "1x32" scales
            are powers of two whatever it says.
        scaling: where the scale comes from; only tensorwise scales can be delayed or static.
        mx_mode: how a "1x32" scale is rounded to a power of two; see `fp8core.scaling.mx_scale_code`.
        rounding: of e2m1: to "nearest", ties to even; or "stochastic", up with the probability of the place between two values.
        hadamard: of e2m1: the 16 signs of a random Hadamard transform along the contracted axis, before the cast; both
            operands of a GEMM have the same or none, since it leaves their product as it is. None: no transform.
        axis_free: codes and scale are the same whichever axis is contracted, so one cast serves two GEMMs.
        is_four_bit: the format is e2m1.
    """

    __setstate__ = _set_fields

    format: Format
    granularity: Granularity = "tensorwise"
    power_of_two: bool = False
    scaling: Scaling = "dynamic"
    mx_mode: MxMode = "rceil"
    rounding: Rounding = "nearest"
    hadamard: tuple[int, ...] | None = None
    axis_free: bool = field(init=False, repr=False, compare=False)
    is_four_bit: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_known("granularity", self.granularity, GRANULARITIES)
        check_known("scaling", self.scaling, SCALINGS)
        check_known("MX rounding mode", self.mx_mode, MX_MODES)
        check_known("rounding", self.rounding, ROUNDINGS)
        object.__setattr__(self, "axis_free", self.granularity in ("tensorwise", "128x128"))
        object.__setattr__(self, "is_four_bit", self.format.name == E2M1FN.name)
        self._check_four_bits()
        if self.scaling != "dynamic" and self.granularity != "tensorwise":
            raise ValueError(
                f"{self.scaling} scaling is defined for tensorwise scales, not {self.granularity}: the history of "
                "a row or a block says nothing about the next batch's; use granularity='tensorwise'"
            )

    def _check_four_bits(self) -> None:
        """Refuse what only e2m1 has of another format, and what it lacks."""
        if not self.is_four_bit:
            if self.granularity in ("1x16", "16x16"):
                raise ValueError(
                    f"{self.granularity} scales are those of e2m1, not {self.format.short}; take '1x128', or '1x32'"
                )
            if self.rounding != "nearest" or self.hadamard is not None:
                raise ValueError(
                    f"stochastic rounding and the Hadamard transform are of e2m1, not {self.format.short}; leave both out"
                )
            return
        if self.granularity not in _OF_FOUR_BITS or self.power_of_two:
            raise ValueError(
                f"e2m1 is scaled in blocks of 16 or 32, not {self.granularity}{' by powers of two' * self.power_of_two}; "
                "take '1x16', '16x16', or for scales that are powers of two '1x32'"
            )
        if self.hadamard is not None and (len(self.hadamard) != 16 or {*self.hadamard} - {1, -1}):
            raise ValueError(
                f"hadamard={self.hadamard}: expected a tuple of 16 signs, each 1 or -1: fp8core.four_bits.SIGNS"
            )

    def __str__(self) -> str:
        scaling = "" if self.scaling == "dynamic" else f"_{self.scaling}"
        if self.is_four_bit:
            mode = f"_{self.mx_mode}" * (self.granularity == "1x32")
            stochastic = "_stochastic" * (self.rounding == "stochastic")
            return f"e2m1_{self.granularity}{mode}{stochastic}" + "_hadamard" * (self.hadamard is not None)
        if self.granularity == "1x32":
            return f"{self.format.short}_1x32_{self.mx_mode}"
        return f"{self.format.short}_{self.granularity}{scaling}" + ("_pow2" if self.power_of_two else "")


@dataclass(frozen=True, slots=True)
class Gemm:
    """One of the three GEMMs.

    Attributes:
        a, b: its operands' casts; None of a GEMM in high precision.
        fast_accum: the hardware may accumulate with fewer bits.
        granularity: the finer of the two operands', since no kernel mixes rowwise and tensorwise.
        is_four_bit: e2m1 is among its operands.
    """

    __setstate__ = _set_fields

    a: Cast | None
    b: Cast | None
    fast_accum: bool = False
    granularity: Granularity = field(init=False, repr=False, compare=False)
    is_four_bit: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = {cast.granularity for cast in (self.a, self.b) if cast is not None}
        object.__setattr__(
            self, "is_four_bit", any(c is not None and c.is_four_bit for c in (self.a, self.b))
        )
        finest: tuple[Granularity, ...] = ("1x16", "16x16", "1x32", "1x128", "128x128", "rowwise")
        finer = next((granularity for granularity in finest if granularity in kinds), "tensorwise")
        object.__setattr__(self, "granularity", finer)
        if self.a is None or self.b is None:
            if self.a is not self.b:
                raise ValueError(
                    f"operand a is {self.a}, operand b is {self.b}: no kernel multiplies FP8 by high precision; "
                    "cast both operands or neither"
                )
            return
        if not any(kinds <= family for family in _FAMILIES):
            known = "; ".join(" with ".join(sorted(family, reverse=True)) for family in _FAMILIES)
            raise ValueError(
                f"operand a is {self.a}, operand b is {self.b}: no kernel mixes these; pairs that exist: {known}"
            )
        if self.a.hadamard != self.b.hadamard:
            raise ValueError(
                f"operand a is {self.a}, operand b is {self.b}: a transform of one alone changes the product; give both the "
                "same signs, or neither"
            )

    @property
    def is_fp8(self) -> bool:
        """False for a GEMM left in high precision; True for four bits too."""
        return self.a is not None

    def __str__(self) -> str:
        return f"{self.a} @ {self.b}" if self.is_fp8 else "high precision"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that a Float8Linear needs to know.

    Attributes:
        name: as users say it ("rowwise"); "custom" when it came from a hand-made configuration.
        doc: its equations in words.
        output, grad_input, grad_weight: the three GEMMs.
        backend: who multiplies, a key of `fp8core.gemm.BACKENDS`; "reference" emulates in high precision.
        kernels: who casts: "auto", the fused kernels where they run and the compiler does not do it; "always", the
            operators `fp8core::*`; "never", plain PyTorch. The same codes and scales, see `fp8core.inputs.operands`.
        pad_inner_dim: fill dimensions up to the next multiple of 16 with zeros, which changes no result.
        fp8_all_gather: FSDP2 gathers weights as FP8 codes where one cast serves all GEMMs that read them; see
            `fp8core.distributed.fsdp`. Changes bytes on the wire and no result.
        min_tokens: what becomes of a call whose number of tokens FP8 can't contract: "refuse", an error; "bf16", its three
            GEMMs run in high precision, and count as that.
        history: of delayed scaling; no meaning without it.
        nearest: the recipe to take where hardware lacks this one; "" if it has no substitute.
        seed: of stochastic rounding.
    """

    __setstate__ = _set_fields

    name: str
    doc: str
    output: Gemm
    grad_input: Gemm
    grad_weight: Gemm
    backend: str = "torch"
    kernels: Kernels = "auto"
    pad_inner_dim: bool = False
    fp8_all_gather: bool = False
    min_tokens: Literal["refuse", "bf16"] = "refuse"
    history: AmaxHistory = AmaxHistory()
    nearest: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        backend_named(self.backend)
        self._check_four_bits()
        check_known("kernels", self.kernels, KERNELS)
        check_known("min_tokens", self.min_tokens, ("refuse", "bf16"))

    def _check_four_bits(self) -> None:
        """Refuse what is not offered beside e2m1."""
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: expected a whole number from 0, below 2**32")
        if not self.is_four_bit:
            return
        refused = {
            "pad_inner_dim: blocks can't be filled up once they are codes; make sizes multiples of 16 (1x32: of 32), or take "
            "ragged='bf16'": self.pad_inner_dim,
            "kernels='always': no kernel casts to e2m1; take 'auto'": self.kernels == "always",
            f"{self.scaling} scaling: a layer remembers one thing alone; make all casts dynamic": self.scaling
            != "dynamic",
            "stochastic rounding of input or weight: a recomputed forward pass would draw other numbers; round grad_output alone": any(
                cast is not None and cast.rounding == "stochastic"
                for cast in (self.output.a, self.output.b, self.grad_input.b, self.grad_weight.b)
            ),
        }
        for why, is_so in refused.items():
            if is_so:
                raise ValueError(
                    f"recipe {self.name} has operands of four bits, beside which there is no {why}"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Recipe:
        """Itself: it never changes, and compiled code is guarded by the object."""
        return self

    @property
    def gemms(self) -> dict[str, Gemm]:
        """The three GEMMs by name, in the order of `GEMMS`."""
        return {"output": self.output, "grad_input": self.grad_input, "grad_weight": self.grad_weight}

    @property
    def fp8_gemms(self) -> int:
        """How many of the three GEMMs take FP8 operands."""
        # Spelled out, since each forward pass of each layer asks
        return (
            (self.output.a is not None) + (self.grad_input.a is not None) + (self.grad_weight.a is not None)
        )

    @property
    def casts(self) -> list[Cast]:
        """Casts of the operands of the three GEMMs, without those in high precision."""
        return [cast for gemm in self.gemms.values() for cast in (gemm.a, gemm.b) if cast is not None]

    @property
    def is_four_bit(self) -> bool:
        """e2m1 is among its operands."""
        return self.output.is_four_bit or self.grad_input.is_four_bit or self.grad_weight.is_four_bit

    @property
    def is_stochastic(self) -> bool:
        """Some cast rounds stochastically, so that a layer must count its passes."""
        return any(cast.rounding == "stochastic" for cast in self.casts)

    @property
    def scaling(self) -> Scaling:
        """ "delayed" or "static" if any cast is, so that a layer must remember amaxes; else "dynamic"."""
        scalings = {cast.scaling for cast in self.casts}
        if {"delayed", "static"} <= scalings:
            raise ValueError(f"recipe {self.name} mixes delayed and static casts; take one of the two")
        return next((s for s in scalings if s != "dynamic"), "dynamic")

    def emulated(self) -> Recipe:
        """The same recipe multiplied in high precision: the same codes and scales, on any device."""
        return self.with_backend("reference")

    def with_backend(self, backend: str) -> Recipe:
        """The same recipe multiplied by another backend of `fp8core.gemm.BACKENDS`.

        Raises:
            ValueError: there is none of that name.
        """
        return replace(self, backend=backend)

    def with_kernels(self, kernels: Kernels) -> Recipe:
        """The same recipe with its casts made by kernels "always", "never", or as "auto" decides."""
        return replace(self, kernels=kernels)

    def with_fp8_all_gather(self, wanted: bool = True) -> Recipe:
        """The same recipe with its weights gathered as FP8 codes by FSDP2, or not."""
        return replace(self, fp8_all_gather=wanted)

    def for_ragged_batches(self, how: Ragged) -> Recipe:
        """The same recipe for batches whose number of tokens is no multiple of 16, which grad_weight contracts.

        Args:
            how: "refuse": an error that names the layer and the size; "bf16": such calls run in high precision, and count as
                that; "pad": they are filled up with zeros, which changes no result; so are layers of such sizes, which are
                then converted too.

        Raises:
            ValueError: another word.
        """
        check_known("ragged", how, RAGGED)
        return replace(self, min_tokens="bf16" if how == "bf16" else "refuse", pad_inner_dim=how == "pad")

    def with_seed(self, seed: int) -> Recipe:
        """The same recipe with other random numbers for stochastic rounding."""
        return replace(self, seed=seed)

    def in_high_precision(self, *gemms: str) -> Recipe:
        """The same recipe with the named GEMMs left uncast.

        Raises:
            ValueError: a name that is none of `GEMMS`.
        """
        for name in gemms:
            check_known("GEMM", name, GEMMS)
        kept: dict[str, Any] = dict(self.gemms) | dict.fromkeys(gemms, Gemm(None, None))
        return replace(self, name="-".join((self.name, *(f"{name}_hp" for name in gemms))), **kept)

    def __str__(self) -> str:
        extras = "" if self.backend == "torch" else f", backend={self.backend}"
        extras += "" if self.kernels == "auto" else f", kernels={self.kernels}"
        extras += ", pad_inner_dim" if self.pad_inner_dim else ""
        extras += ", min_tokens=bf16" if self.min_tokens == "bf16" else ""
        return self.name + extras + (", fp8_all_gather" if self.fp8_all_gather else "")


_E4M3, _E5M2 = native_pair()
_TENSOR = Cast(_E4M3)
_TENSOR_GRAD = Cast(_E5M2)
_ROW = Cast(_E4M3, "rowwise", power_of_two=True)
_TENSOR_POW2 = Cast(_E4M3, power_of_two=True)
_DELAYED = Cast(_E4M3, scaling="delayed")
_DELAYED_GRAD = Cast(_E5M2, scaling="delayed")
_STATIC = Cast(_E4M3, scaling="static")
_STATIC_GRAD = Cast(_E5M2, scaling="static")
_BLOCK = Cast(_E4M3, "1x128", power_of_two=True)
_SQUARE = Cast(_E4M3, "128x128", power_of_two=True)
_MX = Cast(_E4M3, "1x32")
_MX4 = Cast(E2M1FN, "1x32")
_NV4 = Cast(E2M1FN, "1x16")
_NV4_SQUARE = Cast(E2M1FN, "16x16")
_NV4_GRAD = Cast(E2M1FN, "1x16", rounding="stochastic")

_OURS: dict[str, Recipe] = {
    r.name: r
    for r in (
        Recipe(
            name="tensorwise",
            doc=(
                "output = e4m3(input) @ e4m3(weight).T, grad_input = e5m2(grad_output) @ e4m3(weight), "
                "grad_weight = e5m2(grad_output).T @ e4m3(input); one fp32 scale a tensor; fast accumulation "
                "in the forward GEMM only. Cheapest; one outlier costs the whole tensor its small values."
            ),
            output=Gemm(_TENSOR, _TENSOR, fast_accum=True),
            grad_input=Gemm(_TENSOR_GRAD, _TENSOR),
            grad_weight=Gemm(_TENSOR_GRAD, _TENSOR),
        ),
        Recipe(
            name="rowwise",
            doc=(
                "All operands of all three GEMMs e4m3, with one power-of-two scale for each row (a) or column "
                "(b), so that each operand is cast anew along each axis over which it is contracted; fast "
                "accumulation in the forward GEMM only. Robust to outlier tokens and channels; more casts."
            ),
            output=Gemm(_ROW, _ROW, fast_accum=True),
            grad_input=Gemm(_ROW, _ROW),
            grad_weight=Gemm(_ROW, _ROW),
        ),
        Recipe(
            name="rowwise_with_gw_hp",
            doc=(
                "output = e4m3_rowwise(input) @ e4m3_rowwise(weight).T, grad_input = "
                "e4m3_rowwise(grad_output) @ e4m3_tensorwise(weight), grad_weight = grad_output.T @ input in "
                "high precision; power-of-two scales. Input and grad_output are cast along one axis only, and "
                "the number of tokens need not be a multiple of 16."
            ),
            output=Gemm(_ROW, _ROW, fast_accum=True),
            grad_input=Gemm(_ROW, _TENSOR_POW2),
            grad_weight=Gemm(None, None),
        ),
        Recipe(
            name="delayed",
            doc=(
                "As tensorwise, but scale = fp8_max / amax / 2**margin with the largest amax of the last 1024 "
                "steps (TransformerEngine's DelayedScaling): a cast reads its tensor once. A value above that "
                "amax saturates. `update_scales` after each optimizer step moves the history on; until its first "
                "call scales are dynamic. `amax_state_dict` saves the amaxes beside the model."
            ),
            output=Gemm(_DELAYED, _DELAYED, fast_accum=True),
            grad_input=Gemm(_DELAYED_GRAD, _DELAYED),
            grad_weight=Gemm(_DELAYED_GRAD, _DELAYED),
            nearest="tensorwise",
        ),
        Recipe(
            name="static",
            doc=(
                "As tensorwise, but scale = fp8_max / amax / 2**margin with the largest amax seen before the "
                "first `update_scales`; later ones change nothing. Until then scales are dynamic."
            ),
            output=Gemm(_STATIC, _STATIC, fast_accum=True),
            grad_input=Gemm(_STATIC_GRAD, _STATIC),
            grad_weight=Gemm(_STATIC_GRAD, _STATIC),
            nearest="tensorwise",
        ),
        Recipe(
            name="blockwise",
            doc=(
                "e4m3 everywhere, power-of-two scales: output = e4m3_1x128(input) @ e4m3_128x128(weight).T, "
                "grad_input = e4m3_1x128(grad_output) @ e4m3_128x128(weight), grad_weight = "
                "e4m3_1x128(grad_output).T @ e4m3_1x128(input), each 1x128 along the contracted axis (DeepSeek-V3, "
                "arXiv 2412.19437, section 3.3). Outliers cost their block only; the weight is cast once."
            ),
            output=Gemm(_BLOCK, _SQUARE),
            grad_input=Gemm(_BLOCK, _SQUARE),
            grad_weight=Gemm(_BLOCK, _BLOCK),
            backend="triton",
            nearest="rowwise",
        ),
        Recipe(
            name="mxfp8",
            doc=(
                "e4m3 everywhere in blocks of 32 along the contracted axis with E8M0 scales X = 2**e, code = "
                "x / X, e = ceil(log2(amax / 448)) (RCEIL; OCP MX 1.0 and its other modes in `fp8core.scaling`). "
                "Each operand is cast along both of its axes."
            ),
            output=Gemm(_MX, _MX),
            grad_input=Gemm(_MX, _MX),
            grad_weight=Gemm(_MX, _MX),
            nearest="rowwise",
        ),
        Recipe(
            name="nvfp4",
            doc=(
                "e2m1 everywhere in blocks of 16 along the contracted axis, each with an e4m3 scale, and one float32 scale a "
                "tensor; the weight in squares of 16 by 16; grad_output rounded stochastically; both operands of grad_weight "
                "behind a random Hadamard transform by 16 (arXiv 2509.25149). Emulated: no product of e2m1 runs here."
            ),
            output=Gemm(_NV4, _NV4_SQUARE),
            grad_input=Gemm(_NV4_GRAD, _NV4_SQUARE),
            grad_weight=Gemm(replace(_NV4_GRAD, hadamard=SIGNS), replace(_NV4, hadamard=SIGNS)),
            backend="reference",
        ),
        Recipe(
            name="mxfp4",
            doc=(
                "e2m1 everywhere in blocks of 32 along the contracted axis with E8M0 scales, as mxfp8, to nearest (OCP MX "
                "1.0). Emulated: no product of e2m1 runs here."
            ),
            output=Gemm(_MX4, _MX4),
            grad_input=Gemm(_MX4, _MX4),
            grad_weight=Gemm(_MX4, _MX4),
            backend="reference",
        ),
    )
}
# Words that arms without FP8, arms that stand for several recipes, and arms of peers are written with
_WORDS = ("any", "base", "bf16", "custom", "fp8", "no_fp8")
_OF_PEERS = (
    "torchao",
    "torchaomx",
    "nocompile",
    "te",
    "deepgemm",
    "aiter",
    "tutorial",
    "nanochat",
    "scaled_mm",
)
RECIPES = ExtensionTable("recipes", _OURS, of_type(Recipe), (*_WORDS, *_OF_PEERS))


def recipe_named(name: str) -> Recipe:
    """The published recipe of that name.

    Raises:
        ValueError: unknown; the message lists the known names. Or an extension's that cannot be used; it says why.
    """
    check_known("recipe", name, RECIPES)
    return RECIPES[name]
