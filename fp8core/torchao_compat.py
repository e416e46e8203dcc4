"""Lets code that imports `torchao.float8` run on fp8core, unchanged.

    import fp8core.torchao_compat
    fp8core.torchao_compat.install()
    from torchao.float8 import convert_to_float8_training           # fp8core's

Code of your own needs no more than another import: `from fp8core import convert_to_float8_training`. This is for code
that you don't edit, such as a trainer's. `docs/migrate-from-torchao.md` has a line for each of torchao's public names.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import fp8core
from fp8core.distributed.weight_shard import WeightShard
from fp8core.formats import native_pair

FOLLOWS = "0.18.0"  # the torchao whose names these are
_CONFIG = (
    "CastConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
    "Float8LinearRecipeName",
    "ScalingGranularity",
    "ScalingType",
)
NAMES: dict[str, tuple[str, ...]] = {  # by module: what each takes from fp8core
    "torchao.float8": (
        *_CONFIG,
        "FP8Granularity",
        "_auto_filter_for_recipe",
        "convert_to_float8_training",
        "precompute_float8_dynamic_scale_for_fsdp",
    ),
    "torchao.float8.config": _CONFIG,
    "torchao.float8.float8_linear": ("Float8Linear",),
    "torchao.float8.float8_linear_utils": (
        "_auto_filter_for_recipe",
        "_auto_filter_for_rowwise",
        "_auto_filter_for_tensorwise",
        "convert_to_float8_training",
    ),
    "torchao.float8.float8_tensor_parallel": (
        "Float8ColwiseParallel",
        "Float8RowwiseParallel",
        "PrepareFloat8ModuleInput",
    ),
    "torchao.float8.fsdp_utils": ("precompute_float8_dynamic_scale_for_fsdp",),
    "torchao.float8.types": ("FP8Granularity",),
}


class _StandIn(ModuleType):
    """A module that has fp8core's names for whoever imports them. Beside torchao it has torchao's own for torchao's other modules, in
    which functions of torchao's compare with enums of torchao's.

    Its file is this one, so that "cannot import name" says where the name was looked for.
    """

    def __init__(self, name: str, held: dict[str, Any], theirs: ModuleType | None = None) -> None:
        super().__init__(name, f"Names of {name}, made by {__name__}.install().")
        spec = ModuleSpec(name, None, origin=__file__)
        vars(self).update(__spec__=spec, __file__=__file__, __all__=sorted(held), _held=held, _theirs=theirs)

    def __getattr__(self, name: str) -> Any:
        importer = str(sys._getframe(1).f_globals.get("__name__"))
        if self._theirs is not None and importer.partition(".")[0] == "torchao":
            return getattr(self._theirs, name)
        if name not in self._held:
            raise AttributeError(f"module {self.__name__!r} of {__file__} has no attribute {name!r}")
        return self._held[name]


@dataclass
class _Installed:
    """What `uninstall` undoes: our modules, and torchao's own that they took the place of."""

    modules: dict[str, _StandIn]
    replaced: dict[str, ModuleType] = field(default_factory=dict)
    torchao: ModuleType | None = None


_installed: _Installed | None = None


def install(beside_torchao: bool = False) -> None:
    """Puts modules that hold fp8core's names in `sys.modules`, as `torchao.float8` and its public submodules.

    What is imported from then on is fp8core's; names of fp8core's that torchao has not are not added. Calling it again
    changes nothing.

    Args:
        beside_torchao: False: `torchao` itself is a stand-in that holds `float8` alone. True: the real torchao is
            imported and stays, its `quantize_` included, and only `torchao.float8` and the submodules of `NAMES` are
            replaced; names that something has imported already, and those that torchao's own modules import, stay torchao's.

    Raises:
        RuntimeError: the real torchao is imported already, and `beside_torchao` is False.
        ImportError: `beside_torchao`, and there is no torchao.
    """
    global _installed
    if _installed is not None:
        return
    present = sys.modules.get("torchao")
    if present is not None and not beside_torchao:
        raise RuntimeError(
            f"torchao {getattr(present, '__version__', 'of unknown version')} is imported already, and code that holds its "
            "names would go on using them; call install() before anything imports torchao, or "
            "install(beside_torchao=True) to replace torchao.float8 for what is imported from now on"
        )
    real = importlib.import_module("torchao") if beside_torchao else None
    found = [name for name in NAMES if find_spec(name)] if beside_torchao else []  # versions differ
    theirs = {name: importlib.import_module(name) for name in found}
    package = theirs.get("torchao.float8")
    modules = {name: _StandIn(name, _held_by(name), theirs.get(name)) for name in NAMES}
    float8 = modules["torchao.float8"]
    float8.__path__ = (
        [] if package is None else package.__path__
    )  # torchao's other submodules stay importable
    if real is None:
        top = modules["torchao"] = _StandIn("torchao", {})
        top.__path__ = []
        vars(top)["__version__"] = f"{FOLLOWS}+fp8core"
    state = _Installed(modules, torchao=real)
    state.replaced = {name: sys.modules[name] for name in modules if name in sys.modules}
    if package is not None:
        for name in [name for name in sys.modules if name.startswith("torchao.float8.")]:
            setattr(float8, name.rpartition(".")[2], sys.modules[name])
    for name, module in modules.items():
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent] if parent not in modules else modules[parent], child, module)
    _installed = state


def uninstall() -> None:
    """Undoes `install`: the next import finds the real torchao, if there is one. Names imported already stay fp8core's."""
    global _installed
    if _installed is None:
        return
    for name, module in _installed.modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]
    sys.modules.update(_installed.replaced)
    if _installed.torchao is not None:
        vars(_installed.torchao)["float8"] = _installed.replaced["torchao.float8"]
    _installed = None


def _held_by(name: str) -> dict[str, Any]:
    held: dict[str, Any] = {attribute: getattr(fp8core, attribute) for attribute in NAMES[name]}
    if name == "torchao.float8.config":
        e4m3, e5m2 = native_pair()
        held |= {"e4m3_dtype": e4m3.dtype, "e5m2_dtype": e5m2.dtype}
    if name == "torchao.float8.fsdp_utils":
        held["WeightWithDynamicFloat8CastTensor"] = WeightShard  # accelerate looks for weights of this class
    return held
