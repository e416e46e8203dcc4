"""Oracle: an allocator whose every byte is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.timing.device_memory import free_bytes, peak_memory


class FakeAllocator:
    """What `torch.cuda` says of its caching allocator: blocks of 2 MiB, kept when they are freed."""

    BLOCK = 2 * 2**20

    def __init__(self) -> None:
        self.now = self.kept = self.most = self.most_kept = self.waits = 0

    def allocate(self, size: int) -> None:
        self.now += size
        self.kept = max(self.kept, -(-self.now // self.BLOCK) * self.BLOCK)
        self.most, self.most_kept = max(self.most, self.now), max(self.most_kept, self.kept)

    def free(self, size: int) -> None:
        self.now -= size

    def reset_peak_memory_stats(self) -> None:
        self.most, self.most_kept = self.now, self.kept

    def memory_allocated(self) -> int:
        return self.now

    def memory_reserved(self) -> int:
        return self.kept

    def max_memory_allocated(self) -> int:
        return self.most

    def max_memory_reserved(self) -> int:
        return self.most_kept

    def synchronize(self) -> None:
        self.waits += 1


def test_the_peak_is_of_the_block_alone() -> None:
    cuda: Any = FakeAllocator()
    cuda.allocate(3_000_000)  # of others, which stay
    cuda.allocate(50_000_000)  # a peak of others, from before
    cuda.free(50_000_000)
    cuda.kept = 2 * cuda.BLOCK  # its blocks were given back
    with peak_memory(cuda) as peak:
        cuda.allocate(4_000_000)
        cuda.allocate(2_000_000)
        cuda.free(6_000_000)
        assert (peak.allocated, peak.reserved) == (0, 0), "not before the end"
    assert peak.allocated == 6_000_000
    assert peak.reserved == 3 * cuda.BLOCK, "9 MB take five blocks; two were there"
    assert cuda.waits == 1


def test_a_cpu_has_memory_and_a_gpu_that_is_not_there_no_limit() -> None:
    assert 2**20 < free_bytes("cpu") < 2**50
    if not torch.cuda.is_available():
        assert free_bytes("cuda") > 2**60


@pytest.mark.gpu
def test_a_tensor_is_seen() -> None:
    with peak_memory() as peak:
        held = torch.empty(2**24, dtype=torch.uint8, device="cuda")
        del held
    assert peak.allocated == 2**24
    assert peak.reserved >= peak.allocated
