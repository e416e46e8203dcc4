"""The way back: a model that was converted to FP8 becomes the high-precision model that it was."""

from __future__ import annotations

from torch import nn

from fp8core.arguments import check_type, is_dtensor
from fp8core.distributed.fsdp_state import is_sharded_by_fsdp
from fp8core.distributed.weight_shard import WeightShard
from fp8core.experts.interface import take_back
from fp8core.experts.moe import GroupedMatmul
from fp8core.linear import Float8Linear
from fp8core.replace import keep_from_fast_path, take_over


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Puts the layers back whose place Float8Linear took, and lets experts multiply in high precision.

        model = convert_to_high_precision(model)        # then export it, or torchao's quantize_(model, ...)

    Each layer has the class that it had before conversion, the trained parameters themselves, its hooks and whatever
    attributes were set on it. Amaxes of delayed scaling are dropped. A Float8Linear that was never an nn.Linear becomes
    one.

    Args:
        module: any model; changed in place, except when it is itself a Float8Linear. One without FP8 is left alone.

    Returns:
        The model; the new layer if `module` is a Float8Linear.

    Raises:
        ValueError: `fully_shard` or `parallelize_module` was applied: save a full state_dict and load it into the plain
            model, which takes it strictly.
        TypeError: no module.
    """
    check_type("module", module, nn.Module, "convert_to_high_precision(model)")
    layers = {m: fqn or "the model" for fqn, m in module.named_modules() if isinstance(m, Float8Linear)}
    cut = [fqn for layer, fqn in layers.items() if is_dtensor(layer.weight)]
    if layers and (cut or is_sharded_by_fsdp(module)):
        raise ValueError(
            f"{cut[0] if cut else 'the model'} is sharded, and a new layer would not have what shards it; gather a full "
            "state_dict and load it into the unconverted model, which takes it strictly"
        )
    unwrapped: dict[int, nn.Parameter] = {}  # a weight shared by layers stays shared
    plain = {layer: _plain(layer, unwrapped) for layer in layers}
    for product in module.modules():
        if isinstance(product, GroupedMatmul):
            product.recipe = None
    for experts in list(module.modules()):
        take_back(experts)
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, Float8Linear):
                setattr(parent, name, plain[child])
    keep_from_fast_path(module)
    return plain[module] if isinstance(module, Float8Linear) else module


def _plain(layer: Float8Linear, unwrapped: dict[int, nn.Parameter]) -> nn.Linear:
    """The layer's parameters in a layer of the class that it was; its initialisation does not run."""
    kind = layer.converted_from
    linear = kind.__new__(kind)
    nn.Module.__init__(linear)
    if isinstance(linear, nn.Linear):
        linear.in_features, linear.out_features = layer.in_features, layer.out_features
    take_over(linear, layer, drop_hooks_of="fp8core")
    weight = linear.weight
    if isinstance(weight, WeightShard):
        if id(weight) not in unwrapped:
            unwrapped[id(weight)] = nn.Parameter(weight.hp.detach(), requires_grad=weight.requires_grad)
        linear.weight = unwrapped[id(weight)]
    return linear
