"""The native encoder, carried out by a model of the PTX ISA: what the GPU computes by the assembly that it is given."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import ptx_model
import pytest
import torch

from fp8core import cast
from fp8core.formats import E4M3FN, E5M2, Format
from fp8core.kernels import encode, quads

FORMATS = pytest.mark.parametrize("fmt", [E4M3FN, E5M2], ids=lambda f: f.name)
ASM = {"e4m3fn": encode.E4M3_ASM.value, "e5m2": encode.E5M2_ASM.value}
ORACLES = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def natively(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes by the assembly of the native encoder, four at a time."""
    (words,) = ptx_model.run(ASM[fmt.name], 1, list(x.reshape(-1, 4).T))
    return words.astype("<u4")[:, None].view(np.uint8).reshape(-1)


@FORMATS
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_codes_of_the_native_encoder(
    kind: str, fmt: Format, all_bf16: torch.Tensor, hard_float32: torch.Tensor
) -> None:
    """Oracles: ml_dtypes for the rounding of whatever is in range, with magnitudes beyond and Inf brought to the largest
    finite value first, which is the library's contract (OFP8 "SAT"); and `cast_saturating`, which states it."""
    every = {"bfloat16": all_bf16, "float16": all_bf16.view(torch.float16)}.get(kind)
    values = hard_float32 if every is None else every.reshape(-1).float()
    x = values[: len(values) // 4 * 4].numpy()
    got = natively(x, fmt)
    with np.errstate(invalid="ignore"):
        want = np.clip(x, -fmt.max, fmt.max).astype(ORACLES[fmt.name]).view(np.uint8)
    nan = np.isnan(x)
    assert (got[~nan] == want[~nan]).all()
    assert (got[nan] == 0x7F).all()
    contract = cast.cast_saturating(torch.from_numpy(x), fmt).view(torch.uint8).numpy()
    assert (got[~nan] == contract[~nan]).all()
    assert np.isnan(contract[nan].view(ORACLES[fmt.name]).astype(np.float32)).all()


def test_words_are_the_transposed_bytes() -> None:
    """Oracle: NumPy's transposition of all-different bytes: row i in register i, column j in word j."""
    rows = np.arange(16, dtype=np.uint8).reshape(4, 4)
    registers = [np.array([int.from_bytes(row.tobytes(), "little")], np.uint32) for row in rows]
    words = ptx_model.run(quads.WORDS_ASM.value, 4, registers)
    found = np.array([[word[0] >> (8 * i) & 0xFF for i in range(4)] for word in words])
    np.testing.assert_array_equal(found, rows.T)
