"""What FP8 matrix units demand of operands, as questions that need no GPU.

`torch._scaled_mm` on CPU accepts nearly anything, so code that was only run there would fail on the first
GPU. These functions state the rules in Python and are asked on every device, so that a CPU run shows the same
errors. For D [M, N] = A [M, K] @ B [K, N]:

    A row-major, B column-major      the only orientation that Hopper's FP8 units take
    K and N multiples of 16          M is free
    no e5m2 @ e5m2                   except on ROCm
    rowwise: D is bfloat16, B e4m3   the CUTLASS kernel's rule; cuBLAS 12.9 on sm_90 alone is wider, and a
                                     result that depends on the machine is worth less than a conversion
    blocks (1x128, 128x128, 1x32)    not through backend "torch", see `granularity_reason`
    e2m1                             not through backend "torch", see `four_bit_reason`
    NVIDIA 8.9 or newer (OCP formats), AMD gfx942 (fnuz only), gfx950, gfx1200, gfx1201 (OCP)

Sources: ATen `native/cuda/ScaledBlas.cpp` (`_scaled_mm_out_cuda`, `_scaled_mm_allowed_device`),
`native/cuda/RowwiseScaledMM.cuh` (`check_inputs`), and the meta function `_check_scaled_mm_sizes` of torch
2.13, against which the tests compare these rules.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.torch_version import TorchVersion

from fp8core.formats import E2M1FN, E4M3FN, E4M3FNUZ, E5M2FNUZ, E8M0FNU, Format, as_element_format
from fp8core.scaling import BLOCKS
from fp8core.scaling import Operand as Operand

# On a CPU torch 2.11 asserts internally where scales are of rows; 2.12 was not tried
CPU_TAKES_ONE_SCALE = TorchVersion(torch.__version__) < "2.13"
MULTIPLE = 16  # elements; 16 bytes, the vector that the FP8 units load
MIN_CAPABILITY = (8, 9)
OUT_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
_FNUZ = (E4M3FNUZ, E5M2FNUZ)
_ROCM_ARCHS = ("gfx942", "gfx950", "gfx1200", "gfx1201")


class Scaled(Protocol):
    """A quantised matrix: `fp8core.Float8Tensor`, or the plain `Operand`."""

    @property
    def qdata(self) -> torch.Tensor:
        """FP8 codes, 2-dimensional."""
        ...

    @property
    def scale_inv(self) -> torch.Tensor:
        """Decoding scales, of one of the shapes that `fp8core.gemm.scaled_mm` lists."""
        ...


def transposed(x: Scaled) -> Operand:
    """The matrix transposed: views of codes and scales, as `Float8Tensor.t()` without its way through the dispatcher."""
    scale_inv = x.scale_inv.t() if x.scale_inv.dim() else x.scale_inv
    return Operand(x.qdata.t(), scale_inv, getattr(x, "tensor_scale_inv", None))


def is_row_major(t: torch.Tensor) -> bool:
    """True if neighbours in a row of the matrix are neighbours in memory, as torch's meta function asks."""
    rows, columns = t.stride()
    return (columns == 1 and rows > 1) or 0 in t.shape


def granularity_of(
    a: torch.Size,
    b: torch.Size,
    scale_inv_a: torch.Size,
    scale_inv_b: torch.Size,
    scale_dtype: torch.dtype,
) -> str:
    """The multiplication's granularity, from scales of one kind as `fp8core.gemm.scaled_mm` lists them; "1x128" for any blocks."""
    if scale_dtype == E8M0FNU.dtype:
        return "1x32"
    if scale_dtype == E4M3FN.dtype:
        return "1x16"
    if len(scale_inv_a) == 0:
        return "tensorwise"
    per_row = scale_inv_a == (a[0], 1) and scale_inv_b == (1, b[1])
    return "rowwise" if per_row else "1x128"


def is_four_bit(fmt: Format | torch.dtype | str) -> bool:
    """Whether a format is e2m1, or a dtype that of its codes, two a byte."""
    return getattr(fmt, "dtype", fmt) in (torch.uint8, E2M1FN.dtype, E2M1FN.name)


def four_bit_reason(*formats: Format | torch.dtype | str) -> str | None:
    """Why no hardware multiplies these formats here, if e2m1 is among them.

    `torch.nn.functional.scaled_mm` has products of e2m1 for compute capability 10.0, with scales by 16 or 32 that lie swizzled
    (torch 2.13). Nothing here has run there, so they are not used.
    """
    if not any(map(is_four_bit, formats)):
        return None
    return f"no backend multiplies e2m1 on hardware here; {way_out('')}"


def block_reason(
    K: int, a_fmt: Format | torch.dtype | str, b_fmt: Format | torch.dtype | str, granularity: str
) -> str | None:
    """Why e2m1 takes no contracted dimension of this size; None if it does, or is not among the formats."""
    block = BLOCKS.get(granularity, 1)
    if not K % block or not (is_four_bit(a_fmt) or is_four_bit(b_fmt)):
        return None
    return (
        f"K={K} (contracted dimension) is not a multiple of {block}, the block of e2m1's scales; pad the tensor, or leave this "
        "GEMM in high precision"
    )


def shape_reason(
    M: int,
    K: int,
    N: int,
    a_fmt: Format | torch.dtype | str,
    b_fmt: Format | torch.dtype | str,
    granularity: str = "tensorwise",
    out_dtype: torch.dtype = torch.bfloat16,
) -> str | None:
    """Why no FP8 device could compute A [M, K] @ B [K, N]; None if one could."""
    if reason := four_bit_reason(a_fmt, b_fmt):
        return reason
    a_fmt, b_fmt = as_element_format(a_fmt), as_element_format(b_fmt)
    if M < 0 or K < 0 or N < 0:  # `min` of them is a guard on an open size, and export refuses it
        return f"M={M}, K={K}, N={N}: a matrix has no negative size"
    for name, size, what in (("K", K, "contracted dimension"), ("N", N, "columns of B")):
        if size % MULTIPLE:
            return (
                f"{name}={size} ({what}) is not a multiple of {MULTIPLE}, which FP8 matmul needs; "
                "pad it (pad_inner_dim=True) or leave this GEMM in high precision"
            )
    if a_fmt.short == b_fmt.short == "e5m2" and torch.version.hip is None:
        return "e5m2 @ e5m2 has no kernel on NVIDIA hardware; cast one operand to e4m3"
    if reason := out_dtype_reason(out_dtype):
        return reason
    kind = {"rowwise": "rowwise", "1x128": "blockwise", "128x128": "blockwise"}.get(granularity)
    if kind is not None and out_dtype != torch.bfloat16:
        return f"{kind} scaling yields bfloat16 only, not {out_dtype}; ask for bfloat16 and convert"
    if kind == "rowwise" and b_fmt.short != "e4m3":
        return (
            f"rowwise scaling takes e4m3 as right operand, not {b_fmt.short}; put {b_fmt.short} on the left"
        )
    return None


def out_dtype_reason(out_dtype: torch.dtype) -> str | None:
    """Why no FP8 matmul yields this dtype; None if one does."""
    if out_dtype in OUT_DTYPES:
        return None
    return f"out_dtype {out_dtype} is not offered; ask for bfloat16, float16 or float32 and convert"


def device_reason(
    device: torch.device | str, a_fmt: Format | torch.dtype | str, b_fmt: Format | torch.dtype | str
) -> str | None:
    """Why this device has no FP8 matmul for these formats; None if it has, or if it is a CPU (which does)."""
    if reason := four_bit_reason(a_fmt, b_fmt):
        return reason
    device = torch.device(device)
    formats = (as_element_format(a_fmt), as_element_format(b_fmt))
    fnuz = [f.name for f in formats if f in _FNUZ]
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"no FP8 matmul on device type {device.type!r}; use cuda, or backend='reference'"
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device is visible; use device='cpu', or backend='reference'"
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        if arch not in _ROCM_ARCHS:
            return (
                f"{arch} has no FP8 matmul; it needs one of {', '.join(_ROCM_ARCHS)}, or backend='reference'"
            )
        if (arch == "gfx942") != (len(fnuz) == len(formats)):
            wanted = "fnuz" if arch == "gfx942" else "OCP (e4m3fn, e5m2)"
            return f"{arch} multiplies {wanted} formats, not {' @ '.join(f.name for f in formats)}"
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; FP8 "
            "matmul needs 8.9 (Ada) or newer; use bf16, or backend='reference' to emulate"
        )
    if fnuz:
        return f"{', '.join(fnuz)} is AMD MI300's; NVIDIA hardware multiplies e4m3fn and e5m2"
    return None


def granularity_reason(device: torch.device | str, granularity: str, nearest: str = "") -> str | None:
    """Why backend "torch" takes no scales of this granularity; None if it does.

    cuBLAS has kernels for blocks on some devices: 1x128 and 128x128 on compute capability 9.0 with CUDA 12.9, 1x32
    with swizzled scales on 10.0. Their layouts of scales could not be checked on hardware, so they are not used.

    Args:
        device: where it would run.
        granularity: of the multiplication.
        nearest: a recipe to name as the way out.
    """
    kind = torch.device(device).type
    taken = {"tensorwise"} if kind == "cpu" and CPU_TAKES_ONE_SCALE else {"tensorwise", "rowwise"}
    if granularity in taken:
        return None
    instead = (
        ""
        if granularity in ("1x32", "1x16", "16x16")
        else "recipe.with_backend('triton') multiplies these; or "
    )
    return f"backend 'torch' has no kernel for {granularity} scales on {kind}; " + instead + way_out(nearest)


def way_out(nearest: str) -> str:
    """What to do where a backend lacks a recipe: the nearest one, if there is one, or emulation."""
    substitute = f"nearest that works: recipe {nearest!r}; or " if nearest else ""
    return f"{substitute}emulate it with recipe.emulated() (backend='reference')"


def layout_reason(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why these codes cannot be multiplied as they lie in memory; None if they can."""
    rows, columns = a.stride(), b.stride()
    # Spelled out: it is asked three times a step
    if rows[1] == columns[0] == 1 and rows[0] > 1 and columns[1] > 1:
        return None
    if not is_row_major(a):
        return (
            f"A must be row-major, got shape {tuple(a.shape)} with strides {a.stride()}; use a.contiguous()"
        )
    if not is_row_major(b.t()):
        return (
            f"B must be column-major, got shape {tuple(b.shape)} with strides {b.stride()}; "
            "use b.t().contiguous().t()"
        )
    return None


def padded(left: Operand, right: Operand) -> tuple[Operand, Operand]:
    """Lines [m, k] and [n, k] whose k and n are filled up to multiples of 16 with code 0, which is zero in every format.

    The first n columns of left @ right.t() are unchanged, bit for bit; the rest is zero.
    """
    (n, k), scale_inv = right.qdata.shape, right.scale_inv
    more_n, more_k = -n % MULTIPLE, -k % MULTIPLE
    if scale_inv.dim() and scale_inv.shape[0] == n:  # one for each line
        scale_inv = nn.functional.pad(scale_inv, (0, 0, 0, more_n))
    left = Operand(_pad_codes(left.qdata, 0, more_k), left.scale_inv)
    return left, Operand(_pad_codes(right.qdata, more_n, more_k), scale_inv)


def row_major(codes: torch.Tensor) -> torch.Tensor:
    """The codes, copied if they lie otherwise."""
    rows, columns = codes.stride()
    return codes if columns == 1 < rows else codes.clone(memory_format=torch.contiguous_format)


def _pad_codes(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Appends rows and columns of code 0; through uint8, since FP8 dtypes have no fill."""
    if rows == columns == 0:
        return codes
    return nn.functional.pad(codes.view(torch.uint8), (0, columns, 0, rows)).view(codes.dtype)


def grouped_shape(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> tuple[int, ...]:
    """Shape of a grouped product: [T, N] of rows, or [E, M, N] of groups; see `fp8core.gemm.grouped`."""
    if b.dim() == 3:
        return a.shape[0], b.shape[2]
    return offsets.shape[0], a.shape[0], b.shape[1]


def with_padding(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """The offsets with the rows of padding in the last group; without a wait for the device."""
    count = offsets.shape[0] - 1
    return torch.cat((offsets.narrow(0, 0, count), torch.full_like(offsets.narrow(0, count, 1), rows)))
