"""Kernels as somebody else writes them."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 1024):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


@triton.jit
def nested_kernel(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, columns, BLOCK):
            total += tl.load(x_ptr + row * columns + start + at)
        tl.store(y_ptr + row * BLOCK + at, total)


@triton.jit
def data_kernel(count_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(count_ptr)):
        total += tl.load(y_ptr + i * BLOCK + at)
    tl.store(y_ptr + at, total)


@triton.jit
def cast_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at).to(tl.float32).to(tl.float8e4nv))


@triton.jit
def broken_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), undefined_name)  # noqa: F821


def not_a_kernel() -> None:
    pass
