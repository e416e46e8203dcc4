"""Costs of other libraries' layers. Oracle: torchao itself, whose operators are counted one by one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.advise.casts import ENGINE, TENSORS, TORCHAO
from harness.advise.libraries import EAGER_CAST_AO, EAGER_KERNELS_AO, candidates, unavailable
from harness.peers.torchao import linear, missing
from harness.store.errors import UsageError

M, K, N = 256, 128, 512
SIZES = {"input": M * K, "weight": K * N, "grad_output": M * N}
# Views, products and copies of codes; what is left are the operators of casts
_OTHER = ("view", "detach", ".t.", "transpose", "mm", "empty", "as_strided", "alias", "clone")


class _Bytes(TorchDispatchMode):
    """Bytes that plain operators read and write, and their number, by the elements of their largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[int] = Counter()
        self.calls: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in (*args, result) if isinstance(part, torch.Tensor)]
        plain = all(type(part) in (torch.Tensor, nn.Parameter) for part in tensors)
        if plain and tensors and not any(word in str(func) for word in _OTHER):
            size = max(part.numel() for part in tensors)
            whole = [part for part in tensors if part.numel() == size]
            self.bytes[size] += sum(part.numel() * part.element_size() for part in whole)
            self.calls[size] += 1
        return result


@pytest.mark.skipif(missing("cpu") is not None, reason="torchao is not installed")
@pytest.mark.parametrize("recipe", list(candidates(TORCHAO, compiled=False)))
def test_bytes_of_torchaos_eager_casts_are_those_of_its_operators(recipe: str) -> None:
    layer = linear(nn.Linear(K, N, bias=False).to(torch.bfloat16), recipe)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    with _Bytes() as forward:
        y = layer(x)
    grad = torch.randn_like(y)
    with _Bytes() as backward:
        y.backward(grad)
    found = candidates(TORCHAO, compiled=False)[recipe]
    for tensor in TENSORS:
        size, cast = SIZES[tensor], found.casts[tensor]
        counted = (forward.bytes[size] + backward.bytes[size]) / size
        assert cast.streamed == counted
        assert cast.forward == forward.bytes[size] / size
        calls = forward.calls[size] + backward.calls[size]
        assert calls == EAGER_KERNELS_AO * round(counted / EAGER_CAST_AO)
        assert cast.kernels >= calls


def test_where_a_library_cannot_run() -> None:
    with pytest.raises(UsageError, match="take mode=eager"):
        candidates(ENGINE, compiled=True)
    assert "NVIDIA" in unavailable(ENGINE, "tensorwise", "gfx942", compiled=False)
    assert "8.9" in unavailable(ENGINE, "blockwise", "8.9", compiled=False)
    assert unavailable(TORCHAO, "tensorwise", "gfx942", compiled=False) == ""
    assert "12.0" in unavailable(TORCHAO, "rowwise", "12.0", compiled=True)
