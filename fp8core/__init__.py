"""fp8core: a small FP8 training library.

    >>> import torch
    >>> from fp8core import convert_to_float8_training
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    >>> model = convert_to_float8_training(model, config="rowwise")
    >>> model(torch.randn(16, 64)).shape
    torch.Size([16, 64])

`scale` takes high precision to FP8, `scale_inv` takes it back. Names and meanings follow `torchao.float8`.
Read bottom-up: formats, recipe, config, scaling, cast, kernels, gemm, tensor, history, plain_linear, operands,
microbatch, sharded, shared_input, linear, grouped, moe, distributed, producers, convert, schedule. `fp8core.proof`, which proves,
counts and watches, is no part of the library: it attaches itself to `fp8core.observers`.
"""

from typing import TYPE_CHECKING

from fp8core.auto_filter import (
    _auto_filter_for_recipe,
    _auto_filter_for_rowwise,
    _auto_filter_for_tensorwise,
)
from fp8core.config import (
    CastConfig,
    Float8GemmConfig,
    Float8LinearConfig,
    Float8LinearRecipeName,
    FP8Granularity,
    ScalingGranularity,
    ScalingType,
)
from fp8core.convert import convert_to_float8_training
from fp8core.distributed.weight_scales import precompute_float8_dynamic_scale_for_fsdp
from fp8core.experts.grouped import PaddedGroups, grouped_mm, pad_groups
from fp8core.experts.moe import GroupedMatmul, convert_experts_to_float8, dense_layers_only
from fp8core.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, FORMATS, Format
from fp8core.gemm import BACKENDS, scaled_mm
from fp8core.high_precision import convert_to_high_precision
from fp8core.history import (
    AmaxesMissingWarning,
    SharedDrawsWarning,
    amax_state_dict,
    load_amax_state_dict,
    update_scales,
)
from fp8core.inputs.microbatch import microbatches
from fp8core.inputs.shared_input import CastInput, cast_input
from fp8core.linear import Float8Linear, scaled_linear
from fp8core.optimizers import NotTrainedWarning
from fp8core.producers import RMSNorm, SwiGLU
from fp8core.recipe import RECIPES, AmaxHistory, Cast, Gemm, Recipe
from fp8core.schedule import PrecisionSchedule
from fp8core.tensor import Float8Tensor, quantize
from fp8core.transposed import Float8Conv1D

if TYPE_CHECKING:
    from fp8core.distributed.tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
        async_tp_reason,
        check_plan,
    )
    from fp8core.distributed.waited import WaitedRowwiseParallel
    from fp8core.proof.audit import Audit, LayerAudit, audit
    from fp8core.proof.cast_records import CastRecord
    from fp8core.proof.expert_rows import ExpertsAudit
    from fp8core.proof.flops import Matmul, MatmulCount, MatmulCounter, count_matmuls
    from fp8core.proof.other_weights import WeightAudit
    from fp8core.proof.verify import Proof, StepProof, verify
    from fp8core.proof.verify.census import Census, census
    from fp8core.proof.watcher import Watcher, watch

__version__ = "0.1.0"
__all__ = [
    "BACKENDS",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0FNU",
    "FORMATS",
    "RECIPES",
    "AmaxHistory",
    "AmaxesMissingWarning",
    "Audit",
    "Cast",
    "CastConfig",
    "CastInput",
    "CastRecord",
    "Census",
    "ExpertsAudit",
    "FP8Granularity",
    "Float8ColwiseParallel",
    "Float8Conv1D",
    "Float8GemmConfig",
    "Float8Linear",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "Float8RowwiseParallel",
    "Float8Tensor",
    "Format",
    "Gemm",
    "GroupedMatmul",
    "LayerAudit",
    "Matmul",
    "MatmulCount",
    "MatmulCounter",
    "NotTrainedWarning",
    "PaddedGroups",
    "PrecisionSchedule",
    "PrepareFloat8ModuleInput",
    "Proof",
    "RMSNorm",
    "Recipe",
    "ScalingGranularity",
    "ScalingType",
    "SharedDrawsWarning",
    "StepProof",
    "SwiGLU",
    "WaitedRowwiseParallel",
    "Watcher",
    "WeightAudit",
    "_auto_filter_for_recipe",
    "_auto_filter_for_rowwise",
    "_auto_filter_for_tensorwise",
    "amax_state_dict",
    "async_tp_reason",
    "audit",
    "cast_input",
    "census",
    "check_plan",
    "convert_experts_to_float8",
    "convert_to_float8_training",
    "convert_to_high_precision",
    "count_matmuls",
    "dense_layers_only",
    "grouped_mm",
    "load_amax_state_dict",
    "microbatches",
    "pad_groups",
    "precompute_float8_dynamic_scale_for_fsdp",
    "quantize",
    "scaled_linear",
    "scaled_mm",
    "update_scales",
    "verify",
    "watch",
]

_LAZY = {
    # It imports torch.distributed.tensor, which takes longer than all the rest of fp8core
    "distributed.tensor_parallel": (
        "Float8ColwiseParallel",
        "Float8RowwiseParallel",
        "PrepareFloat8ModuleInput",
        "async_tp_reason",
        "check_plan",
    ),
    "distributed.waited": ("WaitedRowwiseParallel",),
    # What proves, counts and watches, without which the library works
    "proof.audit": ("Audit", "LayerAudit", "audit"),
    "proof.cast_records": ("CastRecord",),
    "proof.expert_rows": ("ExpertsAudit",),
    "proof.flops": ("Matmul", "MatmulCount", "MatmulCounter", "count_matmuls"),
    "proof.other_weights": ("WeightAudit",),
    "proof.verify": ("Census", "Proof", "StepProof", "census", "verify"),
    "proof.watcher": ("Watcher", "watch"),
}


def __getattr__(name: str) -> object:
    """Import a name of `_LAZY` at its first use."""
    for module, names in _LAZY.items():
        if name in names:
            from importlib import import_module

            value = globals()[name] = getattr(import_module(f"fp8core.{module}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
