"""torchao_compat: code that imports torchao.float8 gets fp8core, in processes of their own, and can go back."""

from __future__ import annotations

import importlib
import sys
import textwrap

import forked
import pytest

USER = """
    import torch
    from torchao.float8 import (CastConfig, Float8LinearConfig, Float8LinearRecipeName, ScalingType, FP8Granularity,
        _auto_filter_for_recipe, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp)
    from torchao.float8.config import ScalingGranularity, e4m3_dtype
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_linear_utils import convert_to_float8_training as same
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
    from torchao.float8.fsdp_utils import precompute_float8_dynamic_scale_for_fsdp
    import torchao.float8.types
    import torchao
    assert same is convert_to_float8_training
    model = torch.nn.Sequential(torch.nn.Linear(4096, 2048), torch.nn.Linear(2048, 16))
    config = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(model, config=config, module_filter_fn=_auto_filter_for_recipe("tensorwise", ["head"]))
    assert isinstance(model[0], Float8Linear) and not isinstance(model[1], Float8Linear)
    assert model[0].config.cast_config_input.target_dtype == e4m3_dtype
    model(torch.randn(16, 4096)).sum().backward()
    precompute_float8_dynamic_scale_for_fsdp(model)
    library = Float8Linear.__module__.partition(".")[0]
"""
INSTALL = """
    import fp8core.torchao_compat as compat
    compat.install()
    compat.install()
"""


def run(*parts: str) -> None:
    """Each in turn in one fresh interpreter."""
    code = "\n".join(textwrap.dedent(part) for part in parts)
    done = forked.run(["-c", code])
    assert done.returncode == 0, done.stderr


def test_code_written_for_torchao_runs_and_gets_fp8core() -> None:
    run(
        INSTALL,
        USER,
        """
        assert library == "fp8core" and torchao.__version__ == "0.18.0+fp8core"
        import importlib.util
        assert importlib.util.find_spec("torchao") and importlib.util.find_spec("torchao.float8")
        try:
            from torchao.float8 import Float8TrainingTensor
        except ImportError as error:
            assert "torchao_compat.py" in str(error), error
        else:
            raise AssertionError
        try:
            import torchao.quantization
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
        compat.uninstall()
        compat.uninstall()
        import sys
        assert not [name for name in sys.modules if name.partition(".")[0] == "torchao"]
        """,
    )


def test_the_real_torchao_is_refused_or_lives_beside() -> None:
    """Oracle: torchao's own quantize_, on a model that fp8core converted and turned back."""
    pytest.importorskip("torchao")
    run(
        """
        import torchao.float8
        real = torchao.float8.convert_to_float8_training
        import fp8core.torchao_compat as compat
        try:
            compat.install()
        except RuntimeError as error:
            assert "is imported already" in str(error) and "install(beside_torchao=True)" in str(error)
        else:
            raise AssertionError
        assert compat._installed is None
        compat.install(beside_torchao=True)
        """,
        USER,
        """
        assert library == "fp8core"
        from torchao.float8.float8_utils import compute_error
        import torchao.float8.inference
        of_torchao = {"__name__": "torchao.prototype.moe_training.utils"}
        exec("from torchao.float8.config import ScalingGranularity as G", of_torchao)
        exec("from torchao.float8.float8_utils import tensor_to_scale as scale", of_torchao)
        exec("from torchao.float8.float8_linear import matmul_with_hp_or_float8_args", of_torchao)
        assert of_torchao["G"] is not ScalingGranularity
        of_torchao["scale"](torch.randn(4, 4), e4m3_dtype, scaling_granularity=of_torchao["G"].AXISWISE, axiswise_dim=-1)
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        import fp8core
        x = torch.randn(4, 4096)
        fp8core.convert_to_high_precision(model)
        expected = model(x)
        quantize_(model, Int8WeightOnlyConfig())
        assert compute_error(expected, model(x)) > 30
        compat.uninstall()
        assert torchao.float8.convert_to_float8_training is real
        from torchao.float8.float8_linear import Float8Linear
        assert Float8Linear.__module__.startswith("torchao")
        """,
    )


def test_without_torchao_there_is_nothing_to_live_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    compat = importlib.import_module("fp8core.torchao_compat")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ImportError, match="torchao"):
        compat.install(beside_torchao=True)
    assert compat._installed is None


def test_the_filter_answers_as_torchaos() -> None:
    """Oracle: torchao's, on sizes around each of its thresholds, names included."""
    theirs = pytest.importorskip("torchao.float8")
    import torch
    from torch import nn

    from fp8core import Float8LinearRecipeName, FP8Granularity, _auto_filter_for_recipe

    sizes = [s + d for s in (16, 1024, 2048, 4096) for d in (-16, 0, 8, 16)]
    for recipe in ("tensorwise", "rowwise"):
        ours, other = (f(recipe, ["head"]) for f in (_auto_filter_for_recipe, theirs._auto_filter_for_recipe))
        with torch.device("meta"):
            for layer in (nn.Linear(k, n) for k in sizes for n in sizes if k and n):
                for fqn in ("layers.0.q", "lm_head.0"):
                    assert ours(layer, fqn) == other(layer, fqn)
        assert not ours(nn.ReLU(), "q")
    assert _auto_filter_for_recipe(Float8LinearRecipeName.ROWWISE, [])
    for function in (_auto_filter_for_recipe, theirs._auto_filter_for_recipe):
        with pytest.raises(NotImplementedError, match=r"(?i)rowwise_with_gw_hp"):
            function("rowwise_with_gw_hp", [])
        with pytest.raises(ValueError, match="fast"):
            function("fast", [])
    assert str(FP8Granularity) == str(theirs.FP8Granularity)
