"""Classes of GPU kernels and operators by name, for the breakdown of a training step. Needs no torch.

A name says what its author chose to put in it, so this is a reading, not a proof:

* A kernel that fuses a cast with something else (torch.compile does) counts as cast, a triton kernel by its name's words.
* An elementwise kernel of eager PyTorch has no word of its purpose in its name. What launched it decides: inside of an
  FP8 layer it casts, inside of the optimizer's step it belongs to that. Elsewhere it is "other".
* An operator that an FP8 GEMM calls is part of it: a CPU without FP8 instructions multiplies in float32 inside of it. A
  kernel is what its own name says, wherever it was launched.
* GEMM names are those that `fp8core.proof.profiled_gemms` looks for; a test holds the two together.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

FP8_GEMM, BF16_GEMM, CAST, ATTENTION, OPTIMIZER = "fp8_gemm", "bf16_gemm", "cast", "attention", "optimizer"
COLLECTIVE, OTHER = "collective", "other"

CLASSES: dict[str, str] = {
    FP8_GEMM: "matrix products of FP8 operands",
    BF16_GEMM: "all other matrix products, in bfloat16 or the dtype of the set-up",
    CAST: "amax, scaling and rounding to FP8, with operators fused to them",
    ATTENTION: "scaled dot-product attention, its two products included",
    OPTIMIZER: "the optimizer's update",
    COLLECTIVE: "communication between devices",
    OTHER: "norms, activations, embedding, loss, copies and the rest",
}

# The first that matches decides, so that what merely contains the word of a later one comes before it.
_KERNELS: tuple[tuple[str, str], ...] = (
    (COLLECTIVE, r"nccl|rccl|\bc10d::|_c10d_functional|gloo:"),
    # FlashAttention, xformers and cuDNN are built of CUTLASS and call themselves so
    (ATTENTION, r"flash_?(fwd|bwd|attn|attention|fprop|bprop)|pytorch_flash|fmha|sdpa|scaled_dot_product"),
    (ATTENTION, r"(efficient|flash|cudnn|flex)_attention"),
    (OPTIMIZER, r"FusedAdam|FusedOptimizer|_fused_adam|Optimizer\.step#"),
    # cuBLAS writes e4m3 as q and e5m2 as r into the names of its nvjet kernels, bfloat16 as t
    (
        FP8_GEMM,
        r"nvjet_(sm\d+_)?[qr]{2}|(?=.*(gemm|cutlass|xmma|matmul)).*(e4m3|e5m2|fp8|float8|float_e[45]m)",
    ),
    (FP8_GEMM, r"_scaled_mm|_scaled_grouped_mm|fp8core::matmul"),
    (
        BF16_GEMM,
        r"gemm|nvjet|cutlass|xmma|gemv|splitKreduce|aten::(mm|bmm|addmm|baddbmm|_grouped_mm)$|mkldnn_linear",
    ),
    (BF16_GEMM, r"^triton_(tem|mm)_|_grouped_mm|harness::grouped_mm"),
    (CAST, r"^_?(swiglu_|rms_norm_)?cast_|^_amax_|fp8core::|float8|e4m3|e5m2"),
    (CAST, r"^triton_.*(_clamp|_clip|amax|abs_max|abs_.*_max)|aten::(amax|abs|clamp)$"),
)
# Functions whose other operators are casts: the layers of fp8core and of torchao.
_ENCLOSING: tuple[tuple[str, str], ...] = (
    (OPTIMIZER, r"Optimizer\.step#"),
    (CAST, r"^_ScaledLinear|matmul_with_hp_or_float8_args|_ToFloat8ConstrFunc|NoCompile|fp8core::(?!matmul)"),
)


def kernel_class(name: str, enclosing: Iterable[str] = ()) -> str:
    """The class of a kernel, or of an operator on the CPU.

    Args:
        name: as a profiler gives it; C++ names demangled or not.
        enclosing: names of what called it, the innermost first: asked where its own name says nothing.

    >>> kernel_class("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT"), kernel_class("nvjet_tst_128x256_64x4_2x1_v_bz_TNN")
    ('fp8_gemm', 'bf16_gemm')
    >>> kernel_class("aten::mul"), kernel_class("aten::mul", ["_ScaledLinearBackward"])
    ('other', 'cast')
    """
    chain = (name, *enclosing)
    for depth, link in enumerate(chain, 1):
        found = _first(_ENCLOSING, link) or _first(_KERNELS, link)
        if found == BF16_GEMM and link.startswith("aten::"):
            within = (_first(_KERNELS, caller) for caller in chain[depth:])
            return FP8_GEMM if FP8_GEMM in within else BF16_GEMM
        if found is not None:
            return found
    return OTHER


def _first(table: Iterable[tuple[str, str]], name: str) -> str | None:
    return next((kind for kind, pattern in table if re.search(pattern, name, re.IGNORECASE)), None)
