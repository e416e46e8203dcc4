"""What the kernels become on sm_89, sm_90, sm_100 and sm_120: compiled here, without a GPU, and read.

Every launcher is run on CPU tensors for a device that is only claimed. What it would launch - kernel, argument
types, alignment, constants, warps, stages - is recorded and compiled by Triton and its ptxas; a tuned operator
offers all its candidates. Oracle: the PTX ISA's names, and `cuobjdump`'s count of stack and local memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8core.kernels import launch, launchers, tuning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(launch.INTERPRETED, reason="an interpreted kernel cannot be compiled"),
]
E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
TARGETS = (89, 90, 100, 120)
READ = (89, 90, 100)  # whose instructions are asserted; sm_120 only has to build
M, K, N = 4096, 2048, 1024
TYPES = {
    torch.float32: "fp32",
    BF16: "bf16",
    torch.uint8: "u8",
    torch.int32: "i32",
    E4M3: "fp8e4nv",
    E5M2: "fp8e5",
}
DUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Launch(NamedTuple):
    """A recorded launch: hashable, so that each is compiled once."""

    kernel: Any
    signature: tuple[tuple[str, str], ...]
    aligned: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


class Built(NamedTuple):
    ptx: str
    registers: int
    stack: int
    local: int


def type_name(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return "*" + TYPES[arg.dtype]
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<{TYPES[arg.base.dtype]}{list(arg.block_shape)}>"
    return "fp32" if isinstance(arg, float) else "i32"


@cache
def build(recorded: Launch, capability: int) -> Built:
    """PTX and resource usage."""
    signature, constants = dict(recorded.signature), dict(recorded.constants)
    attributes = {(i,): [["tt.divisibility", 16]] for i in recorded.aligned}
    source = ASTSource(fn=recorded.kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    built = triton.compile(source, target=target, options=dict(recorded.options))
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(built.asm["cubin"])
        done = subprocess.run([DUMP, "-res-usage", cubin], capture_output=True, text=True, check=True)
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout)
    assert usage, done.stdout
    return Built(built.asm["ptx"], *(int(n) for n in usage.groups()))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Sequence[Any]], list[Launch]]:
    """launches(operator, capability, args): what its launcher starts on such a device, all candidates included."""

    def record_all(name: str, capability: int, args: Sequence[Any]) -> list[Launch]:
        found: list[Launch] = []

        def record(
            kernel: Any,
            grid: tuple[int, ...],
            *args: Any,
            device: torch.device,
            num_warps: int = 8,
            num_stages: int = 2,
            fp_fusion: bool = False,
            **constants: Any,
        ) -> None:
            named = dict(zip(kernel.arg_names, map(type_name, args), strict=False)) | dict.fromkeys(
                constants, "constexpr"
            )
            assert list(named) == kernel.arg_names, "arguments of the launch are not those of the kernel"
            aligned = [i for i, arg in enumerate(args) if not isinstance(arg, (int, float)) or arg % 16 == 0]
            aligned = [i for i in aligned if not isinstance(args[i], (float, TensorDescriptor))]
            options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": fp_fusion}
            found.append(
                Launch(
                    kernel,
                    tuple(named.items()),
                    tuple(aligned),
                    tuple(constants.items()),
                    tuple(options.items()),
                )
            )

        def all_of(*args: Any) -> tuning.Candidate:
            *others, last = args[4]
            for candidate in others:
                args[5](candidate)
            return last

        target = launch.Target(capability, 132, launch.native_cast(capability), f"sm_{capability}")
        monkeypatch.setattr(launch, "launch", record)
        monkeypatch.setattr(launch, "target_of", lambda device: target)
        monkeypatch.setattr(tuning, "choose", all_of)
        launchers.LAUNCHERS[name](*args)
        assert found
        return found

    return record_all


def x(dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(M, K, dtype=dtype)


ONE = torch.ones(())
CASTS: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
    "cast": lambda dtype: (x(), ONE, dtype, False),
    "cast_both": lambda dtype: (x(), ONE, dtype, True),
    "cast_delayed": lambda dtype: (x(), ONE, dtype, False, 0),
    "cast_delayed_both": lambda dtype: (x(), ONE, dtype, True, 1),
    "cast_rowwise": lambda dtype: (x(), dtype, True),
    "cast_rowwise_both": lambda dtype: (x(), dtype, True),
    "cast_1x128": lambda dtype: (x(), dtype, False),
    "cast_1x128_both": lambda dtype: (x(), dtype, False),
    "cast_128x128_both": lambda dtype: (x(), dtype, False),
    "cast_mx": lambda dtype: (x(), dtype, "rceil"),
    "cast_mx_both": lambda dtype: (x(), dtype, "even"),
    "rms_norm_cast_delayed": lambda dtype: (x(), x()[0], 1e-5, ONE, dtype, False, 0),
    "rms_norm_cast_rowwise": lambda dtype: (x(), x()[0], 1e-5, dtype, True),
    "swiglu_cast_delayed_both": lambda dtype: (x(), x(), ONE, dtype, False, 0),
}
OTHERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "amax": lambda: (x(),),
    "amax_rows_cols": lambda: (x(),),
    "rms_norm": lambda: (x(), x()[0], 1e-5),
    "rms_norm_amax": lambda: (x(), x()[0], 1e-5),
    "rms_norm_backward": lambda: (x(), x(), x()[0], torch.ones(M, 1)),
    "swiglu": lambda: (x(), x()),
    "swiglu_amax": lambda: (x(), x()),
    "swiglu_backward": lambda: (x(), x(), x()),
    "swiglu_backward_amax": lambda: (x(), x(), x()),
}


def assert_wide_and_unspilled(built: Built, stores_tensors: bool = True) -> None:
    """No spill; tensors are read and written 16 bytes at a time, and nothing is stored byte by byte."""
    assert (built.stack, built.local) == (0, 0), f"spills: {built.stack} B stack, {built.local} B local"
    assert re.search(r"ld\.global\S*\.v4\.b32", built.ptx)
    assert not re.search(r"ld\.global\S*\.(?:b|u)(?:8|16)\b", built.ptx)
    if stores_tensors:
        assert re.search(r"st\.global\S*\.v4\.b32", built.ptx)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", CASTS)
def test_casts(name: str, dtype: torch.dtype, launches: Callable[..., list[Launch]]) -> None:
    """The conversion is the hardware's, saturating and from float32 in one rounding; division is correctly rounded."""
    instruction = "cvt.rn.satfinite.e4m3x2.f32" if dtype == E4M3 else "cvt.rn.satfinite.e5m2x2.f32"
    for capability in TARGETS if dtype == E4M3 else (90,):
        recorded_launches = launches(name, capability, CASTS[name](dtype))
        if capability not in READ:
            build(recorded_launches[0], capability)
            continue
        for recorded in recorded_launches:
            built = build(recorded, capability)
            assert_wide_and_unspilled(built, stores_tensors="amax" not in recorded.kernel.__name__)
            constants = dict(recorded.constants)
            if "NATIVE" not in constants:
                continue  # the amax pass before a cast
            assert instruction in built.ptx
            assert "cvt.rz" not in built.ptx
            assert "mul.ftz" not in built.ptx
            if name.startswith(
                "cast"
            ):  # the mean of a norm and a sigmoid may be approximate, a scale may not
                assert not re.search(r"\bdiv\.(?:full|approx)", built.ptx)
            divides = not constants.get("POWER_OF_TWO", True)
            assert ("div.rn.f32" in built.ptx) == divides or not name.startswith("cast")
            if "mx" not in name:
                assert not re.search(r"st\.global\S*\.b8\b", built.ptx)


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels(name: str, launches: Callable[..., list[Launch]]) -> None:
    """16-byte accesses, no spills."""
    for capability in TARGETS:
        for recorded in launches(name, capability, OTHERS[name]()):
            built = build(recorded, capability)
            if capability in READ:
                assert_wide_and_unspilled(built, stores_tensors=not name.startswith("amax"))


def test_every_operator_is_compiled() -> None:
    assert CASTS.keys() | OTHERS.keys() | {"matmul"} == launchers.LAUNCHERS.keys()


def test_bit_encoder_builds_where_there_is_no_instruction(
    launches: Callable[..., list[Launch]],
) -> None:
    """sm_80 has no FP8 conversion; the casts must build there all the same, and add after rounding the product."""
    for name in ("cast_both", "cast_mx_both", "cast_1x128_both"):
        for recorded in launches(name, 80, CASTS[name](E4M3)):
            ptx = build(recorded, 80).ptx
            assert "e4m3" not in ptx
            assert not re.search(r"\bfma\.rn\.f32", ptx)


MATMULS: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "tensorwise": (ONE, ONE),
    "rowwise": (torch.ones(M, 1), torch.ones(N, 1)),
    "1x128 x 128x128": (torch.ones(K // 128, M).t(), torch.ones(N // 128, K // 128)),
    "1x128 x 1x128": (torch.ones(K // 128, M).t(), torch.ones(K // 128, N).t()),
}
FP8_INSTRUCTION = {
    89: r"mma\.sync\S*m16n8k32\S*f32\.e4m3\.e4m3\.f32",
    90: r"wgmma\.mma_async\S*m64n\d+k32\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\S*kind::f8f6f4",
}


@pytest.mark.parametrize("out_dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("promote_every", [0, 128])
@pytest.mark.parametrize("scaling", MATMULS)
def test_matmul(
    scaling: str, promote_every: int, out_dtype: torch.dtype, launches: Callable[..., list[Launch]]
) -> None:
    """The FP8 matrix instruction and no other; operands by TMA from sm_90 on; promotion only where asked for."""
    a, b_t = torch.empty(M, K, dtype=E4M3), torch.empty(N, K, dtype=E4M3)
    args = (a, b_t, *MATMULS[scaling], out_dtype, promote_every)
    for capability in TARGETS:
        recorded_launches = launches("matmul", capability, args)
        if capability not in READ:
            build(recorded_launches[0], capability)
            continue
        for recorded in recorded_launches:
            built = build(recorded, capability)
            constants = dict(recorded.constants)
            assert re.search(FP8_INSTRUCTION[capability], built.ptx)
            assert not re.search(r"mma\S*\.f16", built.ptx)
            assert (built.stack, built.local) == (0, 0), f"spills: {recorded.constants} {recorded.options}"
            assert re.search(r"st\.global\S*\.v4\.b32", built.ptx)
            assert ("cp.async.bulk.tensor" in built.ptx) == (capability >= 90)
            if capability < 100 and scaling in ("tensorwise", "rowwise"):
                threads = 32 * dict(recorded.options)["num_warps"]
                sums = constants["BLOCK_M"] * constants["BLOCK_N"] // threads
                adds = len(re.findall(r"\badd(?:\.rn)?\.f32\b", built.ptx))
                assert adds == (sums if promote_every else 0)


@pytest.mark.parametrize("promote_every", [32, 64])
def test_promotion_interval(promote_every: int, launches: Callable[..., list[Launch]]) -> None:
    """sm_90: a sum is promoted BLOCK_K / interval times for each block of K."""
    a, b_t = torch.empty(M, K, dtype=E4M3), torch.empty(N, K, dtype=E4M3)
    for recorded in launches("matmul", 90, (a, b_t, ONE, ONE, BF16, promote_every)):
        constants, options = dict(recorded.constants), dict(recorded.options)
        sums = constants["BLOCK_M"] * constants["BLOCK_N"] // (32 * options["num_warps"])
        adds = len(re.findall(r"\badd(?:\.rn)?\.f32\b", build(recorded, 90).ptx))
        assert adds == sums * constants["BLOCK_K"] // promote_every


def test_gradients_multiply_e5m2_by_e4m3(launches: Callable[..., list[Launch]]) -> None:
    a, b_t = torch.empty(M, K, dtype=E5M2), torch.empty(N, K, dtype=E4M3)
    for recorded in launches("matmul", 90, (a, b_t, ONE, ONE, BF16, 128)):
        assert re.search(r"wgmma\.mma_async\S*\.f32\.e5m2\.e4m3", build(recorded, 90).ptx)


def test_old_gpu_is_refused(launches: Callable[..., list[Launch]]) -> None:
    a = torch.empty(16, 16, dtype=E4M3)
    with pytest.raises(ValueError, match="sm_80 has no FP8 matrix units"):
        launches("matmul", 80, (a, a, ONE, ONE, BF16, 0))
